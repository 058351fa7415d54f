"""Gradients in the coordinates of a basis: their squares, Gram matrices and inner products.

Axis letters: n examples, c cotangents, e groups, t positions, o outputs, i inputs, q combinations, w weight matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from whence.jacobian.gradients import (
    HALVES,
    Block,
    Dense,
    Factor,
    Kronecker,
    Rows,
    Tangent,
    Whole,
    cotangents_first,
    fused_kernels,
    is_transposed_in_memory,
    multiply_into,
    product,
    promoted,
    transposed_product,
)

MOST_COTANGENTS = 32  # largest number of cotangents for the fused Gram kernel
CHUNK_NUMBERS = {"cpu": 2**23, "cuda": 2**29}  # entries of gradient matrices formed at once
ALIGNED = 8  # a GPU's tensor units need rows of multiples of this: others take three times as long


def example_slices(n: int, numbers: int, like: Tensor) -> Iterator[slice]:
    """Slices of n examples, so short that matrices with so many `numbers` for each example can be formed at once."""
    step = max(1, CHUNK_NUMBERS["cuda" if like.is_cuda else "cpu"] // numbers)
    return (slice(low, min(low + step, n)) for low in range(0, n, step))


def mix(g: Tensor, weights: Tensor) -> Tensor:
    """Combine gradients (n, c, ...) with weights (n, c, q): (n, q, ...)."""
    transposed = is_transposed_in_memory(g)
    stored = g.transpose(-1, -2) if transposed else g
    kernels = fused_kernels(g)
    if kernels is not None and weights.shape[2] <= kernels.MOST_WEIGHTS and stored[0, 0].is_contiguous():
        mixed = kernels.mixtures(stored.flatten(2), weights)
    elif g.shape[1] == 1:  # a matrix product would take longer
        mixed = weights.transpose(1, 2) * stored.flatten(2)
    else:  # without the copy of the weights a GPU takes twice as long
        mixed = weights.transpose(1, 2).contiguous() @ stored.flatten(2)
    found: Tensor = mixed.unflatten(2, stored.shape[2:])
    return found.transpose(-1, -2) if transposed else found


def inner_products(g: Tensor, vectors: Tensor) -> Tensor:
    """(n, c) inner products of gradients (n, c, e, t, o) with one vector for each example, (n, e, t, o)."""
    if is_transposed_in_memory(g):
        g, vectors = g.transpose(3, 4), vectors.transpose(2, 3)
    kernels = fused_kernels(g)
    if kernels is not None and g.shape[1] <= MOST_COTANGENTS and g[0, 0].is_contiguous():
        found: Tensor = kernels.inner_products(g.flatten(2), vectors.flatten(1))
        return found
    rows, column = g.flatten(2), vectors.flatten(1).unsqueeze(2)
    if g.dtype == torch.bfloat16:  # single precision would take a GPU three times as long here
        return (rows @ column).squeeze(2).float()
    return product(rows, column).squeeze(2)


def scaled_grams(values: Tensor, scales: Tensor, positive: bool = False) -> Tensor:
    """V diag(scale) V^T for values (n, c, p) and scales (w, n or 1, 1, p): (w, n, c, c).

    If no scale is negative (`positive`), a product reads one tensor instead of two.
    """
    kernels = fused_kernels(values) if values.dtype == torch.bfloat16 and values.is_contiguous() else None
    if kernels is not None and positive and scales.shape[1] == 1 and values.shape[1] <= MOST_COTANGENTS:
        return torch.stack([kernels.grams(values, scale.flatten().sqrt().float()) for scale in scales])
    found = []
    for scale in scales:
        scaled = values * (scale.sqrt() if positive else scale).to(values.dtype)
        found.append(product(scaled, (scaled if positive else values).transpose(1, 2)))
    return torch.stack(found)


@dataclass(frozen=True)
class Factored:
    """Outer products g a^T, kept as their factors."""

    a: Tensor  # (n, e, i)
    g: Tensor  # (n, c, e, o)

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, n, c] phi^2, for weights of each example or shared (q, 1, c): (q, e, o, i)."""
        g, a = self.g.square(), self.a.square()
        each = weights.transpose(0, 1).to(g.dtype).contiguous()  # (n or 1, q, c)
        if g.shape[1] > 1:
            return self._summed_products((each @ g.flatten(2)).unflatten(2, g.shape[2:]), a)
        if a.shape[2] < g.shape[3]:  # a multiple of the shorter factor has fewer numbers
            return self._summed_products(each.unsqueeze(3) * a.unsqueeze(1), g.squeeze(1)).mT
        return self._summed_products(each.unsqueeze(3) * g, a)

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, e, o, i): (w, n, c, c)."""
        n, c, e, o = self.g.shape
        if c == 1:
            return self.variances(weights).unsqueeze(3)
        scale = torch.einsum("nei,weoi->wneo", self.a.square(), weights)
        return scaled_grams(self.g.reshape(n, c, e * o), scale.reshape(len(weights), n, 1, e * o), positive)

    def variances(self, weights: Tensor) -> Tensor:
        """Only the diagonals of `grams`: (w, n, c)."""
        g, a = self.g.square(), self.a.square()
        if g.shape[1] > 1:
            return torch.einsum("nceo,wneo->wnc", g, torch.einsum("nei,weoi->wneo", a, weights))
        longer, shorter = g, a
        if a.shape[2] > g.shape[3]:
            longer, shorter, weights = a.unsqueeze(1), g.squeeze(1), weights.mT
        flat = weights.mT.transpose(0, 1).flatten(1, 2)  # (e, w i, o): the longer factor is summed first
        summed: Tensor = (flat @ longer.permute(1, 2, 3, 0)[0]).unflatten(1, (len(weights), -1))  # (e, w, i, n)
        return summed.mul_(shorter.permute(1, 2, 0).unsqueeze(1)).sum((0, 2)).unsqueeze(2)

    def mix(self, weights: Tensor) -> Factored:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        return Factored(self.a, mix(self.g, weights.to(self.g.dtype)))

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of (e, o, i): (n, c, r)."""
        o, i = self.g.shape[3], self.a.shape[2]
        group, row, column = index // (o * i), (index // i) % o, index % i
        return self.g[:, :, group, row] * self.a[:, group, column].unsqueeze(1)

    @staticmethod
    def _summed_products(left: Tensor, right: Tensor) -> Tensor:
        """Sums over examples of outer products of (n, q, e, o) and (n, e, i): (q, e, o, i)."""
        n, q, e, o = left.shape
        if e > 1:
            return torch.einsum("nqeo,nei->qeoi", left, right)
        return transposed_product(left.reshape(n, q * o), right.squeeze(1)).reshape(q, 1, o, -1)


@dataclass(frozen=True)
class Full:
    """The gradients themselves, flattened."""

    values: Tensor  # (n, c, p), where p includes the padding
    shape: tuple[int, ...]  # of the block's matrix
    padding: int = 0  # zeros after every row of the matrix

    def matrices(self) -> Tensor:
        """The gradients as (n, c, *shape)."""
        return widened(self._trimmed(self.values))

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, n, c] phi^2, for weights of each example or shared (q, 1, c): (q, *shape)."""
        values, shared = self.values, weights.shape[1] == 1
        half = values.dtype == torch.bfloat16
        if shared and (values.is_cuda or half):  # reads the gradients once, writes no squares
            dtype = torch.float32 if half else values.dtype
            squares, rows = torch.linalg.vector_norm(values, dim=0, dtype=dtype).square(), weights.squeeze(1).to(dtype)
            return self._trimmed(rows @ squares if len(squares) > 1 else rows * squares)
        each = weights.expand(-1, len(values), -1).flatten(1).to(values.dtype)  # (q, n c)
        return self._trimmed(product(each, values.square().flatten(0, 1)))

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, *shape): (w, n, c, c)."""
        if self.values.shape[1] == 1:
            return self.variances(weights).unsqueeze(3)
        return scaled_grams(self.values, self._padded(weights).reshape(len(weights), 1, 1, -1), positive)

    def variances(self, weights: Tensor) -> Tensor:
        """Only the diagonals of `grams`, reading the gradients once: (w, n, c)."""
        n, c, p = self.values.shape
        columns = self._padded(weights).reshape(len(weights), p).to(self.values.dtype)
        kernels = fused_kernels(self.values) if self.values.dtype == torch.bfloat16 else None
        if kernels is not None and len(weights) <= kernels.MOST_WEIGHTS and self.values.is_contiguous():
            found: Tensor = kernels.squares(self.values.flatten(0, 1), columns.contiguous())
            return found.reshape(-1, n, c)
        return product(columns, self.values.reshape(n * c, p).square().T).reshape(-1, n, c)

    def mix(self, weights: Tensor) -> Full:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        values = widened(self.values)
        return Full(weights.transpose(1, 2).to(values.dtype) @ values, self.shape, self.padding)

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions: (n, c, r)."""
        whole = len(index) == math.prod(self.shape) and not self.padding  # positions are in ascending order
        return self.values if whole else self.values[:, :, index + index // self.shape[-1] * self.padding]

    def _trimmed(self, flat: Tensor) -> Tensor:
        """(..., p) to (..., *shape), without the padding."""
        rows = flat.reshape(*flat.shape[:-1], *self.shape[:-1], self.shape[-1] + self.padding)
        return rows[..., : self.shape[-1]]

    def _padded(self, matrices: Tensor) -> Tensor:
        """(..., *shape), padded with zeros as the gradients are."""
        return pad(matrices, (0, self.padding)) if self.padding else matrices


@dataclass(frozen=True)
class Sparse:
    """A few rows of a large matrix, with each (example, row) pair once."""

    rows: Tensor  # (u,)
    of: Tensor  # (u,) the examples they belong to
    values: Tensor  # (u, c, d)
    examples: int
    shape: tuple[int, ...]  # (V, d)

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, n, c] phi^2, for weights of each example or shared (q, 1, c): (q, V, d)."""
        each = weights.transpose(0, 1).to(self.values.dtype)
        each = each if len(each) == 1 else each[self.of]
        sums = each @ self.values.square()  # (u, q, d)
        return sums.new_zeros(self.shape[0], *sums.shape[1:]).index_add_(0, self.rows, sums).transpose(0, 1)

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, V, d): (w, n, c, c)."""
        scaled = self.values * weights[:, self.rows].unsqueeze(2)  # (w, u, c, d)
        return self._by_example((scaled @ self.values.transpose(1, 2)).transpose(0, 1)).transpose(0, 1)

    def variances(self, weights: Tensor) -> Tensor:
        """Only the diagonals of `grams`: (w, n, c)."""
        squares = torch.einsum("ucd,wud->ucw", self.values.square(), weights[:, self.rows])
        return self._by_example(squares).permute(2, 0, 1)

    def mix(self, weights: Tensor) -> Sparse:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        mixed = weights[self.of].transpose(1, 2).to(self.values.dtype) @ self.values
        return Sparse(self.rows, self.of, mixed, self.examples, self.shape)

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of (V, d): (n, c, r)."""
        wanted, at = torch.unique(index // self.shape[1], return_inverse=True)
        place = torch.full((self.shape[0],), -1, device=index.device)
        place[wanted] = torch.arange(len(wanted), device=index.device)
        here = place[self.rows] >= 0
        table = self.values.new_zeros(self.examples, len(wanted), *self.values.shape[1:])
        table[self.of[here], place[self.rows[here]]] = self.values[here]
        return table.permute(0, 2, 1, 3)[:, :, at, index % self.shape[1]]

    def _by_example(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.examples, *values.shape[1:]).index_add_(0, self.of, values)


Rotated: TypeAlias = Factored | Full | Sparse


@dataclass(frozen=True)
class Basis:
    """A basis U = U_out (x) U_in of one block; `None` stands for the identity.

    A basis may have fewer columns than rows. Then it spans a part of the block's space, and only the squared length of
    the rest, outside, is known.
    """

    block: Block
    inputs: Tensor | None = None  # (e, i, i) for kronecker blocks, (i, i) for others; columns are the directions
    outputs: Tensor | None = None  # (e, o, o) for kronecker blocks

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates."""
        shape = [*self.block.matrix_shape]
        shape[-1] = shape[-1] if self.inputs is None else self.inputs.shape[-1]
        if self.outputs is not None:
            shape[-2] = self.outputs.shape[-1]
        return tuple(shape)

    @property
    def tensors(self) -> list[Tensor]:
        """The matrices that are not the identity."""
        return [one for one in (self.inputs, self.outputs) if one is not None]

    @cached_property
    def missing(self) -> int:
        """Number of directions that the basis does not span."""
        return self.block.numel - math.prod(self.shape)

    def select(self, rows: Tensor, columns: Tensor) -> Basis:
        """Keep some output and some input directions of a kronecker block."""
        assert self.inputs is not None
        assert self.outputs is not None
        return Basis(self.block, self.inputs[:, :, columns].contiguous(), self.outputs[:, :, rows].contiguous())

    def to_coordinates(self, matrix: Tensor) -> Tensor:
        """Coordinates U^T v of matrices (..., *block.matrix_shape)."""
        moved = matrix if self.outputs is None else self.outputs.transpose(-1, -2) @ matrix
        return moved if self.inputs is None else moved @ self.inputs

    def from_coordinates(self, matrix: Tensor) -> Tensor:
        """U c: from coordinates back to matrices."""
        moved = matrix if self.outputs is None else self.outputs @ matrix
        return moved if self.inputs is None else moved @ self.inputs.transpose(-1, -2)

    def solve(self, damped: DiagonalMoments, matrices: Tensor) -> Tensor:
        """F_lam^-1 v for matrices (..., *block.matrix_shape), given s + lambda in this basis."""
        basis, weights = self.to(matrices.dtype), damped.inverse()
        if not self.missing:
            return basis.from_coordinates(basis.to_coordinates(matrices) * weights.inside.to(matrices.dtype))
        rest = weights.outside  # applied everywhere and subtracted inside: needs no second matrix
        inside = (weights.inside - rest).to(matrices.dtype)
        return basis.from_coordinates(basis.to_coordinates(matrices) * inside).add_(matrices, alpha=rest)

    def to(self, dtype: torch.dtype, device: torch.device | None = None) -> Basis:
        """The same basis in another precision, optionally on another device."""
        parts = [None if part is None else part.to(device=device, dtype=dtype) for part in (self.inputs, self.outputs)]
        return Basis(self.block, *parts)


@dataclass(frozen=True)
class DiagonalMoments:
    """The diagonal of a second moment of a block's gradients in its basis."""

    inside: Tensor  # sums of squares of each coordinate, float64
    outside: float  # mean over the directions that the basis does not span; zero if it spans all

    def times(self, factor: float) -> DiagonalMoments:
        """Multiply by a factor."""
        return DiagonalMoments(factor * self.inside, factor * self.outside)

    def empty_directions(self, basis: Basis) -> int:
        """Number of directions of the block without any gradient."""
        return int((self.inside <= 0).sum()) + basis.missing * (self.outside <= 0)

    def over(self, other: DiagonalMoments) -> DiagonalMoments:
        """Divide by other moments, direction by direction."""
        return DiagonalMoments(self.inside / other.inside, self.outside / other.outside)

    def inverse(self) -> DiagonalMoments:
        """One over these moments."""
        return DiagonalMoments(1.0 / self.inside, 1.0 / self.outside)

    def trace(self, basis: Basis) -> float:
        """The sum over all directions of the block."""
        return float(self.inside.sum()) + basis.missing * self.outside

    def damped(self, ridge: float) -> DiagonalMoments:
        """Add a ridge; outside, a zero becomes one, to allow division."""
        return DiagonalMoments(self.inside + ridge, self.outside + ridge or 1.0)


def widened(values: Tensor) -> Tensor:
    """Convert half precision to float32; squares in bfloat16 would keep only two digits."""
    return values.float() if values.dtype in HALVES else values


def widened_on_cpu(values: Tensor) -> Tensor:
    """Keep half precision on a GPU, whose products are in single precision; else convert it to float32."""
    return values if values.is_cuda else widened(values)


def gradient_matrices(a: Tensor, g: Tensor) -> Tensor:
    """sum_t g_t a_t^T for a (n, e, t, i) and g (n, c, e, t, o): (n, c, e, o, i), one batched product for each example.

    If a GPU would have to transpose the gradients for that, there is one product for each cotangent. float16 gives
    float32, other precisions stay.
    """
    n, c, e, t, o = g.shape
    if g.is_cuda and e == 1 and not is_transposed_in_memory(g):
        dtype = torch.float32 if g.dtype == torch.float16 else g.dtype
        found = g.new_empty(n, c, 1, o, a.shape[-1], dtype=dtype)
        for at in range(c):
            multiply_into(g[:, at, 0].transpose(1, 2), a[:, 0], found[:, at, 0])
        return found
    left = g.permute(0, 2, 1, 4, 3).reshape(n, e, c * o, t)
    matrices = left @ a if g.dtype == torch.bfloat16 else product(left, a)
    return matrices.reshape(n, e, c, o, a.shape[-1]).transpose(1, 2)


def products_are_rounded(device: torch.device) -> bool:
    """Whether single-precision products keep only three digits here, as with TF32 on a GPU."""
    return device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32


def parts_outside(tangent: Kronecker, basis: Basis, inputs: Tensor) -> list[Kronecker]:
    """Tangents whose squared lengths add up to that of the part of a gradient G outside a basis.

    P and Q project onto its output and input directions. G - P G Q = G (I - Q) + (I - P) G Q, two orthogonal parts.
    `inputs` are the layer's in the basis. The squared length of G minus that of P G Q is the same and cheaper, but if
    the basis holds nearly all of G and products are rounded, it is only rounding error.
    """
    parts = []
    if basis.inputs is not None and basis.inputs.shape[1] > basis.inputs.shape[2]:
        parts.append(Kronecker(tangent.block, Whole(_minus_projection(tangent.a, basis.inputs)), tangent.g))
    if basis.outputs is not None and basis.outputs.shape[1] > basis.outputs.shape[2]:
        parts.append(Kronecker(tangent.block, Whole(inputs), Whole(_minus_projection(tangent.g, basis.outputs))))
    return parts


def _minus_projection(factor: Factor, columns: Tensor) -> Tensor:
    """A factor minus its projection onto columns (e, i, r)."""
    return factor.tensor() - Whole(factor.project(columns)).project(columns.transpose(-1, -2))


def times(values: Tensor, matrix: Tensor) -> Tensor:
    """`values @ matrix`, without copying the matrix for every example if there is one group."""
    if values.dtype in HALVES:
        return product(values, matrix.to(values.dtype).expand(*values.shape[:-2], -1, -1))
    if matrix.dim() == 3 and len(matrix) == 1:
        return (values.squeeze(-3) @ matrix[0]).unsqueeze(-3)
    return values @ matrix


def rotated_values(tangent: Dense | Rows, basis: Basis) -> Full | Sparse:
    """Gradients that are not sums of outer products, in the coordinates of a basis."""
    if isinstance(tangent, Dense):
        values = widened(tangent.values)
        if basis.inputs is not None:  # as one product, not example by example
            values = (values.flatten(0, 1) @ basis.inputs.to(values.dtype)).unflatten(0, values.shape[:2])
        return Full(values, basis.shape)
    rows, examples, values = tangent.aggregate()
    values = widened(values)
    moved = values if basis.inputs is None else values @ basis.inputs
    return Sparse(rows, examples, moved, tangent.index.shape[0], basis.shape)


def gram_matrices(tangent: Kronecker | Dense) -> Tensor:
    """Inner products of the gradients of every example's cotangents, (n, c, c), without forming any matrix."""
    if isinstance(tangent, Dense):
        values = widened(tangent.values)
        return values.square().sum(2, keepdim=True) if values.shape[1] == 1 else values @ values.mT
    g, moved = _gram_factors(tangent)
    return product(moved, g.transpose(1, 2))


def squared_lengths(tangent: Kronecker | Dense) -> Tensor:
    """Squared lengths of the gradients, (n, c): only the diagonals of `gram_matrices`."""
    if isinstance(tangent, Dense):
        return widened(tangent.values).square().sum(2)
    g, moved = _gram_factors(tangent)
    products = g * moved
    return products.sum(2, dtype=torch.float32 if products.dtype in HALVES else None)


def _gram_factors(tangent: Kronecker) -> tuple[Tensor, Tensor]:
    """(n, c, e t o) g, and sum_s <a_t, a_s> g_s; their inner products are those of the gradient matrices."""
    a, g = promoted(tangent.inputs(), tangent.grads())
    if tangent.positions == 1:
        a, g = widened(a), widened(g)
        return g.flatten(2), (g * a.square().sum(-1, keepdim=True).unsqueeze(1)).flatten(2)
    inner = product(a, a.transpose(-1, -2))
    if g.dtype in HALVES:  # beyond the range of float16
        inner, g = inner.bfloat16(), g.bfloat16()
    first = cotangents_first(g)
    g, inner = (g.transpose(0, 1), inner) if first else (g, inner.unsqueeze(1))
    if is_transposed_in_memory(g):
        g = g.transpose(-1, -2)
        moved = g @ inner
    else:
        moved = inner @ g
    g, moved = (g.transpose(0, 1), moved.transpose(0, 1)) if first else (g, moved)
    return g.flatten(2), moved.flatten(2)


def weighted_sum(tangent: Tangent, weights: Tensor) -> Tensor:
    """Sum of the gradients of all examples and cotangents with weights (n, c), shaped as the block's matrix."""
    if isinstance(tangent, Dense):
        values = widened(tangent.values).flatten(0, 1)
        return weights.flatten().to(values.dtype) @ values
    if isinstance(tangent, Rows):
        grads = widened(tangent.grads)
        rows = torch.einsum("nc,nctd->ntd", weights.to(grads.dtype), grads).flatten(0, 1)
        return rows.new_zeros(tangent.block.matrix_shape).index_add_(0, tangent.index.flatten(), rows)
    g = tangent.grads()
    if not (g.is_cuda and g.dtype == torch.float16):
        g = widened(g)
        return tangent.a.total(mix(g, weights.to(g.dtype).unsqueeze(2)).squeeze(1))
    unit, size = normalized(weights, math.inf)
    return tangent.a.total(mix(g, unit.to(g.dtype).unsqueeze(2)).squeeze(1).float()) * size


def normalized(values: Tensor, order: float = 2.0) -> tuple[Tensor, Tensor]:
    """Values divided by their norm, and the norm: small numbers underflow in float16."""
    size: Tensor = torch.linalg.vector_norm(values, order)
    return values / torch.where(size > 0, size, 1.0), size


def directional_derivatives(tangent: Tangent, direction: Tensor) -> Tensor:
    """Inner products of the gradients with a direction shaped as the block's matrix: (n, c)."""
    if isinstance(tangent, Dense):
        values = widened(tangent.values)
        return values @ direction.to(values.dtype)
    if isinstance(tangent, Rows):
        grads = widened(tangent.grads)
        return torch.einsum("nctd,ntd->nc", grads, direction.to(grads.dtype)[tangent.index])
    g = tangent.grads()
    unit, size = normalized(direction) if g.dtype in HALVES else (direction, 1.0)
    return inner_products(*promoted(g, tangent.a.project(unit.transpose(-1, -2)))) * size


def mix_cotangents(tangent: Tangent, weights: Tensor) -> Tangent:
    """Other cotangents as combinations of those pulled back: weights (n, c, q)."""

    def mixed(g: Tensor) -> Tensor:
        wide = widened(g)
        return mix(wide, weights.to(wide.dtype))

    if isinstance(tangent, Kronecker):
        return Kronecker(tangent.block, tangent.a, Whole(mixed(tangent.grads())))
    if isinstance(tangent, Rows):
        return Rows(tangent.block, tangent.index, mixed(tangent.grads))
    return Dense(tangent.block, mixed(tangent.values))


class BasisView:
    """Gradients in the coordinates of a basis.

    A Kronecker tangent seen at one position stays factored. Otherwise its factors are rotated, once, and matrices are
    formed from them in chunks. Where products are `rounded`, the part outside the basis is measured directly, not as a
    difference of squared lengths. A `coarse` view forms matrices in bfloat16 after the rotation, where rounding moves
    nothing from one coordinate to another.
    """

    def __init__(self, tangent: Tangent, basis: Basis, rounded: bool = False, coarse: bool = False) -> None:
        self.tangent, self.basis, self.rounded, self.coarse = tangent, basis, rounded, coarse
        self._rotated_inputs: Tensor | None = None  # layer inputs in the basis, before rounding to bfloat16
        self._gram_matrices: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the basis spans all of the block."""
        return not self.basis.missing

    def chunks(self) -> Iterator[tuple[slice, Rotated]]:
        """Yield (which examples, their gradients); several chunks only where matrices must be formed."""
        if self._rotated is not None:
            yield slice(None), self._rotated
        else:
            yield from self._matrix_chunks(*self._rotated_factors)

    def coordinates(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of the basis: (n, c, r)."""
        found = [rotated.gather(index) for _, rotated in self.chunks()]
        return found[0] if len(found) == 1 else torch.cat(found)

    def mixed(self, weights: Tensor) -> Iterator[tuple[slice, Rotated]]:
        """As `chunks`, for q combinations of the cotangents with weights (n, c, q)."""
        if self._rotated is not None:
            yield slice(None), self._rotated.mix(weights)
            return
        a, g = self._rotated_factors
        if weights.shape[2] > g.shape[1]:  # matrices of fewer cotangents take fewer products
            yield from ((part, formed.mix(weights[part])) for part, formed in self._matrix_chunks(a, g))
        elif g.dtype == torch.float16:  # small weights would underflow
            sizes = weights.abs().amax(1).unsqueeze(2)  # (n, q, 1)
            units = weights / torch.where(sizes > 0, sizes, 1.0).transpose(1, 2)
            for part, formed in self._matrix_chunks(a, mix(g, units.to(g.dtype))):
                yield part, Full(formed.values * sizes[part].to(formed.values.dtype), formed.shape, formed.padding)
        else:
            yield from self._matrix_chunks(a, mix(g, weights.to(g.dtype)))

    def gram_matrices(self) -> Tensor:
        """Inner products of every example's gradients, (n, c, c); only of the part outside, if products are rounded."""
        if self._gram_matrices is None:
            self._gram_matrices = functools.reduce(torch.add, map(gram_matrices, self._parts_to_measure()))
        return self._gram_matrices

    def squared_lengths(self) -> Tensor:
        """Only the diagonals of `gram_matrices`, (n, c)."""
        if self._gram_matrices is not None:
            return torch.diagonal(self._gram_matrices, dim1=1, dim2=2)
        return functools.reduce(torch.add, map(squared_lengths, self._parts_to_measure()))

    def _parts_to_measure(self) -> Sequence[Kronecker | Dense]:
        """The parts of the gradients outside the basis, or whole gradients if products are exact."""
        assert not isinstance(self.tangent, Rows)  # these have a complete basis
        if not self.rounded:
            return [self.tangent]
        assert isinstance(self.tangent, Kronecker)  # so have exact blocks where products are rounded
        if self._rotated is None:
            _ = self._rotated_factors  # projects the inputs
        inputs = self._rotated.a.unsqueeze(2) if isinstance(self._rotated, Factored) else self._rotated_inputs
        assert inputs is not None
        return parts_outside(self.tangent, self.basis, inputs)

    @cached_property
    def _rotated(self) -> Rotated | None:
        """The rotated gradients of all examples, unless matrices must be formed."""
        tangent, basis = self.tangent, self.basis
        if not isinstance(tangent, Kronecker):
            return rotated_values(tangent, basis)
        if tangent.positions != 1:
            return None
        a, g = _project(tangent.a, basis.inputs), _project(tangent.g, basis.outputs)
        return Factored(widened(a).squeeze(2), widened(g).squeeze(3))

    @cached_property
    def _rotated_factors(self) -> tuple[Tensor, Tensor]:
        """The rotated factors that matrices are formed from."""
        tangent, inputs, kept = self.tangent, self.basis.inputs, self.basis.shape[-1]
        assert isinstance(tangent, Kronecker)
        if inputs is not None and inputs.is_cuda and kept % ALIGNED:
            inputs = pad(inputs, (0, -kept % ALIGNED))
        a, g = _project(tangent.a, inputs), _project(tangent.g, self.basis.outputs)
        self._rotated_inputs = None if self.complete else a[..., :kept]
        if not self.coarse or inputs is None:
            return widened(a), widened(g)
        rows = g.shape[1] * self.basis.shape[1]
        fewer = rows * kept < tangent.positions * (rows + kept)  # matrices have fewer numbers than factors
        if fewer and a.dtype == g.dtype == torch.float16:
            return a, g  # matrices will be in single precision
        return a.bfloat16(), g.bfloat16()

    def _matrix_chunks(self, a: Tensor, g: Tensor) -> Iterator[tuple[slice, Full]]:
        n, c, e, _, o = g.shape
        for where in example_slices(n, c * e * o * a.shape[3], a):
            matrices = gradient_matrices(a[where], g[where])
            padding = matrices.shape[-1] - self.basis.shape[-1]
            yield where, Full(matrices.reshape(len(matrices), c, -1), self.basis.shape, padding)


@dataclass(frozen=True)
class Weights:
    """Weights of a block's directions in sums of squares, for each of w estimators.

    The weight outside multiplies the whole squared length, so it also counts inside the basis, and weights inside are
    reduced by it. Not so if products are rounded to TF32: then differences of squared lengths are meaningless.
    """

    basis: Basis
    inside: Tensor  # (w, *shape) for each coordinate; minus the weight outside, unless products are rounded
    outside: Tensor  # (w, 1, 1, 1)
    rounded: bool

    @classmethod
    def of(cls, basis: Basis, weights: Iterable[DiagonalMoments], count: int, dtype: torch.dtype) -> Weights:
        """Weights of `count` estimators; only one of them in float64 at a time."""
        inside, outside, rounded = torch.empty(0, device="cpu"), [], False
        for at, one in enumerate(weights):
            if at == 0:
                rounded = products_are_rounded(one.inside.device)
                inside = torch.empty(count, *one.inside.shape, dtype=dtype, device=one.inside.device)
            inside[at] = one.inside if rounded or not basis.missing else one.inside - one.outside
            outside.append(one.outside)
        return cls(basis, inside, inside.new_tensor(outside).reshape(-1, 1, 1, 1), rounded)

    @cached_property
    def positive(self) -> bool:
        """Whether no weight inside is negative, so that gradients can be scaled by square roots."""
        return bool((self.inside >= 0).all())

    def variances(self, view: BasisView) -> Tensor:
        """Weighted squared lengths of the gradients, (w, n, c)."""
        found = torch.cat([self.sums_inside(rotated, cross_products=False) for _, rotated in view.chunks()], 1)
        return found if view.complete else found + self.outside.squeeze(-1) * view.squared_lengths()

    def grams(self, view: BasisView) -> Tensor:
        """Weighted inner products of the gradients of every example's cotangents, (w, n, c, c)."""
        found = torch.cat([self.sums_inside(rotated, cross_products=True) for _, rotated in view.chunks()], 1)
        return found if view.complete else found.add_(self.outside * view.gram_matrices())

    def sums_inside(self, rotated: Rotated, cross_products: bool) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c), or only the squared lengths, (w, n, c)."""
        return rotated.grams(self.inside, self.positive) if cross_products else rotated.variances(self.inside)


def formed_bytes(tangent: Kronecker, room: float) -> float:
    """Bytes of the gradient matrices of one example, for each cotangent.

    Zero for a single position, or if chunks of matrices take less than `room`.
    """
    e, o, i = tangent.block.matrix_shape
    grads = widened(tangent.grads())
    chunk = 2.0 * grads.element_size() * CHUNK_NUMBERS["cuda" if grads.is_cuda else "cpu"]
    return 0.0 if tangent.positions == 1 or chunk <= room else 2.0 * grads.element_size() * e * o * i


def _project(factor: Factor, basis: Tensor | None) -> Tensor:
    return factor.tensor() if basis is None else factor.project(basis)
