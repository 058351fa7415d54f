"""statsmodels as a second opinion: OLS with HC0 to HC3, influence measures, and the ridge sandwich of `TheilGLS`."""

from __future__ import annotations

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from statsmodels.sandbox.regression.penalized import TheilGLS

import oracles
import whence
from networks import batches_of, linear
from reference.make_inputs import RegressionSet, load

SETS = ("diabetes", "wine", "breast_cancer")


@pytest.fixture(scope="module", params=SETS)
def chosen(request: pytest.FixtureRequest) -> RegressionSet:
    return load(request.param)


def fit_linear(chosen: RegressionSet, ridge: float, **options: object) -> whence.Tracer:
    weights = oracles.ridge_fit(oracles.linear_tangents(chosen.design, 1), chosen.targets, ridge)
    batches = batches_of(torch.as_tensor(chosen.design), torch.as_tensor(chosen.targets), 64)
    return whence.fit(linear(weights[None]), batches, ridge=ridge, progress=False, **options)


@pytest.mark.parametrize(("name", "kind"), [("hec0", "HC0"), ("hec1", "HC1"), ("hec2", "HC2"), ("hec3", "HC3")])
def test_robust_prediction_errors(chosen: RegressionSet, name: str, kind: str) -> None:
    results = sm.OLS(chosen.targets[:, 0], chosen.design).fit(cov_type=kind)
    wanted = results.get_prediction(chosen.test_design).se_mean ** 2
    uncertainty = fit_linear(chosen, 0.0).predict(torch.as_tensor(chosen.test_design))
    np.testing.assert_allclose(np.asarray(getattr(uncertainty, name))[:, 0], wanted, rtol=1e-10)


def test_plain_prediction_errors_and_influence(chosen: RegressionSet) -> None:
    results = sm.OLS(chosen.targets[:, 0], chosen.design).fit()
    influence = results.get_influence()
    tracer = fit_linear(chosen, 0.0, noise="unbiased")
    uncertainty = tracer.predict(torch.as_tensor(chosen.test_design))
    np.testing.assert_allclose(
        np.asarray(uncertainty.ho)[:, 0], results.get_prediction(chosen.test_design).se_mean ** 2, rtol=1e-10
    )
    np.testing.assert_allclose(np.asarray(tracer.leverage)[:, 0], influence.hat_matrix_diag, rtol=1e-10)
    np.testing.assert_allclose(
        np.asarray(tracer.loo_residuals)[:, 0], influence.resid_press, rtol=1e-10, atol=1e-12 * chosen.targets.std()
    )


@pytest.mark.parametrize("ridge", [0.3, 30.0])
def test_ho_with_a_ridge_is_the_mixed_estimator(chosen: RegressionSet, ridge: float) -> None:
    # Theil and Goldberger: prior information "coefficients are 0" of unit weight, penalised by ridge / sigma^2.
    p = chosen.design.shape[1]
    targets = chosen.targets[:, 0]
    mse = sm.OLS(targets, chosen.design).fit().mse_resid
    mixed = TheilGLS(targets, chosen.design, r_matrix=np.eye(p), q_matrix=np.zeros(p), sigma_prior=np.eye(p))
    results = mixed.fit(pen_weight=ridge / mse, cov_type="sandwich")
    shape = np.asarray(results.normalized_cov_params)  # F_lam^-1 F F_lam^-1, without a noise level
    tracer = fit_linear(chosen, ridge)
    uncertainty = tracer.predict(torch.as_tensor(chosen.test_design))
    wanted = np.einsum("mi,ij,mj->m", chosen.test_design, shape, chosen.test_design) * float(tracer.sigma[0, 0])
    np.testing.assert_allclose(np.asarray(uncertainty.ho)[:, 0], wanted, rtol=1e-10)
    residuals = targets - chosen.design @ results.params
    assert float(tracer.sigma[0, 0]) == pytest.approx(np.mean(residuals**2), rel=1e-10)
    np.testing.assert_allclose(np.asarray(uncertainty.mean)[:, 0], chosen.test_design @ results.params, rtol=1e-9)
