"""`ridge="loo"` takes the ridge whose refits without each example err least, and keeps the curve."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import networks
import oracles
import whence
from networks import SharedOutputs, batches_of

ROADS = ("primal", "dual")


def fit(case: networks.Case, road: str, **options: object) -> whence.Tracer:
    options = {"ridge": "loo", **options}
    return whence.fit(case.model, case.batches(), structure=whence.Exact(road=road), progress=False, **options)


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", ["mlp", "single_output", "embedding", "tied"])
def test_the_curve_is_the_closed_form(name: str, road: str) -> None:
    case = networks.build(name)
    outputs, tangents, weights = oracles.tangents_of(case.model, case.inputs)
    residuals = case.targets.numpy() - outputs
    path = fit(case, road).ridge_path
    assert path is not None
    largest = np.linalg.eigvalsh(oracles.curvature(tangents))[-1]
    # Below this the dense oracle loses digits itself: residuals and 1 - leverage vanish together.
    trusted = path.ridges.numpy() > 1e-5 * largest
    assert trusted.sum() > 20
    wanted = [oracles.loo_error(tangents, residuals, weights, ridge) for ridge in path.ridges.numpy()[trusted]]
    np.testing.assert_allclose(path.errors.numpy()[trusted], wanted, rtol=1e-8)


@pytest.mark.parametrize("name", ["mlp", "convolution", "tied"])
def test_roads_agree_on_the_choice(name: str) -> None:
    case = networks.build(name)
    primal, dual = (fit(case, road) for road in ROADS)
    assert primal.ridge == pytest.approx(dual.ridge, rel=1e-8)


@pytest.mark.parametrize("road", ROADS)
def test_the_choice_is_reported_and_is_a_plain_ridge(road: str) -> None:
    case = networks.build("mlp")
    chosen = fit(case, road)
    path = chosen.ridge_path
    assert path is not None
    assert chosen.ridge == float(path.ridges[path.errors.argmin()]) == chosen.diagnostics["ridge"]
    plain = fit(case, road, ridge=chosen.ridge)
    assert plain.ridge_path is None
    for name in ("ho", "hec3", "laplace"):
        one, two = (tracer.predict(case.test_inputs).covariance(name) for tracer in (chosen, plain))
        np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12 * float(two.abs().max()))


@pytest.mark.parametrize("road", ROADS)
def test_refits_err_as_the_curve_says_and_least_at_the_choice(road: str, rng: np.random.Generator) -> None:
    # Linear in its weights, started anywhere: the curve is about the refitted model, not about the given weights.
    mixing, inputs = rng.normal(size=(2, 4, 12)), rng.normal(size=(15, 4))
    tangents = np.einsum("ni,cip->ncp", inputs, mixing)
    targets = tangents @ rng.normal(size=12) + 6.0 * rng.normal(size=(15, 2))
    model = SharedOutputs(torch.as_tensor(mixing), torch.as_tensor(rng.normal(size=12))).eval()
    batches = batches_of(torch.as_tensor(inputs), torch.as_tensor(targets))
    tracer = whence.fit(model, batches, structure=whence.Exact(road=road), ridge="loo", progress=False)
    path = tracer.ridge_path
    assert path is not None

    def refit_error(ridge: float) -> float:
        without = oracles.refits(tangents, targets, ridge)
        return sum(np.sum((y - J @ w) ** 2) for y, J, w in zip(targets, tangents, without, strict=True)) / 15

    picked = list(range(12, len(path.ridges), 6))
    np.testing.assert_allclose(path.errors[picked], [refit_error(float(path.ridges[g])) for g in picked], rtol=1e-8)
    best = int(path.errors.argmin())
    assert 0 < best < len(path.ridges) - 1, "noise and signal balance inside the grid"
    assert refit_error(tracer.ridge) < min(refit_error(tracer.ridge * 3), refit_error(tracer.ridge / 3))


def test_no_matrix_no_curve() -> None:
    with pytest.raises(whence.InputError, match="matrix"):
        fit(networks.build("mlp"), "matrix_free")
