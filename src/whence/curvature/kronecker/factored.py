"""Preconditioned gradients of a layer seen once, kept factored: products with others without any full matrix.

In the eigenbasis F_lam^-1 divides each coordinate by its own s + lambda. For gradients g a^T and g' a'^T with turned
factors vg, ua, vg', ua' that is

    <g a^T, F_lam^-1 g' a'^T> = sum_y vg_y vg'_y B_y,      B_y = sum_x ua_x ua'_x / (s_yx + lambda)

and B serves all outputs of both examples: a product over the layer for each pair of examples, not for each output.
Outside a corner of the basis all is divided by one number, so that inner products of the factors say the rest: with the
parts h and b of g and a that the corner does not span, (h h' a a' + vg vg' b b') / (s_outside + lambda): one number is
added to B, and h follows vg with weights of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.tangents.forms import Kronecker, Tangent

from .basis import Basis
from .moments import Squares

HELD = {"cpu": 2**18, "cuda": 2**26}
"""Numbers that are multiplied one by one in one go: on a CPU as many as stay in its cache."""

LARGEST = 2048
"""Outputs of a layer of which the complement of a corner is worked out, which takes their cube."""


@dataclass(frozen=True)
class Parts:
    """Factors of gradients g a^T, turned into a basis and split at its corner.

    Attributes:
        inputs: a (n, i).
        inputs_inside: ua (n, x).
        inputs_beyond: b (n, i), without columns where the basis spans all.
        grads_inside: vg (n, c, y).
        grads_beyond: h, likewise: (n, c, o - y) in a basis of what the corner does not span, or (n, c, o).
    """

    inputs: Tensor
    inputs_inside: Tensor
    inputs_beyond: Tensor
    grads_inside: Tensor
    grads_beyond: Tensor

    @classmethod
    def of(cls, tangent: Kronecker, basis: Basis, dtype: torch.dtype, complement: Tensor | None = None) -> Parts:
        """Split what was captured; a basis of the output directions outside the corner makes h shorter."""
        a, g = tangent.inputs()[:, 0, 0].to(dtype), tangent.grads()[:, :, 0, 0].to(dtype)
        into, out = (None if one is None else one[0].to(dtype) for one in (basis.inputs, basis.outputs))
        inside, turned = a if into is None else a @ into, g if out is None else g @ out
        if not basis.outside or into is None or out is None:
            return cls(a, inside, a[:, :0], turned, g[:, :, :0])
        beyond = g - turned @ out.T if complement is None else g @ complement
        return cls(a, inside, a - inside @ into.T, turned, beyond)

    def matrices(self, basis: Basis, complement: Tensor | None = None) -> Tensor:
        """The gradients that were split, as matrices (n c, 1, o, i)."""
        g = self.grads_inside
        if basis.outputs is not None:
            g = g @ basis.outputs[0].to(g.dtype).T
        if self.grads_beyond.shape[2]:
            g = g + (self.grads_beyond if complement is None else self.grads_beyond @ complement.T)
        return torch.einsum("nco,ni->ncoi", g, self.inputs).flatten(0, 1).unsqueeze(1)

    @classmethod
    def join(cls, pieces: Sequence[Parts]) -> Parts:
        """Several pieces of a batch as one."""
        return cls(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Factored:
    """F_lam^-1 times the gradients of m inputs for k cotangents each.

    Attributes:
        basis: of the block.
        parts: the factors of the gradients themselves.
        complement: (o, o - y) output directions that the corner does not span, where they were worked out.
        inside: (m, y, x) turned inputs, divided by s + lambda.
        weight: 1 / (s_outside + lambda), zero where the basis spans all.
    """

    basis: Basis
    parts: Parts
    complement: Tensor | None
    inside: Tensor
    weight: float

    @classmethod
    def of(
        cls, pieces: Sequence[Parts], basis: Basis, squares: Squares, ridge: float, complement: Tensor | None
    ) -> Factored:
        """Divide by the curvature."""
        parts = Parts.join(pieces)
        inside = parts.inputs_inside.unsqueeze(1) / (squares.inside[0] + ridge).to(parts.inputs.dtype)
        return cls(basis, parts, complement, inside, 1.0 / (squares.outside + ridge) if basis.outside else 0.0)

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents, seen once as well, (n, c, m k)."""
        assert isinstance(tangent, Kronecker)
        others = Parts.of(tangent, self.basis, self.inside.dtype, self.complement)
        theirs, ours = others.grads_inside, self.parts.grads_inside
        n, c, y = theirs.shape
        m, k = ours.shape[:2]
        found = self.inside.new_empty(n, c, m * k)
        held = HELD["cuda" if self.inside.is_cuda else "cpu"]
        many, few = (max(1, room // (m * max(y, 1))) for room in (16 * held, held // k))
        weights, room = self.inside.new_empty(min(many, n), m, y), self.inside.new_empty(min(few, n), m, k, y)
        for low in range(0, n, many):
            some = slice(low, min(low + many, n))
            here = self._weights(others, some, weights[: some.stop - low]).unsqueeze(2)  # (some, m, 1, y)
            for scale, left, into in zip(*(one.split(few) for one in (here, theirs[some], found[some])), strict=True):
                space = room if few == 1 else room[: len(scale)]
                torch.mul(scale, ours, out=space)
                torch.bmm(left, space.view(-1, m * k, y).mT, out=into)
            if self.weight:
                self._add_beyond(others, some, found[some].unflatten(2, (m, k)))
        return found

    def _weights(self, others: Parts, some: slice, into: Tensor) -> Tensor:
        """B of every pair of examples, (some, m, y), written where it is told to."""
        torch.mm(others.inputs_inside[some], self.inside.flatten(0, 1).T, out=into.flatten(1))
        if self.weight:
            into += (self.weight * others.inputs_beyond[some] @ self.parts.inputs_beyond.T).unsqueeze(2)
        return into

    def _add_beyond(self, others: Parts, some: slice, found: Tensor) -> None:
        """Add what output directions outside the corner say to (some, c, m, k): one weight for all of them."""
        alike = self.weight * others.inputs[some] @ self.parts.inputs.T  # (some, m)
        products = others.grads_beyond[some].flatten(0, 1) @ self.parts.grads_beyond.flatten(0, 1).T
        found.addcmul_(products.view_as(found), alike[:, None, :, None])


def complement_of(basis: Basis, dtype: torch.dtype) -> Tensor | None:
    """Orthonormal output directions (o, o - y) that a corner does not span; nothing where that would take long."""
    if not basis.outside or basis.inputs is None or basis.outputs is None or basis.outputs.shape[1] > LARGEST:
        return None
    kept = basis.outputs[0].double()
    whole: Tensor = torch.linalg.qr(kept, mode="complete").Q
    return whole[:, kept.shape[1] :].to(dtype)


def seen_once(tangent: Tangent) -> Kronecker | None:
    """The gradients of a block, if they are outer products of two vectors."""
    if not isinstance(tangent, Kronecker) or tangent.positions != 1 or tangent.g.shape[2] > 1:
        return None
    return tangent
