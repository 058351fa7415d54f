"""Eigenbases for the meats alone: a rotation of the leading coordinates of the curvature's basis, block by block.

Eigenvectors are in ascending order, so the leading coordinates are the last ones of each side. The rotation
R = U^T V from the curvature's basis U to the meats' basis V is also a `Basis`, of the leading coordinates in U.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.curvature.rotation import Basis, Factored, Full, Rotated, Sparse, Weights, example_slices, times


def leading_basis(basis: Basis, size: int | None) -> Basis | None:
    """The last `size` directions (all if `None`) of each side of a basis; `None` if the meats keep one basis."""
    sides = basis.tensors
    if basis.inputs is None or basis.block.kind == "rows" or (basis.block.kind == "kronecker" and len(sides) < 2):
        return None
    return Basis(basis.block, *(one[..., 0 if size is None else -size :].contiguous() for one in sides))


def last_coordinates(shape: Sequence[int]) -> tuple[Any, ...]:
    """Index of the last coordinates on every side, as many as `shape` says."""
    return (..., *(slice(-size, None) for size in shape))


def leading_part(rotated: Rotated, shape: Sequence[int]) -> Factored | Full:
    """The last coordinates of rotated gradients on every side, as many as `shape` says."""
    assert not isinstance(rotated, Sparse)
    if isinstance(rotated, Factored):
        return Factored(rotated.a[..., -shape[2] :], rotated.g[..., -shape[1] :])
    matrices = rotated.matrices()[last_coordinates(shape)]
    return Full(matrices.flatten(2), matrices.shape[2:])


def rotate(rotated: Rotated, rotation: Basis) -> Factored | Full:
    """V^T phi from U^T phi."""
    given = leading_part(rotated, rotation.shape)
    if isinstance(given, Factored):
        inputs, outputs = rotation.tensors
        a, g = times(given.a.unsqueeze(2), inputs), times(given.g.unsqueeze(3), outputs)
        return Factored(a.squeeze(2), g.squeeze(3))
    moved = _swapped(given.matrices(), rotation)
    moved = moved if rotation.outputs is None else moved.transpose(-1, -2)
    return Full(moved.flatten(2), moved.shape[2:])


def _swapped(matrices: Tensor, rotation: Basis) -> Tensor:
    """R^T M, (n, c, e, j, q), with inputs before outputs."""
    inputs, *outputs = rotation.tensors
    return times(times(matrices, inputs).transpose(-1, -2), outputs[0]) if outputs else matrices @ inputs


@dataclass(frozen=True)
class TwoBasisWeights(Weights):
    """Weights of a block where some meats have their own basis for the leading coordinates."""

    rotation: Basis  # R, from the curvature's basis to the meats'
    which: list[int]  # positions of these meats; their plain weights are zero on the leading coordinates
    solved: Tensor  # 1 / (s + lambda) of the leading coordinates
    meats: Tensor  # (w, e, j, q) D of these meats, inputs before outputs, as in `_solve`

    @classmethod
    def add_to(cls, plain: Weights, rotation: Basis, meats: Mapping[int, Tensor], solved: Tensor) -> TwoBasisWeights:
        """Move the leading coordinates of some meats to their own basis, with D by position in `meats`."""
        inside, where = plain.inside.clone(), last_coordinates(rotation.shape)
        for at in meats:  # cancels the outside weight, which the squared length adds everywhere
            inside[at][where] = -plain.outside[at].item() if plain.basis.missing and not plain.rounded else 0.0
        chosen = torch.stack(list(meats.values())).to(inside.dtype)
        chosen = chosen if rotation.outputs is None else chosen.transpose(-1, -2).contiguous()
        own = (rotation, list(meats), solved[where].to(inside.dtype), chosen)
        return cls(plain.basis, inside, plain.outside, plain.rounded, *own)

    def sums_inside(self, rotated: Rotated, cross_products: bool) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c), or only the squared lengths, (w, n, c)."""
        found, solved = super().sums_inside(rotated, cross_products), self._solve(rotated)
        own = [full.grams(self.meats) if cross_products else full.variances(self.meats) for full in solved]
        found[self.which] += torch.cat(own, 1)
        return found

    def _solve(self, rotated: Rotated) -> Iterator[Full]:
        """Yield chunks of R^T (phi / (s + lambda)), phi in coordinates of U, as (n, c, e, j, q): sides swapped."""
        given, inverse = leading_part(rotated, self.rotation.shape), self.solved
        n, c = (given.g if isinstance(given, Factored) else given.values).shape[:2]
        for part in example_slices(n, c * inverse.numel(), inverse):
            if isinstance(given, Full):
                moved = _swapped(given.matrices()[part] * inverse, self.rotation)
            else:  # the product over inputs serves all cotangents: (n, e, j, i) times (e, i, o)
                inputs, outputs = self.rotation.tensors
                inner = times(given.a[part].unsqueeze(2) * inputs.transpose(1, 2), inverse.transpose(1, 2))
                moved = times(given.g[part].unsqueeze(3) * inner.unsqueeze(1), outputs)
            yield Full(moved.flatten(2), moved.shape[2:])
