"""Scores of a prediction: the higher, the likelier it is wrong."""

from __future__ import annotations

import torch
from torch import Tensor

from whence_paper.scores import spearman

from .fits import Predicted


def of_outputs(outputs: Tensor) -> dict[str, Tensor]:
    """(m,) each, from the outputs alone: margin, largest output, entropy of their softmax."""
    outputs = outputs.double()
    top = outputs.topk(2, 1).values
    logs = outputs.log_softmax(1)
    return {
        "margin": top[:, 1] - top[:, 0],
        "largest output": -top[:, 0],
        "entropy": -(logs.exp() * logs).sum(1),
    }


def of_variances(found: Predicted, estimator: str) -> dict[str, Tensor]:
    """(m,) each, from the variances of one estimator: the paper's sum over outputs first."""
    variances, apart = found.variances[estimator], found.differences.get(estimator)
    winner = variances.gather(1, found.outputs.argmax(1, keepdim=True)).squeeze(1)
    alone = {"sum": variances.sum(1), "predicted output": winner}
    return alone if apart is None else {**alone, "margin's": apart[:, 0]}


def with_largest_output(found: Predicted) -> dict[str, float]:
    """Rank correlation of the sum of variances with the largest output, by estimator: above 0 it points wrongly."""
    top = found.outputs.amax(1)
    return {name: spearman(variances.sum(1), top) for name, variances in found.variances.items()}


def of_both(found: Predicted, estimator: str) -> dict[str, Tensor]:
    """(m,) each, from outputs and variances: is the margin large beside its error? None without differences."""
    if estimator not in found.differences:
        return {}
    apart = found.differences[estimator].double()
    ordered = found.outputs.double().sort(1, descending=True).values
    gaps = ordered[:, :1] - ordered[:, 1 : 1 + apart.shape[1]]  # (m, k - 1), or as many as there are differences
    over = gaps / apart.sqrt()
    normal = torch.distributions.Normal(0.0, 1.0)
    return {
        "margin over its error": -over[:, 0],
        "smallest difference over its error": -over.amin(1),
        "chance that another wins": normal.cdf(-over).sum(1),
    }


def of_probabilities(found: Predicted, estimator: str) -> dict[str, Tensor]:
    """(m,) each, of the probability p of the largest logit against the second: its variance, and p less sure by it.

    The first is the delta method's, (p (1 - p))^2 times the variance of the difference d of the two logits; the second
    averages the logistic function over d, approximately: it is logistic(d / sqrt(1 + pi / 8 var d)).
    """
    top = found.outputs.double().topk(2, 1).values
    gap, variance = top[:, 0] - top[:, 1], found.differences[estimator][:, 0].double()
    p = gap.sigmoid()
    return {
        "probability's variance": (p * (1 - p)).square() * variance,
        "averaged probability": -(gap / (1 + torch.pi / 8 * variance).sqrt()),
    }


def of_members(members: Tensor) -> dict[str, Tensor]:
    """(m,) each, from the outputs (e, m, k) of an ensemble: the sum of their variances, their mean's margin."""
    mean = members.double().mean(0)
    return {"ensemble variance": members.double().var(0).sum(1), "ensemble margin": of_outputs(mean)["margin"]}
