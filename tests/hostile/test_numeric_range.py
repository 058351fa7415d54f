"""Scales and ridges at the ends of what floats can hold: a right answer, by rescaling, or an error that says why."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import whence

APPROXIMATE = ["ekfac", "kfac", "diagonal"]
STRUCTURES = ["exact", "core", *APPROXIMATE, "sketch"]


def problem(scale: float = 1.0, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A linear network; outputs and targets are multiplied by `scale`, gradients are not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 1).double()
    with torch.no_grad():
        model.weight.copy_(scale * torch.tensor([[0.3, -0.2, 0.5]], dtype=torch.float64))
        model.bias.fill_(0.1 * scale)
    targets = scale * torch.randn(8, 1, generator=generator, dtype=torch.float64)
    return model.to(dtype), x.to(dtype), targets.to(dtype)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("scale", [1e-140, 1e-100, 1e100, 1e140])
def test_variances_follow_the_square_of_the_scale(scale: float, structure: str) -> None:
    found, wanted = [], []
    for size, into in ((scale, found), (1.0, wanted)):
        model, x, targets = problem(size)
        tracer = whence.fit(model, [(x, targets)], structure=structure, ridge=0.5, progress=False)
        uncertainty, table, why = tracer.predict(x), tracer.training_frame(x), tracer.explain(x)
        into += [uncertainty.variance(name) / size / size for name in ("ho", "hec0", "hec2", "hec3", "jackknife")]
        into += [torch.tensor(table[name].to_numpy()) for name in ("leverage", "cook", "suspicion", "test_share")]
        into += [torch.tensor(table.loo_residual.to_numpy()) / size, why.noise_p, why.scarcity_p, why.ratio]
        into += [tracer.attribute(x, matrix=True).hec3.matrix, tracer.suggest(3).score]
        if structure not in APPROXIMATE:
            change = tracer.what_if(x, remove=[1], relabel={2: [0.5 * size]})
            into += [change.change / size, change.new_hec3 / size / size]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_squares_that_are_no_numbers_are_refused(scale: float, structure: str) -> None:
    model, x, targets = problem(scale)
    with pytest.raises(whence.InputError, match=r"Scale inputs and targets to about one"):
        whence.fit(model, [(x, targets)], structure=structure, ridge=0.5, progress=False)


@pytest.mark.parametrize("structure", APPROXIMATE)
@pytest.mark.parametrize("ridge", [1e-300, 1e160, 1e300])
def test_ridges_whose_squares_are_no_numbers(ridge: float, structure: str) -> None:
    """Without a ridge worth the name variances are those at ridge zero; with a huge one they go to zero as 1 / ridge^2.

    At 1e300 the exact answer, 1e-600, is zero in any float.
    """
    model, x, targets = problem()
    found = whence.fit(model, [(x, targets)], structure=structure, ridge=ridge, progress=False).predict(x)
    if ridge < 1:
        wanted = whence.fit(model, [(x, targets)], structure=structure, ridge=0.0, progress=False).predict(x)
        torch.testing.assert_close(found.hec3, wanted.hec3, rtol=1e-8, atol=0.0)
        torch.testing.assert_close(found.ho, wanted.ho, rtol=1e-8, atol=0.0)
        return
    rows = torch.cat([x, torch.ones(8, 1, dtype=torch.float64)], dim=1)
    laplace = rows.square().sum(1) * (targets - model(x)).detach().square().mean() / ridge
    torch.testing.assert_close(found.laplace[:, 0], laplace, rtol=1e-8, atol=0.0)
    assert float(found.hec3.abs().max()) < 1e-300
    assert math.isfinite(float(found.ho.sum()))


@pytest.mark.parametrize("structure", ["core", whence.Core(size=2), "exact", "ekfac", "sketch"])
def test_no_information_and_no_ridge_is_an_error(structure: str | whence.Core) -> None:
    """Hidden units that never fire: no selected weight moves any output."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    with torch.no_grad():
        model[0].bias.fill_(-1e3)
    _, x, targets = problem()
    options = {"structure": structure, "parameters": ["0.weight", "0.bias"], "progress": False}
    with pytest.raises(whence.SingularCurvatureError, match="directions without information at ridge=0"):
        whence.fit(model, [(x, targets)], ridge=0.0, **options)
    assert not whence.fit(model, [(x, targets)], ridge=1.0, **options).predict(x).hec3.any()


def test_variances_of_predictions_that_are_no_numbers_are_refused() -> None:
    model, x, targets = problem()
    tracer = whence.fit(model, [(x, targets)], structure="exact", ridge=0.5, progress=False)
    far = 1e200 * x
    calls = (
        tracer.predict,
        lambda inputs: tracer.predict(inputs, outputs=[0]),
        tracer.explain,
        tracer.attribute,
        lambda inputs: tracer.suggest(1, pool=inputs),
    )
    for call in calls:
        with pytest.raises(whence.InputError, match="infinite or NaN"):
            call(far)
