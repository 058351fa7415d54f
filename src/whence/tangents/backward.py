"""Backward passes down to the outputs of recorded uses, and no further."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whence.tangents.assemble import Pulled
from whence.tangents.layout import Layout
from whence.tangents.recorder import Record


def pull(outputs: Tensor, records: Sequence[Record], cotangents: Tensor, last: bool) -> list[list[Tensor | None]]:
    """Gradients in the outputs of the records, for one cotangent after the other: nothing else is computed."""
    edges = [record.edge for record in records]
    found: list[list[Tensor | None]] = []
    for number, cotangent in enumerate(cotangents):
        keep = not last or number + 1 < len(cotangents)
        grads = torch.autograd.grad(outputs, edges, cotangent, retain_graph=keep, allow_unused=True)
        found.append(list(grads))
    return found


def pull_back(
    outputs: Tensor,
    records: Sequence[Record],
    layouts: Sequence[Layout],
    cotangents: Tensor,
    *,
    last: bool,
    batched: bool = False,
) -> list[Pulled]:
    """Gradients (n, c, ...) in the output of every record, examples in front, for cotangents (c, n, k)."""
    if not records:
        return []
    if batched:
        return _pull_back_at_once(outputs, records, layouts, cotangents, last)
    rows = pull(outputs, records, cotangents, last)
    found = []
    for at, (record, layout) in enumerate(zip(records, layouts, strict=True)):
        grads = layout.stack([_or_zeros(row[at], record) for row in rows], len(outputs))
        found.append(Pulled(record, layout, grads))
        for row in rows:
            row[at] = None  # the stacked copy is all that is kept
    return found


def _pull_back_at_once(
    outputs: Tensor, records: Sequence[Record], layouts: Sequence[Layout], cotangents: Tensor, last: bool
) -> list[Pulled]:
    edges = [record.edge for record in records]
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, edges, cotangents, retain_graph=not last, allow_unused=True, is_grads_batched=True
    )
    every = [
        _or_zeros(None, record).expand(len(cotangents), *record.shape) if grads is None else grads
        for record, grads in zip(records, found, strict=True)
    ]
    return [
        Pulled(record, layout, layout.canonical(grads, len(outputs), lead=1))
        for record, layout, grads in zip(records, layouts, every, strict=True)
    ]


def _or_zeros(gradient: Tensor | None, record: Record) -> Tensor:
    if gradient is not None:
        return gradient
    shape, dtype, device = record.output
    return torch.zeros(shape, dtype=dtype, device=device)
