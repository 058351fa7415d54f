"""Where the outputs of changed examples settle, when their loss is not a parabola.

A label that is turned round moves its own output far: one Newton step, with the Hessian of before, goes much too far
where that Hessian was small, as it is for a label that was certain. So the loss of the changed examples is taken as it
is, and that of all others by its parabola. With F dw = J_S^T g the outputs of the set move by Q g, and at the new
optimum

    g = n v(Q g) - e + L Q g

with n how often each example counts, v its new residual at its new output, e and L residual and Hessian of before.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.likelihoods import Likelihood

from .fitted import Fitted

STEPS = 50
SMALLEST = 1e-6


@dataclass(frozen=True)
class Settled:
    """The changed examples after the change.

    Attributes:
        push: (s k,) g.
        roots: (s, k, q) roots of the Hessians at the new outputs, sample weights included.
        residuals: (s, k) at the new outputs, the same.
    """

    push: Tensor
    roots: Tensor
    residuals: Tensor


def expected_targets(likelihood: Likelihood, outputs: Tensor, where: str) -> Tensor:
    """Targets as the network expects them, where there are none."""
    if likelihood.has_classes:
        return likelihood.check_targets(likelihood.probabilities(outputs), outputs, where)
    return outputs


def settle(
    fitted: Fitted, index: Tensor, counts: Tensor, within: Tensor, given: Tensor, targets: Tensor
) -> Settled | None:
    """Newton's method on g; `None` for squared error and recentered fits, whose losses are parabolas.

    For networks that answer once an example, of which all outputs are looked at.

    Args:
        fitted: the fit.
        index: (s,) the changed examples.
        counts: (s,) how often each is to count.
        within: (s k, s k) Q.
        given: (s, k) residuals with the new labels at the old outputs, sample weights included.
        targets: (s, ...) targets, as the likelihood encodes them.
    """
    problem = fitted.problem
    likelihood, outputs = problem.likelihood, problem.outputs[index]
    if problem.hessian_roots is None or fitted.weighing.recenter or not len(index):
        return None
    if likelihood.hessian_root(outputs, targets) is None:
        return None
    before, old = problem.hessian_roots[index], fitted.meats.roots["hec0"].sum(2)[index]
    weights = torch.ones_like(counts) if problem.sample_weights is None else problem.sample_weights[index]
    often, share = counts.reshape(-1, 1), weights.to(outputs.dtype).reshape(-1, 1)
    start = likelihood.residuals(outputs, targets)
    eye = torch.eye(within.shape[0], dtype=within.dtype, device=within.device)

    def looks(g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        moved = (within @ g).reshape(outputs.shape)
        fresh = given + share * (likelihood.residuals(outputs + moved, targets) - start)
        lost = (before @ (before.transpose(1, 2) @ moved.unsqueeze(2))).squeeze(2)
        return moved, fresh, g - (often * fresh - old + lost).reshape(-1)

    def roots_at(moved: Tensor) -> Tensor:
        found = likelihood.hessian_root(outputs + moved, targets)
        assert found is not None
        return share.sqrt().unsqueeze(2) * found

    push = torch.zeros_like(eye[0])
    moved, fresh, off = looks(push)
    for _ in range(STEPS):
        if float(off.abs().max()) <= 1e-12 * max(1.0, float(push.abs().max())):
            break
        step = torch.linalg.solve(eye + _blocks(often, roots_at(moved), before) @ within, off)
        size, best = 1.0, looks(push - step)
        while float(best[2].norm()) > float(off.norm()) and size > SMALLEST:
            size /= 2
            best = looks(push - size * step)
        push, (moved, fresh, off) = push - size * step, best
    return Settled(push, roots_at(moved), fresh)


def _blocks(often: Tensor, after: Tensor, before: Tensor) -> Tensor:
    """The block-diagonal matrix of n L' - L, (s k, s k)."""
    each = often.unsqueeze(2) * (after @ after.transpose(1, 2)) - before @ before.transpose(1, 2)
    found: Tensor = torch.block_diag(*each)
    return found
