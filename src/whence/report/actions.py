"""The actions that would help most: labels to check, regions to collect."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from whence.ordering import largest_first
from whence.tracing.asking import borrowed_model, each
from whence.tracing.suggestions import label_first

from .causes import Traced
from .fitted import Reportable
from .training import Training

ACTIONS = 10
LEAST = 3
"""Of each kind, where there are as many: their benefits are measured on two scales."""
POOL = 1000
"""Outputs of scarce predictions among which regions are chosen."""


@dataclass(frozen=True)
class Action:
    """Something to do.

    Attributes:
        kind: "label" to check the label of a training example, "region" to collect inputs like a prediction's.
        at: which training example, or which prediction.
        benefit: share of the variance of the traced predictions that it may take away.
        stands_for: for a region, how many scarce predictions are nearer to it than to the other regions.
        among: for a region, of how many.
    """

    kind: Literal["label", "region"]
    at: int
    benefit: float
    stands_for: int = 0
    among: int = 0


def actions(fitted: Reportable, traced: Traced, training: Training, most: int = ACTIONS) -> list[Action]:
    """The best of both kinds, by benefit."""
    labels = labels_to_check(traced, training, most)
    regions = regions_to_collect(fitted, traced, most)
    kept = labels[:LEAST] + regions[:LEAST]
    rest = sorted(labels[LEAST:] + regions[LEAST:], key=lambda action: -action.benefit)
    return sorted(kept + rest[: max(0, most - len(kept))], key=lambda action: -action.benefit)


def labels_to_check(traced: Traced, training: Training, most: int) -> list[Action]:
    """Labels that the others contradict, by what they add to HeC3 beyond usual noise."""
    if traced.total <= 0:
        return []
    excess = torch.where(training.contradicted, traced.excess, 0.0)
    best = largest_first(excess)[:most].tolist()
    return [Action("label", at, float(excess[at]) / traced.total) for at in best if excess[at] > 0]


def regions_to_collect(fitted: Reportable, traced: Traced, most: int) -> list[Action]:
    """Scarce predictions whose labels would take away most of the variance, one after the other."""
    scarce = traced.chosen[traced.explanation.scarce[traced.chosen]]
    if not len(scarce):
        return []
    ho = traced.explanation.ho[scarce]
    room = max(1, POOL // fitted.problem.k)
    pool = scarce[largest_first(ho)[:room]].sort().values
    places = torch.searchsorted(traced.chosen, pool).tolist()
    batches = each(fitted, list(traced.inputs.pick(places)), lambda inputs, _: inputs)
    with borrowed_model(fitted):
        found = label_first(fitted, batches, None, most)
        products = torch.cat([fitted.bread.products(batch, batches) for batch in batches])  # (p, k, p, k)
    picks = found.index.tolist()
    alike = _alike(products)[:, picks].argmax(1)
    members = torch.bincount(alike.cpu(), minlength=len(picks)).tolist()
    total = float(traced.uncertainty.laplace.sum())
    return [
        Action("region", int(pool[pick]), float(score) / total if total > 0 else 0.0, members[place], len(pool))
        for place, (pick, score) in enumerate(zip(picks, found.score.tolist(), strict=True))
        if score > 0
    ]


def _alike(products: Tensor) -> Tensor:
    """(p, p) how strongly two predictions hang together: the norm of their covariance over those of their variances."""
    norms = products.square().sum((1, 3)).sqrt()
    own = norms.diagonal().clamp_min(torch.finfo(norms.dtype).tiny).sqrt()
    return norms / (own.unsqueeze(0) * own.unsqueeze(1))
