"""The gradients of one piece of a block as seen from a basis: what several sums need is computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from whence.tangents.forms import Dense, Factor, Kronecker, Rows, Tangent, Whole

from .basis import Basis
from .contraction import along_factors, mix
from .measure import (
    CHUNK_NUMBERS,
    along,
    beyond,
    dense_times,
    energy,
    lengths,
    outer,
    products_are_rounded,
    raised,
    total,
)
from .rotated import Factored, Full, Rotated, Sparse

ALIGNED = 4
"""Rows of a multiple of so many numbers suit a GPU: its tensor units take no others."""

PAIRS_COST = 8
"""How many times dearer than in a gradient matrix a number is in products of pairs of positions on a GPU."""


class View:
    """Gradients in the coordinates of a basis, by the cheapest order of contractions.

    A Kronecker tangent stays factored when it is seen at one position, or at so few that pairs of positions are
    cheaper than matrices; else the matrices are formed in chunks, before or after the rotation, whichever takes fewer
    products. Factors are turned once, however often the gradients are asked for.

    Args:
        tangent: the gradients of every example's cotangents.
        basis: of the same block.
        rounded: whether products are so coarse that what lies outside the basis must be measured for itself, and not
            as a difference of squared lengths.
    """

    def __init__(self, tangent: Tangent, basis: Basis, rounded: bool = False) -> None:
        """Nothing is computed yet."""
        self.basis = basis
        self.rounded = rounded
        self._tangent: Tangent | None = _held(tangent) if basis.outside and isinstance(tangent, Kronecker) else tangent
        self._held: Rotated | None = None
        self._early = True
        self._factors: tuple[Tensor, Tensor] | None = None
        self._energy: Tensor | None = None
        self._lengths: Tensor | None = None

    @property
    def tangent(self) -> Tangent:
        """The gradients as they were pulled back."""
        assert self._tangent is not None, "a view of gradients that were let go"
        return self._tangent

    def let_go(self) -> None:
        """Of the gradients as they were, where they are held in a basis that spans all."""
        if self._held is not None and self.complete:
            self._tangent = None

    def settle(self) -> None:
        """Let go of the gradients as they were, where that is possible, and of squares."""
        self.let_go()
        if isinstance(self._held, Factored):
            self._held.__dict__.pop("squared", None)

    @property
    def complete(self) -> bool:
        """Whether the basis spans all of the block."""
        return not self.basis.outside

    def chunks(self) -> Iterator[tuple[slice, Rotated]]:
        """Yield (which examples, their gradients); several chunks only where matrices must be formed."""
        held = self._rotated()
        if held is not None:
            yield slice(0, _examples(held)), held
        else:
            yield from self._formed(*self._turned())

    def mixed(self, weights: Tensor) -> Iterator[tuple[slice, Rotated]]:
        """The same for combinations of the cotangents by weights (n, c, q), which are as many cotangents q."""
        held = self._rotated()
        if held is None:
            a, g = self._turned()
            yield from self._formed(a, mix(g, weights.to(g.dtype)))
        elif isinstance(held, Factored) and not _stays_factored(held.a.shape[2], weights.shape[2], self.basis):
            yield from self._formed(held.a, mix(held.g, weights.to(held.g.dtype)))
        else:
            yield slice(0, _examples(held)), held.mix(weights.to(dtype_of(held)))

    def energy(self) -> Tensor:
        """Inner products of every example's gradients, (n, c, c); of what lies outside, if products are rounded."""
        if self._energy is None and self._lengths is not None and self._lengths.shape[1] == 1:
            self._energy = self._lengths.unsqueeze(2)
        if self._energy is None:
            first, *rest = map(energy, self._measured())
            self._energy = sum(rest, start=first)
        return self._energy

    def lengths(self) -> Tensor:
        """The diagonals of `energy` alone, (n, c)."""
        if self._energy is not None:
            return torch.diagonal(self._energy, dim1=1, dim2=2)
        if self._lengths is None:
            first, *rest = map(lengths, self._measured())
            self._lengths = sum(rest, start=first)
        return self._lengths

    def total(self, weights: Tensor) -> Tensor:
        """Sum of the gradients weighted by (n, c), shaped as the block's matrix, where the basis does not span all."""
        return total(self.tangent, weights)

    def along(self, direction: Tensor) -> Tensor:
        """Inner products (n, c) with a direction: in coordinates of a basis that spans all, else of the block."""
        if not self.complete:
            return along(self.tangent, direction)
        held = self._rotated()
        if held is not None:
            return held.along(direction.to(dtype_of(held)))
        a, g = self._turned()
        if not self._early:
            direction = self.basis.out_of(direction.to(g.dtype))
        extra = a.shape[-1] - direction.shape[-1]  # columns of zeros
        return along_factors(a, g, torch.nn.functional.pad(direction.to(g.dtype), (0, extra)))

    def _measured(self) -> list[Tangent]:
        if not self.rounded:
            return [self.tangent]
        if not isinstance(self.tangent, Kronecker):
            return beyond(self.tangent, self.basis)
        held = self._rotated()
        if isinstance(held, Factored):
            return beyond(self.tangent, self.basis, held.a, held.g)
        a, g = self._turned()
        if not self._early:
            return beyond(self.tangent, self.basis)
        return beyond(self.tangent, self.basis, a[..., : self.basis.shape[-1]], g)

    def _rotated(self) -> Rotated | None:
        """The gradients of all examples, unless that takes matrices."""
        if self._held is None:
            tangent, basis = self.tangent, self.basis
            if isinstance(tangent, Dense):
                inside = raised(tangent.values) if basis.inputs is None else dense_times(tangent, basis.inputs)
                self._held = Full(inside, basis.shape)
            elif isinstance(tangent, Rows):
                rows, examples, values = tangent.aggregate()
                values = raised(values)
                moved = values if basis.outputs is None else values @ basis.outputs[0]
                self._held = Sparse(rows, examples, moved, tangent.index.shape[0], basis.shape)
            elif stays_factored(tangent, basis):
                self._held = Factored(_project(tangent.a, basis.inputs), _project(tangent.g, basis.outputs))
        return self._held

    def _turned(self) -> tuple[Tensor, Tensor]:
        """The factors that matrices are formed from."""
        if self._factors is None:
            tangent, basis = self.tangent, self.basis
            assert isinstance(tangent, Kronecker)
            self._early = turns_early(tangent, basis)
            inputs = basis.inputs
            if inputs is not None and inputs.is_cuda and inputs.shape[-1] % ALIGNED:
                inputs = torch.nn.functional.pad(inputs, (0, -inputs.shape[-1] % ALIGNED))
            self._factors = (
                _project(tangent.a, inputs if self._early else None),
                _project(tangent.g, basis.outputs if self._early else None),
            )
        return self._factors

    def _formed(self, a: Tensor, g: Tensor) -> Iterator[tuple[slice, Full]]:
        n, c, e, _, o = g.shape
        step = max(1, CHUNK_NUMBERS["cuda" if a.is_cuda else "cpu"] // (c * e * o * a.shape[3]))
        for start in range(0, n, step):
            where = slice(start, min(start + step, n))
            matrices = outer(a[where], g[where])
            if not self._early:
                matrices = self.basis.into(matrices)
            padding = matrices.shape[-1] - self.basis.shape[-1]
            yield where, Full(matrices.reshape(len(matrices), c, -1), self.basis.shape, padding)


def views(tangents: Sequence[Tangent], bases: Sequence[Basis], device: torch.device) -> list[View]:
    """Every block of a piece on a device, in its basis."""
    rounded = products_are_rounded(device)
    return [View(tangent, basis, rounded) for tangent, basis in zip(tangents, bases, strict=True)]


def stays_factored(tangent: Kronecker, basis: Basis, cotangents: int | None = None) -> bool:
    """Whether the gradient matrices of this tangent, or of so many cotangents, need never be formed."""
    return _stays_factored(tangent.positions, tangent.cotangents if cotangents is None else cotangents, basis)


def _stays_factored(t: int, c: int, basis: Basis) -> bool:
    _, o, i = basis.shape
    dear = PAIRS_COST if basis.inputs is not None and basis.inputs.is_cuda else 1
    return t == 1 or dear * t * t * (o + i) < c * o * i


def formed_bytes(tangent: Kronecker, cotangents: int, room: float) -> float:
    """Bytes that are formed on the way for each cotangent of an example: matrices, or products of pairs of positions.

    None for a single position, and where the matrices are formed in chunks that take less than `room`.
    """
    t, (e, o, i) = tangent.positions, tangent.block.matrix_shape
    if t == 1:
        return 0.0
    grads = raised(tangent.grads())
    item = grads.element_size()
    if stays_factored(tangent, Basis(tangent.block), cotangents):
        return 1.5 * item * e * o * t * (t + 1)
    chunk = 2.0 * item * CHUNK_NUMBERS["cuda" if grads.is_cuda else "cpu"]
    return 0.0 if chunk <= room else 2.0 * item * e * o * i


def turns_early(tangent: Kronecker, basis: Basis) -> bool:
    """Whether turning the factors takes fewer products than turning the matrices."""
    c, t = tangent.cotangents, tangent.positions
    _, o, i = tangent.block.matrix_shape
    _, o_in, i_in = basis.shape
    turn_factors = t * i * i_in + c * t * o * o_in + c * t * o_in * i_in
    turn_matrices = c * t * o * i + c * (o_in * o * i + o_in * i * i_in)
    return basis.inputs is not None and turn_factors <= turn_matrices


def dtype_of(rotated: Rotated) -> torch.dtype:
    """The precision of the gradients."""
    return rotated.g.dtype if isinstance(rotated, Factored) else rotated.values.dtype


def _examples(rotated: Rotated) -> int:
    if isinstance(rotated, Sparse):
        return rotated.count
    return len(rotated.g if isinstance(rotated, Factored) else rotated.values)


def _held(tangent: Kronecker) -> Kronecker:
    """Factors that are turned and measured are computed once, and lie as many products want them."""
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    if g.is_cuda:
        a, g = a.contiguous(), g.contiguous()
    return Kronecker(tangent.block, Whole(a), Whole(g))


def _project(factor: Factor, basis: Tensor | None) -> Tensor:
    return raised(factor.tensor() if basis is None else factor.project(basis))
