"""Calibration and risk-coverage curves, if test targets are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whence.display import number
from whence.influence.intervals import Intervals
from whence.report.task import Predictions
from whence.results import Uncertainty

STEPS = 60
BINS = 10


class Curve(NamedTuple):
    """A line in the unit square, or above it: its name, its style, and its points."""

    name: str
    style: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """Some curves with their axes; the horizontal one goes from 0 to 1."""

    title: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    caption: str
    top: float = 1.0  # end of the vertical axis
    diagonal: bool = True  # draw a line from corner to corner, the perfect result


def charts(predictions: Predictions) -> list[Chart]:
    """Calibration and risk-coverage, if some targets are known."""
    known = predictions.known
    if known is None or predictions.targets is None:
        return []
    u = predictions.uncertainty
    scores = {"HeC3": ("hec3", u.hec3.sum(1).cpu()[known]), "Ho": ("ho", u.ho.sum(1).cpu()[known])}
    if predictions.task.kind == "regression":
        assert predictions.intervals is not None
        errors = (predictions.targets - predictions.answers)[known].square().mean(1)
        calibration = interval_calibration(u, predictions.targets, predictions.intervals)
        return [calibration, risk_coverage(scores, errors, "typical error (RMSE)", root=True)]
    scores["belief alone"] = ("belief", -predictions.confidence[known])
    right = predictions.right[known]
    calibration = confidence_calibration(predictions.confidence[known].clamp(0.0, 1.0), right)
    return [calibration, risk_coverage(scores, (~right).double(), "share of wrong answers")]


def risk_coverage(
    scores: dict[str, tuple[str, Tensor]],  # for each name its style and (m,) scores, higher for less sure
    losses: Tensor,  # (m,) 0 or 1, or squared errors
    risk: str,  # name of the mean loss
    root: bool = False,  # show its square root
) -> Chart:
    """Mean loss of the remaining predictions when the most uncertain ones are handed to a person."""
    m = len(losses)
    counts = np.unique(np.linspace(max(1, m // STEPS), m, STEPS).round().astype(int))
    coverage = tuple((counts / m).tolist())
    shown = np.sqrt if root else np.asarray
    curves = [
        Curve(name, style, coverage, tuple(shown(kept_risk(score.numpy(), losses.numpy())[counts - 1]).tolist()))
        for name, (style, score) in scores.items()
    ]
    means = ", ".join(f"{curve.name} {number(float(np.mean(curve.y)))}" for curve in curves)
    return Chart(
        "What leaving out the most uncertain gains",
        "share of predictions kept, the surest first",
        risk,
        tuple(curves),
        f"At the right all predictions are kept: {risk} {number(curves[0].y[-1])}. Towards the left the "
        f"most uncertain are left to a person. Lower is better; means over the curves: {means}.",
        top=max(max(curve.y) for curve in curves) or 1.0,
        diagonal=False,
    )


def kept_risk(scores: NDArray[Any], errors: NDArray[Any]) -> NDArray[np.float64]:
    """(m,) mean error of the j + 1 predictions with the lowest scores; equal scores share their errors."""
    order = np.argsort(scores, kind="stable")
    _, block = np.unique(scores[order], return_inverse=True)
    shared = np.bincount(block, errors[order]) / np.bincount(block)
    risk: NDArray[np.float64] = np.cumsum(shared[block]) / np.arange(1, len(scores) + 1)
    return risk


def interval_calibration(uncertainty: Uncertainty, targets: Tensor, intervals: Intervals) -> Chart:
    """How often ranges for a new observation contain it, if it is known, against their nominal level."""
    levels = [0.02, 0.05, *np.arange(0.1, 0.95, 0.05).tolist(), 0.95, 0.99]
    error = (targets - uncertainty.mean.cpu()).abs()
    held = [error <= intervals.half_width(uncertainty, level) for level in levels]
    shares = [float(one[~error.isnan().any(1)].double().mean()) for one in held]
    return Chart(
        "Are the ranges as wide as they should be?",
        "share promised",
        "share held",
        (Curve("ranges", "hec3", tuple(levels), tuple(shares)),),
        f"Ranges that promise 95 % hold {100 * shares[-2]:.1f}\xa0% of the observed values. On the line promises are "
        "kept; below it the ranges are too narrow, above it too wide.",
    )


def confidence_calibration(confidence: Tensor, right: Tensor) -> Chart:
    """How often answers are right, against the network's confidence (m,) in them."""
    order = confidence.argsort(stable=True)
    bins = [part for part in order.tensor_split(BINS) if len(part)]
    x = tuple(float(confidence[part].double().mean()) for part in bins)
    y = tuple(float(right[part].double().mean()) for part in bins)
    error = sum(len(part) * abs(a - b) for part, a, b in zip(bins, x, y, strict=True)) / len(order)
    return Chart(
        "Is the model as often right as it believes?",
        "belief in the answer",
        "share of right answers",
        (Curve("model", "hec3", x, y),),
        f"Each point is a tenth of the predictions. The model believes {100 * confidence.double().mean():.1f}\xa0% on "
        f"average and is right in {100 * right.double().mean():.1f}\xa0%; the mean distance from the line is "
        f"{100 * error:.1f}\xa0%. Below the line it is too sure of itself.",
    )


def ticks(top: float, most: int = 5) -> Sequence[float]:
    """Round numbers from zero to the top of an axis."""
    raw = top / most
    size = 10.0 ** np.floor(np.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    return [round(float(step * place), 12) for place in range(int(top / step + 1e-9) + 1)]
