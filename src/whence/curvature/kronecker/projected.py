"""Features for the exact algebra: chosen coordinates of the gradients, over all blocks together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.memory import Budget
from whence.tangents.batches import Inputs
from whence.tangents.linearization import Linearization

from .basis import Basis
from .stream import LayerStream
from .view import View


@dataclass(frozen=True)
class Projected:
    """Features z = chosen coordinates of U^T phi, over all blocks together. Bases may have fewer columns than rows.

    Attributes:
        bases: of each block.
        indices: flat positions among each block's coordinates.
        sizes: (r,) second moments of the features over the training set, where they are known.
        orthonormal: whether the bases' columns are.
    """

    stream: LayerStream
    bases: Sequence[Basis]
    indices: Sequence[Tensor]
    sizes: Tensor | None
    notes: list[str]
    orthonormal: bool = True

    @property
    def size(self) -> int:
        """The number r of features."""
        return sum(len(index) for index in self.indices)

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples, rows (n, k, r))."""
        for where, tangents, _ in self.stream.of(inputs, 0, self.stream.identity(outputs), outputs):
            n = where.stop - where.start
            rows: Tensor | None = None
            low = 0
            for tangent, basis, index in zip(tangents, self.bases, self.indices, strict=True):
                for part, rotated in View(tangent, basis).chunks() if len(index) else ():
                    found = rotated.gather(index)
                    if rows is None:
                        rows = found.new_empty(n, outputs, self.size)
                    rows[part, :, low : low + len(index)] = found
                low += len(index)
            assert rows is not None
            yield where, rows

    def weights(self) -> Tensor:
        """The network's weights in these coordinates, (r,)."""
        problem = self.stream.problem
        return self._along({name: p.detach().double() for name, p in problem.selection.parameters.items()})

    def into(self, vectors: Tensor) -> Tensor:
        """U^T v: vectors among the selected weights (..., d) in these coordinates, (..., r)."""
        return self._along(self.stream.problem.selection.unflatten(vectors.double()))

    def _along(self, parameters: Mapping[str, Tensor]) -> Tensor:
        parts = []
        for basis, index in zip(self.bases, self.indices, strict=True):
            moved = basis.to(torch.float64).into(basis.block.to_matrix(parameters))
            lead = moved.shape[: moved.ndim - len(basis.shape)]
            parts.append(moved.reshape(*lead, math.prod(basis.shape))[..., index])
        return torch.cat(parts, dim=-1).to(self.stream.problem.dtype)

    def prescale(self, ridge: float | None) -> Tensor:
        """Square roots of the damped second moments, which make the curvature's diagonal one."""
        problem = self.stream.problem
        if self.sizes is None or ridge is None:
            return torch.ones(self.size, dtype=problem.dtype, device=problem.device)
        return (self.sizes + max(ridge, 1e-12 * float(self.sizes.max()))).sqrt().to(problem.dtype)

    def lift(self, step: Tensor) -> Tensor:
        """U z: from the coordinates (..., r) back to the selected weights, (..., d)."""
        problem = self.stream.problem
        lead = step.shape[:-1]
        tensors: dict[str, Tensor] = {}
        for basis, index, part in zip(
            self.bases, self.indices, step.split([len(index) for index in self.indices], dim=-1), strict=True
        ):
            flat = step.new_zeros(*lead, math.prod(basis.shape))
            flat[..., index] = part
            matrix = basis.to(step.dtype).out_of(flat.reshape(*lead, *basis.shape))
            tensors.update(basis.block.from_matrix(matrix))
        return problem.selection.flatten(tensors, leading=len(lead))


def primal_bytes(r: int) -> float:
    """Memory of the primal algebra on r features."""
    return 9.0 * r * r * 8


def leaving(problem: Linearization, r: int) -> Linearization:
    """The same problem with the memory that the algebra on r features leaves, for their rows."""
    return replace(problem, budget=Budget(problem.device, max(problem.budget.limit - primal_bytes(r), 0.0)))
