"""Per-example gradients in the coordinates of a basis, and the few sums that every estimator is made of.

Three forms, one for each form of tangent. None of them ever holds more than one chunk of examples, and a linear layer
seen once an example never has its gradient matrices formed at all.

Axis letters: n examples, c cotangents, e groups, t positions, o outputs, i inputs, q weighted sums, w weight matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor


@dataclass(frozen=True)
class Factored:
    """Sums of outer products, sum_t g_t a_t^T, kept as their factors."""

    a: Tensor  # (n, e, t, i)
    g: Tensor  # (n, c, e, t, o)

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, c] phi^2: (q, e, o, i)."""
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
        outer, inner = self.g.flatten(1).square(), self.a.flatten(1).square()  # (n, o) and (n, i), with one group
        return torch.stack([(outer * one.unsqueeze(1)).T @ inner for one in weights.T]).unsqueeze(1)

    def grams(self, weights: Tensor) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, e, o, i): (w, n, c, c)."""
        n, c, e, t, o = self.g.shape
        if t == 1:
            scale = _times_inputs(self.a.squeeze(2).square(), weights)  # (w, n, e, o)
            return scaled_grams(self.g.reshape(n, c, e * o), scale.reshape(len(weights), n, 1, e * o))
        first, second, _ = _pairs(t, self.a)
        pairs = self.a[:, :, first] * self.a[:, :, second]  # (n, e, P, i)
        scale = torch.einsum("nepi,weoi->wnepo", pairs, weights)
        full = scale[:, :, :, _square(t, self.a)].reshape(len(weights), n, e, t, t, o)
        moved = torch.einsum("wnetso,ndeso->wndeto", full, self.g)
        return torch.einsum("nceto,wndeto->wncd", self.g, moved)

    def variances(self, weights: Tensor) -> Tensor:
        """The diagonals of `grams` alone: (w, n, c)."""
        n, c, e, t, o = self.g.shape
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
        moved = torch.einsum("neti,eoi->neto", self.a, direction)
        return torch.einsum("nceto,neto->nc", self.g, moved)

    def total(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[n, c] phi: (e, o, i)."""
        return torch.einsum("neto,neti->eoi", torch.einsum("nceto,nc->neto", self.g, weights), self.a)

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

    values: Tensor  # (n, c, p)
    shape: tuple[int, ...]  # of the block's matrix

    def squares(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[q, c] phi^2: (q, *shape)."""
        n, c, p = self.values.shape
        repeated = weights.repeat(1, n)  # (q, n c)
        return (repeated @ self.values.square().reshape(n * c, p)).reshape(-1, *self.shape)

    def single(self, weights: Tensor) -> Tensor:
        """sum_n weights[n, q] phi^2 for one cotangent: (q, *shape)."""
        return (weights.T @ self.values.squeeze(1).square()).reshape(-1, *self.shape)

    def grams(self, weights: Tensor) -> Tensor:
        """sum_p W_p phi_c phi_d for weight matrices (w, *shape): (w, n, c, c)."""
        return scaled_grams(self.values, weights.reshape(len(weights), 1, 1, -1))

    def variances(self, weights: Tensor) -> Tensor:
        """The diagonals of `grams` alone, reading the gradients once: (w, n, c)."""
        n, c, p = self.values.shape
        flat, turned = self.values.reshape(n * c, p), weights.reshape(len(weights), p).T
        step = n * c if flat.is_cuda else max(1, CACHE_NUMBERS // p)
        parts = [flat[low : low + step].square() @ turned for low in range(0, n * c, step)]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).reshape(n, c, -1).permute(2, 0, 1)

    def mix(self, weights: Tensor) -> Full:
        """Other cotangents as combinations of these: weights (n, c, q)."""
        return Full(weights.transpose(1, 2) @ self.values, self.shape)

    def along(self, direction: Tensor) -> Tensor:
        """Inner products with a direction: (n, c)."""
        return self.values @ direction.reshape(-1)

    def total(self, weights: Tensor) -> Tensor:
        """sum_n sum_c weights[n, c] phi."""
        return (weights.reshape(-1) @ self.values.flatten(0, 1)).reshape(self.shape)

    def gather(self, index: Tensor) -> Tensor:
        """The coordinates at flat positions: (n, c, r)."""
        return self.values[:, :, index]


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

    def grams(self, weights: Tensor) -> Tensor:
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


CACHE_NUMBERS = 2**17
"""Numbers that a core's cache holds with room to spare."""

GROUP_ROWS = 128
"""Rows that fill a GPU's tensor units."""

Rotated: TypeAlias = Factored | Full | Sparse


def mix(g: Tensor, weights: Tensor) -> Tensor:
    """Gradients (n, c, e, t, o) combined by weights (n, c, q): (n, q, e, t, o)."""
    if g.shape[1] == 1:
        return g * weights.reshape(len(g), -1, 1, 1, 1)
    return torch.einsum("nceto,ncq->nqeto", g, weights)


def scaled_grams(values: Tensor, scales: Tensor) -> Tensor:
    """V diag(scale) V^T for values (n, c, p) and scales (w, n or 1, 1, p): (w, n, c, c), a cacheful at a time."""
    n, c, p = values.shape
    if c == 1:
        squares = values.squeeze(1).square()
        flat = scales.reshape(len(scales), -1, p)
        one = squares @ flat.squeeze(1).T if flat.shape[1] == 1 else torch.einsum("np,wnp->nw", squares, flat)
        return one.T.reshape(len(scales), n, 1, 1)
    if values.is_cuda:
        return torch.stack([_grouped_gram(values, scale) for scale in scales])
    found = values.new_empty(len(scales), n, c, c)
    step = max(1, CACHE_NUMBERS // (c * p))
    for low in range(0, n, step):
        part = values[low : low + step]
        flipped = part.transpose(1, 2)
        for at, scale in enumerate(scales):
            here = scale if len(scale) == 1 else scale[low : low + step]
            torch.bmm(part * here, flipped, out=found[at, low : low + step])
    return found


def _grouped_gram(values: Tensor, scale: Tensor) -> Tensor:
    """V diag(scale) V^T for values (n, c, p) on a GPU: (n, c, c).

    Products of c x p matrices are too small for its tensor units, so several examples share one product, of which only
    the blocks on the diagonal are kept.
    """
    n, c, p = values.shape
    together = max(1, min(n, GROUP_ROWS // c))
    groups = -(-n // together)
    fill = (0, 0, 0, 0, 0, groups * together - n)
    padded, scaled = (torch.nn.functional.pad(one, fill) if fill[-1] else one for one in (values, values * scale))
    wide = scaled.reshape(groups, together * c, p) @ padded.reshape(groups, together * c, p).transpose(1, 2)
    blocks = wide.reshape(groups, together, c, together, c).diagonal(dim1=1, dim2=3)  # (groups, c, c, together)
    return blocks.permute(0, 3, 1, 2).reshape(-1, c, c)[:n]


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
