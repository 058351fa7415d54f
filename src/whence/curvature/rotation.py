"""Gradients in the coordinates of a basis, contracted in the cheapest order: squares, Gram matrices, inner products.

Products are laid out for the cache of a CPU core or the tensor units of a GPU.

Axis letters: n examples, c cotangents, e groups, t positions, o outputs, i inputs, q combinations, w weight matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from whence.jacobian.gradients import Block, Dense, Factor, Kronecker, Rows, Tangent, Whole, is_transposed_in_memory

CACHE_NUMBERS = 2**17
"""Numbers that a core's cache holds with room to spare."""

GROUP_ROWS = 128
"""Rows that fill a GPU's tensor units."""


def mix(g: Tensor, weights: Tensor) -> Tensor:
    """Gradients (n, c, e, t, o) combined by weights (n, c, q): (n, q, e, t, o)."""
    if g.shape[1] == 1:
        return g * weights.reshape(len(g), -1, 1, 1, 1)
    transposed = is_transposed_in_memory(g)
    lying = g.transpose(3, 4) if transposed else g
    rows = weights.transpose(1, 2).contiguous()  # as it lies a GPU takes twice as long
    mixed: Tensor = (rows @ lying.flatten(2)).unflatten(2, lying.shape[2:])
    return mixed.transpose(3, 4) if transposed else mixed


def few_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Columns (q, p) times rows (n, p) as (q, n): with few columns and many rows up to four times as fast as (n, q)."""
    return columns @ rows.T


def along_factors(a: Tensor, g: Tensor, direction: Tensor) -> Tensor:
    """Inner products of sum_t g_t a_t^T with a direction (e, o, i), for (n, e, t, i) and (n, c, e, t, o): (n, c)."""
    if g.shape[1:4] == (1, 1, 1) and not g.is_cuda:  # one outer product of two vectors, the longer ones first
        outer, inner, matrix = g.flatten(1), a.flatten(1), direction[0]
        if inner.shape[1] > outer.shape[1]:
            outer, inner, matrix = inner, outer, matrix.T
        return (few_columns(outer, matrix.T) * inner.T).sum(0).unsqueeze(1)
    transposed = direction.transpose(-1, -2)
    moved = (a.squeeze(1) @ transposed[0]).unsqueeze(1) if len(transposed) == 1 else a @ transposed  # (n, e, t, o)
    if is_transposed_in_memory(g):
        g, moved = g.transpose(3, 4), moved.transpose(2, 3)
    return (g.flatten(2) @ moved.flatten(1).unsqueeze(2)).squeeze(2)


def scaled_grams(values: Tensor, scales: Tensor, positive: bool = False) -> Tensor:
    """V diag(scale) V^T for values (n, c, p) and scales (w, n or 1, 1, p): (w, n, c, c), a cacheful at a time.

    Where no scale is negative, a GPU reads one tensor in place of two.
    """
    n, c, p = values.shape
    if c == 1:
        squares = values.squeeze(1).square()
        flat = scales.reshape(len(scales), -1, p)
        one = few_columns(squares, flat.squeeze(1)) if flat.shape[1] == 1 else torch.einsum("np,wnp->wn", squares, flat)
        return one.reshape(len(scales), n, 1, 1)
    if values.is_cuda and positive:
        roots = (values * scale.sqrt() for scale in scales)
        return torch.stack([_grouped_products(one, one) for one in roots])
    if values.is_cuda:
        return torch.stack([_grouped_products(values * scale, values) for scale in scales])
    found = values.new_empty(len(scales), n, c, c)
    step = max(1, CACHE_NUMBERS // (c * p))
    for low in range(0, n, step):
        part = values[low : low + step]
        flipped = part.transpose(1, 2)
        for at, scale in enumerate(scales):
            here = scale if len(scale) == 1 else scale[low : low + step]
            torch.bmm(part * here, flipped, out=found[at, low : low + step])
    return found


def _grouped_products(left: Tensor, right: Tensor) -> Tensor:
    """L R^T for both (n, c, p) on a GPU: (n, c, c).

    Products of c x p matrices are too small for its tensor units, so several examples share one product, of which only
    the blocks on the diagonal are kept.
    """
    n, c, p = left.shape
    together = max(1, min(n, GROUP_ROWS // c))
    even = n - n % together
    ours, theirs = (one[:even].reshape(-1, together * c, p) for one in (left, right))
    blocks = (ours @ theirs.transpose(1, 2)).reshape(-1, together, c, together, c).diagonal(dim1=1, dim2=3)
    found = blocks.permute(0, 3, 1, 2).reshape(-1, c, c)
    return found if even == n else torch.cat([found, left[even:] @ right[even:].transpose(1, 2)])


@dataclass(frozen=True)
class Factored:
    """Sums of outer products, sum_t g_t a_t^T, kept as their factors."""

    a: Tensor  # (n, e, t, i)
    g: Tensor  # (n, c, e, t, o)

    @property
    def vectors(self) -> bool:
        """Whether every example has one gradient, the outer product of two vectors."""
        return self.g.shape[1:4] == (1, 1, 1)

    @cached_property
    def squared(self) -> tuple[Tensor, Tensor]:
        """Squares of the two vectors, (n, o) and (n, i)."""
        return self.g.flatten(1).square(), self.a.flatten(1).square()

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, c] phi^2: (q, e, o, i)."""
        if self.vectors:
            return weights.reshape(-1, 1, 1, 1) * _crossed(*self.squared)
        if self.a.shape[2] == 1:
            outer = torch.einsum("qc,nceo->qneo", weights, self.g.squeeze(3).square())
            return torch.einsum("qneo,nei->qeoi", outer, self.a.squeeze(2).square())
        first, second, twice = _pairs(self.a.shape[2], self.a)
        outer = torch.einsum(
            "qc,ncepo->qnepo", weights, self.g[:, :, :, first] * self.g[:, :, :, second]
        )  # the cotangents are summed before the product over inputs
        inner = self.a[:, :, first] * self.a[:, :, second] * twice
        return torch.einsum("qnepo,nepi->qeoi", outer, inner)

    def single(self, weights: Tensor) -> Tensor:
        """sum_n weights[n, q] phi^2 for one cotangent seen at one position: (q, e, o, i)."""
        outer, inner = self.squared
        if inner.shape[1] < outer.shape[1]:  # the shorter vector is weighted
            found = (weights.unsqueeze(2) * inner.unsqueeze(1)).flatten(1).T @ outer  # (q i, o)
            return found.reshape(weights.shape[1], 1, -1, outer.shape[1]).transpose(2, 3)
        found = (weights.unsqueeze(2) * outer.unsqueeze(1)).flatten(1).T @ inner  # (q o, i)
        return found.reshape(weights.shape[1], 1, -1, inner.shape[1])

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, e, o, i): (w, n, c, c)."""
        n, c, e, t, o = self.g.shape
        if self.vectors:
            return self._forms(weights).reshape(-1, n, 1, 1)
        if t == 1:
            scale = _times_inputs(self.a.squeeze(2).square(), weights)  # (w, n, e, o)
            return scaled_grams(self.g.reshape(n, c, e * o), scale.reshape(len(weights), n, 1, e * o), positive)
        first, second, _ = _pairs(t, self.a)
        pairs = self.a[:, :, first] * self.a[:, :, second]  # (n, e, P, i)
        scale = torch.einsum("nepi,weoi->wnepo", pairs, weights)
        full = scale[:, :, :, _square(t, self.a)].reshape(len(weights), n, e, t, t, o)
        moved = torch.einsum("wnetso,ndeso->wndeto", full, self.g)
        return torch.einsum("nceto,wndeto->wncd", self.g, moved)

    def variances(self, weights: Tensor) -> Tensor:
        """The diagonals of `grams` alone: (w, n, c)."""
        n, c, e, t, o = self.g.shape
        if self.vectors:
            return self._forms(weights).unsqueeze(2)
        if t == 1:
            scale = _times_inputs(self.a.squeeze(2).square(), weights).reshape(len(weights), n, e * o)
            return (self.g.reshape(n, c, e * o).square() @ scale.permute(1, 2, 0)).permute(2, 0, 1)
        first, second, _ = _pairs(t, self.a)
        scale = torch.einsum("nepi,weoi->wnepo", self.a[:, :, first] * self.a[:, :, second], weights)
        full = scale[:, :, :, _square(t, self.a)].reshape(len(weights), n, e, t, t, o)
        moved = torch.einsum("wnetso,nceso->wnceto", full, self.g)
        return (moved * self.g).sum((3, 4, 5))

    def mix(self, weights: Tensor) -> Factored:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        return Factored(self.a, mix(self.g, weights))

    def along(self, direction: Tensor) -> Tensor:
        """Inner products with a direction (e, o, i): (n, c)."""
        return along_factors(self.a, self.g, direction)

    def total(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[n, c] phi: (e, o, i)."""
        if self.vectors:
            outer, inner = self.g.flatten(1), self.a.flatten(1)
            shorter = inner.shape[1] < outer.shape[1]
            found = _crossed(outer, weights * inner) if shorter else _crossed(weights * outer, inner)
            return found.unsqueeze(0)
        return torch.einsum("neto,neti->eoi", torch.einsum("nceto,nc->neto", self.g, weights), self.a)

    def _forms(self, weights: Tensor) -> Tensor:
        """sum_p W_p phi^2 of one gradient an example, for weight matrices (w, 1, o, i): (w, n)."""
        outer, inner = self.squared
        _, _, o, i = weights.shape
        if i < o:
            moved = few_columns(outer, weights.squeeze(1).transpose(1, 2).reshape(-1, o)).reshape(-1, i, len(outer))
            return (moved * inner.T).sum(1)
        moved = few_columns(inner, weights.reshape(-1, i)).reshape(-1, o, len(inner))  # (w, o, n)
        return (moved * outer.T).sum(1)

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of (e, o, i): (n, c, r)."""
        _, _, _, _, o = self.g.shape
        i = self.a.shape[3]
        group, row, column = index // (o * i), (index // i) % o, index % i
        if self.a.shape[2] == 1:
            return self.g[:, :, group, 0, row] * self.a[:, group, 0, column].unsqueeze(1)
        rows, at_row = torch.unique(group * o + row, return_inverse=True)
        columns, at_column = torch.unique(group * i + column, return_inverse=True)
        left = self.g[:, :, rows // o, :, rows % o]  # (R, n, c, t): advanced indices come first
        right = self.a[:, columns // i, :, columns % i]  # (C, n, t)
        products = left.permute(1, 2, 0, 3) @ right.permute(1, 2, 0).unsqueeze(1)  # (n, c, R, C)
        return products[:, :, at_row, at_column]


@dataclass(frozen=True)
class Full:
    """The gradients themselves, flattened."""

    values: Tensor  # (n, c, p), p with the padding
    shape: tuple[int, ...]  # of the block's matrix
    padding: int = 0  # zeros after every row of the matrix

    def matrices(self) -> Tensor:
        """The gradients as (n, c, *shape)."""
        return self._trimmed(self.values)

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, c] phi^2: (q, *shape)."""
        n, c, p = self.values.shape
        repeated = weights.repeat(1, n)  # (q, n c)
        return self._trimmed(repeated @ self.values.square().reshape(n * c, p))

    def single(self, weights: Tensor) -> Tensor:
        """sum_n weights[n, q] phi^2 for one cotangent: (q, *shape)."""
        return self._trimmed(weights.T @ self.values.squeeze(1).square())

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, *shape): (w, n, c, c)."""
        return scaled_grams(self.values, self._padded(weights).reshape(len(weights), 1, 1, -1), positive)

    def variances(self, weights: Tensor) -> Tensor:
        """The diagonals of `grams` alone, reading the gradients once: (w, n, c)."""
        n, c, p = self.values.shape
        flat, columns = self.values.reshape(n * c, p), self._padded(weights).reshape(len(weights), p)
        step = n * c if flat.is_cuda else max(1, CACHE_NUMBERS // p)
        parts = [few_columns(flat[low : low + step].square(), columns) for low in range(0, n * c, step)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).reshape(-1, n, c)

    def mix(self, weights: Tensor) -> Full:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        return Full(weights.transpose(1, 2) @ self.values, self.shape, self.padding)

    def along(self, direction: Tensor) -> Tensor:
        """Inner products with a direction: (n, c)."""
        return self.values @ self._padded(direction).reshape(-1)

    def total(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[n, c] phi."""
        return self._trimmed(weights.reshape(-1) @ self.values.flatten(0, 1))

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions: (n, c, r)."""
        return self.values[:, :, index + index // self.shape[-1] * self.padding if self.padding else index]

    def _trimmed(self, flat: Tensor) -> Tensor:
        """(..., p) to (..., *shape), without the padding."""
        rows = flat.reshape(*flat.shape[:-1], *self.shape[:-1], self.shape[-1] + self.padding)
        return rows[..., : self.shape[-1]]

    def _padded(self, matrices: Tensor) -> Tensor:
        """(..., *shape) with zeros where the gradients have them."""
        return torch.nn.functional.pad(matrices, (0, self.padding)) if self.padding else matrices


@dataclass(frozen=True)
class Sparse:
    """Few rows of a large matrix, each pair of example and row once."""

    rows: Tensor  # (u,)
    examples: Tensor  # (u,)
    values: Tensor  # (u, c, d)
    count: int  # examples in this chunk
    shape: tuple[int, ...]  # (V, d)

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, c] phi^2: (q, V, d)."""
        summed = torch.einsum("qc,ucd->uqd", weights, self.values.square())
        out = summed.new_zeros(self.shape[0], *summed.shape[1:])
        return out.index_add_(0, self.rows, summed).transpose(0, 1)

    def grams(self, weights: Tensor, positive: bool = False) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, V, d): (w, n, c, c)."""
        scaled = self.values * weights[:, self.rows].unsqueeze(2)  # (w, u, c, d)
        return self._by_example((scaled @ self.values.transpose(1, 2)).transpose(0, 1)).transpose(0, 1)

    def variances(self, weights: Tensor) -> Tensor:
        """The diagonals of `grams` alone: (w, n, c)."""
        squares = torch.einsum("ucd,wud->ucw", self.values.square(), weights[:, self.rows])
        return self._by_example(squares).permute(2, 0, 1)

    def mix(self, weights: Tensor) -> Sparse:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        mixed = weights[self.examples].transpose(1, 2) @ self.values
        return Sparse(self.rows, self.examples, mixed, self.count, self.shape)

    def along(self, direction: Tensor) -> Tensor:
        """Inner products with a direction (V, d): (n, c)."""
        return self._by_example((self.values @ direction[self.rows].unsqueeze(2)).squeeze(2))

    def total(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[n, c] phi: (V, d)."""
        summed = torch.einsum("uc,ucd->ud", weights[self.examples], self.values)
        return summed.new_zeros(self.shape).index_add_(0, self.rows, summed)

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions of (V, d): (n, c, r)."""
        wanted, at = torch.unique(index // self.shape[1], return_inverse=True)
        place = torch.full((self.shape[0],), -1, device=index.device)
        place[wanted] = torch.arange(len(wanted), device=index.device)
        wanted_rows = place[self.rows] >= 0
        table = self.values.new_zeros(self.count, len(wanted), *self.values.shape[1:])
        table[self.examples[wanted_rows], place[self.rows[wanted_rows]]] = self.values[wanted_rows]
        return table.permute(0, 2, 1, 3)[:, :, at, index % self.shape[1]]

    def _by_example(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.count, *values.shape[1:]).index_add_(0, self.examples, values)


Rotated: TypeAlias = Factored | Full | Sparse


def _crossed(outer: Tensor, inner: Tensor) -> Tensor:
    """Sums of products (o, i) of rows (n, o) and (n, i): the shorter ones on the left, up to 7 times as fast."""
    found: Tensor = (inner.T @ outer).T if inner.shape[1] < outer.shape[1] else outer.T @ inner
    return found


def _times_inputs(inputs: Tensor, weights: Tensor) -> Tensor:
    """(n, e, i) with (w, e, o, i) to (w, n, e, o), one large product where there is one group."""
    if weights.shape[1] == 1:
        flat = weights.squeeze(1).flatten(0, 1)  # (w o, i)
        moved = inputs.squeeze(1) @ flat.T
        return moved.reshape(len(inputs), len(weights), 1, -1).transpose(0, 1)
    return torch.einsum("nei,weoi->wneo", inputs, weights)


def _pairs(t: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unordered pairs of positions, and how often each counts: (P,), (P,), (P, 1)."""
    first, second = torch.triu_indices(t, t, device=like.device)
    twice = torch.where(first == second, 1.0, 2.0).to(like.dtype).unsqueeze(1)
    return first, second, twice


def _square(t: int, like: Tensor) -> Tensor:
    """Which unordered pair each ordered pair of positions is: (t t,)."""
    first, second = torch.triu_indices(t, t, device=like.device)
    table = torch.empty(t, t, dtype=torch.long, device=like.device)
    number = torch.arange(len(first), device=like.device)
    table[first, second] = number
    table[second, first] = number
    return table.reshape(-1)


@dataclass(frozen=True)
class Basis:
    """A basis U = U_out (x) U_in of one block; `None` stands for the identity.

    A basis may have fewer columns than rows: then it spans a part of the block's space, and what lies outside is
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

    def select(self, rows: Tensor, columns: Tensor) -> Basis:
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


CHUNK_NUMBERS = {"cpu": 2**23, "cuda": 2**29}
"""Gradient entries that may be held at once when gradient matrices must be formed."""


def raised(values: Tensor) -> Tensor:
    """Half precision to float32; squares of bfloat16 would keep two digits."""
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def outer(a: Tensor, g: Tensor) -> Tensor:
    """sum_t g_t a_t^T: (n, e, t, i) and (n, c, e, t, o) to (n, c, e, o, i), as one batched product an example.

    On a GPU, where gradients would have to be transposed for that, it is one for each cotangent.
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


def outside_of(
    tangent: Tangent, basis: Basis, inputs: Tensor | None = None, grads: Tensor | None = None
) -> list[Tangent]:
    """Tangents whose squared lengths add up to what of a gradient lies outside a basis.

    G - P G Q = G (I - Q) + (I - P) G Q, two parts at right angles. The difference of the squared lengths of G and P G Q
    is the same and cheaper, but nothing but rounding where the basis holds nearly all of G and products are coarse.

    Args:
        tangent: the gradients G.
        basis: which may span a part of the block only.
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
    transposed = weights.transpose(1, 2).to(values.dtype)  # (n, q, c)
    return Dense(tangent.block, (transposed * values if values.shape[1] == 1 else transposed @ values,))


ALIGNED = 4
"""Rows of a multiple of so many numbers suit a GPU: its tensor units take no others."""

PAIRS_COST = 8
"""How many times dearer than in a gradient matrix a number is in products of pairs of positions on a GPU."""


class BasisView:
    """Gradients in the coordinates of a basis, by the cheapest order of contractions.

    A Kronecker tangent stays factored when it is seen at one position, or at so few that pairs of positions are
    cheaper than matrices; else the matrices are formed in chunks, before or after the rotation, whichever takes fewer
    products. Factors are rotated once, however often the gradients are asked for.

    Args:
        tangent: the gradients of every example's cotangents.
        basis: of the same block.
        rounded: whether products are so coarse that what lies outside the basis must be measured for itself, and not
            as a difference of squared lengths.
    """

    def __init__(self, tangent: Tangent, basis: Basis, rounded: bool = False) -> None:
        """Nothing is computed yet."""
        self.basis = basis
        self.rounded = rounded
        self._tangent: Tangent | None = _held(tangent) if basis.outside and isinstance(tangent, Kronecker) else tangent
        self._held: Rotated | None = None
        self._rotated_first = True
        self._factors: tuple[Tensor, Tensor] | None = None
        self._energy: Tensor | None = None
        self._lengths: Tensor | None = None

    @property
    def tangent(self) -> Tangent:
        """The gradients as they were captured."""
        assert self._tangent is not None, "a view of gradients that were freed"
        return self._tangent

    def free_captured(self) -> None:
        """Free the gradients as they were captured, where they are held in a basis that spans the whole block."""
        if self._held is not None and self.complete:
            self._tangent = None

    def compact(self) -> None:
        """Free the captured gradients, where that is possible, and their squares."""
        self.free_captured()
        if isinstance(self._held, Factored):
            self._held.__dict__.pop("squared", None)

    @property
    def complete(self) -> bool:
        """Whether the basis spans all of the block."""
        return not self.basis.outside

    def chunks(self) -> Iterator[tuple[slice, Rotated]]:
        """Yield (which examples, their gradients); several chunks only where matrices must be formed."""
        held = self._rotated()
        if held is not None:
            yield slice(0, _examples(held)), held
        else:
            yield from self._formed(*self._factors_to_form())

    def mixed(self, weights: Tensor) -> Iterator[tuple[slice, Rotated]]:
        """The same for combinations of the cotangents by weights (n, c, q), which are as many cotangents q."""
        held = self._rotated()
        if held is None:
            a, g = self._factors_to_form()
            yield from self._formed(a, mix(g, weights.to(g.dtype)))
        elif isinstance(held, Factored) and not _stays_factored(held.a.shape[2], weights.shape[2], self.basis):
            yield from self._formed(held.a, mix(held.g, weights.to(held.g.dtype)))
        else:
            yield slice(0, _examples(held)), held.mix(weights.to(dtype_of(held)))

    def energy(self) -> Tensor:
        """Inner products of every example's gradients, (n, c, c); of what lies outside, if products are rounded."""
        if self._energy is None and self._lengths is not None and self._lengths.shape[1] == 1:
            self._energy = self._lengths.unsqueeze(2)
        if self._energy is None:
            first, *rest = map(energy, self._measured())
            self._energy = sum(rest, start=first)
        return self._energy

    def lengths(self) -> Tensor:
        """The diagonals of `energy` alone, (n, c)."""
        if self._energy is not None:
            return torch.diagonal(self._energy, dim1=1, dim2=2)
        if self._lengths is None:
            first, *rest = map(lengths, self._measured())
            self._lengths = sum(rest, start=first)
        return self._lengths

    def total(self, weights: Tensor) -> Tensor:
        """Sum of the gradients weighted by (n, c), shaped as the block's matrix, where the basis does not span all."""
        return total(self.tangent, weights)

    def along(self, direction: Tensor) -> Tensor:
        """Inner products (n, c) with a direction: in coordinates of a basis that spans all, else of the block."""
        if not self.complete:
            return along(self.tangent, direction)
        held = self._rotated()
        if held is not None:
            return held.along(direction.to(dtype_of(held)))
        a, g = self._factors_to_form()
        if not self._rotated_first:
            direction = self.basis.out_of(direction.to(g.dtype))
        extra = a.shape[-1] - direction.shape[-1]  # columns of zeros
        return along_factors(a, g, torch.nn.functional.pad(direction.to(g.dtype), (0, extra)))

    def _measured(self) -> list[Tangent]:
        if not self.rounded:
            return [self.tangent]
        if not isinstance(self.tangent, Kronecker):
            return outside_of(self.tangent, self.basis)
        held = self._rotated()
        if isinstance(held, Factored):
            return outside_of(self.tangent, self.basis, held.a, held.g)
        a, g = self._factors_to_form()
        if not self._rotated_first:
            return outside_of(self.tangent, self.basis)
        return outside_of(self.tangent, self.basis, a[..., : self.basis.shape[-1]], g)

    def _rotated(self) -> Rotated | None:
        """The gradients of all examples, unless that takes matrices."""
        if self._held is None:
            tangent, basis = self.tangent, self.basis
            if isinstance(tangent, Dense):
                inside = raised(tangent.values) if basis.inputs is None else dense_times(tangent, basis.inputs)
                self._held = Full(inside, basis.shape)
            elif isinstance(tangent, Rows):
                rows, examples, values = tangent.aggregate()
                values = raised(values)
                moved = values if basis.outputs is None else values @ basis.outputs[0]
                self._held = Sparse(rows, examples, moved, tangent.index.shape[0], basis.shape)
            elif stays_factored(tangent, basis):
                self._held = Factored(_project(tangent.a, basis.inputs), _project(tangent.g, basis.outputs))
        return self._held

    def _factors_to_form(self) -> tuple[Tensor, Tensor]:
        """The factors that matrices are formed from."""
        if self._factors is None:
            tangent, basis = self.tangent, self.basis
            assert isinstance(tangent, Kronecker)
            self._rotated_first = rotates_factors_first(tangent, basis)
            inputs = basis.inputs
            if inputs is not None and inputs.is_cuda and inputs.shape[-1] % ALIGNED:
                inputs = torch.nn.functional.pad(inputs, (0, -inputs.shape[-1] % ALIGNED))
            self._factors = (
                _project(tangent.a, inputs if self._rotated_first else None),
                _project(tangent.g, basis.outputs if self._rotated_first else None),
            )
        return self._factors

    def _formed(self, a: Tensor, g: Tensor) -> Iterator[tuple[slice, Full]]:
        n, c, e, _, o = g.shape
        step = max(1, CHUNK_NUMBERS["cuda" if a.is_cuda else "cpu"] // (c * e * o * a.shape[3]))
        for start in range(0, n, step):
            where = slice(start, min(start + step, n))
            matrices = outer(a[where], g[where])
            if not self._rotated_first:
                matrices = self.basis.into(matrices)
            padding = matrices.shape[-1] - self.basis.shape[-1]
            yield where, Full(matrices.reshape(len(matrices), c, -1), self.basis.shape, padding)


def basis_views(tangents: Sequence[Tangent], bases: Sequence[Basis], device: torch.device) -> list[BasisView]:
    """Every block of a chunk on a device, in its basis."""
    rounded = products_are_rounded(device)
    return [BasisView(tangent, basis, rounded) for tangent, basis in zip(tangents, bases, strict=True)]


def stays_factored(tangent: Kronecker, basis: Basis, cotangents: int | None = None) -> bool:
    """Whether the gradient matrices of this tangent, or of so many cotangents, need never be formed."""
    return _stays_factored(tangent.positions, tangent.cotangents if cotangents is None else cotangents, basis)


def _stays_factored(t: int, c: int, basis: Basis) -> bool:
    _, o, i = basis.shape
    dear = PAIRS_COST if basis.inputs is not None and basis.inputs.is_cuda else 1
    return t == 1 or dear * t * t * (o + i) < c * o * i


def formed_bytes(tangent: Kronecker, cotangents: int, room: float) -> float:
    """Bytes that are formed on the way for each cotangent of an example: matrices, or products of pairs of positions.

    None for a single position, and where the matrices are formed in chunks that take less than `room`.
    """
    t, (e, o, i) = tangent.positions, tangent.block.matrix_shape
    if t == 1:
        return 0.0
    grads = raised(tangent.grads())
    item = grads.element_size()
    if stays_factored(tangent, Basis(tangent.block), cotangents):
        return 1.5 * item * e * o * t * (t + 1)
    chunk = 2.0 * item * CHUNK_NUMBERS["cuda" if grads.is_cuda else "cpu"]
    return 0.0 if chunk <= room else 2.0 * item * e * o * i


def rotates_factors_first(tangent: Kronecker, basis: Basis) -> bool:
    """Whether rotating the factors takes fewer products than rotating the matrices."""
    c, t = tangent.cotangents, tangent.positions
    _, o, i = tangent.block.matrix_shape
    _, o_in, i_in = basis.shape
    rotate_factors = t * i * i_in + c * t * o * o_in + c * t * o_in * i_in
    rotate_matrices = c * t * o * i + c * (o_in * o * i + o_in * i * i_in)
    return basis.inputs is not None and rotate_factors <= rotate_matrices


def dtype_of(rotated: Rotated) -> torch.dtype:
    """The precision of the gradients."""
    return rotated.g.dtype if isinstance(rotated, Factored) else rotated.values.dtype


def _examples(rotated: Rotated) -> int:
    if isinstance(rotated, Sparse):
        return rotated.count
    return len(rotated.g if isinstance(rotated, Factored) else rotated.values)


def _held(tangent: Kronecker) -> Kronecker:
    """Factors that are rotated and measured are computed once, and lie as many products want them."""
    a, g = raised(tangent.inputs()), raised(tangent.grads())
    if g.is_cuda:
        a, g = a.contiguous(), g.contiguous()
    return Kronecker(tangent.block, Whole(a), Whole(g))


def _project(factor: Factor, basis: Tensor | None) -> Tensor:
    return raised(factor.tensor() if basis is None else factor.project(basis))
