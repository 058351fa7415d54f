"""From gradients in the outputs of recorded uses to the tangents of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.tangents.factors import Factor, Joined, Padded, Stacked, Whole
from whence.tangents.forms import Block, Dense, Kronecker, Rows, Tangent
from whence.tangents.layout import Layout
from whence.tangents.recorder import Record
from whence.tangents.rules.base import Followed, Root
from whence.tangents.rules.embeddings import scatter

LEAST_APART = 2**18
"""On a CPU, gradients of several parameters of a block stay apart if they have more numbers: no cache holds a copy."""


@dataclass(frozen=True)
class Pulled:
    """A record with what came back to its output.

    Args:
        record: The use.
        layout: Where its examples are.
        grads: Gradients (n, c, ...) in the output, examples in front, a few of all cotangents each.
        reduced: Gradients (n, c, *shape) in the tensors of the roles, where those of the output were not kept.
    """

    record: Record
    layout: Layout
    grads: tuple[Tensor, ...]
    reduced: Mapping[str, Tensor]

    def dense(self, role: str) -> Tensor:
        """Gradients (n, c, *shape) in the tensor of a role."""
        if role in self.reduced:
            return self.reduced[role]
        parts = [self.record.use.dense(role, self.layout, grads) for grads in self.grads]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # of one part, cat is a copy


@dataclass(frozen=True)
class Sizes:
    """What a tangent without a single use is made of."""

    examples: int
    cotangents: int
    like: Tensor


def tangents_of(blocks: Sequence[Block], pulled: Sequence[Pulled], sizes: Sizes) -> list[Tangent]:
    """The tangents of all blocks."""
    uses: dict[str, dict[int, Pulled]] = {}
    for at, one in enumerate(pulled):
        for source in one.record.roles.values():
            for root in source.roots:
                uses.setdefault(root.parameter, {})[at] = one
    found = []
    for block in blocks:
        own = {at: one for name in block.parameters for at, one in uses.get(name, {}).items()}
        found.append(_tangent(block, [own[at] for at in sorted(own)], sizes))
    return found


def _tangent(block: Block, pulled: Sequence[Pulled], sizes: Sizes) -> Tangent:
    """The tangent of one block, from all uses of its parameters."""
    if block.kind == "kronecker":
        return _kronecker(block, pulled, sizes)
    if block.kind == "rows":
        return _rows(block, pulled, sizes)
    parts = tuple(_dense(block, at, pulled, sizes) for at in range(len(block.parameters)))
    apart = len(parts) == 1 or (not parts[0].is_cuda and sum(part.numel() for part in parts) > LEAST_APART)
    return Dense(block, parts if apart else (torch.cat(parts, -1),))


def _kronecker(block: Block, pulled: Sequence[Pulled], sizes: Sizes) -> Kronecker:
    e, o, i = block.matrix_shape
    sides: list[tuple[Factor, Factor]] = []
    for one in pulled:
        source = one.record.roles.get("weight")
        if source is None or source.parameter != block.parameters[0]:
            continue
        pairs = [one.record.use.factors(one.layout, grads, block.has_bias) for grads in one.grads]
        a, g = pairs[0]
        if len(pairs) > 1:
            g = Stacked(tuple(g for _, g in pairs))
        if source.view is not None and source.view.rows is not None:
            g = Padded(g, source.view.rows[0], o)
        sides.append((a, g))
    if not sides:
        empty = sizes.like.new_zeros(sizes.examples, sizes.cotangents, e, 0, o)
        return Kronecker(block, Whole(empty.new_zeros(sizes.examples, e, 0, i)), Whole(empty))
    if len(sides) == 1:
        return Kronecker(block, *sides[0])
    return Kronecker(block, Joined(tuple(a for a, _ in sides)), Joined(tuple(g for _, g in sides)))


def _rows(block: Block, pulled: Sequence[Pulled], sizes: Sizes) -> Rows:
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for one in pulled:
        source = one.record.roles.get("weight")
        if source is not None and source.parameter == block.parameters[0]:
            found.append(one.record.use.rows(one.layout, torch.cat(one.grads, 1)))
            continue
        for root, grads in _roots(one, block.parameters[0]):
            if root.index is not None:
                index, values = _taken(root, grads)
                found.append((index, values, None))
    if not found:
        grads = sizes.like.new_zeros(sizes.examples, sizes.cotangents, 0, block.matrix_shape[1])
        return Rows(block, torch.zeros(sizes.examples, 0, dtype=torch.long, device=grads.device), grads)
    if len(found) == 1:
        return Rows(block, *found[0])
    weighted = any(weights is not None for _, _, weights in found)
    every = [torch.ones_like(index) if weights is None else weights for index, _, weights in found]
    index, grads = torch.cat([f[0] for f in found], 1), torch.cat([f[1] for f in found], 2)
    return Rows(block, index, grads, torch.cat(every, 1) if weighted else None)


def _dense(block: Block, at: int, pulled: Sequence[Pulled], sizes: Sizes) -> Tensor:
    """The sum of all uses of one parameter, (n, c, p)."""
    name, shape = block.parameters[at], block.shapes[at]
    total: Tensor | None = None
    for one in pulled:
        for root, grads in _roots(one, name):
            if root.index is not None:
                grads = scatter(*_taken(root, grads), shape)
            flat = grads.flatten(2) if grads.dim() > 2 else grads.unsqueeze(2)
            total = flat if total is None else total + flat
    if total is None:
        return sizes.like.new_zeros(()).expand(sizes.examples, sizes.cotangents, torch.Size(shape).numel())
    return total


def _taken(root: Root, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Index (n, t) and gradients (n, c, t, d) of rows that were taken from a table for all examples alike."""
    assert root.index is not None
    n, c = grads.shape[:2]
    index = root.index.flatten()
    return index.expand(n, -1), grads.reshape(n, c, len(index), -1)


def _roots(one: Pulled, name: str) -> Iterator[tuple[Root, Tensor]]:
    """Gradients (n, c, *shape) in a parameter behind a record, or in rows taken from it."""
    for role, source in one.record.roles.items():
        if any(root.parameter == name for root in source.roots):
            yield from ((root, grads) for root, grads in _pull(source, one.dense(role)) if root.parameter == name)


def _pull(source: Followed, grads: Tensor) -> Iterator[tuple[Root, Tensor]]:
    """Pull gradients (n, c, *shape) in a followed tensor back to where it comes from."""
    roots, view = source.roots, source.view
    if roots[0].tensor is source.tensor:
        yield roots[0], grads
    elif view is not None and view.rows is None:
        yield roots[0], grads.transpose(-1, -2) if view.transposed else grads
    else:
        flat = grads.flatten(0, 1).to(source.tensor.dtype)
        found = torch.autograd.grad(
            source.tensor, [r.tensor for r in roots], flat, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        for root, values in zip(roots, found, strict=True):
            if values is not None:
                yield root, values.unflatten(0, grads.shape[:2])
