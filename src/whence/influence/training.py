"""What every training example does to the fit: one row each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.data.batches import Inputs
from whence.influence.attribution import terms_of
from whence.influence.calibration import leave_one_out_leverage
from whence.influence.fitted import Fitted, frame
from whence.likelihoods import Likelihood
from whence.linalg import largest_first
from whence.runtime.memory import few_at_once

if TYPE_CHECKING:
    import pandas


def cooks_distance(fitted: Fitted) -> Tensor:
    """(n,) how far the fit moves when an example leaves it, in units of what the fit as a whole may move.

    D_i = (w - w_(-i))^T F_lam (w - w_(-i)) / (dof s^2), which is u_i^T Q_i u_i / (dof s^2) with the leverage block Q_i
    and the leave-one-out residual u_i, dof the effective degrees of freedom and s^2 the noise variance (or dispersion).
    It is Cook's where there is no ridge and the noise is the unbiased one.
    """
    left_out = fitted.left_out.hec3
    moved = _moved(fitted)
    scale = fitted.bread.degrees_of_freedom * fitted.noise_scale
    found = (left_out * moved).sum(1).clamp_min(0.0)
    return found / scale if scale > 0 else torch.zeros_like(found)


def _moved(fitted: Fitted) -> Tensor:
    """(n, k) how far the outputs of each example move when it leaves: Q_i u_i, whatever the policy made of Q_i.

    Leave-one-out residuals are u_i = r_i + L_i Q_i u_i under true leverages, and r_i + L_i Q_i r_i under "one_plus_q".
    Only "clip" takes the way back through the inverse of L_i, which is nearly singular where probabilities are certain.
    """
    residuals, left_out, weighing = _residuals(fitted), fitted.left_out.hec3, fitted.weighing
    if weighing.policy == "clip":
        roots, moved = fitted.problem.hessian_roots, left_out - residuals
        if roots is None:
            return moved
        pieces = few_at_once(roots @ roots.transpose(1, 2))
        curved = torch.cat([torch.linalg.pinv(some, hermitian=True) for some in pieces])
        return (curved @ moved.unsqueeze(2)).squeeze(2)
    vectors = left_out if weighing.policy == "exact" else residuals
    if weighing.by_output:  # each alone
        return torch.diagonal(fitted.bread.leverage_blocks, dim1=1, dim2=2) * vectors
    if weighing.units is None:
        return (fitted.bread.leverage_blocks @ vectors.unsqueeze(2)).squeeze(2)
    apart = weighing.units.split(fitted.bread.leverage_blocks) @ vectors.reshape(-1, weighing.units.width, 1)
    return apart.reshape(vectors.shape)


@dataclass(frozen=True)
class Doubts:
    """How little each label fits what the other examples say.

    Attributes:
        score: (n,) the size of the doubt.
        order: (n,) the examples, the most doubtful label first. It tells labels apart whose scores round to the same
            number; examples without a score come last.
    """

    score: Tensor
    order: Tensor


def doubts(fitted: Fitted) -> Doubts:
    """How little each label fits what the other examples say.

    For squared error the size of the studentized residual, (e_i^T u_i / s^2)^1/2, times the root of the example's
    weight. The residual alone forgives an example that pulls the fit towards its own label; the leave-one-out residual
    alone blames one that has few others around it. This is their geometric mean: e / (s sqrt(1 - leverage)) for one
    output.

    For other losses the largest entry of the residual at the prediction without the example, f - q e with its
    leave-one-out leverage q: for classes 1 - p of the label there. It is bounded, where u, to first order, is not.
    Examples are ordered by its logarithm, and by log-odds where that is zero: a label that the network is certain of
    has a 1 - p below the smallest number there is.
    Where mixtures of the outputs are looked at, single outputs are not known, and its length is taken.
    """
    if fitted.problem.sketch is not None:
        lengths = fitted.problem.unweighted(residuals_without(fitted)).norm(dim=1)
        return Doubts(lengths, largest_first(lengths))
    squared = type(fitted.problem.likelihood).hessian_root is Likelihood.hessian_root  # weights make roots of their own
    if fitted.problem.hessian_roots is not None and not squared:
        logs, ties = fitted.problem.doubt(change_without(fitted))
        return Doubts(logs.exp(), largest_first(logs, ties))
    scale = fitted.noise_scale**0.5
    product = (fitted.residuals / scale * (fitted.left_out.hec3 / scale)).sum(1).clamp_min(0.0)
    found = product.sqrt() if scale > 0 else torch.zeros_like(product)
    return Doubts(found, largest_first(found))


def suspicion(fitted: Fitted) -> Tensor:
    """(n,) how little each label fits what the other examples say: the scores of `doubts`."""
    return doubts(fitted).score


def change_without(fitted: Fitted) -> Tensor:
    """(n, k) from the network's outputs to each example's prediction in the fit without it."""
    change = -(leave_one_out_leverage(fitted) @ _residuals(fitted).unsqueeze(2)).squeeze(2)
    return fitted.step.change + change if fitted.weighing.recenter else change


def residuals_without(fitted: Fitted) -> Tensor:
    """(n, k) residuals of each example at its prediction in the fit without it, sample weights multiplied in."""
    return fitted.problem.moved(change_without(fitted))


def influence(fitted: Fitted, inputs: Inputs) -> tuple[Tensor, int]:
    """(n,) sum over a batch of |f(x) - f_(-i)(x)|^2, the terms of HeC3, and the size of the batch."""
    total, count = torch.zeros(fitted.problem.n, dtype=fitted.problem.dtype, device=fitted.problem.device), 0
    for _, terms in terms_of(fitted, inputs):
        total += terms.hec3.sum(0)
        count += len(terms)
    return total, count


def training_frame(fitted: Fitted, moved: tuple[Tensor, int] | None) -> pandas.DataFrame:
    """One row a training example; see `Tracer.training_frame`."""
    suspect = doubts(fitted)
    columns = {
        "leverage": fitted.leverage.sum(1),
        "residual": fitted.residuals.norm(dim=1),
        "loo_residual": fitted.loo_residuals.norm(dim=1),
        "cook": cooks_distance(fitted),
    }
    if moved is not None:
        total, count = moved
        columns["test_influence"] = (total / count).sqrt()
        columns["test_share"] = total / total.sum().clamp_min(torch.finfo(total.dtype).tiny)
    columns["suspicion"] = suspect.score
    columns["suspect_rank"] = places(suspect.order)
    table = frame({name: [column] for name, column in columns.items()})
    table.index.name = "example"
    return table


def places(order: Tensor) -> Tensor:
    """Place of each example in an order, 1 for the first.

    Examples:
        >>> places(torch.tensor([1, 2, 0])).tolist()
        [3, 1, 2]
    """
    found = torch.empty_like(order)
    found[order] = torch.arange(1, len(order) + 1, device=order.device)
    return found


def _residuals(fitted: Fitted) -> Tensor:
    """(n, k) residuals with their sample weights, as the leave-one-out residuals have them."""
    return fitted.meats.roots["hec0"].sum(2)
