"""The fitted object: what it says about the training set, and about itself."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import whence
from doubles import batches, fit, inputs_and_targets, mlp

FINDINGS = (
    "parameters",
    "ridge",
    "degrees of freedom",
    "Newton step",
    "Newton change",
    "leverage policy",
    "largest leverage",
    "guarded leverages",
)


def test_what_is_told_of_the_training_set(device: torch.device) -> None:
    x, y = inputs_and_targets(device)
    tracer = fit(mlp(device), batches(device))
    for name in ("residuals", "leverage", "loo_residuals"):
        assert getattr(tracer, name).shape == (8, 2)
        assert getattr(tracer, name).device.type == device.type
    torch.testing.assert_close(tracer.residuals, y - mlp(device)(x).detach())
    torch.testing.assert_close(tracer.sigma, tracer.residuals.T @ tracer.residuals / 8)
    assert ((tracer.leverage > 0) & (tracer.leverage < 1)).all()
    assert float(tracer.leverage.sum()) == pytest.approx(tracer.degrees_of_freedom)
    assert tracer.ridge == 0.5
    assert tracer.ridge_path is None


def test_what_is_told_of_the_fit() -> None:
    tracer = fit(mlp(), batches())
    for name in FINDINGS:
        assert tracer.diagnostics[name] is not None
    assert tracer.diagnostics["parameters"] == 26
    assert tracer.diagnostics["leverage policy"] == "exact"
    assert "(stationarity)" in str(tracer.diagnostics)


def test_a_recentred_fit() -> None:
    """The optimum of a linear model is reached in one step, from wherever it starts."""
    x, y = inputs_and_targets()
    model = nn.Linear(3, 2, dtype=torch.float64)
    tracer = fit(model, [(x, y)], recenter=True)
    design = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], 1)
    optimum = torch.linalg.solve(design.T @ design + 0.5 * torch.eye(4), design.T @ y)
    found = tracer.predict(x)
    torch.testing.assert_close(found.mean, design @ optimum)
    torch.testing.assert_close(tracer.residuals, y - design @ optimum)
    assert "; taken" in str(tracer.diagnostics)
    with torch.no_grad():
        model.weight.copy_(optimum[:3].T)
        model.bias.copy_(optimum[3])
    there = fit(model, [(x, y)])
    assert there.diagnostics["Newton step"] == pytest.approx(0, abs=1e-12)
    torch.testing.assert_close(there.predict(x).hec3, found.hec3)


def test_an_untrained_network_of_zeros() -> None:
    """No weights and no residuals to divide by."""
    x, _ = inputs_and_targets()
    model = nn.Linear(3, 2, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    tracer = fit(model, [(x, torch.zeros(8, 2, dtype=torch.float64))])
    found = tracer.predict(x)
    assert (found.hec3 == 0).all()
    assert (found.ho == 0).all()
    assert (found.ratio == 1).all()
    assert (found.laplace == 0).all()
    assert tracer.diagnostics["Newton change"] == 0


def test_one_training_example() -> None:
    x, y = inputs_and_targets(n=1)
    found = fit(mlp(), [(x, y)]).predict(x)
    assert torch.isfinite(found.hec3).all()
    assert (found.jackknife.abs() < 1e-12).all(), "one example has no spread"


@pytest.mark.parametrize("leverage", ["exact", "one_plus_q", "clip"])
def test_leverage_policies_can_be_forced(leverage: Any) -> None:
    tracer = fit(mlp(), batches(), leverage=leverage)
    assert tracer.diagnostics["leverage policy"] == leverage


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        fit(mlp(), batches()).sigma = torch.zeros(1)  # type: ignore[misc]


def test_it_shows_itself() -> None:
    shown = repr(fit(mlp(), batches()))
    assert shown.startswith("Tracer(8 training examples, 2 outputs, 26 parameters; gaussian, ridge 0.5, noise ")
    assert "degrees of freedom" in shown


def test_predictions_repeat_to_the_bit() -> None:
    x, _ = inputs_and_targets()
    tracer = fit(mlp(), batches())
    one, other = tracer.predict(x), tracer.predict(x)
    for name in one.covariances:
        assert torch.equal(one.covariance(name), other.covariance(name))


def test_uncertainties_travel() -> None:
    x, _ = inputs_and_targets()
    found = fit(mlp(), batches()).predict(x)
    back: whence.Uncertainty = pickle.loads(pickle.dumps(found))
    assert torch.equal(back.hec3, found.hec3)


@pytest.mark.gpu
@pytest.mark.parametrize("data", ["cpu", "cuda"])
@pytest.mark.parametrize("model", ["cpu", "cuda"])
def test_data_follow_the_model(model: str, data: str) -> None:
    x, _ = inputs_and_targets(torch.device(data))
    found = fit(mlp(torch.device(model)), batches(torch.device(data))).predict(x)
    assert found.hec3.device.type == model
    torch.testing.assert_close(found.hec3.cpu(), fit(mlp(), batches()).predict(x.cpu()).hec3, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", range(3))
def test_covariances_asked_for_later_allow_for_the_rounding_of_a_network_in_single_precision(seed: int) -> None:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)]
    net = nn.Sequential(
        *layers, nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )
    x, y = torch.randn(60, 3, 16, 16), torch.eye(10).repeat(6, 1)
    tracer = whence.fit(net.eval(), [(x, y)], structure="ekfac", progress=False)
    found, wanted = tracer.predict(x[:20]), tracer.predict(x[:20], covariance=True)
    torch.testing.assert_close(found.covariance("hec3"), wanted.covariance("hec3"), rtol=1e-4, atol=1e-6)


STRUCTURES = [whence.Exact(road) for road in ("primal", "dual", "matrix_free")]
STRUCTURES += [whence.Core(size=8), whence.EKFAC(), whence.Sketch(size=8)]


@pytest.mark.parametrize("structure", STRUCTURES, ids=str)
def test_a_model_may_be_frozen_after_its_fit(structure: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(20, 3, dtype=torch.float64)
    data = [(x, torch.stack([x.sum(1), x[:, 0].sin()], 1))]
    tracer = whence.fit(net, data, structure=structure, ridge=0.3, progress=False)
    before, verdicts = tracer.predict(x[:5]), tracer.explain(x[:5]).verdicts
    tracer.save(tmp_path / "fit")
    net.requires_grad_(False)
    loaded = whence.load(tmp_path / "fit", net, data, progress=False)
    for one in (tracer, loaded):
        found = one.predict(x[:5])
        torch.testing.assert_close(found.ho, before.ho)
        torch.testing.assert_close(found.hec3, before.hec3)
        assert one.explain(x[:5]).verdicts == verdicts
    assert not any(parameter.requires_grad for parameter in net.parameters())
