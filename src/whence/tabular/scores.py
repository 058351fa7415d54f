"""Predictions in the words of the target, and honest numbers about them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy
import torch

from whence import Uncertainty
from whence.display import number
from whence.tabular.targets import Target

LEVEL = 0.95
NORMAL = 1.959963984540054
"""Standard deviations on either side that hold 95 % of a normal distribution."""


@dataclass(frozen=True)
class Predicted:
    """Arrays with a row for each prediction.

    Attributes:
        center: (m,) the predicted number, or the place of the predicted class.
        low: (m,) lower 95 % bound of a new observation: the variance of the prediction, and the noise on top.
        high: (m,) the upper one; NaN for classes, both.
        probabilities: (m, classes) of all classes; (m, 0) for numbers.
        spread: (m,) standard deviation of the prediction by HeC3, or of the predicted class's probability.
        ho: (m,) trace of Ho.
        hec3: (m,) trace of HeC3.
        ratio: (m,) HeC3 / Ho.
    """

    center: Any
    low: Any
    high: Any
    probabilities: Any
    spread: Any
    ho: Any
    hec3: Any
    ratio: Any

    @classmethod
    def of(cls, target: Target, uncertainty: Uncertainty, noise: float) -> Predicted:
        """Read off what `Tracer.predict` gave.

        Args:
            target: what is predicted.
            uncertainty: of the predictions.
            noise: variance of a label around its mean; for numbers.
        """
        ho, hec3 = uncertainty.ho.sum(1).numpy(), uncertainty.hec3.sum(1).numpy()
        ratio = uncertainty.ratio.numpy()
        if target.task == "regression":
            mean = uncertainty.mean[:, 0].numpy()
            reach = NORMAL * numpy.sqrt(hec3 + noise)
            return cls(mean, mean - reach, mean + reach, numpy.zeros((len(mean), 0)), numpy.sqrt(hec3), ho, hec3, ratio)
        probabilities = uncertainty.probabilities.numpy()
        variances = torch.diagonal(uncertainty.probability_covariance("hec3"), dim1=1, dim2=2).clamp_min(0.0).numpy()
        if target.outputs == 1:
            probabilities = numpy.concatenate([1 - probabilities, probabilities], axis=1)
            variances = numpy.concatenate([variances, variances], axis=1)
        best = probabilities.argmax(1)
        none = numpy.full(len(best), numpy.nan)
        spread = numpy.sqrt(variances[numpy.arange(len(best)), best])
        return cls(best, none, none, probabilities, spread, ho, hec3, ratio)

    def take(self, which: Any) -> Predicted:
        """Some of the rows."""
        return Predicted(**{field.name: getattr(self, field.name)[which] for field in fields(self)})


@dataclass(frozen=True)
class Score:
    """One number with its name and what it means."""

    name: str
    value: float
    words: str


def score(target: Target, predicted: Predicted, values: Any) -> list[Score]:
    """How good predictions are.

    Args:
        target: what is predicted.
        predicted: (m,) predictions.
        values: (m,) what was observed.
    """
    if not len(values):
        return []
    return _regression(predicted, values) if target.task == "regression" else _classes(target, predicted, values)


def _regression(predicted: Predicted, values: Any) -> list[Score]:
    errors = values - predicted.center
    spread = float(((values - values.mean()) ** 2).mean())
    squares = float((errors**2).mean())
    covered = float(((values >= predicted.low) & (values <= predicted.high)).mean())
    return [
        Score("R2", 1 - squares / spread if spread > 0 else float("nan"), "1 is perfect, 0 no better than the mean"),
        Score("RMSE", squares**0.5, f"typical error; always saying the mean would give {number(spread**0.5, 4)}"),
        Score("MAE", float(numpy.abs(errors).mean()), "mean absolute error"),
        Score("coverage", covered, f"share of rows inside their {100 * LEVEL:.0f} % interval"),
    ]


def _classes(target: Target, predicted: Predicted, values: Any) -> list[Score]:
    places = values.astype(int)
    own = predicted.probabilities[numpy.arange(len(places)), places]
    most = numpy.bincount(places).max() / len(places)
    right = float((predicted.center == places).mean())
    found = [
        Score("accuracy", right, f"always saying the most frequent class would give {most:.3f}"),
        Score("log loss", float(-numpy.log(numpy.maximum(own, 1e-300)).mean()), "mean of -log(p of the true class)"),
        Score("confidence", float(predicted.probabilities.max(1).mean()), "mean probability given to the answer"),
    ]
    if len(target.classes) == 2 and 0 < places.sum() < len(places):
        area = auroc(predicted.probabilities[:, 1], places == 1)
        found.insert(1, Score("AUROC", area, f"how well {target.classes[1]!r} is ranked above {target.classes[0]!r}"))
    return found


def auroc(values: Any, positive: Any) -> float:
    """How often a positive has the larger value, ties counted half.

    Examples:
        >>> auroc(numpy.array([0.1, 0.4, 0.4, 0.9]), numpy.array([False, False, True, True]))
        0.875
    """
    _, place, count = numpy.unique(values, return_inverse=True, return_counts=True)
    ranks = (numpy.cumsum(count) - (count - 1) / 2)[place]
    many = int(positive.sum())
    return float((ranks[positive].sum() - many * (many + 1) / 2) / (many * (len(positive) - many)))
