"""Inner products of training gradients with preconditioned gradients F_lam^-1 J^T, kept factored where that serves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.rotation import CHUNK_NUMBERS, Basis, raised
from whence.jacobian.gradients import Dense, Kronecker, Rows, Tangent


def align(tangent: Tangent, directions: Tensor) -> Tensor:
    """<J_i^T u_c, v_q> for every example, cotangent and direction.

    A layer seen at one position never has its gradient matrices formed: g^T V a takes one matrix product for each
    direction. Layers with shared weights take that way too, unless forming the matrices first is cheaper.

    Args:
        tangent: gradients of n examples for c cotangents.
        directions: V (q, *matrix shape of the block).

    Returns:
        (n, c, q).
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
            moved = _times_inputs(some_a, directions)  # (n, e, t, q, o)
            left = some_g.permute(0, 2, 3, 1, 4).reshape(len(some_g), e * t, c, o)
            parts.append(torch.einsum("nsco,nsqo->ncq", left, moved.flatten(1, 2)))
        else:
            matrices = torch.einsum("nceto,neti->nceoi", some_g, some_a)
            parts.append(matrices.flatten(2) @ directions.flatten(1).T)
    return torch.cat(parts)


def _times_inputs(a: Tensor, directions: Tensor) -> Tensor:
    """V a: (n, e, t, i) with (q, e, o, i) to (n, e, t, q, o); one large product where there is one group."""
    n, e, t, i = a.shape
    q, _, o, _ = directions.shape
    if e == 1:
        return (a.reshape(-1, i) @ directions.reshape(-1, i).T).reshape(n, e, t, q, o)
    return torch.einsum("neti,qeoi->netqo", a, directions)


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


PRODUCT_NUMBERS = {"cpu": 2**18, "cuda": 2**26}
"""Numbers that are multiplied one by one at a time: on a CPU as many as stay in its cache."""

LARGEST_COMPLEMENT = 2048
"""The complement of a truncated basis is computed for layers with at most so many outputs, whose cube it takes."""


@dataclass(frozen=True)
class FactorParts:
    """Factors of gradients g a^T, rotated into a basis and split at what it spans.

    Attributes:
        inputs: a (n, i).
        inputs_inside: ua (n, x).
        inputs_outside: b (n, i), without columns where the basis spans all.
        grads_inside: vg (n, c, y).
        grads_outside: h, likewise: (n, c, o - y) in a basis of what it does not span, or (n, c, o).
    """

    inputs: Tensor
    inputs_inside: Tensor
    inputs_outside: Tensor
    grads_inside: Tensor
    grads_outside: Tensor

    @classmethod
    def of(cls, tangent: Kronecker, basis: Basis, dtype: torch.dtype, complement: Tensor | None = None) -> FactorParts:
        """Split what was captured; `complement`, a basis of the output directions outside the basis makes h shorter."""
        a, g = tangent.inputs()[:, 0, 0].to(dtype), tangent.grads()[:, :, 0, 0].to(dtype)
        into, out = (None if one is None else one[0].to(dtype) for one in (basis.inputs, basis.outputs))
        inside, rotated = a if into is None else a @ into, g if out is None else g @ out
        if not basis.outside or into is None or out is None:
            return cls(a, inside, a[:, :0], rotated, g[:, :, :0])
        outside = g - rotated @ out.T if complement is None else g @ complement
        return cls(a, inside, a - inside @ into.T, rotated, outside)

    def matrices(self, basis: Basis, complement: Tensor | None = None) -> Tensor:
        """The gradients that were split, as matrices (n c, 1, o, i)."""
        g = self.grads_inside
        if basis.outputs is not None:
            g = g @ basis.outputs[0].to(g.dtype).T
        if self.grads_outside.shape[2]:
            g = g + (self.grads_outside if complement is None else self.grads_outside @ complement.T)
        return torch.einsum("nco,ni->ncoi", g, self.inputs).flatten(0, 1).unsqueeze(1)

    @classmethod
    def join(cls, chunks: Sequence[FactorParts]) -> FactorParts:
        """Several chunks of a batch as one."""
        return cls(*(torch.cat([getattr(chunk, name) for chunk in chunks]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Preconditioned:
    """F_lam^-1 times the gradients of m inputs for k cotangents each.

    Attributes:
        basis: of the block.
        parts: the factors of the gradients themselves.
        complement: (o, o - y) output directions that the basis does not span, where they were worked out.
        inside: (m, y, x) rotated inputs, divided by s + lambda.
        weight: 1 / (s_outside + lambda), zero where the basis spans all.
    """

    basis: Basis
    parts: FactorParts
    complement: Tensor | None
    inside: Tensor
    weight: float

    @classmethod
    def of(
        cls, chunks: Sequence[FactorParts], basis: Basis, curvature: Tensor, outside: float, complement: Tensor | None
    ) -> Preconditioned:
        """Divide by s + lambda (1, y, x) inside the basis, and multiply by 1 / (s + lambda) outside."""
        parts = FactorParts.join(chunks)
        inside = parts.inputs_inside.unsqueeze(1) / curvature[0].to(parts.inputs.dtype)
        return cls(basis, parts, complement, inside, outside if basis.outside else 0.0)

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents, outer products as well, (n, c, m k)."""
        assert isinstance(tangent, Kronecker)
        others = FactorParts.of(tangent, self.basis, self.inside.dtype, self.complement)
        theirs, ours = others.grads_inside, self.parts.grads_inside
        n, c, y = theirs.shape
        m, k = ours.shape[:2]
        found = self.inside.new_empty(n, c, m * k)
        numbers = PRODUCT_NUMBERS["cuda" if self.inside.is_cuda else "cpu"]
        many, few = (max(1, room // (m * max(y, 1))) for room in (16 * numbers, numbers // k))
        weights, room = self.inside.new_empty(min(many, n), m, y), self.inside.new_empty(min(few, n), m, k, y)
        for low in range(0, n, many):
            some = slice(low, min(low + many, n))
            here = self._weights(others, some, weights[: some.stop - low]).unsqueeze(2)  # (some, m, 1, y)
            for scale, left, into in zip(*(one.split(few) for one in (here, theirs[some], found[some])), strict=True):
                space = room if few == 1 else room[: len(scale)]
                torch.mul(scale, ours, out=space)
                torch.bmm(left, space.view(-1, m * k, y).mT, out=into)
            if self.weight:
                self._add_outside(others, some, found[some].unflatten(2, (m, k)))
        return found

    def _weights(self, others: FactorParts, some: slice, into: Tensor) -> Tensor:
        """B of every pair of examples, (some, m, y)."""
        torch.mm(others.inputs_inside[some], self.inside.flatten(0, 1).T, out=into.flatten(1))
        if self.weight:
            into += (self.weight * others.inputs_outside[some] @ self.parts.inputs_outside.T).unsqueeze(2)
        return into

    def _add_outside(self, others: FactorParts, some: slice, found: Tensor) -> None:
        """Add what output directions outside the basis say to (some, c, m, k): one weight for all of them."""
        alike = self.weight * others.inputs[some] @ self.parts.inputs.T  # (some, m)
        products = others.grads_outside[some].flatten(0, 1) @ self.parts.grads_outside.flatten(0, 1).T
        found.addcmul_(products.view_as(found), alike[:, None, :, None])


def complement_of(basis: Basis, dtype: torch.dtype) -> Tensor | None:
    """Orthonormal output directions (o, o - y) that a basis does not span; `None` where that would take long."""
    if (
        not basis.outside
        or basis.inputs is None
        or basis.outputs is None
        or basis.outputs.shape[1] > LARGEST_COMPLEMENT
    ):
        return None
    spanned = basis.outputs[0].double()
    whole: Tensor = torch.linalg.qr(spanned, mode="complete").Q
    return whole[:, spanned.shape[1] :].to(dtype)


def as_outer_product(tangent: Tangent) -> Kronecker | None:
    """The gradients of a block, if they are outer products of two vectors."""
    if not isinstance(tangent, Kronecker) or tangent.positions != 1 or tangent.g.shape[2] > 1:
        return None
    return tangent
