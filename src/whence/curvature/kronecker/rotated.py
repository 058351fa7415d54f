"""Per-example gradients in the coordinates of a basis, and the few sums that every estimator is made of.

Three forms, one for each form of tangent. None of them ever holds more than one chunk of examples, and a linear layer
seen once an example never has its gradient matrices formed at all.

Axis letters: n examples, c cotangents, e groups, t positions, o outputs, i inputs, q weighted sums, w weight matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from .contraction import CACHE_NUMBERS, along_factors, few_columns, mix, scaled_grams


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
        corner = left.permute(1, 2, 0, 3) @ right.permute(1, 2, 0).unsqueeze(1)  # (n, c, R, C)
        return corner[:, :, at_row, at_column]


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
        kept = place[self.rows] >= 0
        table = self.values.new_zeros(self.count, len(wanted), *self.values.shape[1:])
        table[self.examples[kept], place[self.rows[kept]]] = self.values[kept]
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
