"""Intervals of new observations that adapt to the local noise and have the stated coverage.

The variance of a prediction says how far it would move with other training data. A new observation has its own noise in
addition. HeC3 / Ho estimates how much larger than usual the noise is around an input, at no cost. Conformal calibration
determines how far to believe this ratio, and how many such standard deviations an interval needs. It uses errors at
training examples that the model had not seen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from whence.estimators import observation_noise
from whence.influence.fitted import Fitted, divide, evenly_spaced, training_examples
from whence.results import Uncertainty

LEVEL = 0.95
ESTIMATORS = ("ho", "hec3", "laplace")
CALIBRATION_EXAMPLES = 2000  # training examples, evenly spaced, on which intervals are calibrated
# How far HeC3 / Ho is believed: zero means the same noise everywhere, one takes the ratio as it is.
EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)
CLEARLY_BETTER = 1e-3  # gain of the mean log-likelihood that a larger exponent must bring
BIN, MOST_BINS = 100, 5  # fewest calibration examples in a bin, and most bins
FREEDOM, MEDIAN = 4.0, 0.7407  # of the t distribution that compares exponents: degrees of freedom, median of |t|
# Exponent of the leverage above the ordinary one. If data are scarce, the model is wrong in ways that its variance does
# not reflect: without this, 95 % intervals held .89 of such rows on seven tables.
FAR = 0.25


@dataclass(frozen=True)
class Intervals:
    """Half-widths q s(x) of intervals of new observations, for each of k outputs.

    s^2(x) = (HeC3(x) + noise r(x)^exponent) max(1, scarcity)^(1/4). r(x) is the average of the squared leave-one-out
    residuals of the training examples behind the prediction, relative to that of all: HeC3 / Ho up to a factor.
    Scarcity is the leverage relative to that of a training example that was left out. q is the conformal quantile of
    |error| / s over training examples that the model had not seen and whose scale s is similar: bins of equal size, up
    to five if there are enough examples, so that wide and narrow intervals have the same coverage.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 200, dtype=torch.float64).unsqueeze(1)
        >>> y = x + (0.1 + x.abs()) * torch.randn(200, 1, generator=torch.Generator().manual_seed(0))
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, y)], ridge=0.1, recenter=True, progress=False)
        >>> half = Intervals.of(tracer).half_width(tracer.predict(x))
        >>> 0.93 < float(((y - tracer.predict(x).mean).abs() <= half).double().mean()) < 0.98
        True
    """

    noise: Tensor  # (k,) mean variance of a new observation around the regression function
    relative: Tensor  # (k,) noise of Ho over the mean squared leave-one-out residual: r is this times HeC3 / Ho
    ordinary: Tensor  # (k,) median of Laplace's variance of the calibration examples, each left out
    exponent: Tensor  # (k,) how far r is believed
    scales: Tensor  # (s, k) s of the calibration examples, ascending
    scores: Tensor  # (s, k) |error| / s of the same examples

    @classmethod
    def of(cls, fitted: Fitted, errors: Tensor | None = None) -> Intervals:
        """Calibrate on errors (n, k) of models trained without the example (NaN: none), or leave-one-out residuals."""
        loo, residuals = fitted.loo_residuals.double().cpu(), fitted.residuals.double().cpu()
        errors = (loo if errors is None else errors.double()).reshape(len(loo), -1)
        known = fitted.counted.cpu() & torch.isfinite(errors).all(1)
        index = evenly_spaced(known.nonzero().squeeze(1), CALIBRATION_EXAMPLES)
        variances, sizes = left_out_variances(fitted, index), errors[index].abs()
        noise = observation_noise(residuals[known], loo[known]).clamp_min(1e-12 * errors[known].square().mean(0))
        relative = divide(fitted.sigma.diagonal().double().cpu(), loo[known].square().mean(0), 1.0)
        ordinary = variances["laplace"].median(dim=0).values
        found = cls(noise, relative, ordinary, torch.zeros_like(noise), sizes[:0], sizes[:0])
        tried = [replace(found, exponent=torch.full_like(noise, exponent)) for exponent in EXPONENTS]
        scales = torch.stack([one.scale(variances) for one in tried])  # (exponents, s, k)
        best = [_best(sizes[:, output], scales[:, :, output]) for output in range(sizes.shape[1])]
        found = replace(found, exponent=noise.new_tensor([EXPONENTS[at] for at in best]))
        ordered, order = found.scale(variances).sort(dim=0)
        return replace(found, scales=ordered, scores=sizes.gather(0, order) / ordered)

    def scale(self, variances: Mapping[str, Tensor]) -> Tensor:
        """(m, k) s(x), positive, from Ho, HeC3 and Laplace's variance."""
        ho, hec3, laplace = (variances[name] for name in ESTIMATORS)
        local = divide(hec3, ho, 1.0) * self.relative
        scarcity = divide(laplace, self.ordinary.expand_as(laplace), 1.0).clamp_min(1.0)
        square = (hec3 + self.noise * local**self.exponent) * scarcity**FAR
        return square.sqrt().clamp_min(torch.finfo(square.dtype).tiny)

    def half_width(self, uncertainty: Uncertainty, level: float = LEVEL) -> Tensor:
        """(m, k) half the width of the interval of a new observation around each prediction."""
        scales = self.scale(_variances(uncertainty))
        bins = min(max(len(self.scores) // BIN, 1), MOST_BINS)
        factors = torch.stack([conformal_quantile(some, level) for some in self.scores.tensor_split(bins)])  # (bins, k)
        edges = torch.stack([some[0] for some in self.scales.tensor_split(bins)])[1:]
        which = torch.searchsorted(edges.T.contiguous(), scales.T.contiguous()).T  # (m, k)
        return factors.gather(0, which) * scales


def conformal_quantile(scores: Tensor, level: float) -> Tensor:
    """(k,) the ceil(level (s + 1))th smallest of scores (s, k), or the largest if there are too few.

    Examples:
        >>> conformal_quantile(torch.arange(1.0, 101.0).unsqueeze(1), 0.95)
        tensor([96.])
    """
    count = len(scores)
    return scores.sort(dim=0).values[min(max(math.ceil(level * (count + 1)), 1), count) - 1]


def _variances(uncertainty: Uncertainty) -> dict[str, Tensor]:
    return {name: uncertainty.variance(name).double().cpu() for name in ESTIMATORS}


def _best(sizes: Tensor, scales: Tensor) -> int:
    """The index of the scale, among several (e, s), that fits errors of these sizes (s,) best; the first of ties.

    By the log-likelihood of a t distribution with these scales times one factor, which is set by the median.
    """
    scaled = sizes / scales
    unit = scaled.median(dim=1, keepdim=True).values.clamp_min(torch.finfo(sizes.dtype).tiny) / MEDIAN
    tails = (FREEDOM + 1) / 2 * torch.log1p((scaled / unit).square() / FREEDOM)
    losses = (scales.log() + unit.log() + tails).mean(1).tolist()
    return reduce(lambda best, at: at if losses[at] < losses[best] - CLEARLY_BETTER else best, range(len(losses)))


def left_out_variances(fitted: Fitted, index: Tensor) -> dict[str, Tensor]:
    """(s, k) variances of some training examples, each in the fit without it.

    An example loses its weight h in its own prediction; the weight of all others grows by 1 / (1 - h). Off-diagonal
    leverage between outputs is ignored. An approximate curvature behaves as if it did not contain the example.
    """
    examples = index.to(fitted.problem.device)
    parts = [_variances(fitted.predict(inputs)) for _, inputs, _ in training_examples(fitted, examples)]
    found = {name: torch.cat([part[name] for part in parts]) for name in ESTIMATORS}
    if fitted.loo.policy != "exact":
        return found
    leverage = fitted.leverage[examples].double().cpu().clamp(0.0, 1.0 - 1e-9)
    own = {"ho": fitted.sigma.diagonal().double().cpu(), "hec3": fitted.loo_residuals.double().cpu()[index].square()}
    left = {
        name: (found[name] - leverage.square() * square).clamp_min(0.0) / (1.0 - leverage).square()
        for name, square in own.items()
    }
    return left | {"laplace": found["laplace"] / (1.0 - leverage)}
