"""Gradients in the coordinates of a basis, contracted in the cheapest order: squares, Gram matrices, inner products.

Axis letters: n examples, c cotangents, e groups, t positions, o outputs, i inputs, q combinations, w weight matrices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator
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
)

CACHE_NUMBERS = 2**17  # fit well into the cache of a CPU core: Gram matrices take a third of the time
ROW_NUMBERS = 2**23  # numbers in rows multiplied at once: a fourth of a GPU's cache
GROUP_ROWS = 128  # fill the tensor units of a GPU
MOST_COTANGENTS = 32  # largest number of cotangents for the fused Gram kernel
CHUNK_NUMBERS = {"cpu": 2**23, "cuda": 2**29}  # entries of gradient matrices formed at once
LARGEST_COMPLEMENT = 4608  # largest side for which directions outside a basis are computed
ALIGNED = 8  # a GPU's tensor units need rows of multiples of this: others take three times as long


def slices(n: int, numbers: int, like: Tensor) -> Iterator[slice]:
    """Split n examples such that matrices with this many numbers for each are formed for some examples at once."""
    step = max(1, CHUNK_NUMBERS["cuda" if like.is_cuda else "cpu"] // numbers)
    return (slice(low, min(low + step, n)) for low in range(0, n, step))


def mix(g: Tensor, weights: Tensor) -> Tensor:
    """Combine gradients (n, c, ...) with weights (n, c, q): (n, q, ...)."""
    transposed = is_transposed_in_memory(g)
    lying = g.transpose(-1, -2) if transposed else g
    count, kernels = weights.shape[2], fused_kernels(g)
    if kernels is not None and count <= kernels.MOST_WEIGHTS and lying[0, 0].is_contiguous():
        found: Tensor = kernels.mixtures(lying.flatten(2), weights).unflatten(2, lying.shape[2:])
        return found.transpose(-1, -2) if transposed else found
    if g.shape[1] <= 2:  # a matrix product would take longer
        parts = weights.reshape(*weights.shape, *[1] * (g.dim() - 2)).unbind(1)  # (n, q, ...)
        first = g[:, :1] * parts[0]
        return first if g.shape[1] == 1 else first.addcmul_(g[:, 1:], parts[1])
    if g.dtype in HALVES and g.is_cuda:  # tensor units need multiples of eight
        rows = pad(weights, (0, -count % 8)).transpose(1, 2)
    else:
        rows = weights.transpose(1, 2).contiguous()  # without the copy a GPU takes twice as long
    mixed: Tensor = (rows @ lying.flatten(2))[:, :count].unflatten(2, lying.shape[2:])
    return mixed.transpose(-1, -2) if transposed else mixed


def inner_products(g: Tensor, moved: Tensor) -> Tensor:
    """(n, c) inner products of gradients (n, c, e, t, o) with one vector for each example, (n, e, t, o)."""
    if is_transposed_in_memory(g):
        g, moved = g.transpose(3, 4), moved.transpose(2, 3)
    kernels = fused_kernels(g)
    if kernels is not None and g.shape[1] <= MOST_COTANGENTS and g[0, 0].is_contiguous():
        found: Tensor = kernels.inner_products(g.flatten(2), moved.flatten(1))
        return found
    if not g.is_cuda and g.dtype not in HALVES:  # products with one vector each take a CPU several times as long
        return (g * moved.unsqueeze(1)).sum((2, 3, 4))
    rows, column = g.flatten(2), moved.flatten(1).unsqueeze(2)
    if g.dtype == torch.bfloat16:  # single precision would take a GPU three times as long here
        return (rows @ column).squeeze(2).float()
    return product(rows, column).squeeze(2)


def scaled_grams(values: Tensor, scales: Tensor, positive: bool = False) -> Tensor:
    """V diag(scale) V^T for values (n, c, p) and scales (w, n or 1, 1, p): (w, n, c, c).

    If no scale is negative, a GPU reads one tensor instead of two.
    """
    n, c, p = values.shape
    half = values.dtype == torch.bfloat16
    kernels = fused_kernels(values) if half and values.is_contiguous() else None
    if kernels is not None and positive and scales.shape[1] == 1 and c <= MOST_COTANGENTS:
        return torch.stack([kernels.grams(values, scale.flatten().sqrt().float()) for scale in scales])
    if (values.is_cuda or half) and positive:
        roots = (scale.sqrt().to(values.dtype) for scale in scales)
        return torch.stack([_grouped_products(one, one) for one in (_times_rows(values, root) for root in roots)])
    if values.is_cuda or half:
        return torch.stack([_grouped_products(values * scale.to(values.dtype), values) for scale in scales])
    found = values.new_empty(len(scales), n, c, c)
    step = max(1, CACHE_NUMBERS // (c * p))
    for low in range(0, n, step):
        part = values[low : low + step]
        for scale, into in zip(scales, found, strict=True):
            here = scale if len(scale) == 1 else scale[low : low + step]
            torch.bmm(part * here, part.transpose(1, 2), out=into[low : low + step])
    return found


def _times_rows(values: Tensor, row: Tensor) -> Tensor:
    """Values (n, c, p) times one row (1, 1, p), or one row for each example (n, 1, p).

    A GPU handles two-byte numbers three times as fast if both factors have the same shape, so the row is repeated to a
    size that stays in its cache.
    """
    if len(row) > 1 or values.dtype != torch.bfloat16 or not values.is_contiguous():
        return values * row
    rows, p = values.flatten(0, 1), values.shape[2]
    size = min(len(rows), max(1, ROW_NUMBERS // p))
    repeated, found = row[0].expand(size, -1).contiguous(), torch.empty_like(rows)
    for part, into in zip(rows.split(size), found.split(size), strict=True):
        torch.mul(part, repeated[: len(part)], out=into)
    return found.reshape(values.shape)


def _grouped_products(left: Tensor, right: Tensor) -> Tensor:
    """L R^T for both (n, c, p) on a GPU: (n, c, c).

    Products of c x p matrices are too small for its tensor units. Several examples therefore share one product, and
    only its diagonal blocks are kept.
    """
    n, c, p = left.shape
    together = max(1, min(n, GROUP_ROWS // c))
    aligned = 8 // math.gcd(c, 8)
    together -= together % aligned if together > aligned else 0

    def products(some: slice) -> Tensor:
        ours, theirs = (one[some].reshape(-1, together * c, p) for one in (left, right))
        blocks = product(ours, theirs.transpose(1, 2)).reshape(-1, together, c, together, c).diagonal(dim1=1, dim2=3)
        return blocks.permute(0, 3, 1, 2).reshape(-1, c, c)

    over = n % together
    found = products(slice(0, n - over))
    return torch.cat([found, products(slice(n - together, n))[together - over :]]) if over else found


@dataclass(frozen=True)
class Factored:
    """Outer products g a^T, kept as their factors."""

    a: Tensor  # (n, e, i)
    g: Tensor  # (n, c, e, o)

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, n, c] phi^2, for weights of each example or shared (q, 1, c): (q, e, o, i)."""
        outer, each = self.g.square(), weights.transpose(0, 1).to(self.g.dtype)  # (n or 1, q, c)
        one = self.g.shape[1] == 1  # a matrix product would take longer
        mixed = each.unsqueeze(3) * outer if one else (each @ outer.flatten(2)).unflatten(2, outer.shape[2:])
        return self._crossed(mixed, self.a.square())

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, e, o, i): (w, n, c, c)."""
        n, c, e, o = self.g.shape
        if c == 1:
            return self.variances(weights).unsqueeze(3)
        scale = torch.einsum("nei,weoi->wneo", self.a.square(), weights)
        return scaled_grams(self.g.reshape(n, c, e * o), scale.reshape(len(weights), n, 1, e * o), positive)

    def variances(self, weights: Tensor) -> Tensor:
        """Only the diagonals of `grams`: (w, n, c)."""
        scale = torch.einsum("nei,weoi->wneo", self.a.square(), weights)
        return torch.einsum("nceo,wneo->wnc", self.g.square(), scale)

    def mix(self, weights: Tensor) -> Factored:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        return Factored(self.a, mix(self.g, weights.to(self.g.dtype)))

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of (e, o, i): (n, c, r)."""
        o, i = self.g.shape[3], self.a.shape[2]
        group, row, column = index // (o * i), (index // i) % o, index % i
        return self.g[:, :, group, row] * self.a[:, group, column].unsqueeze(1)

    @staticmethod
    def _crossed(outer: Tensor, inner: Tensor) -> Tensor:
        """Sums over examples of products of (n, q, e, o) and (n, e, i): (q, e, o, i)."""
        n, q, e, o = outer.shape
        if e > 1:
            return torch.einsum("nqeo,nei->qeoi", outer, inner)
        left, right = outer.reshape(n, q * o), inner.squeeze(1)
        # up to 7 times as fast with the shorter rows first
        found = (right.T @ left).T if right.shape[1] < left.shape[1] else left.T @ right
        return found.reshape(q, 1, o, -1)


@dataclass(frozen=True)
class Full:
    """The gradients themselves, flattened."""

    values: Tensor  # (n, c, p), where p includes the padding
    shape: tuple[int, ...]  # of the block's matrix
    padding: int = 0  # zeros after every row of the matrix

    def matrices(self) -> Tensor:
        """The gradients as (n, c, *shape)."""
        return raised(self._trimmed(self.values))

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
        parts = self.values.reshape(n * c, p).split(n * c if columns.is_cuda else max(1, CACHE_NUMBERS // p))
        return torch.cat([product(columns, part.square().T) for part in parts], 1).reshape(-1, n, c)

    def mix(self, weights: Tensor) -> Full:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        values = raised(self.values)
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
    def outside(self) -> int:
        """Number of directions that the basis does not span."""
        return self.block.numel - math.prod(self.shape)

    @cached_property
    def input_complement(self) -> Tensor | None:
        """Orthonormal input directions (i, i - x) outside a basis of one group; `None` if they take too long."""
        return _complement(self.inputs) if self.outside else None

    @cached_property
    def output_complement(self) -> Tensor | None:
        """As `input_complement`, for the outputs: (o, o - y)."""
        return _complement(self.outputs) if self.outside else None

    def select(self, rows: Tensor, columns: Tensor) -> Basis:
        """Keep some output and some input directions of a kronecker block."""
        assert self.inputs is not None
        assert self.outputs is not None
        return Basis(self.block, self.inputs[:, :, columns].contiguous(), self.outputs[:, :, rows].contiguous())

    def into(self, matrix: Tensor) -> Tensor:
        """Coordinates U^T v of matrices (..., *block.matrix_shape)."""
        moved = matrix if self.outputs is None else self.outputs.transpose(-1, -2) @ matrix
        return moved if self.inputs is None else moved @ self.inputs

    def out_of(self, matrix: Tensor) -> Tensor:
        """U c: from coordinates back to matrices."""
        moved = matrix if self.outputs is None else self.outputs @ matrix
        return moved if self.inputs is None else moved @ self.inputs.transpose(-1, -2)

    def solve(self, damped: DiagonalMoments, matrices: Tensor) -> Tensor:
        """F_lam^-1 v for matrices (..., *block.matrix_shape), given s + lambda in this basis."""
        basis, weights = self.to(matrices.dtype), 1.0 / damped.inside
        if not self.outside:
            return basis.out_of(basis.into(matrices) * weights.to(matrices.dtype))
        rest = 1.0 / damped.outside  # applied everywhere and subtracted inside: needs no second matrix
        return basis.out_of(basis.into(matrices) * (weights - rest).to(matrices.dtype)).add_(matrices, alpha=rest)

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

    def damped(self, ridge: float) -> DiagonalMoments:
        """Add a ridge; outside, a zero becomes one, to allow division."""
        return DiagonalMoments(self.inside + ridge, self.outside + ridge or 1.0)


def _complement(columns: Tensor | None) -> Tensor | None:
    """Orthonormal directions (i, i - r) orthogonal to columns (1, i, r), if there are any and i is not too large."""
    if columns is None or columns.dim() != 3 or len(columns) > 1 or columns.shape[1] == columns.shape[2]:
        return None
    if columns.shape[1] > LARGEST_COMPLEMENT:
        return None
    whole: Tensor = torch.linalg.qr(columns[0].double(), mode="complete").Q
    return whole[:, columns.shape[2] :].to(columns.dtype)


def raised(values: Tensor) -> Tensor:
    """Convert half precision to float32; squares in bfloat16 would keep only two digits."""
    return values.float() if values.dtype in HALVES else values


def halved(values: Tensor) -> Tensor:
    """Keep half precision on a GPU, whose products are in single precision; else convert it to float32."""
    return values if values.is_cuda else raised(values)


def outer(a: Tensor, g: Tensor, single: bool = False) -> Tensor:
    """sum_t g_t a_t^T for a (n, e, t, i) and g (n, c, e, t, o): (n, c, e, o, i), one batched product for each example.

    If a GPU would have to transpose the gradients for that, there is one product for each cotangent. float16 gives
    float32; bfloat16 gives bfloat16, or float32 if `single`.
    """
    n, c, e, t, o = g.shape
    half, transposed = g.dtype in HALVES, is_transposed_in_memory(g)
    if g.is_cuda and e == 1 and not (transposed if half else g.transpose(-1, -2).is_contiguous()):
        single = half and (single or g.dtype == torch.float16)
        found = g.new_empty(n, c, 1, o, a.shape[-1], dtype=torch.float32 if single else g.dtype)
        for at in range(c):
            multiply_into(g[:, at, 0].transpose(1, 2), a[:, 0], found[:, at, 0])
        return found
    if transposed or not half:
        left = g.permute(BY_OUTPUT).reshape(n, e, c * o, t)
    else:
        left = g.permute(BY_POSITION).reshape(n, e, t, c * o).transpose(2, 3)
    matrices = left @ a if g.dtype == torch.bfloat16 and not single else product(left, a)
    return matrices.reshape(n, e, c, o, a.shape[-1]).transpose(1, 2)


BY_OUTPUT, BY_POSITION = (0, 2, 1, 4, 3), (0, 2, 3, 1, 4)  # orders of the axes (n, c, e, t, o) for products


def in_bfloat16(g: Tensor) -> Tensor:
    """Gradients (n, c, e, t, o) in bfloat16; those of images in the order that `outer` needs, by the same copy."""
    if not is_transposed_in_memory(g):
        return g.bfloat16()
    return g.permute(BY_OUTPUT).to(torch.bfloat16, memory_format=torch.contiguous_format).permute(BY_OUTPUT)


def project_by_example(g: Factor, columns: Tensor) -> Tensor:
    """Gradients (n, c, e, t, o) along columns (e, o, y), in half precision in the memory order that `outer` needs."""
    values = g.tensor()
    n, c, _, t, _ = values.shape
    lies = cotangents_first(values) and (t % ALIGNED == 0 or is_transposed_in_memory(values))
    if values.dtype != torch.float16 or len(columns) > 1 or not lies:
        return g.project(columns)
    turned, found = columns[0].T.to(values.dtype).expand(n, -1, -1), values.new_empty(n, c, 1, columns.shape[2], t)
    for at in range(c):
        torch.bmm(turned, values[:, at, 0].transpose(1, 2), out=found[:, at, 0])
    return found.transpose(3, 4)


def held_in_bfloat16(factor: Factor) -> bool:
    """Whether a factor is stored as a bfloat16 tensor, not unfolded from one."""
    return isinstance(factor, Whole) and factor.values.dtype == torch.bfloat16


def project_in_float16(factor: Factor, basis: Tensor) -> Tensor:
    """`project` bfloat16 in float16, which has three more digits, after division by a power of two to fit its range.

    This takes a GPU half the time of TF32, with as many digits. The result is in bfloat16.
    """
    values = factor.tensor()
    largest = torch.linalg.vector_norm(values, math.inf).double()
    size = largest.clamp_min(torch.finfo(torch.bfloat16).tiny).log2().ceil().clamp_max(127.0).exp2()
    kernels = fused_kernels(values) if values.is_contiguous() else None
    if kernels is None:
        return Whole((values / size).half()).project(basis).bfloat16().mul_(size)
    size = size.float()
    projected = Whole(kernels.rescaled(values, 1 / size, torch.float16)).project(basis)
    found: Tensor = kernels.rescaled(projected.contiguous(), size, torch.bfloat16)
    return found


def products_are_rounded(device: torch.device) -> bool:
    """Whether single-precision products keep only three digits here, as with TF32 on a GPU."""
    return device.type == "cuda" and torch.backends.cuda.matmul.allow_tf32


def outside_of(tangent: Tangent, basis: Basis, inputs: Tensor | None = None) -> list[Tangent]:
    """Tangents whose squared lengths add up to the squared length of a gradient G outside a basis.

    G - P G Q = G (I - Q) + (I - P) G Q, two orthogonal parts. The difference of the squared lengths of G and P G Q is
    the same and cheaper, but with coarse products it is only rounding error if the basis holds nearly all of G. Pass
    `inputs`, the inputs of a Kronecker tangent in the basis, if they are known.
    """
    if not isinstance(tangent, Kronecker):

        def rest(g: Tensor) -> Tensor:
            """Rows v (..., i) less U U^T v, for orthonormal columns U (i, r)."""
            wide, columns = raised(g), basis.inputs
            return torch.zeros_like(wide) if columns is None else wide - times(times(wide, columns), columns.T)

        return [with_grads(tangent, rest)]
    if inputs is None:
        inputs = tangent.inputs() if basis.inputs is None else tangent.a.project(basis.inputs)
    parts: list[Tangent] = []
    if basis.inputs is not None and basis.inputs.shape[1] > basis.inputs.shape[2]:
        over = _left_over(tangent.a, basis.inputs, basis.input_complement)
        parts.append(Kronecker(tangent.block, Whole(over), tangent.g))
    if basis.outputs is not None and basis.outputs.shape[1] > basis.outputs.shape[2]:
        over = _left_over(tangent.g, basis.outputs, basis.output_complement)
        parts.append(Kronecker(tangent.block, Whole(inputs), Whole(over)))
    return parts


def _left_over(factor: Factor, columns: Tensor, complement: Tensor | None) -> Tensor:
    """A factor along the complement of columns (e, i, r) if given, else minus its projection onto them."""
    if complement is not None:
        return factor.project(complement.unsqueeze(0))
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
        values = raised(tangent.values)
        if basis.inputs is not None:  # as one product, not example by example
            values = (values.flatten(0, 1) @ basis.inputs.to(values.dtype)).unflatten(0, values.shape[:2])
        return Full(values, basis.shape)
    rows, examples, values = tangent.aggregate()
    values = raised(values)
    moved = values if basis.inputs is None else values @ basis.inputs
    return Sparse(rows, examples, moved, tangent.index.shape[0], basis.shape)


def energy(tangent: Tangent) -> Tensor:
    """Inner products of the gradients of every example's cotangents, (n, c, c), without forming any matrix."""
    if isinstance(tangent, Dense):
        values = raised(tangent.values)
        return values.square().sum(2, True) if values.shape[1] == 1 else values @ values.transpose(1, 2)
    if isinstance(tangent, Rows):
        plain = rotated_values(tangent, Basis(tangent.block))
        return plain.grams(plain.values.new_ones(1, *plain.shape))[0]
    g, moved = _with_inputs(tangent)
    return product(moved, g.transpose(1, 2))


def lengths(tangent: Tangent) -> Tensor:
    """Squared lengths of the gradients, (n, c): only the diagonals of `energy`."""
    if not isinstance(tangent, Kronecker):
        return torch.diagonal(energy(tangent), dim1=1, dim2=2)
    g, moved = _with_inputs(tangent)
    products = g * moved
    return products.sum(2, dtype=torch.float32 if products.dtype in HALVES else None)


def _with_inputs(tangent: Kronecker) -> tuple[Tensor, Tensor]:
    """(n, c, e t o) g, and sum_s <a_t, a_s> g_s; their inner products are those of the gradient matrices."""
    a, g = promoted(tangent.inputs(), tangent.grads())
    if tangent.positions == 1:
        a, g = raised(a), raised(g)
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


def total(tangent: Tangent, weights: Tensor) -> Tensor:
    """Sum of the gradients of all examples and cotangents with weights (n, c), shaped as the block's matrix."""
    if isinstance(tangent, Dense):
        values = raised(tangent.values).flatten(0, 1)
        return weights.flatten().to(values.dtype) @ values
    if isinstance(tangent, Rows):
        grads = raised(tangent.grads)
        rows = torch.einsum("nc,nctd->ntd", weights.to(grads.dtype), grads).flatten(0, 1)
        return rows.new_zeros(tangent.block.matrix_shape).index_add_(0, tangent.index.flatten(), rows)
    g = tangent.grads()
    if not (g.is_cuda and g.dtype == torch.float16):
        g = raised(g)
        return tangent.a.total(mix(g, weights.to(g.dtype).unsqueeze(2)).squeeze(1))
    unit, size = scaled(weights, math.inf)
    return tangent.a.total(mix(g, unit.to(g.dtype).unsqueeze(2)).squeeze(1).float()) * size


def scaled(values: Tensor, order: float = 2.0) -> tuple[Tensor, Tensor]:
    """Values divided by their norm, and the norm: small numbers underflow in float16."""
    size: Tensor = torch.linalg.vector_norm(values, order)
    return values / torch.where(size > 0, size, 1.0), size


def along(tangent: Tangent, direction: Tensor) -> Tensor:
    """Inner products of the gradients with a direction shaped as the block's matrix: (n, c)."""
    if isinstance(tangent, Dense):
        values = raised(tangent.values)
        return values @ direction.to(values.dtype)
    if isinstance(tangent, Rows):
        grads = raised(tangent.grads)
        return torch.einsum("nctd,ntd->nc", grads, direction.to(grads.dtype)[tangent.index])
    g = tangent.grads()
    unit, size = scaled(direction) if g.dtype in HALVES else (direction, 1.0)
    return inner_products(*promoted(g, tangent.a.project(unit.transpose(-1, -2)))) * size


def with_grads(tangent: Tangent, change: Callable[[Tensor], Tensor]) -> Tangent:
    """The gradients after a change to the part (n, c, ...) that depends on the cotangent."""
    if isinstance(tangent, Kronecker):
        return Kronecker(tangent.block, tangent.a, Whole(change(tangent.grads())))
    if isinstance(tangent, Rows):
        return Rows(tangent.block, tangent.index, change(tangent.grads))
    return Dense(tangent.block, change(tangent.values))


def combine(tangent: Tangent, weights: Tensor) -> Tangent:
    """Other cotangents as combinations of those pulled back: weights (n, c, q)."""

    def mixed(g: Tensor) -> Tensor:
        wide = raised(g)
        return mix(wide, weights.to(wide.dtype))

    return with_grads(tangent, mixed)


def some_cotangents(tangent: Tangent, some: slice) -> Tangent:
    """The gradients of some of the cotangents."""
    return with_grads(tangent, lambda g: g[:, some])


class BasisView:
    """Gradients in the coordinates of a basis, by the cheapest order of contractions.

    A Kronecker tangent seen at one position stays factored. Otherwise the matrices are formed in chunks, before or
    after the rotation, whichever takes fewer products. Factors are rotated only once. `reads` says how often matrices
    will be requested. Where products are rounded, the part outside the basis is measured directly, not as a difference
    of squared lengths; it is never requested unless `measured`. A `coarse` view forms matrices in bfloat16 after the
    rotation, where rounding moves nothing from one coordinate to another.
    """

    def __init__(
        self,
        tangent: Tangent,
        basis: Basis,
        rounded: bool = False,
        *,
        measured: bool = True,
        coarse: bool = False,
        reads: int = 1,
    ) -> None:
        self.basis, self.rounded, self.coarse, self.reads = basis, rounded, coarse, reads
        self.tangent = _computed(tangent, coarse) if basis.outside and measured else tangent  # before the rotation
        self._inputs: Tensor | None = None  # layer inputs in the basis, before rounding to bfloat16
        self._energy: Tensor | None = None

    @property
    def complete(self) -> bool:
        """Whether the basis spans all of the block."""
        return not self.basis.outside

    def chunks(self) -> Iterator[tuple[slice, Rotated]]:
        """Yield (which examples, their gradients); several chunks only where matrices must be formed."""
        if self._rotated is not None:
            yield slice(None), self._rotated
        else:
            yield from self._formed(*self._factors)

    def coordinates(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of the basis: (n, c, r)."""
        found = [rotated.gather(index) for _, rotated in self.chunks()]
        return found[0] if len(found) == 1 else torch.cat(found)

    def mixed(self, weights: Tensor) -> Iterator[tuple[slice, Rotated]]:
        """As `chunks`, for q combinations of the cotangents with weights (n, c, q)."""
        if self._rotated is not None:
            yield slice(None), self._rotated.mix(weights)
            return
        a, g = self._factors
        most = g.shape[1] * (2 if g.dtype == torch.bfloat16 else 1)  # forming these is cheaper than mixing them
        unrotated = g.dtype == torch.bfloat16 and not self._rotates_factors_first
        if unrotated or weights.shape[2] > most:  # matrices of fewer cotangents take fewer products
            yield from ((part, formed.mix(weights[part])) for part, formed in self._formed(a, g))
        elif g.dtype == torch.float16:  # small weights would underflow
            sizes = weights.abs().amax(1).unsqueeze(2)  # (n, q, 1)
            units = weights / torch.where(sizes > 0, sizes, 1.0).transpose(1, 2)
            for part, formed in self._formed(a, mix(g, units.to(g.dtype))):
                yield part, Full(formed.values * sizes[part].to(formed.values.dtype), formed.shape, formed.padding)
        else:
            yield from self._formed(a, mix(g, weights.to(g.dtype)))

    def energy(self) -> Tensor:
        """Inner products of every example's gradients, (n, c, c); only of the part outside, if products are rounded."""
        if self._energy is None:
            self._energy = functools.reduce(torch.add, map(energy, self._measured()))
        return self._energy

    def lengths(self) -> Tensor:
        """Only the diagonals of `energy`, (n, c)."""
        if self._energy is not None:
            return torch.diagonal(self._energy, dim1=1, dim2=2)
        return functools.reduce(torch.add, map(lengths, self._measured()))

    def _measured(self) -> list[Tangent]:
        """Tangents with the squared lengths outside the basis, or of whole gradients if products are exact."""
        if not self.rounded:
            return [self.tangent]
        if isinstance(self._rotated, Factored):
            return outside_of(self.tangent, self.basis, self._rotated.a.unsqueeze(2))
        if self._rotated is not None or not self._rotates_factors_first:
            return outside_of(self.tangent, self.basis)
        _ = self._factors  # projects the inputs
        assert self._inputs is not None
        return outside_of(self.tangent, self.basis, self._inputs[..., : self.basis.shape[-1]])

    @cached_property
    def _rotated(self) -> Rotated | None:
        """The rotated gradients of all examples, unless matrices must be formed."""
        tangent, basis = self.tangent, self.basis
        if not isinstance(tangent, Kronecker):
            return rotated_values(tangent, basis)
        if tangent.positions != 1:
            return None
        a, g = _project(tangent.a, basis.inputs), _project(tangent.g, basis.outputs)
        return Factored(a.squeeze(2), g.squeeze(3))

    @cached_property
    def _rotates_factors_first(self) -> bool:
        """Whether rotating the factors takes fewer products than rotating the matrices."""
        tangent, basis = self.tangent, self.basis
        assert isinstance(tangent, Kronecker)
        c, t = tangent.cotangents, tangent.positions
        _, o, i = tangent.block.matrix_shape
        _, o_in, i_in = basis.shape
        rotate_factors = (t * i * i_in + c * t * o * o_in) // (2 if self._in_float16 else 1)
        rotate_factors += self.reads * c * t * o_in * i_in
        precision = 2 if self.coarse and not held_in_bfloat16(tangent.g) else 1  # they rotate in single precision
        rotate_matrices = self.reads * (c * t * o * i + precision * c * (o_in * o * i + o_in * i * i_in))
        return basis.inputs is not None and rotate_factors <= rotate_matrices

    @cached_property
    def _in_float16(self) -> bool:
        """Whether factors in bfloat16 are rotated in float16."""
        tangent, basis = self.tangent, self.basis
        assert isinstance(tangent, Kronecker)
        whole = self.coarse and self.complete and basis.inputs is not None and basis.outputs is not None
        return whole and held_in_bfloat16(tangent.a) and held_in_bfloat16(tangent.g)

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor]:
        """The factors that matrices are formed from."""
        tangent, (inputs, outputs) = self.tangent, (self.basis.inputs, self.basis.outputs)
        assert isinstance(tangent, Kronecker)
        if not self._rotates_factors_first:
            inputs = outputs = None
        kept = self.basis.shape[-1]
        if inputs is not None and inputs.is_cuda and kept % ALIGNED:
            inputs = pad(inputs, (0, -kept % ALIGNED))
        a = self._projected(tangent.a, inputs)
        self._inputs = None if self.complete else a
        rows = tangent.cotangents * self.basis.shape[1]
        fewer = rows * kept < tangent.positions * (rows + kept)  # matrices have fewer numbers than factors
        small = self.coarse and (not self._rotates_factors_first or fewer)
        narrow = self.coarse and tangent.positions > tangent.block.matrix_shape[1]  # one product for each cotangent
        g = self._projected(tangent.g, outputs, by_example=small or narrow)
        if small and a.dtype == g.dtype == torch.float16:
            return a, g  # matrices will be in single precision
        if self.coarse and self._rotates_factors_first:
            return a.bfloat16(), in_bfloat16(g)
        if self.coarse and a.dtype == g.dtype and g.dtype in HALVES:
            return a, g  # matrices will be in single precision, rotated later
        return raised(a), raised(g)

    def _projected(self, factor: Factor, basis: Tensor | None, by_example: bool = False) -> Tensor:
        if basis is None:
            return factor.tensor()
        if self._in_float16:
            return project_in_float16(factor, basis)
        return project_by_example(factor, basis) if by_example else factor.project(basis)

    def _formed(self, a: Tensor, g: Tensor) -> Iterator[tuple[slice, Full]]:
        n, c, e, _, o = g.shape
        for where in slices(n, c * e * o * a.shape[3], a):
            matrices = outer(a[where], g[where], single=not self._rotates_factors_first)
            if not self._rotates_factors_first:
                matrices = self.basis.into(matrices)
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
    def of(cls, basis: Basis, pairs: Iterable[tuple[Tensor, float]], count: int, dtype: torch.dtype) -> Weights:
        """Weights inside and outside for `count` estimators; only one of them in float64 at a time."""
        inside, outside, rounded = torch.empty(0, device="cpu"), [], False
        for at, (inner, outer) in enumerate(pairs):
            if at == 0:
                rounded = products_are_rounded(inner.device)
                inside = torch.empty(count, *inner.shape, dtype=dtype, device=inner.device)
            inside[at] = inner if rounded or not basis.outside else inner - outer
            outside.append(outer)
        return cls(basis, inside, inside.new_tensor(outside).reshape(-1, 1, 1, 1), rounded)

    @cached_property
    def positive(self) -> bool:
        """Whether no weight inside is negative, so that gradients can be scaled by square roots."""
        return bool((self.inside >= 0).all())

    def variances(self, view: BasisView) -> Tensor:
        """Weighted squared lengths of the gradients, (w, n, c)."""
        found = torch.cat([self.inside_of(rotated, crossed=False) for _, rotated in view.chunks()], 1)
        return found if view.complete else found + self.outside.squeeze(-1) * view.lengths()

    def grams(self, view: BasisView) -> Tensor:
        """Weighted inner products of the gradients of every example's cotangents, (w, n, c, c)."""
        found = torch.cat([self.inside_of(rotated, crossed=True) for _, rotated in view.chunks()], 1)
        return found if view.complete else found.add_(self.outside * view.energy())

    def inside_of(self, rotated: Rotated, crossed: bool) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c), or only the squared lengths, (w, n, c)."""
        return rotated.grams(self.inside, self.positive) if crossed else rotated.variances(self.inside)


def formed_bytes(tangent: Kronecker, room: float) -> float:
    """Bytes of the gradient matrices of one example, for each cotangent.

    Zero for a single position, or if chunks of matrices take less than `room`.
    """
    e, o, i = tangent.block.matrix_shape
    grads = raised(tangent.grads())
    chunk = 2.0 * grads.element_size() * CHUNK_NUMBERS["cuda" if grads.is_cuda else "cpu"]
    return 0.0 if tangent.positions == 1 or chunk <= room else 2.0 * grads.element_size() * e * o * i


def _computed(tangent: Tangent, coarse: bool) -> Tangent:
    """Compute gradients once that are both rotated and measured; in single precision, contiguous on a GPU."""
    if isinstance(tangent, Dense):
        return with_grads(tangent, raised)
    if isinstance(tangent, Rows):
        return tangent
    if coarse and tangent.positions > 1:
        return Kronecker(tangent.block, tangent.a, Whole(tangent.grads()))
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    if g.is_cuda:
        a, g = a.contiguous(), g.contiguous()
    return Kronecker(tangent.block, Whole(a), Whole(g))


def _project(factor: Factor, basis: Tensor | None) -> Tensor:
    return raised(factor.tensor() if basis is None else factor.project(basis))
