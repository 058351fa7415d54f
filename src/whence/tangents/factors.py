"""The two sides of a Kronecker tangent, held or still to be computed.

Axis letters: e groups, t shared positions, i the side's own axis (layer inputs or outputs), r columns of a basis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

MANY_ROWS = 500
"""From so many on, filling columns up to eights costs less than it saves."""


class Factor(Protocol):
    """One side of a `Kronecker` tangent, perhaps not yet computed: a tensor (..., e, t, i)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of `tensor()`, known without computing it."""
        ...

    def tensor(self) -> Tensor:
        """The factor as a tensor (..., e, t, i)."""
        ...

    def project(self, basis: Tensor) -> Tensor:
        """`tensor() @ basis` for a basis (e, i, r), by the cheapest way and in its precision: (..., e, t, r)."""
        ...


@dataclass(frozen=True)
class Whole:
    """A factor held as a tensor (..., e, t, i), with a column of ones to be appended if `ones`."""

    values: Tensor
    ones: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, i)."""
        return (*self.values.shape[:-1], self.values.shape[-1] + self.ones)

    def tensor(self) -> Tensor:
        """The values, and the column of ones."""
        if not self.ones:
            return self.values
        return torch.cat([self.values, self.values.new_ones(()).expand(*self.values.shape[:-1], 1)], -1)

    def project(self, basis: Tensor) -> Tensor:
        """`tensor() @ basis` without building the column of ones."""
        linear, constant = (basis[:, :-1], basis[:, -1:]) if self.ones else (basis, None)
        # With one group, a batched product would copy the basis for every example.
        one, values = basis.shape[0] == 1, self.values.to(basis.dtype)
        if cotangents_first(values):
            return Whole(values.transpose(0, 1), self.ones).project(basis).transpose(0, 1)
        if one and lies_transposed(values):
            projected = (linear[0].T @ values.squeeze(-3).transpose(-1, -2)).transpose(-1, -2).unsqueeze(-3)
        elif one and values[0].numel() == values.shape[-1]:  # rows, whatever the strides of axes of length 1 say
            return _times(values.reshape(len(values), -1), linear[0], constant).reshape(*values.shape[:-1], -1)
        else:
            projected = (values.squeeze(-3) @ linear[0]).unsqueeze(-3) if one else values @ linear
        return projected if constant is None else projected + constant


def _times(rows: Tensor, linear: Tensor, constant: Tensor | None) -> Tensor:
    """Rows (n, i) times (i, r), plus (1, 1, r). A CPU's products like columns in eights, and are a third faster."""
    size = linear.shape[1]
    missing = 0 if rows.is_cuda or len(rows) < MANY_ROWS else -size % 8
    if missing:
        linear = torch.nn.functional.pad(linear, (0, missing))
        constant = None if constant is None else torch.nn.functional.pad(constant, (0, missing))
    found = rows @ linear if constant is None else torch.addmm(constant[0], rows, linear)
    return found[:, :size]


@dataclass(frozen=True)
class Joined:
    """Factors of several calls of the same weight, one after the other along t."""

    parts: tuple[Factor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, i), t summed over the parts."""
        first = self.parts[0].shape
        return (*first[:-2], sum(part.shape[-2] for part in self.parts), first[-1])

    def tensor(self) -> Tensor:
        """All parts."""
        return torch.cat([part.tensor() for part in self.parts], -2)

    def project(self, basis: Tensor) -> Tensor:
        """All parts, each projected by its own way."""
        return torch.cat([part.project(basis) for part in self.parts], -2)


@dataclass(frozen=True)
class Stacked:
    """Gradients of several cotangents, (n, c, e, t, o) with a few of them each, put together only when needed."""

    parts: tuple[Factor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, c, e, t, o), c summed over the parts."""
        n, _, *rest = self.parts[0].shape
        return (n, sum(part.shape[1] for part in self.parts), *rest)

    def tensor(self) -> Tensor:
        """All parts."""
        return join([part.tensor() for part in self.parts])

    def project(self, basis: Tensor) -> Tensor:
        """All parts, each projected before they are put together."""
        return join([part.project(basis) for part in self.parts])


@dataclass(frozen=True)
class Padded:
    """A factor with zeros before and after its last axis: the gradients of some rows of a weight."""

    part: Factor
    start: int
    size: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, size)."""
        return (*self.part.shape[:-1], self.size)

    def tensor(self) -> Tensor:
        """The part between zeros."""
        values = self.part.tensor()
        return torch.nn.functional.pad(values, (self.start, self.size - self.start - values.shape[-1]))

    def project(self, basis: Tensor) -> Tensor:
        """Only the rows of the basis that meet the part."""
        return self.part.project(basis[:, self.start : self.start + self.part.shape[-1]])


def lies_transposed(values: Tensor) -> bool:
    """Whether the last two axes lie in memory in the other order, as positions and channels of an image do."""
    return values.shape[-1] > 1 and values.shape[-2] > 1 and values.stride(-1) > values.stride(-2)


def cotangents_first(values: Tensor) -> bool:
    """Whether gradients (n, c, e, t, o) lie in memory with the cotangents before the examples, as vmap leaves them."""
    return values.dim() == 5 and min(values.shape[:2]) > 1 and values.stride(1) > values.stride(0)


def join(parts: list[Tensor]) -> Tensor:
    """Put (n, c, e, t, o) together along c, in the order of memory they have: turning them round costs a slow copy."""
    if not lies_transposed(parts[0]):
        return torch.cat(parts, 1)
    return torch.cat([part.transpose(-1, -2) for part in parts], 1).transpose(-1, -2)
