"""What is looked at: some predictions, some mixtures of their outputs, and the examples that move them most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.errors import InputError
from whence.ordering import largest
from whence.tangents.batches import Inputs, batch_size, take
from whence.tracing.alignments import alignments
from whence.tracing.asking import inputs_of
from whence.tracing.fitted import Fitted


@dataclass(frozen=True)
class Points:
    """Some inputs, in pieces that came together.

    Attributes:
        pieces: inputs.
        sizes: how many inputs each piece has.
    """

    pieces: list[Inputs]
    sizes: list[int]

    def __len__(self) -> int:
        """Number of inputs."""
        return sum(self.sizes)

    def __iter__(self) -> Iterator[tuple[slice, Inputs]]:
        """Yield (which inputs, the inputs)."""
        low = 0
        for size, piece in zip(self.sizes, self.pieces, strict=True):
            yield slice(low, low + size), piece
            low += size

    def first(self, most: int) -> Points:
        """Fewer of them; they are in random order within a piece, and so are the pieces' shares."""
        pieces: list[Inputs] = []
        sizes: list[int] = []
        share = min(1.0, most / max(len(self), 1))
        for size, piece in zip(self.sizes, self.pieces, strict=True):
            kept = min(size, max(1, round(share * size)), most - sum(sizes))
            if kept > 0:
                pieces.append(take(piece, slice(0, kept)))
                sizes.append(kept)
        return Points(pieces, sizes)


def draw_points(fitted: Fitted, x: Any, most: int, generator: torch.Generator) -> Points:
    """Up to `most` inputs at random: of x, or of the training set where there is none. Never holds more than that."""
    kept: list[tuple[Tensor, Inputs]] = []  # a random number for each input, and the inputs with the smallest ones
    for inputs, allowed in _training(fitted) if x is None else ((one, None) for one, _ in inputs_of(fitted, x)):
        numbers = torch.rand(batch_size(inputs, "this batch"), generator=generator, dtype=torch.float64, device="cpu")
        if allowed is not None:
            numbers[~allowed] = torch.inf
        kept.append((numbers, inputs))
        every = torch.cat([one for one, _ in kept])
        bound = every.sort().values[min(most, len(every)) - 1]
        kept = [_smallest(numbers, inputs, bound) for numbers, inputs in kept]
        kept = [(numbers, inputs) for numbers, inputs in kept if len(numbers)]
    if not kept:
        raise InputError("expected at least one input to look at, got none.")
    return Points([inputs for _, inputs in kept], [len(numbers) for numbers, _ in kept])


def _training(fitted: Fitted) -> Iterator[tuple[Inputs, Tensor | None]]:
    """Training inputs, and which of them count."""
    weights = fitted.problem.sample_weights
    for batch in fitted.problem.read("trust, sample"):
        yield batch.inputs, None if weights is None else (weights[batch.rows] > 0).cpu()


def _smallest(numbers: Tensor, inputs: Inputs, bound: Tensor) -> tuple[Tensor, Inputs]:
    """Inputs whose number is at most the bound, in the order of their numbers."""
    order = numbers.argsort()
    index = order[(numbers[order] <= bound) & torch.isfinite(numbers[order])]
    return numbers[index], take(inputs, index)  # type: ignore[arg-type]  # tensors take positions as they take slices


def mix(fitted: Fitted, points: Points, generator: torch.Generator) -> list[Tensor]:
    """Random signs of the outputs that are looked at, (m, k) for each piece: one mixture of outputs a point."""
    problem = fitted.problem
    return [
        signs((size, problem.seen(one)), problem.outputs, generator)
        for size, one in zip(points.sizes, points.pieces, strict=True)
    ]


def signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs; drawn on the CPU, so that every device sees the same."""
    drawn = torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1
    return drawn.to(like)


@dataclass(frozen=True)
class Deletion:
    """What is left out at once: an example, some of its outputs, or a group.

    Attributes:
        members: (g,) places of the examples.
        outputs: those that are left out; all of them, unless single outputs or positions are.
    """

    members: Tensor
    outputs: slice = field(default_factory=lambda: slice(None))

    def mask(self, n: int, k: int) -> Tensor:
        """(n, k) true where something is left out."""
        found = torch.zeros(n, k, dtype=torch.bool, device=self.members.device)
        found[self.members, self.outputs] = True
        return found


def most_influential(fitted: Fitted, points: Points, most: int) -> list[Deletion]:
    """Those that would move the predictions most if they were left out, as far as this fit knows."""
    moved = _influence(fitted, points)  # (n or groups, q)
    flat = moved.flatten()
    count = min(most, int((flat > 0).sum()))
    top = largest(flat, count)[1] if count else flat.new_zeros(0, dtype=torch.long)
    groups, units = fitted.weighing.groups, fitted.weighing.units
    width = units.width if units is not None else 1 if fitted.weighing.by_output else fitted.problem.k
    found = []
    for at in top.tolist():
        unit, column = divmod(at, moved.shape[1])
        one = torch.tensor([unit], device=flat.device)
        members = one if groups is None else (groups.index == unit).nonzero().squeeze(1)
        found.append(Deletion(members, slice(column * width, (column + 1) * width)))
    return found


def _influence(fitted: Fitted, points: Points) -> Tensor:
    """(n or groups, q) sums over the points of |a_i W_i|^2 for each column of the weights of HeC3."""
    problem, roots, groups = fitted.problem, fitted.meats.roots["hec3"], fitted.meats.pooled("hec3")
    units = problem.n if groups is None else groups.total
    total = torch.zeros(units, roots.shape[2], dtype=problem.dtype, device=problem.device)
    for _, inputs in points:
        for _, chunks in alignments(fitted, inputs):
            pooled: Tensor | None = None
            for there, aligned in chunks:  # (m, k, n, k)
                weighted = torch.einsum("mkni,niq->mknq", aligned, roots[there]).flatten(0, 1)
                if groups is None:
                    total[there] += weighted.square().sum(0)
                    continue
                pooled = weighted.new_zeros(len(weighted), units, roots.shape[2]) if pooled is None else pooled
                pooled.index_add_(1, groups.index[there], weighted)
            if pooled is not None:
                total += pooled.square().sum(0)
    return total
