"""Inner products of gradients with preconditioned ones, layer by layer, kept factored where a layer is used once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

from whence.curvature.rotation import Basis, DiagonalMoments, example_slices, gradient_matrices, widened
from whence.jacobian.gradients import Dense, Kronecker, Tangent

PRODUCT_NUMBERS = {"cpu": 2**18, "cuda": 2**26}  # scaled gradients held at once


def align(tangent: Tangent, directions: Tensor) -> Tensor:
    """<J_i^T u_c, v_q> for every example, cotangent and direction v (q, *matrix shape of the block): (n, c, q)."""
    if isinstance(tangent, Dense):
        return widened(tangent.values).to(directions.dtype) @ directions.T
    if isinstance(tangent, Kronecker):
        a, g = tangent.inputs().to(directions.dtype), tangent.grads().to(directions.dtype)
        parts = example_slices(len(g), math.prod((g.shape[1], *directions.shape[1:])), g)
        return torch.cat([gradient_matrices(a[some], g[some]).flatten(2) @ directions.flatten(1).T for some in parts])
    rows, examples, values = tangent.aggregate()
    values = widened(values).to(directions.dtype)  # (u, c, d)
    found = values.new_zeros(len(tangent.index), values.shape[1], len(directions))
    for some in example_slices(len(rows), len(directions) * values.shape[2], values):
        products = torch.einsum("ucd,qud->ucq", values[some], directions[:, rows[some]])
        found.index_add_(0, examples[some], products)
    return found


def is_outer_product(tangent: Tangent) -> bool:
    """Whether the gradients of a block are outer products of two vectors."""
    return isinstance(tangent, Kronecker) and tangent.positions == 1 and tangent.g.shape[2] == 1


@dataclass(frozen=True)
class OuterProducts:
    """Outer products g a^T of n examples for c cotangents, split into the parts inside and outside a basis."""

    a: Tensor  # (n, i)
    a_inside: Tensor  # (n, x) coordinates
    a_outside: Tensor  # (n, i)
    g_inside: Tensor  # (n, c, y) coordinates
    g_outside: Tensor  # (n, c, o)

    @classmethod
    def of(cls, tangents: Sequence[Tangent], basis: Basis, dtype: torch.dtype) -> OuterProducts:
        """Split several chunks of gradients."""
        outer = [one for one in tangents if isinstance(one, Kronecker)]
        a = torch.cat([widened(one.inputs()).flatten(1) for one in outer]).to(dtype)
        g = torch.cat([widened(one.grads()).flatten(2) for one in outer]).to(dtype)
        return cls(a, *_split(a, basis.inputs), *_split(g, basis.outputs))


def _split(rows: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor]:
    """Coordinates of rows (..., i) in a basis (1, i, x), and the part outside it."""
    if basis is None:
        return rows, torch.zeros_like(rows)
    columns = basis[0].to(rows.dtype)
    inside = rows @ columns
    return inside, rows - inside @ columns.T


@dataclass(frozen=True)
class PreconditionedGradients:
    """F_lam^-1 times the gradients of m inputs for k cotangents each, in one block."""

    tangents: Sequence[Tangent]
    basis: Basis
    damped: DiagonalMoments  # s + lambda
    dtype: torch.dtype

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents: (n, c, m k)."""
        if self._own is None or not is_outer_product(tangent):
            return align(tangent, self._matrices)
        return self._align_outer(OuterProducts.of([tangent], self.basis, self.dtype), self._own)

    @cached_property
    def _own(self) -> OuterProducts | None:
        """The gradients, if all of them are outer products."""
        factored = all(is_outer_product(tangent) for tangent in self.tangents)
        return OuterProducts.of(self.tangents, self.basis, self.dtype) if factored else None

    @cached_property
    def _matrices(self) -> Tensor:
        """(m k, *matrix shape of the block)."""
        matrices = torch.cat([one.materialize().flatten(0, 1).to(self.dtype) for one in self.tangents])
        return self.basis.solve(self.damped, matrices)

    @cached_property
    def _solved(self) -> Tensor:
        """(m y, x) layer inputs in the basis, divided by s + lambda."""
        assert self._own is not None
        return (self._own.a_inside.unsqueeze(1) / self.damped.inside[0].to(self.dtype)).flatten(0, 1)

    def _align_outer(self, others: OuterProducts, own: OuterProducts) -> Tensor:
        """For every pair, sum_y g_y g'_y B_y with B = sum_x a_x a'_x / (s + lambda); one weight for the part outside.

        B is one large product for many examples; scaled gradients are held for a few examples at once.
        """
        m, k, y = own.g_inside.shape
        n, c = others.g_inside.shape[:2]
        weight = 1.0 / self.damped.outside if self.basis.missing else 0.0
        numbers = PRODUCT_NUMBERS["cuda" if own.a.is_cuda else "cpu"]
        many, few = (max(1, room // (m * max(y, 1))) for room in (16 * numbers, numbers // k))
        found = own.a.new_empty(n, c, m * k)
        for low in range(0, n, many):
            here = slice(low, min(low + many, n))
            scales = (others.a_inside[here] @ self._solved.T).unflatten(1, (m, y))
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


def contract(tangents: Sequence[Tangent], preconditioned: Sequence[PreconditionedGradients], k: int) -> Tensor:
    """(m, k, n, c) sums over blocks of inner products of n examples' gradients with m inputs' preconditioned ones."""
    parts = (one.align(tangent) for tangent, one in zip(tangents, preconditioned, strict=True))
    found = reduce(Tensor.add_, parts)  # (n, c, m k)
    return found.reshape(*found.shape[:2], -1, k).permute(2, 3, 0, 1)
