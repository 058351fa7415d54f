"""What the toy problems say of themselves, against what their draws show."""

from __future__ import annotations

import math

import pytest
import torch

from whence_paper.toys.problems import Problem, Sinc, Spirals

PROBLEMS = [Sinc(1), Sinc(2), Sinc(3), Spirals()]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_mean_and_variance_are_those_of_the_draws(problem: Problem):
    generator = torch.Generator().manual_seed(0)
    x = problem.inputs(3, generator)
    draws = problem.responses(x.repeat(4000, 1), generator).reshape(4000, 3)
    deviation = problem.variance(x).sqrt() + 1e-6
    assert bool(((draws.mean(0) - problem.mean(x)).abs() < 5 * deviation / math.sqrt(4000)).all())
    torch.testing.assert_close(draws.var(0), problem.variance(x), rtol=0.15, atol=1e-2)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_equal_noise_has_the_average_variance_everywhere(problem: Problem):
    generator = torch.Generator().manual_seed(1)
    x = problem.inputs(4, generator)
    draws = problem.targets(x.repeat(2000, 1), "homoscedastic", generator).reshape(2000, 4, -1)
    expected = torch.full((4, len(problem.encoding)), problem.average_variance(), dtype=torch.float64)
    torch.testing.assert_close(draws.var(0), expected, rtol=0.2, atol=0)
    if problem.equal_noise:
        torch.testing.assert_close(problem.variance(x), expected[:, 0])


def test_the_third_scenario_has_few_examples_around_zero():
    generator = torch.Generator().manual_seed(2)
    shares = [float((Sinc(s).inputs(20_000, generator).abs() < 1).double().mean()) for s in (1, 3)]
    assert shares[0] > 0.2
    assert shares[1] < 0.03


def test_the_density_of_the_spirals_is_that_of_their_draws():
    problem = Spirals()
    x = problem.inputs(40_000, torch.Generator().manual_seed(3))
    side, corner = 0.1, torch.tensor([0.0, 0.05], dtype=torch.float64)
    inside = ((x >= corner) & (x < corner + side)).all(1).double().mean()
    steps = corner[0] + side * (torch.arange(20, dtype=torch.float64) + 0.5) / 20
    cells = torch.cartesian_prod(steps, steps - corner[0] + corner[1])
    assert float(inside) == pytest.approx(float(problem.density(cells).mean()) * side**2, rel=0.1)


def test_the_spirals_have_two_outputs_of_opposite_sign():
    x = torch.zeros(5, 2, dtype=torch.float64)
    targets = Spirals().targets(x, "true", torch.Generator().manual_seed(0))
    torch.testing.assert_close(targets[:, 0], -targets[:, 1])
    assert set(targets.abs().flatten().tolist()) == {1.0}


def test_a_scenario_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="1, 2 or 3"):
        Sinc(4)
