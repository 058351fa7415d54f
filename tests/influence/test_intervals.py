"""Intervals of new observations: variances of left-out examples against refits, coverage where noise varies."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence
from whence.influence.intervals import Intervals, conformal_quantile, left_out_variances

RIDGE = 0.5


def fitted(x: Tensor, y: Tensor) -> whence.Tracer:
    """A linear model at its optimum."""
    network = nn.Linear(x.shape[1], 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.solve(x.T @ x + RIDGE * torch.eye(x.shape[1]).double(), x.T @ y).T)
    return whence.fit(network.eval(), [(x, y)], ridge=RIDGE, progress=False)


def uneven(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets with ten times the noise where the last input is one, and that input."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noisy = (torch.rand(n, 1, generator=generator) < 0.3).double()
    y = x.sum(1, keepdim=True) + (0.1 + 0.9 * noisy) * torch.randn(n, 1, dtype=torch.float64, generator=generator)
    return torch.cat([x * (1 - noisy), x * noisy], 1), y, noisy.squeeze(1) > 0


def test_variances_of_left_out_examples_are_those_of_a_fit_without_them() -> None:
    """Dense algebra without the example; the noise of Ho and the residuals of the others are those of the whole fit."""
    x, y, _ = uneven(25, 0)
    tracer = fitted(x, y)
    index = torch.tensor([0, 7, 24])
    found = left_out_variances(tracer, index)
    ho, hec3, laplace = (found[name] for name in ("ho", "hec3", "laplace"))
    for at, example in enumerate(index.tolist()):
        others = [one for one in range(25) if one != example]
        bread = torch.linalg.inv(x[others].T @ x[others] + RIDGE * torch.eye(6).double())
        aligned = x[others] @ bread @ x[example]
        assert float(ho[at]) == pytest.approx(float(tracer.sigma[0, 0] * aligned.square().sum()), rel=1e-9)
        squares = tracer.loo_residuals[others, 0].square()
        quadratic = x[example] @ bread @ x[example]
        assert float(laplace[at]) == pytest.approx(float(tracer.noise_scale * quadratic), rel=1e-9)
        assert float(hec3[at]) == pytest.approx(float((aligned.square() * squares).sum()), rel=1e-9)


def test_intervals_are_wide_where_noise_is() -> None:
    """Both parts of the data are covered as promised; one constant noise would cover nearly all of the quiet part."""
    covered = []
    for seed in range(10):
        x, y, noisy = uneven(500, seed)
        tracer = fitted(x[:250], y[:250])
        intervals = Intervals.of(tracer)
        u = tracer.predict(x[250:])
        inside = ((y[250:] - u.mean).abs() <= intervals.half_width(u)).squeeze(1)
        covered.append([float(inside[which].double().mean()) for which in (~noisy[250:], noisy[250:])])
    quiet, loud = np.mean(covered, axis=0)
    assert 0.91 < quiet < 0.99
    assert 0.91 < loud < 0.99


def test_errors_of_models_that_did_not_see_the_examples_set_the_width() -> None:
    """Errors twice as large make intervals twice as wide; examples without one are left aside."""
    x, y, _ = uneven(200, 1)
    tracer = fitted(x, y)
    u = tracer.predict(x)
    once, twice = (Intervals.of(tracer, factor * tracer.loo_residuals) for factor in (1.0, 2.0))
    torch.testing.assert_close(twice.half_width(u), 2 * once.half_width(u))
    some = torch.where(torch.arange(200).unsqueeze(1) < 50, tracer.loo_residuals, torch.nan)
    assert Intervals.of(tracer, some).scores.shape == (50, 1)


@pytest.mark.parametrize(("count", "place"), [(19, 19), (18, 18), (100, 96), (5, 5)])
def test_quantile_is_that_of_conformal_prediction(count: int, place: int) -> None:
    """The ceil(.95 (s + 1))th smallest of s scores, or the largest."""
    scores = torch.arange(1, count + 1).double()[torch.randperm(count)].unsqueeze(1)
    assert float(conformal_quantile(scores, 0.95)) == place


def test_narrow_and_wide_intervals_are_calibrated_apart() -> None:
    """Calibration examples of scale 2 or so have errors three times as large as their scale says."""
    one, count = torch.ones(1).double(), 400
    near = torch.linspace(-0.1, 0.1, count).double()
    scales = torch.cat([1 + near, 2 + near]).unsqueeze(1)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    scores = torch.linspace(0, 1, count).double()[order].repeat(2).unsqueeze(1) * (1 + 2 * (scales > 1.5))
    intervals = Intervals(one, one, one, 0 * one, scales, scores)
    zeros = torch.zeros(2, 1).double()
    hec3 = torch.tensor([[0.0], [3.0]]).double()  # beside noise 1: scales 1 and 2
    u = whence.Uncertainty(zeros, {}, {"ho": zeros + 1, "hec3": hec3, "laplace": zeros})
    narrow, wide = intervals.half_width(u).squeeze(1).tolist()
    assert narrow == pytest.approx(0.95, abs=0.05)
    assert wide == pytest.approx(2 * 3 * 0.95, abs=0.3)
