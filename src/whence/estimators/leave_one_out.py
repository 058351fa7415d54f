"""Leave-one-out residuals from leverage blocks, under an exact or an approximate curvature."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whence.memory import few_at_once
from whence.tangents.eigh import eigh

Policy = Literal["exact", "one_plus_q", "clip"]

CLIP = 1e-4
"""The paper clips leverages to 1 - 1e-4 when the curvature is approximate."""

NEAR_ONE = 1e-6
"""A leverage within this distance of one is reported: the example decides its own prediction."""


@dataclass(frozen=True)
class LeftOut:
    """Residuals of the training examples after leaving them out.

    Attributes:
        hec2: (n, k) halfway residuals (I - H_ii)^-1/2 e_i.
        hec3: (n, k) leave-one-out residuals u_i = (I - H_ii)^-1 e_i.
        leverage: (n, k) diagonal of the hat blocks R^T Q R after the policy; its sum over outputs is the trace of H.
        guarded: how many of those that are left out, one after the other, the policy had to guard.
    """

    hec2: Tensor
    hec3: Tensor
    leverage: Tensor
    guarded: int


def leave_one_out(residuals: Tensor, hats: Tensor, roots: Tensor | None, policy: Policy, by_output: bool) -> LeftOut:
    """Leave each example out in turn, in closed form.

    With blocks Q_i = J_i F_lam^-1 J_i^T and the output Hessian L_i = R_i R_i^T the hat block is H_i = L_i Q_i and
    u_i = (I - H_i)^-1 e_i. Policies for the eigenvalues h of R^T Q R:

    * "exact": 1 / (1 - h), for curvatures that contain the example itself, where 0 <= h < 1;
    * "one_plus_q": 1 + h, for approximate curvatures, which behave as if they did not contain it;
    * "clip": 1 / (1 - min(h, 1 - 1e-4)), as in the paper.

    Args:
        residuals: e (n, k).
        hats: Q (n, k, k).
        roots: R (n, k, q), or `None` for the identity.
        policy: what to do with the leverages.
        by_output: leave single outputs out, with scalar leverages, instead of whole examples (the paper's stacked
            reading; the same for k = 1).
    """
    inner = hats if roots is None else roots.transpose(1, 2) @ hats @ roots
    plain = _diagonal(hats, roots, inner)
    grow = _growth(policy)
    if by_output or (roots is None and residuals.shape[1] == 1):  # of a single output there is nothing to turn
        shrunk = plain.clamp_min(0.0)
        return LeftOut(
            residuals * grow(shrunk).sqrt(),
            residuals * grow(shrunk),
            _leverage(policy, plain),
            _guarded(policy, plain.reshape(-1, 1)),
        )
    pairs = [eigh(some) for some in few_at_once((inner + inner.transpose(1, 2)) / 2)]
    values, vectors = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    values = values.clamp_min(0.0)
    # u = e + R f(S) R^T Q e with S = R^T Q R and f(s) = (grow(s) - 1) / s, so that no root is ever inverted.
    seen = (hats @ residuals.unsqueeze(-1)).squeeze(-1)
    along = _apply(vectors.transpose(1, 2), seen if roots is None else _apply(roots.transpose(1, 2), seen))

    def grown(growth: Callable[[Tensor], Tensor], slope: float) -> Tensor:
        tiny = values < 1e-12
        factor = torch.where(tiny, slope, (growth(values) - 1.0) / values.clamp_min(1e-300))
        moved = _apply(vectors, along * factor)
        return residuals + (moved if roots is None else _apply(roots, moved))

    return LeftOut(
        grown(lambda s: grow(s).sqrt(), 0.5), grown(grow, 1.0), _leverage(policy, plain), _guarded(policy, values)
    )


def _diagonal(hats: Tensor, roots: Tensor | None, inner: Tensor) -> Tensor:
    """(n, k) leverages of the outputs: the diagonal of R^T Q R, which lies between zero and one, as H's need not.

    Where outputs do not depend on each other the two are the same. Roots without a column for each output leave H's.
    """
    if roots is None or inner.shape == hats.shape:
        return torch.diagonal(inner, dim1=1, dim2=2)
    return torch.einsum("nkq,nkq->nk", roots, hats @ roots)


def _growth(policy: Policy) -> Callable[[Tensor], Tensor]:
    if policy == "one_plus_q":
        return lambda h: 1.0 + h
    if policy == "clip":
        return lambda h: 1.0 / (1.0 - h.clamp(0.0, 1.0 - CLIP))
    # Rounding may push an exact leverage to one; the floor is far below any difference that float64 resolves.
    return lambda h: 1.0 / (1.0 - h).clamp_min(torch.finfo(h.dtype).eps)


def _leverage(policy: Policy, plain: Tensor) -> Tensor:
    if policy == "one_plus_q":
        return plain / (1.0 + plain)
    return plain.clamp(0.0, 1.0 - CLIP) if policy == "clip" else plain


def _guarded(policy: Policy, values: Tensor) -> int:
    limit = {"exact": 1.0 - NEAR_ONE, "one_plus_q": 1.0, "clip": 1.0 - CLIP}[policy]
    return int((values >= limit).any(1).sum())


def _apply(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors.unsqueeze(-1)).squeeze(-1)
