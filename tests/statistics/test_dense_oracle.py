"""Every public number on nonlinear networks, against dense loops over autograd gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

import networks
import oracles
import whence

RIDGE = 0.6
ROADS = ("primal", "dual", "matrix_free")
ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


@dataclass(frozen=True)
class Truth:
    """What the oracle says about one network."""

    case: networks.Case
    tangents: np.ndarray
    test_tangents: np.ndarray
    weights: np.ndarray
    residuals: np.ndarray
    leverage: np.ndarray
    mean: np.ndarray

    def covariances(self, *, apart: bool = False, unbiased: bool = False) -> dict[str, np.ndarray]:
        dof = oracles.degrees_of_freedom(self.leverage) if unbiased else 0.0
        sigma = oracles.noise_covariance(self.residuals, dof)
        return oracles.covariances(self.test_tangents, self.tangents, self.residuals, RIDGE, sigma=sigma, apart=apart)


@cache
def truth_of(name: str) -> Truth:
    case = networks.build(name)
    outputs, tangents, weights = oracles.tangents_of(case.model, case.inputs)
    mean, test_tangents, _ = oracles.tangents_of(case.model, case.test_inputs)
    residuals = case.targets.numpy() - outputs
    leverage = oracles.leverage_blocks(tangents, RIDGE)
    return Truth(case, tangents, test_tangents, weights, residuals, leverage, mean)


@cache
def tracer_of(name: str, road: str = "primal", **options: object) -> whence.Tracer:
    case = truth_of(name).case
    structure = whence.Exact(road=road)
    return whence.fit(case.model, case.batches(), structure=structure, ridge=RIDGE, progress=False, **options)


every_network = pytest.mark.parametrize("name", networks.NAMES)
every_road = pytest.mark.parametrize("road", ROADS)
# Conjugate gradients are slow and have no part in what a variant changes: there they run on one network.
every_road_once = pytest.mark.parametrize(
    ("name", "road"),
    [(name, road) for name in networks.NAMES for road in ("primal", "dual")] + [("mlp", "matrix_free")],
)


def assert_close(got: object, wanted: np.ndarray, tolerance: float = 1e-9) -> None:
    assert np.shape(got) == wanted.shape
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=tolerance, atol=tolerance * abs(wanted).max())


@every_network
@every_road
def test_every_estimator(name: str, road: str) -> None:
    truth = truth_of(name)
    wanted = truth.covariances()
    uncertainty = tracer_of(name, road).predict(truth.case.test_inputs)
    assert_close(uncertainty.mean, truth.mean)
    for estimator in ESTIMATORS:
        assert_close(uncertainty.covariance(estimator), wanted[estimator])
        assert_close(getattr(uncertainty, estimator), np.diagonal(wanted[estimator], axis1=1, axis2=2))
    traces = {estimator: np.trace(wanted[estimator], axis1=1, axis2=2) for estimator in ("hec3", "ho")}
    assert_close(uncertainty.ratio, traces["hec3"] / traces["ho"])


@every_network
@every_road
def test_training_examples(name: str, road: str) -> None:
    truth, tracer = truth_of(name), tracer_of(name, road)
    assert_close(tracer.residuals, truth.residuals)
    assert_close(tracer.leverage, np.diagonal(truth.leverage, axis1=1, axis2=2))
    assert_close(tracer.loo_residuals, oracles.inflated_residuals(truth.residuals, truth.leverage, 1.0))
    assert_close(tracer.sigma, oracles.noise_covariance(truth.residuals))
    assert tracer.degrees_of_freedom == pytest.approx(oracles.degrees_of_freedom(truth.leverage), rel=1e-9)
    assert tracer.ridge == RIDGE


@every_network
def test_three_roads_agree(name: str) -> None:
    batch = truth_of(name).case.test_inputs
    primal, *others = (tracer_of(name, road) for road in ROADS)
    wanted = primal.predict(batch)
    for other in others:
        got = other.predict(batch)
        for estimator in ESTIMATORS:
            assert_close(got.covariance(estimator), wanted.covariance(estimator).numpy(), 1e-8)
        for quantity in ("leverage", "loo_residuals", "sigma"):
            assert_close(getattr(other, quantity), getattr(primal, quantity).numpy(), 1e-8)


@every_road_once
def test_outputs_left_out_apart(name: str, road: str) -> None:
    truth = truth_of(name)
    wanted = truth.covariances(apart=True)
    tracer = tracer_of(name, road, loo="output")
    uncertainty = tracer.predict(truth.case.test_inputs)
    for estimator in set(ESTIMATORS) - {"jackknife"}:
        assert_close(uncertainty.covariance(estimator), wanted[estimator])
    assert_close(tracer.loo_residuals, oracles.inflated_residuals_apart(truth.residuals, truth.leverage, 1.0))
    assert_close(tracer.leverage, np.diagonal(truth.leverage, axis1=1, axis2=2))


@pytest.mark.parametrize("name", ["mlp", "tied"])
def test_centred_jackknife_with_outputs_left_out_apart(name: str) -> None:
    truth = truth_of(name)
    uncertainty = tracer_of(name, loo="output").predict(truth.case.test_inputs)
    assert_close(uncertainty.covariance("jackknife"), truth.covariances(apart=True)["jackknife"])


@every_network
def test_unbiased_noise(name: str) -> None:
    truth, tracer = truth_of(name), tracer_of(name, noise="unbiased")
    wanted = truth.covariances(unbiased=True)
    uncertainty = tracer.predict(truth.case.test_inputs)
    assert_close(tracer.sigma, oracles.noise_covariance(truth.residuals, oracles.degrees_of_freedom(truth.leverage)))
    for estimator in ESTIMATORS:
        assert_close(uncertainty.covariance(estimator), wanted[estimator])


@every_road_once
def test_recentring(name: str, road: str) -> None:
    truth = truth_of(name)
    step = oracles.recentring_step(truth.tangents, truth.residuals, truth.weights, RIDGE)
    residuals = truth.residuals - truth.tangents @ step
    sigma = oracles.noise_covariance(residuals)
    wanted = oracles.covariances(truth.test_tangents, truth.tangents, residuals, RIDGE, sigma=sigma)
    tracer = tracer_of(name, road, recenter=True)
    uncertainty = tracer.predict(truth.case.test_inputs)
    assert_close(tracer.residuals, residuals)
    assert_close(tracer.loo_residuals, oracles.inflated_residuals(residuals, truth.leverage, 1.0))
    assert_close(uncertainty.mean, truth.mean + truth.test_tangents @ step)
    for estimator in ESTIMATORS:
        assert_close(uncertainty.covariance(estimator), wanted[estimator])


@every_network
@every_road
def test_the_size_of_the_step_is_reported_whether_taken_or_not(name: str, road: str) -> None:
    truth = truth_of(name)
    step = oracles.recentring_step(truth.tangents, truth.residuals, truth.weights, RIDGE)
    change = np.sqrt(np.mean((truth.tangents @ step) ** 2) / np.mean(truth.residuals**2))
    diagnostics = tracer_of(name, road).diagnostics
    size = np.linalg.norm(step) / np.linalg.norm(truth.weights)
    assert diagnostics["Newton step"] == pytest.approx(size, rel=1e-8)
    assert diagnostics["Newton change"] == pytest.approx(change, rel=1e-8)


@pytest.mark.parametrize(
    ("chosen", "keep"),
    [("last_layer", "2."), ("0.*", "0."), (["0.weight", "2.bias"], ("0.weight", "2.bias"))],
    ids=["last-layer", "pattern", "names"],
)
def test_chosen_parameters(chosen: str | list[str], keep: str | tuple[str, ...]) -> None:
    case = networks.build("mlp")
    outputs, tangents, weights = oracles.tangents_of(case.model, case.inputs, lambda name: name.startswith(keep))
    _, test_tangents, _ = oracles.tangents_of(case.model, case.test_inputs, lambda name: name.startswith(keep))
    residuals = case.targets.numpy() - outputs
    step = oracles.recentring_step(tangents, residuals, weights, RIDGE)
    residuals = residuals - tangents @ step
    sigma = oracles.noise_covariance(residuals)
    wanted = oracles.covariances(test_tangents, tangents, residuals, RIDGE, sigma=sigma)
    tracer = whence.fit(case.model, case.batches(), parameters=chosen, ridge=RIDGE, recenter=True, progress=False)
    uncertainty = tracer.predict(case.test_inputs)
    for estimator in ESTIMATORS:
        assert_close(uncertainty.covariance(estimator), wanted[estimator])


@pytest.mark.parametrize("road", ["primal", "dual"])
def test_a_float32_network_gives_what_its_float64_copy_gives(road: str) -> None:
    truth = truth_of("mlp")
    case = networks.build("mlp")
    batches = [(x.float(), y.float()) for x, y in case.batches()]
    structure = whence.Exact(road=road)
    tracer = whence.fit(case.model.float(), batches, structure=structure, ridge=RIDGE, progress=False)
    uncertainty = tracer.predict(case.test_inputs.float())
    for estimator, wanted in truth.covariances().items():
        assert_close(uncertainty.covariance(estimator), wanted, 2e-5)
