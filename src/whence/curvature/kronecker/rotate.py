"""Bring captured tangents into the coordinates of a basis, by the cheapest order of contractions."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from whence.tangents.forms import Dense, Factor, Kronecker, Rows, Tangent, Whole

from .basis import Basis
from .rotated import Factored, Full, Rotated, Sparse

CHUNK_NUMBERS = {"cpu": 2**23, "cuda": 2**29}
"""Gradient entries that may be held at once when gradient matrices must be formed."""


def rotate(tangent: Tangent, basis: Basis) -> Iterator[tuple[slice, Rotated]]:
    """Yield (which examples, their gradients in the basis); several chunks only where matrices must be formed.

    A Kronecker tangent stays factored when it is seen at one position, or at so few that pairs of positions are
    cheaper than matrices; else the matrices are formed, before or after the rotation, whichever takes fewer products.
    """
    if isinstance(tangent, Dense):
        values = raised(tangent.values)
        moved = values if basis.inputs is None else values @ basis.inputs
        yield slice(0, len(values)), Full(moved, basis.shape)
    elif isinstance(tangent, Rows):
        rows, examples, values = tangent.aggregate()
        values = raised(values)
        moved = values if basis.outputs is None else values @ basis.outputs[0]
        count = tangent.index.shape[0]
        yield slice(0, count), Sparse(rows, examples, moved, count, basis.shape)
    elif stays_factored(tangent, basis):
        yield (
            slice(0, tangent.examples),
            Factored(_project(tangent.a, basis.inputs), _project(tangent.g, basis.outputs)),
        )
    else:
        yield from _formed(tangent, basis)


def settled(tangent: Tangent, basis: Basis) -> Tangent:
    """Compute once what will be used several times: the factors of tangents that are rotated and measured."""
    if not isinstance(tangent, Kronecker) or not (basis.outside or tangent.positions == 1):
        return tangent
    return Kronecker(tangent.block, Whole(raised(tangent.inputs())), Whole(raised(tangent.grads())))


def stays_factored(tangent: Kronecker, basis: Basis) -> bool:
    """Whether the gradient matrices of this tangent need never be formed."""
    t = tangent.positions
    _, o, i = basis.shape
    return t == 1 or t * t * (o + i) < tangent.cotangents * o * i


def raised(values: Tensor) -> Tensor:
    """Half precision to float32; squares of bfloat16 would keep two digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _project(factor: Factor, basis: Tensor | None) -> Tensor:
    if basis is None:
        return raised(factor.tensor())
    return raised(factor.project(basis))


def _formed(tangent: Kronecker, basis: Basis) -> Iterator[tuple[slice, Full]]:
    n, c, t = tangent.examples, tangent.cotangents, tangent.positions
    _, o, i = tangent.block.matrix_shape
    e, o_in, i_in = basis.shape
    turn_factors = t * i * i_in + c * t * o * o_in + c * t * o_in * i_in
    turn_matrices = c * t * o * i + c * (o_in * o * i + o_in * i * i_in)
    early = basis.inputs is not None and turn_factors <= turn_matrices
    a = _project(tangent.a, basis.inputs if early else None)
    g = _project(tangent.g, basis.outputs if early else None)
    step = max(1, CHUNK_NUMBERS["cuda" if a.is_cuda else "cpu"] // (c * e * (o_in * i_in if early else o * i)))
    for start in range(0, n, step):
        where = slice(start, min(start + step, n))
        matrices = outer(a[where], g[where])
        if not early:
            matrices = basis.into(matrices)
        yield where, Full(matrices.reshape(len(matrices), c, -1), basis.shape)


def outer(a: Tensor, g: Tensor) -> Tensor:
    """sum_t g_t a_t^T: (n, e, t, i) and (n, c, e, t, o) to (n, c, e, o, i), as one batched product an example."""
    n, c, e, t, o = g.shape
    left = g.permute(0, 2, 1, 4, 3).reshape(n, e, c * o, t)
    return (left @ a).reshape(n, e, c, o, a.shape[-1]).transpose(1, 2)


def products_are_rounded(device: torch.device) -> bool:
    """Whether single-precision products lose all but three digits here, as TF32 on a GPU does."""
    return device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32


def beyond(tangent: Tangent, basis: Basis) -> list[Tangent]:
    """Tangents whose squared lengths add up to what of a gradient lies outside a basis.

    G - P G Q = G (I - Q) + (I - P) G Q, two parts at right angles. The difference of the squared lengths of G and P G Q
    is the same and cheaper, but nothing but rounding where the basis holds nearly all of G and products are coarse.
    """
    if isinstance(tangent, Dense):
        return [Dense(tangent.block, _rest(raised(tangent.values), basis.inputs))]
    if isinstance(tangent, Rows):
        columns = None if basis.outputs is None else basis.outputs[0]
        return [Rows(tangent.block, tangent.index, _rest(raised(tangent.grads), columns), tangent.weights)]
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    inside = a if basis.inputs is None else times(a, basis.inputs)
    return [
        Kronecker(tangent.block, Whole(_rest(a, basis.inputs)), Whole(g)),
        Kronecker(tangent.block, Whole(inside), Whole(_rest(g, basis.outputs))),
    ]


def _rest(values: Tensor, columns: Tensor | None) -> Tensor:
    """Rows v (..., i) less U U^T v, for orthonormal columns U (i, r); or (e, i, r), for rows (..., e, t, i)."""
    if columns is None:
        return torch.zeros_like(values)
    return values - times(times(values, columns), columns.transpose(-1, -2))


def times(values: Tensor, matrix: Tensor) -> Tensor:
    """Without a copy of the matrix for every example where it is one for all groups."""
    if matrix.dim() == 3 and len(matrix) == 1:
        return (values.squeeze(-3) @ matrix[0]).unsqueeze(-3)
    return values @ matrix


def lengths(tangent: Tangent) -> Tensor:
    """Squared lengths of the gradients, (n, c): the diagonals of `energy` alone."""
    if not isinstance(tangent, Kronecker):
        return torch.diagonal(energy(tangent), dim1=1, dim2=2)
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    if tangent.positions == 1:
        return (g.square().sum(-1) * a.square().sum(-1).unsqueeze(1)).sum((2, 3))
    return (((a @ a.transpose(-1, -2)).unsqueeze(1) @ g) * g).sum((2, 3, 4))


def energy(tangent: Tangent) -> Tensor:
    """Inner products of the gradients of every example's cotangents, (n, c, c), without forming any matrix."""
    if isinstance(tangent, Dense) and tangent.values.shape[1] == 1:
        return raised(tangent.values).square().sum(2, keepdim=True)
    if not isinstance(tangent, Kronecker):
        full = tangent.materialize().flatten(2)
        return raised(full) @ raised(full).transpose(1, 2)
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    n, c = g.shape[:2]
    if tangent.positions == 1:
        scaled = g * a.square().sum(-1, keepdim=True).unsqueeze(1)
    else:
        scaled = (a @ a.transpose(-1, -2)).unsqueeze(1) @ g
    if c == 1:
        return (scaled * g).flatten(1).sum(1).reshape(n, 1, 1)
    return scaled.reshape(n, c, -1) @ g.reshape(n, c, -1).transpose(1, 2)
