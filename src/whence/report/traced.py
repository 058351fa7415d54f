"""Trace predictions to training examples: which predictions, what is behind them, and what would help most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from whence.data.batches import combine
from whence.influence import Explanation
from whence.influence.fitted import Fitted, Terms, check_same, divide, for_each_batch, using_model, variance_terms
from whence.influence.suggest import label_first
from whence.linalg import largest, largest_first
from whence.report.task import Examples
from whence.results import Uncertainty

MOST_OUTPUTS = 50  # with more outputs, covariances are not computed just for the ranges of probabilities
EXAMPLES = 6  # training examples named for each traced prediction and estimator
ACTIONS = 10
LEAST_ACTIONS = 3  # of each kind, if there are enough: their benefits are measured on two scales
LARGEST = 1e150
"""Bound of squared residuals over the noise, which vanishes if the network is certain of a wrong label."""
POOL = 1000  # outputs of scarce predictions among which regions are chosen


class LargestShares(NamedTuple):
    """The training examples behind t predictions, largest share of the variance first."""

    share: Tensor  # (t, c)
    examples: Tensor  # (t, c) positions in the training set


@dataclass(frozen=True)
class Traced:
    """The result of tracing t of m predictions to n training examples."""

    chosen: Tensor  # (t,) the predictions that were traced, ascending
    inputs: Examples  # of these
    uncertainty: Uncertainty  # of these, with covariances
    explanation: Explanation  # of all m
    check: LargestShares  # of HeC3
    near: LargestShares  # of Ho
    excess: Tensor  # (n,) contribution of each training example to HeC3 of the traced predictions, beyond usual noise
    gap: float  # median over the traced of |sum over training examples / HeC3 - 1|


def choose(uncertainty: Uncertainty, count: int) -> Tensor:
    """(t,) which predictions to trace, ascending: a quarter each by Ho, HeC3 and ratio, the rest evenly by rank."""
    m = len(uncertainty)
    if m <= count:
        return torch.arange(m, device="cpu")
    scores = (uncertainty.ho.sum(1), uncertainty.hec3.sum(1), uncertainty.ratio)
    orders = [largest_first(score.cpu()) for score in scores]
    highest = torch.cat([order[: count // 4] for order in orders]).unique()
    rest = orders[0][~torch.isin(orders[0], highest)]
    evenly = torch.linspace(0, len(rest) - 1, count - len(highest), device="cpu").round().long()
    chosen: Tensor = torch.cat([highest, rest[evenly]]).sort().values
    return chosen


def trace(
    fitted: Fitted,
    source: Examples,
    uncertainty: Uncertainty,
    level: float,
    count: int,
    examples: Any = None,
    pool: Any = None,
) -> Traced:
    """Trace at most `count` predictions, and give a verdict on all of them."""
    explanation = fitted.explain(source.batches, level, EXAMPLES, examples, pool)
    explanation = combine([explanation], lambda values: values[0].cpu())
    check_same(uncertainty.ho.sum(1).cpu(), explanation.ho)
    chosen = choose(uncertainty, count)
    inputs = Examples(list(source.select(chosen.tolist())), source.positional)
    noise = usual_noise(fitted)
    batches = for_each_batch(
        fitted, inputs.batches, lambda batch, _: [_sums(terms, noise) for _, terms in variance_terms(fitted, batch)]
    )
    check, near, hec3, excess = zip(*(sums for batch in batches for sums in batch), strict=True)
    if len(chosen) < len(uncertainty) or not uncertainty.covariances:
        again = fitted.predict(inputs.batches, covariance=fitted.problem.k <= MOST_OUTPUTS or None)
        check_same(uncertainty.mean.cpu()[chosen], again.mean.cpu())
        uncertainty = again
    check, near = (LargestShares(*map(torch.cat, zip(*parts, strict=True))) for parts in (check, near))
    gap = (divide(torch.cat(hec3), uncertainty.trace("hec3"), 1.0) - 1.0).abs().median()
    return Traced(chosen, inputs, uncertainty, explanation, check, near, torch.stack(excess).sum(0).cpu(), float(gap))


def usual_noise(fitted: Fitted) -> float:
    """The mean of the squared leave-one-out residuals over the noise that Ho assumes."""
    noise = fitted.noise_variance[fitted.counted].double()
    squares = fitted.adjusted.hec3.double().square().sum(1)[fitted.counted]
    values = (squares[noise > 0] / noise[noise > 0]).clamp_max(LARGEST)
    return float(values.mean()) if len(values) else 1.0


def _sums(terms: Terms, mean_noise: float) -> tuple[LargestShares, LargestShares, Tensor, Tensor]:
    """For each prediction: largest shares of HeC3 and Ho, and HeC3. For each training example: excess."""
    most = min(EXAMPLES, terms.ho.shape[1])
    hec3, ho = (divide(values, values.sum(1, keepdim=True), 0.0) for values in (terms.hec3, terms.ho))
    check, near = (LargestShares(*(part.cpu() for part in largest(shares, most))) for shares in (hec3, ho))
    return check, near, terms.hec3.sum(1), terms.hec3.sum(0) - mean_noise * terms.ho.sum(0)


@dataclass(frozen=True)
class Action:
    """Something to do: check the label of a training example, or collect inputs in the region of a prediction."""

    kind: Literal["label", "region"]
    at: int  # the training example, or the prediction
    benefit: float  # share of the variance of the traced predictions that it may remove


def actions(fitted: Fitted, traced: Traced, contradicted: Tensor) -> list[Action]:
    """The best actions of both kinds, by benefit."""
    labels, regions = labels_to_check(traced, contradicted, ACTIONS), regions_to_collect(fitted, traced, ACTIONS)
    kept = labels[:LEAST_ACTIONS] + regions[:LEAST_ACTIONS]
    rest = sorted(labels[LEAST_ACTIONS:] + regions[LEAST_ACTIONS:], key=lambda action: -action.benefit)
    return sorted(kept + rest[: ACTIONS - len(kept)], key=lambda action: -action.benefit)


def labels_to_check(traced: Traced, contradicted: Tensor, most: int) -> list[Action]:
    """Labels that the other examples contradict, by their contribution to HeC3 beyond usual noise."""
    total, excess = float(traced.uncertainty.hec3.sum()), torch.where(contradicted, traced.excess, 0.0)
    best = largest_first(excess)[:most].tolist() if total > 0 else []
    return [Action("label", at, float(excess[at]) / total) for at in best if excess[at] > 0]


def regions_to_collect(fitted: Fitted, traced: Traced, most: int) -> list[Action]:
    """Scarce predictions whose labels would reduce the variance most, one after the other."""
    scarce = traced.chosen[traced.explanation.scarce[traced.chosen]]
    if not len(scarce):
        return []
    pool = scarce[largest_first(traced.explanation.ho[scarce])[: max(1, POOL // fitted.problem.k)]].sort().values
    chosen = list(traced.inputs.select(torch.searchsorted(traced.chosen, pool).tolist()))
    batches = for_each_batch(fitted, chosen, lambda inputs, _: inputs)
    with using_model(fitted):
        found = label_first(fitted, batches, most)
    total = float(traced.uncertainty.laplace.sum())
    pairs = zip(pool[found.index.cpu()].tolist(), found.score.tolist(), strict=True)
    return [Action("region", at, score / total) for at, score in pairs if score > 0 and total > 0]
