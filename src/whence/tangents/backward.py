"""Backward passes down to the outputs of recorded uses, and no further."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from whence.tangents.assemble import Pulled
from whence.tangents.layout import Layout
from whence.tangents.recorder import Record


def pull(outputs: Tensor, records: Sequence[Record], cotangents: Tensor, last: bool) -> list[list[Tensor | None]]:
    """Gradients in the outputs of the records, for one cotangent after the other: nothing else is computed."""
    edges = [record.edge for record in records]
    ends = [last and at + 1 == len(cotangents) for at in range(len(cotangents))]
    return [list(_backward(outputs, edges, one, end)) for one, end in zip(cotangents, ends, strict=True)]


def pull_back(
    outputs: Tensor,
    records: Sequence[Record],
    layouts: Sequence[Layout],
    cotangents: Tensor,
    *,
    last: bool,
    batched: bool = False,
) -> list[Pulled]:
    """What c backward passes bring to every record, for cotangents (c, n, k)."""
    if not records:
        return []
    n = len(outputs)
    gathered = [_Gathered(record, layout) for record, layout in zip(records, layouts, strict=True)]
    edges = [record.edge for record in records]
    if batched:
        for one, grads in zip(gathered, _backward(outputs, edges, cotangents, last, batched=True), strict=True):
            one.add(grads, len(cotangents), n)
        return [one.done() for one in gathered]
    for number, cotangent in enumerate(cotangents):
        end = last and number + 1 == len(cotangents)
        for one, grads in zip(gathered, _backward(outputs, edges, cotangent, end), strict=True):
            one.add(None if grads is None else grads.unsqueeze(0), 1, n)
    return [one.done() for one in gathered]


def gradients(
    outputs: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, *, keep: bool = True, batched: bool = False
) -> list[Tensor]:
    """What a backward pass brings to leaves; zeros to those that the outputs do not depend on.

    Torch can fill these in itself, but 2.4 takes zeros that want gradients, and none has one for each of a batch.

    Args:
        outputs: of the model.
        leaves: tensors that they are differentiated by.
        cotangents: shaped as the outputs; with one more axis in front where they are a batch.
        keep: whether there will be more backward passes.
        batched: pull several cotangents back at once.
    """
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, leaves, cotangents, retain_graph=keep, allow_unused=True, is_grads_batched=batched
    )
    lead = (len(cotangents),) if batched else ()
    pairs = zip(found, leaves, strict=True)
    return [leaf.new_zeros(*lead, *leaf.shape) if grad is None else grad for grad, leaf in pairs]


def _backward(
    outputs: Tensor, edges: Sequence[GradientEdge], cotangents: Tensor, last: bool, batched: bool = False
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(
        outputs, edges, cotangents, retain_graph=not last, allow_unused=True, is_grads_batched=batched
    )


class _Gathered:
    """The gradients of one record while the backward passes are made.

    Where the gradient in the output is larger than what is wanted of it (norms, biases alone, bare parameters), it is
    reduced at once, so that not all cotangents' are held.
    """

    def __init__(self, record: Record, layout: Layout) -> None:
        self.record, self.layout = record, layout
        self.grads: list[Tensor] = []
        self.reduced: dict[str, list[Tensor]] = {role: [] for role in record.roles}
        self.reduces = record.use.kind == "dense" or "weight" not in record.roles
        self.use = record.use.ready() if self.reduces else record.use

    def add(self, grads: Tensor | None, cotangents: int, n: int) -> None:
        """Take gradients (c, *shape) in the output."""
        if grads is None:
            shape, dtype, device = self.record.output
            grads = torch.zeros((), dtype=dtype, device=device).expand(cotangents, *shape)
        grads = self.layout.canonical(grads, n, lead=1)  # (n, c, ...)
        if not self.reduces:
            self.grads.append(grads)
            return
        for role, values in self.reduced.items():
            values.append(self.use.dense(role, self.layout, grads))

    def done(self) -> Pulled:
        reduced = {role: _joined(values) for role, values in self.reduced.items() if values}
        return Pulled(self.record, self.layout, tuple(self.grads), reduced)


def _joined(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(tuple(values), 1)
