"""The predictions of a report in the words of the task: what was answered, how surely, and whether it was right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor

from whence.errors import ShapeError
from whence.results import Uncertainty

from .causes import Traced
from .curves import Chart, belief_calibration, interval_calibration, risk_coverage
from .meaning import UNKNOWN, Meaning
from .training import say
from .words import number, percent

LEVEL = 0.95
"""Of the ranges that are shown."""
REACH = NormalDist().inv_cdf(0.5 + LEVEL / 2)


@dataclass(frozen=True)
class Predictions:
    """All m predictions.

    Attributes:
        uncertainty: their variances.
        meaning: of the outputs.
        noise: (k,) variance of a new observation around the prediction, for numbers.
        truth: targets as `Meaning.truth` has them; `None` if there are none.
    """

    uncertainty: Uncertainty
    meaning: Meaning
    noise: Tensor
    truth: Tensor | None

    @classmethod
    def of(cls, uncertainty: Uncertainty, meaning: Meaning, noise: Tensor, targets: Tensor | None) -> Predictions:
        """With targets in any form that the likelihood takes."""
        truth = None if targets is None else meaning.truth(targets)
        wanted = uncertainty.mean.shape if meaning.kind != "classes" else uncertainty.mean.shape[:1]
        if truth is not None and truth.shape != wanted:
            raise ShapeError(f"expected test targets of shape {tuple(wanted)}, got {tuple(truth.shape)}.")
        return cls(uncertainty, meaning, noise.cpu(), truth)

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.uncertainty)

    @cached_property
    def beliefs(self) -> Tensor:
        """(m, c) beliefs in each class, or probabilities of each answer."""
        return self.meaning.beliefs(self.uncertainty.mean.cpu().double())

    @cached_property
    def answers(self) -> Tensor:
        """(m,) classes, (m, k) answers, or (m, k) numbers."""
        if self.meaning.kind == "numbers":
            return self.uncertainty.mean.cpu().double()
        return self.meaning.decide(self.beliefs)

    @property
    def sureness(self) -> Tensor:
        """(m,) belief in the answer; of several answers, in the least sure. Squared error may exceed one."""
        if self.meaning.kind == "answers":
            return torch.maximum(self.beliefs, 1.0 - self.beliefs).amin(1)
        return self.beliefs.amax(1)

    @property
    def confidence(self) -> Tensor:
        """(m,) belief in the answer, between 0 and 1."""
        return self.sureness.clamp(0.0, 1.0)

    @property
    def known(self) -> Tensor | None:
        """(m,) whether the target is known; `None` if none is."""
        if self.truth is None:
            return None
        missing = self.truth.isnan() if self.meaning.kind == "numbers" else self.truth == UNKNOWN
        found = ~(missing if missing.ndim == 1 else missing.any(1))
        return found if bool(found.any()) else None

    @property
    def right(self) -> Tensor:
        """(m,) whether the answer is right; for numbers, whether the observed value lies in its 95 % range."""
        assert self.truth is not None
        if self.meaning.kind == "classes":
            return self.answers == self.truth
        if self.meaning.kind == "answers":
            return (self.answers == self.truth).all(1)
        reach = REACH * (self.uncertainty.hec3.cpu() + self.noise).sqrt()
        return ((self.truth - self.answers).abs() <= reach).all(1)

    def say(self, prediction: int) -> str:
        """What was predicted, in words."""
        told = say(self.meaning, self.answers[prediction])
        if self.meaning.kind != "numbers":
            return told
        half = REACH * self.uncertainty.hec3[prediction].sqrt()
        return f"{told} ± {number(float(half[0]), 2)}" if len(half) == 1 else told


def half_widths(predictions: Predictions, traced: Traced) -> Tensor:
    """(t,) half the 95 % range of the belief in the answer, for classes and answers; to first order.

    NaN where the outputs are too many for their covariances to be computed for this alone.
    """
    meaning, again = predictions.meaning, traced.uncertainty
    if meaning.likelihood.has_classes and "hec3" not in again.covariances:
        return torch.full((len(again),), float("nan"), device="cpu")
    if meaning.likelihood.has_classes:
        variance = torch.diagonal(again.probability_covariance("hec3"), dim1=1, dim2=2).cpu().double()
    else:
        variance = again.hec3.cpu().double() / (meaning.high - meaning.low) ** 2
    deviation = variance.clamp_min(0.0).sqrt()
    if meaning.kind == "answers":
        beliefs = meaning.beliefs(again.mean.cpu().double())
        worst = torch.maximum(beliefs, 1.0 - beliefs).argmin(1)
        return REACH * deviation.gather(1, worst.unsqueeze(1)).squeeze(1)
    if deviation.shape[1] == 1:
        return REACH * deviation.squeeze(1)
    best = meaning.decide(meaning.beliefs(again.mean.cpu().double()))
    return REACH * deviation.gather(1, best.unsqueeze(1)).squeeze(1)


def charts(predictions: Predictions) -> tuple[Chart, ...]:
    """Calibration and risk-coverage, where some targets are known."""
    known = predictions.known
    if known is None:
        return ()
    u, meaning = predictions.uncertainty, predictions.meaning
    scores = {"HeC3": ("hec3", u.hec3.sum(1).cpu()[known]), "Ho": ("ho", u.ho.sum(1).cpu()[known])}
    if meaning.kind == "numbers":
        assert predictions.truth is not None
        some = Uncertainty(
            u.mean.cpu().double()[known], {}, {name: u.variance(name).cpu().double()[known] for name in ("ho", "hec3")}
        )
        errors = (predictions.truth - predictions.answers)[known].square().mean(1)
        return (
            interval_calibration(some, predictions.truth[known], predictions.noise.double()),
            risk_coverage(scores, errors, "mean squared error"),
        )
    scores["belief alone"] = ("belief", -predictions.sureness[known])
    right = predictions.right[known]
    return (
        belief_calibration(predictions.confidence[known], right),
        risk_coverage(scores, (~right).double(), "share of wrong answers"),
    )


def outcome(predictions: Predictions) -> str:
    """How often predictions are right, in a sentence; nothing where no target is known."""
    known = predictions.known
    if known is None:
        return ""
    share = float(predictions.right[known].double().mean())
    if predictions.meaning.kind == "numbers":
        return f"Of the observed values {percent(share)} lie in their 95 % ranges (HeC3 and noise)."
    return f"The network is right in {percent(share)} of the {int(known.sum()):,} predictions whose labels are known."
