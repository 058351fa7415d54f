"""A basis of its own for the meats of a block: a rotation of the leading coordinates of the curvature's basis.

Eigenvectors come in ascending order, so that the leading coordinates are the last ones of each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.curvature.eigen import eigenvectors
from whence.tangents.forms import Tangent

from .basis import Basis
from .measure import CHUNK_NUMBERS, outer, times
from .rotated import Factored, Full, Rotated, Sparse
from .second_moments import matrix_moments, whole_moments
from .view import View


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


@dataclass(frozen=True)
class Turn:
    """The rotation R = U^T V from the leading coordinates of the curvature's basis U to the basis V of the meats.

    Attributes:
        basis: V, shaped as U.
        inputs: (e, i, j) of kronecker blocks, (p, q) of dense ones.
        outputs: (e, o, q) of kronecker blocks.
    """

    basis: Basis
    inputs: Tensor
    outputs: Tensor | None

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
        """Which of the coordinates of U are turned."""
        if self.outputs is None:
            return (..., slice(-self.shape[0], None))
        _, o, i = self.shape
        return (..., slice(-o, None), slice(-i, None))

    def apply(self, rotated: Rotated, solved: Tensor) -> Iterator[Full]:
        """Yield R^T (solved * phi) for phi in the coordinates of U, the sides swapped: (n, c, e, j, q), in chunks.

        Args:
            rotated: gradients in U.
            solved: 1 / (s + lambda) of the leading coordinates.
        """
        assert not isinstance(rotated, Sparse)
        n, c = (rotated.g if isinstance(rotated, Factored) else rotated.values).shape[:2]
        step = max(1, CHUNK_NUMBERS["cuda" if solved.is_cuda else "cpu"] // (c * solved.numel()))
        for low in range(0, n, step):
            part = slice(low, low + step)
            if isinstance(rotated, Full):
                moved = self._full(rotated.matrices()[part][self.where] * solved)
            else:
                moved = self._factored(
                    rotated.a[part, ..., -self.shape[2] :], rotated.g[part, ..., -self.shape[1] :], solved
                )
            yield Full(moved.flatten(2), moved.shape[2:])

    def _full(self, matrices: Tensor) -> Tensor:
        if self.outputs is None:
            return matrices @ self.inputs
        return times(times(matrices, self.inputs).transpose(-1, -2), self.outputs)

    def _factored(self, a: Tensor, g: Tensor, solved: Tensor) -> Tensor:
        assert self.outputs is not None
        if a.shape[2] > 1:
            return self._full(outer(a, g) * solved)
        # At one position the product over inputs serves all cotangents: (n, e, j, i) times (e, i, o).
        inner = times(a * self.inputs.transpose(1, 2), solved.transpose(1, 2))
        return times(g * inner.unsqueeze(1), self.outputs)


class MeatFactors:
    """Sums of G^T G and G G^T of residual-weighted gradients among leading coordinates, block by block.

    Args:
        bases: leading directions of each block; `None` for those that keep one basis.
        device: where to sum.
    """

    def __init__(self, bases: Sequence[Basis | None], device: torch.device) -> None:
        """Zeros."""
        self.bases = bases
        self.inputs: list[Tensor | None] = []
        self.outputs: list[Tensor | None] = []
        for basis in bases:
            below = above = None
            if basis is not None:
                *groups, i = basis.shape if basis.outputs is None else (basis.shape[0], basis.shape[2])
                below = torch.zeros(*groups, i, i, dtype=torch.float64, device=device)
                if basis.outputs is not None:
                    e, o, _ = basis.shape
                    above = torch.zeros(e, o, o, dtype=torch.float64, device=device)
            self.inputs.append(below)
            self.outputs.append(above)

    def state(self, places: Sequence[int]) -> dict[str, Tensor]:
        """What is summed up, by name; blocks go by their places among those of all processes."""
        named = (("inputs", self.inputs), ("outputs", self.outputs))
        pairs = [(name, at, one) for name, each in named for at, one in zip(places, each, strict=True)]
        return {f"{name}.{at}": one for name, at, one in pairs if one is not None}

    def add(self, at: int, tangent: Tangent) -> None:
        """Count the gradients J_i^T r_i of one piece of one block."""
        basis, below, above = self.bases[at], self.inputs[at], self.outputs[at]
        if basis is None or below is None:
            return
        for _, rotated in View(tangent, basis).chunks():
            if isinstance(rotated, Factored):
                moments = whole_moments(rotated.a, rotated.g)
            elif above is not None:
                assert isinstance(rotated, Full)
                moments = matrix_moments(rotated.matrices())
            else:
                assert isinstance(rotated, Full)
                flat = rotated.values.flatten(0, 1)
                below += flat.T @ flat
                continue
            below += moments[0]
            if above is not None:
                above += moments[1]

    def turns(self, facts: list[str]) -> list[Turn | None]:
        """The eigenvectors of the sums, as rotations."""
        found: list[Turn | None] = []
        for basis, below, above in zip(self.bases, self.inputs, self.outputs, strict=True):
            if basis is None or below is None or basis.inputs is None:
                found.append(None)
                continue
            name, dtype = basis.block.name, basis.inputs.dtype
            inputs = eigenvectors(below, f"the input factor of the meat of {name}", facts)[1].to(dtype)
            outputs = None
            if above is not None:
                outputs = eigenvectors(above, f"the output factor of the meat of {name}", facts)[1].to(dtype)
            turned = Basis(
                basis.block,
                basis.inputs @ inputs,
                None if outputs is None or basis.outputs is None else basis.outputs @ outputs,
            )
            found.append(Turn(turned, inputs, outputs))
        return found
