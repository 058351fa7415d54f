"""Calibration and risk-coverage curves, where the test targets are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from whence.results import Uncertainty

from .words import number

STEPS = 60
BINS = 10


@dataclass(frozen=True)
class Curve:
    """A line in the unit square, or above it: its name, how it is drawn, and its points."""

    name: str
    style: str
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Chart:
    """Some curves with their axes, and the words that tell what to see.

    Attributes:
        title: what it shows.
        x_label: of the horizontal axis, from 0 to 1.
        y_label: of the vertical axis.
        top: the largest value of the vertical axis.
        curves: the lines.
        even: whether a line from corner to corner tells what would be perfect.
        caption: how to read it.
    """

    title: str
    x_label: str
    y_label: str
    top: float
    curves: tuple[Curve, ...]
    even: bool
    caption: str

    @property
    def places(self) -> list[int]:
        """Points that stand for the curves in a table: at most about twenty."""
        count = len(self.curves[0].x)
        step = -(-count // 20)
        return [place for place in range(count) if place % step == 0 or place == count - 1]


def risk_coverage(scores: dict[str, tuple[str, Tensor]], losses: Tensor, risk: str) -> Chart:
    """Mean loss of the predictions that are kept, when the most uncertain ones are handed to a person.

    Args:
        scores: for each name its style and (m,) scores, higher for less sure.
        losses: (m,) of each prediction: 0 or 1, or squared errors.
        risk: what the mean loss is called.
    """
    m = len(losses)
    counts = np.unique(np.linspace(max(1, m // STEPS), m, STEPS).round().astype(int))
    curves, areas = [], []
    for name, (style, score) in scores.items():
        kept = losses[score.argsort(stable=True)].double().cumsum(0).numpy()[counts - 1] / counts
        curves.append(Curve(name, style, tuple((counts / m).tolist()), tuple(kept.tolist())))
        areas.append(f"{name} {number(float(np.mean(kept)))}")
    top = max(max(curve.y) for curve in curves) or 1.0
    return Chart(
        "What leaving out the most uncertain gains",
        "share of predictions kept, the surest first",
        risk,
        top,
        tuple(curves),
        False,
        f"At the right all predictions are kept: {risk} {number(float(losses.double().mean()))}. Towards the left the "
        f"most uncertain are left to a person. Lower is better; means over the curves: {', '.join(areas)}.",
    )


def interval_calibration(uncertainty: Uncertainty, targets: Tensor, noise: Tensor) -> Chart:
    """How often ranges for a new observation hold it, against how often they promise to.

    Args:
        uncertainty: of m predictions.
        targets: (m, k) numbers.
        noise: (k,) variance of the noise.
    """
    levels = np.array([0.02, 0.05, *np.arange(0.1, 0.95, 0.05), 0.95, 0.99])
    reach = torch.tensor([NormalDist().inv_cdf(0.5 + level / 2) for level in levels], device="cpu")
    error = (targets - uncertainty.mean.cpu()).abs()
    curves = []
    for name, style, estimator in (("HeC3 + noise", "hec3", "hec3"), ("Ho + noise", "ho", "ho")):
        deviation = (uncertainty.variance(estimator).cpu() + noise.cpu()).sqrt()
        scaled = error / deviation.clamp_min(torch.finfo(deviation.dtype).tiny)
        held = [float((scaled <= each).double().mean()) for each in reach]
        curves.append(Curve(name, style, tuple(levels.tolist()), tuple(held)))
    at = int(np.abs(levels - 0.95).argmin())
    return Chart(
        "Are the ranges as wide as they should be?",
        "share promised",
        "share held",
        1.0,
        tuple(curves),
        True,
        f"Ranges that promise 95 % hold {curves[0].y[at]:.1%} of the observed values. On the line promises are kept; "
        "below it the ranges are too narrow, above it too wide.",
    )


def belief_calibration(confidence: Tensor, right: Tensor) -> Chart:
    """How often answers are right, against how sure the network is of them.

    Args:
        confidence: (m,) in the answer given, between 0 and 1.
        right: (m,) whether it was.
    """
    order = confidence.argsort(stable=True)
    parts = [part for part in order.tensor_split(BINS) if len(part)]
    x = tuple(float(confidence[part].double().mean()) for part in parts)
    y = tuple(float(right[part].double().mean()) for part in parts)
    error = sum(len(part) * abs(a - b) for part, a, b in zip(parts, x, y, strict=True)) / len(order)
    return Chart(
        "Is the network as often right as it believes?",
        "belief in the answer",
        "share of right answers",
        1.0,
        (Curve("network", "hec3", x, y),),
        True,
        f"Each point is a tenth of the predictions. The network believes {float(confidence.double().mean()):.1%} on "
        f"average and is right in {float(right.double().mean()):.1%}; the mean distance from the line is {error:.1%}. "
        "Below the line it is too sure of itself.",
    )


def ticks(top: float, most: int = 5) -> Sequence[float]:
    """Round numbers from zero to the top of an axis.

    Examples:
        >>> ticks(1.0)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    raw = top / most
    size = 10.0 ** np.floor(np.log10(raw))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= raw * 0.999)
    return [round(float(step * place), 12) for place in range(int(top / step + 1e-9) + 1)]
