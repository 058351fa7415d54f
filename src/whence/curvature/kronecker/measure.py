"""Sums over captured tangents that take no basis: lengths, inner products, totals, combinations of cotangents."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.tangents.forms import Dense, Kronecker, Rows, Tangent, Whole

from .basis import Basis
from .contraction import along_factors, mix

CHUNK_NUMBERS = {"cpu": 2**23, "cuda": 2**29}
"""Gradient entries that may be held at once when gradient matrices must be formed."""


def raised(values: Tensor) -> Tensor:
    """Half precision to float32; squares of bfloat16 would keep two digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def outer(a: Tensor, g: Tensor) -> Tensor:
    """sum_t g_t a_t^T: (n, e, t, i) and (n, c, e, t, o) to (n, c, e, o, i), as one batched product an example.

    On a GPU, where gradients would have to be turned round for that, it is one for each cotangent.
    """
    n, c, e, t, o = g.shape
    if g.is_cuda and e == 1 and not g.transpose(-1, -2).is_contiguous():
        found = g.new_empty(n, c, 1, o, a.shape[-1])
        for at in range(c):
            torch.bmm(g[:, at, 0].transpose(1, 2), a[:, 0], out=found[:, at, 0])
        return found
    left = g.permute(0, 2, 1, 4, 3).reshape(n, e, c * o, t)
    return (left @ a).reshape(n, e, c, o, a.shape[-1]).transpose(1, 2)


def products_are_rounded(device: torch.device) -> bool:
    """Whether single-precision products lose all but three digits here, as TF32 on a GPU does."""
    return device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32


def beyond(tangent: Tangent, basis: Basis, inputs: Tensor | None = None, grads: Tensor | None = None) -> list[Tangent]:
    """Tangents whose squared lengths add up to what of a gradient lies outside a basis.

    G - P G Q = G (I - Q) + (I - P) G Q, two parts at right angles. The difference of the squared lengths of G and P G Q
    is the same and cheaper, but nothing but rounding where the basis holds nearly all of G and products are coarse.

    Args:
        tangent: the gradients G.
        basis: which may span a corner only.
        inputs: the inputs of a Kronecker tangent in the basis, if they are known.
        grads: its output gradients in the basis, if they are known.
    """
    if isinstance(tangent, Dense):
        return [Dense(tangent.block, (_rest(raised(tangent.values), basis.inputs),))]
    if isinstance(tangent, Rows):
        columns = None if basis.outputs is None else basis.outputs[0]
        return [Rows(tangent.block, tangent.index, _rest(raised(tangent.grads), columns), tangent.weights)]
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    if inputs is None:
        inputs = a if basis.inputs is None else times(a, basis.inputs)
    return [
        Kronecker(tangent.block, Whole(_rest(a, basis.inputs, inputs)), Whole(g)),
        Kronecker(tangent.block, Whole(inputs), Whole(_rest(g, basis.outputs, grads))),
    ]


def _rest(values: Tensor, columns: Tensor | None, inside: Tensor | None = None) -> Tensor:
    """Rows v (..., i) less U U^T v, for orthonormal columns U (i, r); or (e, i, r), for rows (..., e, t, i)."""
    if columns is None:
        return torch.zeros_like(values)
    inside = times(values, columns) if inside is None else inside
    return values - times(inside, columns.transpose(-1, -2))


def times(values: Tensor, matrix: Tensor) -> Tensor:
    """Without a copy of the matrix for every example where it is one for all groups."""
    if matrix.dim() == 3 and len(matrix) == 1:
        return (values.squeeze(-3) @ matrix[0]).unsqueeze(-3)
    return values @ matrix


def dense_times(tangent: Dense, matrix: Tensor) -> Tensor:
    """Gradients (n, c, p) times (p, r), or (p,), part by part."""
    n, c = tangent.parts[0].shape[:2]
    flat = [raised(part).reshape(n * c, -1) for part in tangent.parts]  # else some are multiplied example by example
    rows = matrix.to(flat[0].dtype).split([part.shape[1] for part in flat])
    found: Tensor = flat[0] @ rows[0]
    for part, some in zip(flat[1:], rows[1:], strict=True):
        found = torch.addmm(found, part, some) if some.dim() == 2 else torch.addmv(found, part, some)
    return found.reshape(n, c, *matrix.shape[1:])


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
    if isinstance(tangent, Dense) and tangent.parts[0].shape[1] == 1:
        sizes: list[Tensor] = [torch.linalg.vector_norm(raised(part), dim=2, keepdim=True) for part in tangent.parts]
        return sum((one.square() for one in sizes[1:]), start=sizes[0].square())
    if not isinstance(tangent, Kronecker):
        full = tangent.materialize().flatten(2)
        return raised(full) @ raised(full).transpose(1, 2)
    if tangent.cotangents == 1:  # the very numbers of `lengths`, whichever is asked for first
        return lengths(tangent).unsqueeze(2)
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    n, c = g.shape[:2]
    if tangent.positions == 1:
        scaled = g * a.square().sum(-1, keepdim=True).unsqueeze(1)
    else:
        scaled = (a @ a.transpose(-1, -2)).unsqueeze(1) @ g
    return scaled.reshape(n, c, -1) @ g.reshape(n, c, -1).transpose(1, 2)


def total(tangent: Tangent, weights: Tensor) -> Tensor:
    """The gradients of all examples and cotangents together, weighted by (n, c), shaped as the block's matrix."""
    if isinstance(tangent, Dense):  # as one product: scaled gradients would be as large as they are
        parts = [raised(part).flatten(0, 1) for part in tangent.parts]
        return torch.cat([weights.to(part.dtype).reshape(-1) @ part for part in parts])
    mixed = combine(tangent, weights.unsqueeze(2))
    if isinstance(mixed, Kronecker):
        a, g = raised(mixed.inputs()), raised(mixed.grads())
        return torch.einsum("neto,neti->eoi", g.sum(1), a)
    assert isinstance(mixed, Rows)
    rows, _, values = mixed.aggregate()
    summed = raised(values).sum(1)
    return summed.new_zeros(tangent.block.matrix_shape).index_add_(0, rows, summed)


def along(tangent: Tangent, direction: Tensor) -> Tensor:
    """Inner products of the gradients with a direction shaped as the block's matrix: (n, c)."""
    if isinstance(tangent, Kronecker):
        a, g = raised(tangent.inputs()), raised(tangent.grads())
        return along_factors(a, g, direction.to(a.dtype))
    if isinstance(tangent, Rows):
        at = direction[tangent.index].to(tangent.grads.dtype)  # (n, t, d)
        found = (tangent.grads * at.unsqueeze(1)).sum(3)
        return found.sum(2) if tangent.weights is None else (found * tangent.weights.unsqueeze(1)).sum(2)
    return dense_times(tangent, direction)


def combine(tangent: Tangent, weights: Tensor) -> Tangent:
    """Other cotangents as combinations of those pulled back: weights (n, c, q)."""
    if isinstance(tangent, Kronecker):
        grads = raised(tangent.grads())
        weights = weights.to(grads.dtype)
        return Kronecker(tangent.block, tangent.a, Whole(mix(grads, weights)))
    if isinstance(tangent, Rows):
        grads = raised(tangent.grads)
        mixed = torch.einsum("nctd,ncq->nqtd", grads, weights.to(grads.dtype))
        return Rows(tangent.block, tangent.index, mixed, tangent.weights)
    values = raised(tangent.values)
    turned = weights.transpose(1, 2).to(values.dtype)  # (n, q, c)
    return Dense(tangent.block, (turned * values if values.shape[1] == 1 else turned @ values,))
