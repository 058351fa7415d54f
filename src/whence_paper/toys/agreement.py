"""Estimates of `whence` beside the Monte-Carlo ground truth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Generator, Tensor

import whence

from .montecarlo import Trials, scatter

BOOTSTRAPS = 200
FACTS = ("largest leverage", "degrees of freedom", "Newton change")


@dataclass(frozen=True)
class Estimates:
    """What `whence` says of each trial's network: variances (b, m) summed over outputs, and its diagnostics.

    Attributes:
        mean: (b, m, k) predictions; those of the linearized optimum if recentered.
        variances: (b, m) by estimator.
        leverage: (b,) the largest leverage.
        freedom: (b,) effective degrees of freedom.
        newton: (b,) how far a Newton step would move the training outputs, over the size of the residuals.
    """

    mean: Tensor
    variances: dict[str, Tensor]
    leverage: Tensor
    freedom: Tensor
    newton: Tensor


def estimate(
    trials: Trials, ridge: float, grid: Tensor, recenter: bool = False, names: tuple[str, ...] = ("ho", "hec3")
) -> Estimates:
    """Fit `whence` to every trial's network and its own training set."""
    means, facts = [], []
    variances: dict[str, list[Tensor]] = {name: [] for name in names}
    for weights, x, y in zip(trials.trained.weights.double(), trials.x, trials.y, strict=True):
        tracer = whence.fit(trials.net.module(weights), [(x, y)], ridge=ridge, recenter=recenter, progress=False)
        answer = tracer.predict(grid)
        means.append(answer.mean)
        for name in names:
            variances[name].append(answer.variance(name).sum(1))
        facts.append([float(tracer.diagnostics[key]) for key in FACTS])
    leverage, freedom, newton = torch.tensor(facts, dtype=torch.float64).T
    stacked = {name: torch.stack(rows) for name, rows in variances.items()}
    return Estimates(torch.stack(means), stacked, leverage, freedom, newton)


@dataclass(frozen=True)
class Agreement:
    """An estimator over the Monte-Carlo variance, at the points of a region.

    Attributes:
        average: median over the points of (estimate averaged over draws / Monte-Carlo variance).
        low: of its 95 % interval, which covers both the finite number of retrainings and of draws (bootstrap).
        high: likewise.
        one: the same median, with the estimate from the first draw alone.
        typical: the median over draws of that one-draw median; below the average, since variances are skewed.
        draws_low: its 10 % quantile over draws.
        draws_high: 90 % quantile.
        correlation: between log averaged estimate and log Monte-Carlo variance.
        correlation_one: the same for the first draw alone.
    """

    average: float
    low: float
    high: float
    one: float
    typical: float
    draws_low: float
    draws_high: float
    correlation: float
    correlation_one: float

    def as_dict(self) -> dict[str, Any]:
        """Rounded, for the record."""
        return {key: round(value, 4) for key, value in asdict(self).items()}


def agreement(estimates: Tensor, first: Tensor, predictions: Tensor, region: Tensor) -> Agreement:
    """Compare estimates (b, m) of b draws, and a first one (m,), with the scatter of predictions (t, m, k)."""
    estimates, first, predictions = estimates[:, region], first[region], predictions[:, region]
    truth = scatter(predictions)
    average = estimates.mean(0)
    low, high = _bootstrap(estimates, predictions).quantile(torch.tensor([0.025, 0.975]).double()).tolist()
    single = (estimates / truth).median(dim=1).values
    return Agreement(
        average=float((average / truth).median()),
        low=low,
        high=high,
        one=float((first / truth).median()),
        typical=float(single.median()),
        draws_low=float(single.quantile(0.1)),
        draws_high=float(single.quantile(0.9)),
        correlation=log_correlation(average, truth),
        correlation_one=log_correlation(first, truth),
    )


def _bootstrap(estimates: Tensor, predictions: Tensor) -> Tensor:
    """Medians of estimate / scatter with draws and retrainings drawn again with replacement, (BOOTSTRAPS,)."""
    generator = torch.Generator().manual_seed(0)
    centred = (predictions - predictions.mean(0)).flatten(1)
    t = len(centred)
    shares = _shares(t, generator)
    spread = (shares @ centred.square() - (shares @ centred).square()) * (t / (t - 1))
    scattered = spread.unflatten(1, predictions.shape[1:]).sum(2)
    medians: Tensor = (_shares(len(estimates), generator) @ estimates / scattered).median(dim=1).values
    return medians


def _shares(size: int, generator: Generator) -> Tensor:
    """(BOOTSTRAPS, size) share of each row in a sample of as many rows, drawn with replacement."""
    drawn = torch.randint(size, (BOOTSTRAPS, size), generator=generator)
    return torch.zeros(BOOTSTRAPS, size, dtype=torch.float64).scatter_add_(
        1, drawn, torch.full(drawn.shape, 1 / size, dtype=torch.float64)
    )


def log_correlation(a: Tensor, b: Tensor) -> float:
    """Correlation between the logarithms of two positive vectors.

    Examples:
        >>> a = torch.tensor([1.0, 2.0, 5.0])
        >>> round(log_correlation(a, 3 * a**2), 6)
        1.0
    """
    return float(torch.corrcoef(torch.stack([a.log(), b.log()]))[0, 1])
