"""A basis of its own for the meats of a block: a rotation of the leading coordinates of the curvature's basis.

Eigenvectors come in ascending order, so that the leading coordinates are the last ones of each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.curvature.accumulate import LayerGradients
from whence.curvature.kronecker import MomentSums, Spectrum, SpectrumSums, matrix_moments, whole_moments
from whence.curvature.rotation import CHUNK_NUMBERS, Basis, BasisView, Factored, Full, Rotated, Sparse, Weights, times
from whence.linalg import eigenvectors


def leading(basis: Basis, size: int | None) -> Basis | None:
    """The last `size` directions of each side of a basis (all if `None`); nothing where there are not two sides."""
    if basis.inputs is None or basis.block.kind == "rows":
        return None
    columns = basis.inputs[..., -size:] if size is not None else basis.inputs
    if basis.block.kind == "dense":
        return Basis(basis.block, columns.contiguous())
    if basis.outputs is None:
        return None
    rows = basis.outputs[..., -size:] if size is not None else basis.outputs
    return Basis(basis.block, columns.contiguous(), rows.contiguous())


def leading_part(rotated: Rotated, shape: Sequence[int]) -> Factored | Full:
    """The last coordinates of all sides, so many as a shape has, of gradients in all of them."""
    assert not isinstance(rotated, Sparse)
    if isinstance(rotated, Factored):
        return Factored(rotated.a[..., -shape[2] :], rotated.g[..., -shape[1] :])
    matrices = rotated.matrices()[last(shape)]
    return Full(matrices.flatten(2), matrices.shape[2:])


def last(shape: Sequence[int]) -> tuple[Any, ...]:
    """An index of the last coordinates of all sides."""
    return (..., *(slice(-size, None) for size in shape))


@dataclass(frozen=True)
class MeatRotation:
    """The rotation R = U^T V from the leading coordinates of the curvature's basis U to the basis V of the meats."""

    basis: Basis  # V, shaped as U
    inputs: Tensor  # (e, i, j) of kronecker blocks, (p, q) of dense ones
    outputs: Tensor | None  # (e, o, q) of kronecker blocks

    @property
    def tensors(self) -> list[Tensor]:
        """What it is made of."""
        own = [self.inputs] if self.outputs is None else [self.inputs, self.outputs]
        return [*self.basis.tensors, *own]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates in U."""
        if self.outputs is None:
            return (self.inputs.shape[0],)
        return (len(self.inputs), self.outputs.shape[1], self.inputs.shape[1])

    @property
    def where(self) -> tuple[Any, ...]:
        """Which of the coordinates of U are rotated."""
        return last(self.shape)

    def rotate(self, rotated: Rotated) -> Factored | Full:
        """V^T phi from U^T phi."""
        given = leading_part(rotated, self.shape)
        if isinstance(given, Factored):
            assert self.outputs is not None
            a, g = times(given.a.unsqueeze(2), self.inputs), times(given.g.unsqueeze(3), self.outputs)
            return Factored(a.squeeze(2), g.squeeze(3))
        moved = self._swapped(given.matrices())
        moved = moved if self.outputs is None else moved.transpose(-1, -2)
        return Full(moved.flatten(2), moved.shape[2:])

    def solve(self, rotated: Rotated, inverse: Tensor) -> Iterator[Full]:
        """Yield R^T (inverse * phi) for phi in the coordinates of U, the sides swapped: (n, c, e, j, q), in chunks.

        The inverse is 1 / (s + lambda) of the leading coordinates.
        """
        given = leading_part(rotated, self.shape)
        n, c = given.examples, (given.g if isinstance(given, Factored) else given.values).shape[1]
        step = max(1, CHUNK_NUMBERS["cuda" if inverse.is_cuda else "cpu"] // (c * inverse.numel()))
        for low in range(0, n, step):
            part = slice(low, low + step)
            if isinstance(given, Full):
                moved = self._swapped(given.matrices()[part] * inverse)
            else:  # the product over inputs serves all cotangents: (n, e, j, i) times (e, i, o)
                assert self.outputs is not None
                inner = times(given.a[part].unsqueeze(2) * self.inputs.transpose(1, 2), inverse.transpose(1, 2))
                moved = times(given.g[part].unsqueeze(3) * inner.unsqueeze(1), self.outputs)
            yield Full(moved.flatten(2), moved.shape[2:])

    def _swapped(self, matrices: Tensor) -> Tensor:
        """R^T M, (n, c, e, j, q): inputs before outputs."""
        if self.outputs is None:
            return matrices @ self.inputs
        return times(times(matrices, self.inputs).transpose(-1, -2), self.outputs)


class RotatedMomentSums(MomentSums):
    """Weighted squares of one block in the curvature's basis, and in that of the meats."""

    def __init__(self, basis: Basis, rotation: MeatRotation, count: int, device: torch.device) -> None:
        super().__init__(basis, count, device)
        self.rotation = rotation
        self.rotated = torch.zeros(count, *rotation.basis.shape, dtype=torch.float64, device=device)

    def state(self, name: str) -> dict[str, Tensor]:
        """What is summed up, by name."""
        return {**super().state(name), f"{name}.rotated": self.rotated}

    def add(self, view: BasisView, squared: Tensor, summed: Tensor | None, mixing: Tensor | None = None) -> None:
        """Add a chunk, in both bases."""
        super().add(view, squared, summed, mixing)
        for _, rotated in view.chunks() if mixing is None else view.mixed(mixing):
            self.rotated += self.rotation.rotate(rotated).squares(squared.to(rotated.dtype))


@dataclass(frozen=True)
class TwoBasisWeights(Weights):
    """Weights of a block some of whose meats have a basis of their own among the leading coordinates."""

    rotation: MeatRotation  # to that basis
    which: list[int]  # positions of these meats among the weights, whose weights inside are zero where the rotation is
    solved: Tensor  # 1 / (s + lambda) of the leading coordinates
    meats: Tensor  # (w, e, j, q) D of these meats, inputs before outputs as `MeatRotation.solve` gives them

    @classmethod
    def add_to(
        cls, plain: Weights, rotation: MeatRotation, meats: Mapping[int, Tensor], solved: Tensor
    ) -> TwoBasisWeights:
        """Take the leading coordinates of some meats out of weights in one basis, and put D (by position) there."""
        which = list(meats)
        inside = plain.inside.clone()
        empty = torch.zeros_like(plain.outside)
        if plain.basis.outside and not plain.rounded:
            empty = -plain.outside  # the squared length adds the weight outside everywhere
        for at in which:
            inside[at][rotation.where] = empty[at].item()
        dtype = inside.dtype
        chosen = torch.stack(list(meats.values())).to(dtype)
        if rotation.outputs is not None:
            chosen = chosen.transpose(-1, -2).contiguous()
        return cls(
            plain.basis, inside, plain.outside, plain.rounded, rotation, which, solved[rotation.where].to(dtype), chosen
        )

    def squared(self, rotated: Rotated) -> Tensor:
        """Weighted squared lengths inside the basis, (w, n, c)."""
        found, solved = super().squared(rotated), self.rotation.solve(rotated, self.solved)
        found[self.which] += torch.cat([full.variances(self.meats) for full in solved], 1)
        return found

    def crossed(self, rotated: Rotated) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c)."""
        found, solved = super().crossed(rotated), self.rotation.solve(rotated, self.solved)
        found[self.which] += torch.cat([full.grams(self.meats) for full in solved], 1)
        return found


class TwoBasisSpectrumSums(SpectrumSums):
    """Pass 2, and sums of G^T G and G G^T of residual-weighted gradients G among the leading directions of each block.

    Their eigenvectors are the meats' own bases. A block that keeps one basis has `None` for its leading directions.
    """

    def __init__(
        self, gradients: LayerGradients, bases: Sequence[Basis], noise: Tensor, directions: int | None
    ) -> None:
        super().__init__(gradients, bases, noise)
        self.leading = [leading(basis, directions) for basis in bases]
        self.factors: list[tuple[Tensor, ...]] = []  # of inputs, and of outputs where there are two sides
        for basis in self.leading:
            sides = [] if basis is None else [one.shape for one in (basis.inputs, basis.outputs) if one is not None]
            shapes = [(*shape[:-2], shape[-1], shape[-1]) for shape in sides]
            device = gradients.problem.device
            self.factors.append(tuple(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    def state(self) -> dict[str, Tensor]:
        """Squares, scores, and factors of the meats."""
        named = {f"meat.{at}.{side}": one for at, each in enumerate(self.factors) for side, one in enumerate(each)}
        return {**super().state(), **named}

    def add_view(self, at: int, view: BasisView, residuals: Tensor) -> None:
        """Add the second moments of J_i^T r_i."""
        basis, sums = self.leading[at], self.factors[at]
        for _, rotated in view.mixed(residuals.unsqueeze(2)) if basis is not None else ():
            assert basis is not None
            part = leading_part(rotated, basis.shape)
            if isinstance(part, Factored):
                found = whole_moments(part.a.unsqueeze(2), part.g.unsqueeze(3))
            else:
                rows = part.matrices().flatten(0, 1)
                found = matrix_moments(part.matrices()) if len(sums) == 2 else (rows.T @ rows, rows)
            for total, one in zip(sums, found, strict=False):
                total += one

    def rotations(self, notes: list[str]) -> list[MeatRotation | None]:
        """From the curvature's basis of each block to that of the meats."""
        found: list[MeatRotation | None] = []
        for basis, sums in zip(self.leading, self.factors, strict=True):
            if basis is None or basis.inputs is None:
                found.append(None)
                continue
            sides = [
                eigenvectors(one, f"the {side} factor of the meat of {basis.block.name}", notes)[1].to(basis.inputs)
                for side, one in zip(("input", "output"), sums, strict=False)
            ]
            outputs = sides[1] if len(sides) == 2 else None
            above = None if outputs is None or basis.outputs is None else basis.outputs @ outputs
            found.append(MeatRotation(Basis(basis.block, basis.inputs @ sides[0], above), sides[0], outputs))
        parts = [one for rotation in found if rotation is not None for one in rotation.tensors]
        self.problem.passes.process_group.broadcast(parts, 0, "the eigenvectors of the meats")  # for the same signs
        return found


def describe_rotations(
    bases: Sequence[Basis], rotations: Sequence[MeatRotation | None], spectrum: Spectrum, ridge: float
) -> str:
    """In words: how much of the variance the meats' own bases hold."""
    inside = whole = 0.0
    for rotation, basis, one in zip(rotations, bases, spectrum.curvature, strict=True):
        weight = (one.inside / (one.inside + ridge)).square()
        whole += float(weight.sum()) + basis.outside * (one.outside / (one.outside + ridge or 1.0)) ** 2
        inside += float(weight[rotation.where].sum()) if rotation is not None else 0.0
    return (
        "meats in a basis of their own where "
        f"{100 * inside / max(whole, torch.finfo(torch.float64).tiny):.1f} % of the homoscedastic variance lies, "
        "in the curvature's elsewhere"
    )
