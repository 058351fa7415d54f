"""Orthonormal bases of blocks of parameters, from their Kronecker factors."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whence.tangents.forms import Block


@dataclass(frozen=True)
class Basis:
    """A basis U = U_out (x) U_in of one block; `None` stands for the identity.

    A basis may have fewer columns than rows: then it spans a corner of the block's space, and what lies outside is
    known by its squared length only.

    Attributes:
        block: what it is a basis of.
        inputs: (e, i, i) for kronecker blocks, (p, p) for dense ones; columns are the new coordinates.
        outputs: (e, o, o) for kronecker blocks, (1, d, d) for the columns of row blocks.
    """

    block: Block
    inputs: Tensor | None = None
    outputs: Tensor | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates."""
        full = self.block.matrix_shape
        if self.block.kind == "kronecker":
            o = full[1] if self.outputs is None else self.outputs.shape[-1]
            i = full[2] if self.inputs is None else self.inputs.shape[-1]
            return (full[0], o, i)
        if self.block.kind == "rows":
            return (full[0], full[1] if self.outputs is None else self.outputs.shape[-1])
        return full if self.inputs is None else (self.inputs.shape[-1],)

    @property
    def tensors(self) -> list[Tensor]:
        """What there is of it."""
        return [one for one in (self.inputs, self.outputs) if one is not None]

    @cached_property
    def outside(self) -> int:
        """Number of directions that the basis does not span."""
        return self.block.numel - math.prod(self.shape)

    def corner(self, rows: Tensor, columns: Tensor) -> Basis:
        """Keep some output and some input directions of a kronecker block."""
        assert self.inputs is not None
        assert self.outputs is not None
        return Basis(self.block, self.inputs[:, :, columns].contiguous(), self.outputs[:, :, rows].contiguous())

    def into(self, matrix: Tensor) -> Tensor:
        """Coordinates U^T v of something shaped (..., *block.matrix_shape)."""
        if self.block.kind == "kronecker":
            moved = matrix if self.outputs is None else self.outputs.transpose(-1, -2) @ matrix
            return moved if self.inputs is None else moved @ self.inputs
        if self.block.kind == "rows":
            return matrix if self.outputs is None else matrix @ self.outputs[0]
        return matrix if self.inputs is None else matrix @ self.inputs

    def out_of(self, matrix: Tensor) -> Tensor:
        """Back from coordinates: U c."""
        if self.block.kind == "kronecker":
            moved = matrix if self.outputs is None else self.outputs @ matrix
            return moved if self.inputs is None else moved @ self.inputs.transpose(-1, -2)
        if self.block.kind == "rows":
            return matrix if self.outputs is None else matrix @ self.outputs[0].T
        return matrix if self.inputs is None else matrix @ self.inputs.T

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Basis:
        """The same basis in another precision, perhaps elsewhere."""
        parts = [None if part is None else part.to(device=device, dtype=dtype) for part in (self.inputs, self.outputs)]
        return Basis(self.block, *parts)
