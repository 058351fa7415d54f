"""Inner products of training gradients with preconditioned gradients F_lam^-1 J^T, kept factored where that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whence.curvature.rotation import CHUNK_NUMBERS, Basis, DiagonalMoments, raised
from whence.jacobian.gradients import Dense, Kronecker, Rows, Tangent

PRODUCT_NUMBERS = {"cpu": 2**18, "cuda": 2**26}  # of scaled gradients that are held at once


def align(tangent: Tangent, directions: Tensor) -> Tensor:
    """<J_i^T u_c, v_q> for every example, cotangent and direction.

    A layer seen at one position never has its gradient matrices formed: g^T V a takes one matrix product for each
    direction. Layers with shared weights take that way too, unless forming the matrices first is cheaper.

    Directions V are (q, *matrix shape of the block), and the inner products (n, c, q).
    """
    if isinstance(tangent, Dense):
        return raised(tangent.values).to(directions.dtype) @ directions.T
    if isinstance(tangent, Rows):
        return _align_rows(tangent, directions)
    return _align_kronecker(tangent, directions)


def _align_kronecker(tangent: Kronecker, directions: Tensor) -> Tensor:
    a, g = tangent.inputs().to(directions.dtype), tangent.grads().to(directions.dtype)
    n, c, e, t, o = g.shape
    i, q = a.shape[3], len(directions)
    if not t:  # no example of this batch uses the layer
        return directions.new_zeros(n, c, q)
    factored = q * t * o * (i + c)
    formed = c * o * i * (t + q)
    numbers = q * t * o * e if factored <= formed else c * e * o * i
    step = max(1, CHUNK_NUMBERS["cuda" if g.is_cuda else "cpu"] // numbers)
    parts = []
    for low in range(0, n, step):
        some_a, some_g = a[low : low + step], g[low : low + step]
        if factored <= formed:
            moved = torch.einsum("neti,qeoi->netqo", some_a, directions)
            left = some_g.permute(0, 2, 3, 1, 4).reshape(len(some_g), e * t, c, o)
            parts.append(torch.einsum("nsco,nsqo->ncq", left, moved.flatten(1, 2)))
        else:
            matrices = torch.einsum("nceto,neti->nceoi", some_g, some_a)
            parts.append(matrices.flatten(2) @ directions.flatten(1).T)
    return torch.cat(parts)


def _align_rows(tangent: Rows, directions: Tensor) -> Tensor:
    rows, examples, values = tangent.aggregate()
    n, c = tangent.index.shape[0], tangent.grads.shape[1]
    values = raised(values).to(directions.dtype)  # (u, c, d)
    found = values.new_zeros(n, c, len(directions))
    step = max(1, CHUNK_NUMBERS["cuda" if values.is_cuda else "cpu"] // (len(directions) * values.shape[2]))
    for low in range(0, len(rows), step):
        part = slice(low, low + step)
        products = torch.einsum("ucd,qud->ucq", values[part], directions[:, rows[part]])
        found.index_add_(0, examples[part], products)
    return found


def is_outer_product(tangent: Tangent) -> bool:
    """Whether the gradients of a block are outer products of two vectors."""
    return isinstance(tangent, Kronecker) and tangent.positions == 1 and tangent.g.shape[2] == 1


@dataclass(frozen=True)
class OuterProducts:
    """Outer products g a^T of n examples for c cotangents, split into what lies inside a basis and outside."""

    a: Tensor  # (n, i)
    a_inside: Tensor  # (n, x) coordinates
    a_outside: Tensor  # (n, i)
    g_inside: Tensor  # (n, c, y) coordinates
    g_outside: Tensor  # (n, c, o), or fewer along a complement of the basis

    @classmethod
    def of(cls, tangents: Sequence[Tangent], basis: Basis, dtype: torch.dtype) -> OuterProducts:
        """Split several chunks of gradients."""
        outer = [one for one in tangents if isinstance(one, Kronecker)]
        a = torch.cat([raised(one.inputs()).flatten(1) for one in outer]).to(dtype)
        g = torch.cat([raised(one.grads()).flatten(2) for one in outer]).to(dtype)
        return cls(a, *_split(a, basis.inputs), *_split(g, basis.outputs, basis.complement))


def _split(rows: Tensor, basis: Tensor | None, complement: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Coordinates of rows (..., i) in a basis (1, i, x), and what lies outside of it, along a complement if given."""
    if basis is None:
        return rows, torch.zeros_like(rows)
    columns = basis[0].to(rows.dtype)
    inside = rows @ columns
    return inside, rows - inside @ columns.T if complement is None else rows @ complement.to(rows.dtype)


@dataclass(frozen=True)
class Directions:
    """F_lam^-1 times the gradients of m inputs for k cotangents each, in one block."""

    tangents: Sequence[Tangent]
    basis: Basis
    damped: DiagonalMoments  # s + lambda
    dtype: torch.dtype
    own: OuterProducts | None  # the gradients, where all of them are outer products

    @classmethod
    def of(cls, tangents: Sequence[Tangent], basis: Basis, damped: DiagonalMoments, dtype: torch.dtype) -> Directions:
        """Nothing is solved yet: it is clear with the other gradients which form serves."""
        factored = all(is_outer_product(tangent) for tangent in tangents)
        return cls(tangents, basis, damped, dtype, OuterProducts.of(tangents, basis, dtype) if factored else None)

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents: (n, c, m k)."""
        if self.own is None or not is_outer_product(tangent):
            return align(tangent, self._matrices)
        return self._align_outer(OuterProducts.of([tangent], self.basis, self.dtype), self.own)

    @cached_property
    def _matrices(self) -> Tensor:
        """(m k, *matrix shape of the block)."""
        matrices = torch.cat([one.materialize().flatten(0, 1).to(self.dtype) for one in self.tangents])
        return self.basis.solve(self.damped, matrices)

    @cached_property
    def _solved(self) -> Tensor:
        """(m, y, x) inputs of the layer in the basis, divided by s + lambda."""
        assert self.own is not None
        return self.own.a_inside.unsqueeze(1) / self.damped.inside[0].to(self.dtype)

    def _align_outer(self, others: OuterProducts, own: OuterProducts) -> Tensor:
        """sum_y g_y g'_y B_y with B = sum_x a_x a'_x / (s + lambda), of every pair; what lies outside has one weight.

        B takes one large product for many examples; scaled gradients of few of them are held at once.
        """
        m, k, y = own.g_inside.shape
        n, c = others.g_inside.shape[:2]
        weight = 1.0 / self.damped.outside if self.basis.outside else 0.0
        numbers = PRODUCT_NUMBERS["cuda" if own.a.is_cuda else "cpu"]
        many, few = (max(1, room // (m * max(y, 1))) for room in (16 * numbers, numbers // k))
        found = own.a.new_empty(n, c, m * k)
        for low in range(0, n, many):
            here = slice(low, min(low + many, n))
            scales = (others.a_inside[here] @ self._solved.flatten(0, 1).T).unflatten(1, (m, y))
            if weight:
                scales += (weight * others.a_outside[here] @ own.a_outside.T).unsqueeze(2)
            pieces = zip(*(one.split(few) for one in (scales, others.g_inside[here], found[here])), strict=True)
            for scale, left, into in pieces:
                scaled = (scale.unsqueeze(2) * own.g_inside).view(len(scale), m * k, y)
                torch.bmm(left, scaled.mT, out=into)
            if weight:
                alike = weight * others.a[here] @ own.a.T  # (n, m)
                products = others.g_outside[here].flatten(0, 1) @ own.g_outside.flatten(0, 1).T
                shaped = found[here].unflatten(2, (m, k))
                shaped.addcmul_(products.view_as(shaped), alike[:, None, :, None])
        return found
