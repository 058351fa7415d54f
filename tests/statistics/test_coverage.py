"""Confidence intervals on simulated data with a known mean function cover it as often as they should.

Every output of a fit carries its own noise, so one fit with 10 outputs is 10 independent simulations and 200 fits are
S = 2,000. At one test point the number of covering intervals is then Binomial(S, c) with c the true coverage, and the
observed share has standard error sqrt(c (1 - c) / S), 0.005 at c = 0.95. The seeds are fixed; a tolerance of four
standard errors would fail one draw of seeds in 16,000 per test point.

Under the model with normal noise c is known exactly for Ho: (f - true) / se follows Student's t with n - p degrees of
freedom, times sqrt((n - p) / n) where the noise is divided by n. For HeC3 no exact law exists, and the nominal level
is asked for with the same tolerance.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy import stats

import oracles
import whence
from networks import batches_of, linear

N, P, OUTPUTS, FITS, LEVEL = 60, 3, 10, 200, 0.95
SIMULATIONS = FITS * OUTPUTS
TEST_POINTS = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, -1.0], [1.0, 0.0, 2.0]])


@cache
def coverage(noise: str, heteroscedastic: bool) -> dict[str, np.ndarray]:
    """Share of simulations whose interval holds the true mean, at each test point, for Ho and HeC3."""
    rng = np.random.default_rng(7)
    hits = {name: np.zeros(len(TEST_POINTS)) for name in ("ho", "hec3")}
    for _ in range(FITS):
        design = np.column_stack([np.ones(N), rng.normal(size=(N, P - 1))])
        truth = rng.normal(size=(P, OUTPUTS))
        scale = 0.2 + design[:, 2:] ** 2 if heteroscedastic else np.ones((N, 1))
        targets = design @ truth + scale * rng.normal(size=(N, OUTPUTS))
        weights = np.linalg.lstsq(design, targets, rcond=None)[0]
        batches = batches_of(torch.as_tensor(design), torch.as_tensor(targets), N)
        tracer = whence.fit(linear(weights.T), batches, ridge=0.0, noise=noise, progress=False)
        uncertainty = tracer.predict(torch.as_tensor(TEST_POINTS))
        for name, total in hits.items():
            low, high = (np.asarray(bound) for bound in uncertainty.interval(LEVEL, name))
            inside = (low <= TEST_POINTS @ truth) & (TEST_POINTS @ truth <= high)
            total += inside.sum(axis=1)
    return {name: total / SIMULATIONS for name, total in hits.items()}


def standard_error(share: float) -> float:
    return float(np.sqrt(share * (1 - share) / SIMULATIONS))


@pytest.mark.parametrize("noise", ["unbiased", "mle"])
def test_ho_covers_as_students_t_says(noise: str) -> None:
    shrink = np.sqrt((N - P) / N) if noise == "mle" else 1.0
    exact = 1 - 2 * stats.t.sf(stats.norm.ppf((1 + LEVEL) / 2) * shrink, df=N - P)
    assert abs(coverage(noise, heteroscedastic=False)["ho"] - exact).max() < 4 * standard_error(exact)


def test_hec3_covers_under_constant_noise() -> None:
    shares = coverage("unbiased", heteroscedastic=False)["hec3"]
    assert abs(shares - LEVEL).max() < 4 * standard_error(LEVEL)


def test_hec3_covers_where_noise_varies_and_ho_does_not() -> None:
    shares = coverage("unbiased", heteroscedastic=True)
    assert abs(shares["hec3"] - LEVEL).max() < 4 * standard_error(LEVEL)
    assert shares["ho"].min() < 0.85, "at the far test point, where noise is largest"


def test_an_interval_is_the_mean_and_a_normal_quantile(rng: np.random.Generator) -> None:
    design, targets = rng.normal(size=(20, P)), rng.normal(size=(20, 2))
    weights = np.linalg.lstsq(design, targets, rcond=None)[0]
    batches = batches_of(torch.as_tensor(design), torch.as_tensor(targets))
    uncertainty = whence.fit(linear(weights.T), batches, ridge=0.0, progress=False).predict(
        torch.as_tensor(TEST_POINTS)
    )
    tangents = oracles.linear_tangents(design, 2)
    residuals = targets - design @ weights
    variances = oracles.covariances(
        oracles.linear_tangents(TEST_POINTS, 2), tangents, residuals, 0.0, sigma=oracles.noise_covariance(residuals)
    )
    for level, name in ((0.5, "hec3"), (0.95, "ho"), (0.999, "jackknife")):
        half = stats.norm.ppf((1 + level) / 2) * np.sqrt(np.diagonal(variances[name], axis1=1, axis2=2))
        low, high = uncertainty.interval(level, name)
        np.testing.assert_allclose(low, TEST_POINTS @ weights - half, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(high, TEST_POINTS @ weights + half, rtol=1e-9, atol=1e-9)
