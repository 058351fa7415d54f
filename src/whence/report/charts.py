"""Calibration and risk-coverage curves, if test targets are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whence.influence.intervals import Intervals
from whence.report.task import Predictions
from whence.results import Uncertainty

STEPS = 60  # points of a risk-coverage curve
BINS = 10  # of confidence
LEVELS = [0.02, 0.05, *(at / 20 for at in range(2, 19)), 0.95, 0.99]  # of intervals


class Curve(NamedTuple):
    """A line: its name, its style, and its points."""

    name: str
    style: str
    x: list[float]
    y: list[float]


@dataclass(frozen=True)
class Chart:
    """Some curves; the horizontal axis goes from 0 to 1, the vertical one from 0 to `top`. The template has the words.

    The kind "error" is risk-coverage with root mean square errors, "wrong" with shares of wrong answers. "intervals"
    and "confidence" are calibrations.
    """

    kind: Literal["error", "wrong", "intervals", "confidence"]
    curves: list[Curve]
    top: float = 1.0
    means: tuple[float, ...] = ()  # of the confidence, of the right answers, and of the distance between them

    @property
    def ticks(self) -> list[float]:
        """Round numbers on the vertical axis, from zero to at most its top."""
        raw = self.top / 5
        size = 10.0 ** np.floor(np.log10(raw))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
        return [round(float(step * place), 12) for place in range(int(self.top / step + 1e-9) + 1)]


def charts(predictions: Predictions) -> list[Chart]:
    """Calibration and risk-coverage, if some targets are known."""
    known, u = predictions.known, predictions.uncertainty
    if known is None or predictions.targets is None:
        return []
    scores = {("HeC3", "hec3"): u.trace("hec3").cpu()[known], ("Ho", "ho"): u.trace("ho").cpu()[known]}
    if predictions.task.kind == "regression":
        assert predictions.intervals is not None
        errors = (predictions.targets - predictions.answers)[known].square().mean(1)
        return [
            interval_calibration(u, predictions.targets, predictions.intervals),
            risk_coverage("error", scores, errors),
        ]
    scores["belief alone", "belief"] = -predictions.confidence[known]
    right = predictions.right[known]
    return [
        confidence_calibration(predictions.confidence[known].clamp(0.0, 1.0), right),
        risk_coverage("wrong", scores, (~right).double()),
    ]


def risk_coverage(kind: Literal["error", "wrong"], scores: dict[tuple[str, str], Tensor], losses: Tensor) -> Chart:
    """Mean of the losses (m,) of the remaining predictions when the most uncertain ones are handed to a person.

    Scores (m,), higher for less sure, have a name and a style.
    """
    m = len(losses)
    counts = np.unique(np.linspace(max(1, m // STEPS), m, STEPS).round().astype(int))
    curves = []
    for (name, style), score in scores.items():
        risk = kept_risk(score.numpy(), losses.numpy())[counts - 1]
        curves.append(Curve(name, style, (counts / m).tolist(), (np.sqrt(risk) if kind == "error" else risk).tolist()))
    return Chart(kind, curves, max(max(curve.y) for curve in curves) or 1.0)


def kept_risk(scores: NDArray[Any], errors: NDArray[Any]) -> NDArray[np.float64]:
    """(m,) mean error of the j + 1 predictions with the lowest scores; equal scores share their errors."""
    order = np.argsort(scores, kind="stable")
    _, block = np.unique(scores[order], return_inverse=True)
    shared = np.bincount(block, errors[order]) / np.bincount(block)
    risk: NDArray[np.float64] = np.cumsum(shared[block]) / np.arange(1, len(scores) + 1)
    return risk


def interval_calibration(uncertainty: Uncertainty, targets: Tensor, intervals: Intervals) -> Chart:
    """How often ranges for a new observation contain it, if it is known, against their nominal level."""
    error = (targets - uncertainty.mean.cpu()).abs()
    known = ~error.isnan().any(1)
    shares = [float((error <= intervals.half_width(uncertainty, level))[known].double().mean()) for level in LEVELS]
    return Chart("intervals", [Curve("ranges", "hec3", LEVELS, shares)])


def confidence_calibration(confidence: Tensor, right: Tensor) -> Chart:
    """How often answers are right, against the network's confidence (m,) in them, in tenths of the predictions."""
    bins = [part for part in confidence.argsort(stable=True).tensor_split(BINS) if len(part)]
    x, y = ([float(values[part].double().mean()) for part in bins] for values in (confidence, right))
    distance = sum(len(part) * abs(a - b) for part, a, b in zip(bins, x, y, strict=True)) / len(right)
    means = float(confidence.double().mean()), float(right.double().mean()), distance
    return Chart("confidence", [Curve("model", "hec3", x, y)], means=means)
