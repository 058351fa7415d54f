"""Preconditioned gradients of a layer seen once, kept factored: products with others without any full matrix.

In the eigenbasis F_lam^-1 divides each coordinate by its own s + lambda. For gradients g a^T and g' a'^T with turned
factors vg, ua, vg', ua' that is

    <g a^T, F_lam^-1 g' a'^T> = sum_y vg_y vg'_y B_y,      B_y = sum_x ua_x ua'_x / (s_yx + lambda)

and B serves all outputs of both examples: a product over the layer for each pair of examples, not for each output.
Outside a corner of the basis all is divided by one number, so that inner products of the factors say the rest: with the
parts h and b of g and a that the corner does not span, (h h' a a' + vg vg' b b') / (s_outside + lambda).
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


@dataclass(frozen=True)
class Parts:
    """Factors of gradients g a^T, turned into a basis and split at its corner.

    Attributes:
        inputs: a (n, i).
        inputs_inside: ua (n, x).
        inputs_beyond: b (n, i), without columns where the basis spans all.
        grads_inside: vg (n, c, y).
        grads_beyond: h (n, c, o), likewise.
    """

    inputs: Tensor
    inputs_inside: Tensor
    inputs_beyond: Tensor
    grads_inside: Tensor
    grads_beyond: Tensor

    @classmethod
    def of(cls, tangent: Kronecker, basis: Basis, dtype: torch.dtype) -> Parts:
        """Split what was captured."""
        a, g = tangent.inputs()[:, 0, 0].to(dtype), tangent.grads()[:, :, 0, 0].to(dtype)
        into, out = (None if one is None else one[0].to(dtype) for one in (basis.inputs, basis.outputs))
        inside, turned = a if into is None else a @ into, g if out is None else g @ out
        if not basis.outside or into is None or out is None:
            return cls(a, inside, a[:, :0], turned, g[:, :, :0])
        return cls(a, inside, a - inside @ into.T, turned, g - turned @ out.T)

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
        inside: (m, y, x) turned inputs, divided by s + lambda.
        weight: 1 / (s_outside + lambda), zero where the basis spans all.
    """

    basis: Basis
    parts: Parts
    inside: Tensor
    weight: float

    @classmethod
    def of(cls, pieces: Sequence[Parts], basis: Basis, squares: Squares, ridge: float) -> Factored:
        """Divide by the curvature."""
        parts = Parts.join(pieces)
        inside = parts.inputs_inside.unsqueeze(1) / (squares.inside[0] + ridge).to(parts.inputs.dtype)
        return cls(basis, parts, inside, 1.0 / (squares.outside + ridge) if basis.outside else 0.0)

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents, (n, c, m k)."""
        assert isinstance(tangent, Kronecker)
        ours, others = self.parts, Parts.of(tangent, self.basis, self.inside.dtype)
        n, c, y = others.grads_inside.shape
        m, k = ours.grads_inside.shape[:2]
        found = self.inside.new_empty(n, c, m, k)
        step = max(1, HELD["cuda" if self.inside.is_cuda else "cpu"] // (c * y))
        for low in range(0, n, step):
            some = slice(low, min(low + step, n))
            grads = others.grads_inside[some]
            for at in range(m):
                weights = others.inputs_inside[some] @ self.inside[at].T  # B, (n, y)
                found[some, :, at] = (grads * weights.unsqueeze(1)) @ ours.grads_inside[at].T
        if self.weight:
            self._add_outside(found, others)
        return found.reshape(n, c, m * k)

    def _add_outside(self, found: Tensor, others: Parts) -> None:
        n, _, m, _ = found.shape
        for grads, inputs in (("grads_beyond", "inputs"), ("grads_inside", "inputs_beyond")):
            left, right = getattr(others, grads), getattr(self.parts, grads)
            products = (left.flatten(0, 1) @ right.flatten(0, 1).T).reshape(found.shape)
            near = getattr(others, inputs) @ getattr(self.parts, inputs).T * self.weight  # (n, m)
            found.addcmul_(products, near.reshape(n, 1, m, 1))


def seen_once(tangent: Tangent) -> Kronecker | None:
    """The gradients of a block, if they are outer products of two vectors."""
    if not isinstance(tangent, Kronecker) or tangent.positions > 1 or tangent.g.shape[2] > 1:
        return None
    return tangent
