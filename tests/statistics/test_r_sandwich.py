"""An `nn.Linear` at ridge 0 is ordinary least squares: the numbers of R's `lm` and `sandwich`, to 1e-10."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import oracles
import whence
from networks import batches_of, linear
from reference.make_inputs import LINEAR, load

REFERENCE = Path(__file__).parent.parent / "reference"
ESTIMATORS = {"ho": "const", "hec0": "HC0", "hec1": "HC1", "hec2": "HC2", "hec3": "HC3"}


class Fitted:
    """One data set with R's numbers, and the tracer of the least-squares `nn.Linear` on it."""

    def __init__(self, name: str) -> None:
        self.reference = json.loads((REFERENCE / f"{name}.json").read_text(encoding="utf-8"))
        chosen = load(name)
        self.k, self.p = chosen.targets.shape[1], chosen.design.shape[1]
        weights = oracles.ridge_fit(oracles.linear_tangents(chosen.design, self.k), chosen.targets, 0.0)
        self.model = linear(weights.reshape(self.k, self.p))
        self.batches = batches_of(torch.as_tensor(chosen.design), torch.as_tensor(chosen.targets), 64)
        self.tracer = whence.fit(self.model, self.batches, ridge=0.0, noise="unbiased", progress=False)
        self.test = torch.as_tensor(chosen.test_design)
        self.uncertainty = self.tracer.predict(self.test)


@pytest.fixture(scope="module", params=LINEAR)
def fitted(request: pytest.FixtureRequest) -> Fitted:
    return Fitted(request.param)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_prediction_variances_are_those_of_vcov_hc(fitted: Fitted, name: str) -> None:
    wanted = np.reshape(fitted.reference[f"prediction_{ESTIMATORS[name]}"], (-1, fitted.k, fitted.k))
    variances = np.diagonal(wanted, axis1=1, axis2=2)
    np.testing.assert_allclose(getattr(fitted.uncertainty, name), variances, rtol=1e-10)
    got = fitted.uncertainty.covariance(name)
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-11 * abs(wanted).max())


@pytest.mark.parametrize("name", ESTIMATORS)
def test_coefficient_covariances_are_vcov_hc(fitted: Fitted, name: str) -> None:
    # Predicting at the unit vectors e_1 .. e_p and their pairwise sums reads off every entry of vcov (one output).
    wanted = np.array(fitted.reference[f"vcov_{ESTIMATORS[name]}"])[: fitted.p, : fitted.p]
    units = np.eye(fitted.p)
    left, right = np.triu_indices(fitted.p)
    both = fitted.tracer.predict(torch.as_tensor(units[left] + units[right]))
    alone = fitted.tracer.predict(torch.as_tensor(units))
    variance_of_sum = np.asarray(getattr(both, name))[:, 0]
    variances = np.asarray(getattr(alone, name))[:, 0]
    np.testing.assert_allclose(variances, np.diag(wanted), rtol=1e-10)
    got = (variance_of_sum - variances[left] - variances[right]) / 2
    off_diagonal = left != right
    entries = wanted[left, right]
    scale = np.sqrt(np.diag(wanted)[left] * np.diag(wanted)[right])
    assert (abs(got - entries) / scale)[off_diagonal].max() < 1e-9


def test_hat_values_residuals_and_means_are_those_of_lm(fitted: Fitted) -> None:
    hat_values = np.array(fitted.reference["hat_values"])
    residuals = np.array(fitted.reference["residuals"])
    close = {"rtol": 1e-10, "atol": 1e-10 * abs(residuals).max()}
    np.testing.assert_allclose(fitted.tracer.leverage, np.tile(hat_values[:, None], fitted.k), rtol=1e-10)
    np.testing.assert_allclose(fitted.tracer.residuals, residuals, **close)
    np.testing.assert_allclose(fitted.tracer.loo_residuals, residuals / (1 - hat_values[:, None]), **close)
    mean = fitted.test.numpy() @ np.array(fitted.reference["coefficients"])
    np.testing.assert_allclose(fitted.uncertainty.mean, mean, rtol=1e-10, atol=1e-10 * abs(mean).max())


def test_sigma_divides_by_n_or_by_what_is_left_of_it(fitted: Fitted) -> None:
    residuals = np.array(fitted.reference["residuals"])
    n = len(residuals)
    np.testing.assert_allclose(fitted.tracer.sigma, residuals.T @ residuals / (n - fitted.p), rtol=1e-10)
    plain = whence.fit(fitted.model, fitted.batches, ridge=0.0, progress=False)
    np.testing.assert_allclose(plain.sigma, residuals.T @ residuals / n, rtol=1e-10)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_units_of_the_inputs_do_not_matter(fitted: Fitted, name: str) -> None:
    # Columns measured in units from 1e-4 to 1e4: the same model, a curvature with a condition number above 1e16.
    units = torch.logspace(-4, 4, fitted.p, dtype=torch.float64)
    batches = [(x * units, y) for x, y in fitted.batches]
    tracer = whence.fit(linear(fitted.model.weight / units), batches, ridge=0.0, noise="unbiased", progress=False)
    got = tracer.predict(fitted.test * units).covariance(name)
    wanted = np.reshape(fitted.reference[f"prediction_{ESTIMATORS[name]}"], (-1, fitted.k, fitted.k))
    np.testing.assert_allclose(got, wanted, rtol=1e-10, atol=1e-11 * abs(wanted).max())
