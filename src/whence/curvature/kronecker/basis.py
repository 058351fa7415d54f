"""Orthonormal bases of blocks of parameters, from their Kronecker factors."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from whence.errors import SingularCurvatureError
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

    @property
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


def eigenvectors(matrix: Tensor, where: str, facts: list[str]) -> tuple[Tensor, Tensor]:
    """Eigenvalues (ascending, clamped at zero) and eigenvectors of symmetric matrices (..., m, m), in float64.

    float32 `eigh` fails to converge, or gives NaN without a word, on rank-deficient factors (pixels that are always
    zero are enough). Where even float64 does, other drivers are tried, and the fact is told; nothing is ever added to
    the matrix.
    """
    exact = matrix.double()
    check_factor(exact, where)
    try:
        values, vectors = torch.linalg.eigh(exact)
        if bool(torch.isfinite(vectors).all()):
            return values.clamp_min(0.0), vectors
    except RuntimeError:  # torch.linalg.LinAlgError is one
        pass
    facts.append(f"the eigenvectors of {where} needed a second driver")
    values, vectors = _second_driver(exact)
    return values.clamp_min(0.0), vectors


def _second_driver(matrix: Tensor) -> tuple[Tensor, Tensor]:
    flat = matrix.reshape(-1, *matrix.shape[-2:]).cpu().numpy()
    try:
        pairs = [numpy.linalg.eigh(one) for one in flat]
        values = numpy.stack([pair[0] for pair in pairs])
        vectors = numpy.stack([pair[1] for pair in pairs])
    except numpy.linalg.LinAlgError:
        # A symmetric positive matrix has its eigenvectors as singular vectors; the driver is unrelated to eigh's.
        left, sizes, _ = numpy.linalg.svd(flat, hermitian=False)
        values, vectors = sizes[:, ::-1].copy(), left[:, :, ::-1].copy()
    shape = matrix.shape
    return (
        torch.from_numpy(values).to(matrix.device).reshape(shape[:-1]),
        torch.from_numpy(vectors).to(matrix.device).reshape(shape),
    )


def check_factor(sums: Tensor, where: str) -> None:
    """Raise when sums over the gradients of the training set are not finite."""
    if not bool(torch.isfinite(sums).all()):
        raise SingularCurvatureError(
            f"expected finite gradients of the outputs in the weights, got NaN or infinity in {where}. Look for a "
            "square root, a logarithm or a norm at zero in the model; gradients of a float16 model may overflow: use "
            "float32."
        )
