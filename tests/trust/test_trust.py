"""Trust: every check catches the case that is planted for it, and is content where there is nothing to find."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import networks
from doubles import fit
from trusted_fits import CHECKS, RIDGE, TEST, look, sine, told_at_once, trained
from whence.trust import checks


def test_nothing_is_found_where_there_is_nothing(converged: nn.Sequential) -> None:
    trust = look(fit(converged, [sine()], ridge=RIDGE))
    assert [check.name for check in trust] == list(CHECKS)
    assert trust.level == "fine", str(trust)
    assert all(check.level == "fine" for check in trust)
    assert trust.sample == 16


@pytest.mark.parametrize("structure", ["ekfac", "kfac", "diagonal", "core", "sketch"])
def test_the_distance_is_that_from_an_exact_fit(structure: str, converged: nn.Sequential) -> None:
    """One output, so that variances along a mixture are the variances."""
    tracer = fit(converged, [sine()], ridge=RIDGE, structure=structure)
    exact = fit(converged, [sine()], ridge=RIDGE).predict(TEST)
    found = look(tracer, sample=len(TEST), tolerance=1e-12)["distance"].numbers
    factors = (tracer.predict(TEST).ho / exact.ho).squeeze(1)
    assert found["ho"] == pytest.approx(float(factors.median()), rel=1e-6)
    ranks = [values.squeeze(1).argsort().argsort().double() for values in (tracer.predict(TEST).ho, exact.ho)]
    assert found["ho rank"] == pytest.approx(float(torch.corrcoef(torch.stack(ranks))[0, 1]), abs=1e-9)


@pytest.mark.parametrize(("structure", "level"), [("diagonal", "do not trust"), ("core", "fine")])
def test_a_structure_that_is_off(structure: str, level: str, converged: nn.Sequential) -> None:
    tracer = fit(converged, [sine()], ridge=RIDGE, structure=structure)
    found = look(tracer)["distance"]
    assert found.level == level, found
    if level != "fine":
        assert 'structure="core"' in found.words
        assert max(found.numbers["ho"], 1 / found.numbers["ho"]) > 2


def test_leverages_that_are_off(converged: nn.Sequential) -> None:
    """The diagonal counts directions twice, so that examples seem to decide more than they do."""
    few = [tuple(part[:14] for part in sine())]
    assert look(fit(converged, few, ridge=0.02, structure="diagonal"))["leave-one-out"].level != "fine"
    assert look(fit(converged, few, ridge=0.02, structure="core"))["leave-one-out"].level == "fine"


def test_a_network_that_was_stopped_early(converged: nn.Sequential, stopped: nn.Sequential) -> None:
    tracer = fit(stopped, [sine()], ridge=RIDGE)
    found = look(tracer)["stationarity"]
    assert found.level == "careful", found
    assert "train longer" in found.words
    assert "use the verdicts" not in found.words
    assert "stationarity" in told_at_once(tracer)
    x, _ = sine()
    plain, moved = (fit(stopped, [sine()], ridge=RIDGE, recenter=one).predict(x).hec3.sum() for one in (False, True))
    assert found.numbers["after the step"] == pytest.approx(float(plain / moved), rel=0.05)
    there = fit(converged, [sine()], ridge=RIDGE)
    assert look(there)["stationarity"].numbers["standard errors"] < 1e-3
    assert there.diagnostics["trust"] == "fine"


def test_a_step_that_was_taken_is_not_held_against_the_network(stopped: nn.Sequential) -> None:
    exact = look(fit(stopped, [sine()], ridge=RIDGE, recenter=True))["stationarity"]
    assert exact.level == "fine"
    assert exact.numbers["standard errors"] < 1e-3
    rough = look(fit(stopped, [sine()], ridge=RIDGE, recenter=True, structure="diagonal"))["stationarity"]
    assert rough.numbers["standard errors"] > 0.25
    assert "approximate step" in rough.words


def test_a_lambda_that_is_far_too_large(converged: nn.Sequential) -> None:
    """With that penalty the weights should be nearly zero."""
    found = look(fit(converged, [sine()], ridge=1e4 * RIDGE))
    assert found["stationarity"].level == "do not trust"
    assert "whence.ridge_from_weight_decay" in found["stationarity"].words


def test_a_lambda_that_is_far_too_small(generator: torch.Generator) -> None:
    """More weights than numbers: every example decides its own prediction."""
    x = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    tracer = fit(networks.linear(torch.ones(1, 20)), [(x, y)], ridge=1e-8)
    found = look(tracer, None)
    assert found["degrees of freedom"].level == "careful"
    assert "nearly every target" in found["degrees of freedom"].words
    assert found["leverage"].level == "do not trust"
    assert found["leverage"].numbers["guarded"] == 8
    assert "leverage" in told_at_once(tracer)
    assert tracer.diagnostics["trust"] == "do not trust"


def test_more_freedom_than_numbers() -> None:
    x, y = sine(8)
    tracer = fit(trained(RIDGE, 20), [(x, y)], ridge=1e-5, structure="diagonal")
    found = look(tracer)["degrees of freedom"]
    assert found.numbers["found"] > found.numbers["of"] == 8
    assert found.level == "do not trust"
    assert "impossible" in found.words
    assert found.numbers["exact"] <= 8 + 1e-6
    assert "degrees of freedom" in told_at_once(tracer)
    assert tracer.diagnostics["trust"] == "do not trust"


def test_clipped_leverages() -> None:
    x, y = sine(8)
    found = look(fit(trained(RIDGE, 20), [(x, y)], ridge=1e-5, structure="diagonal", leverage="clip"))["leverage"]
    assert found.level == "do not trust"
    assert "one_plus_q" in found.words


def test_outputs_that_bend(converged: nn.Sequential) -> None:
    """Three examples hold a sine; without one of them it would be another curve."""
    x = torch.tensor([[-2.0], [0.1], [2.0]], dtype=torch.float64)
    found = look(fit(converged, [(x, 3 * x.cos())], ridge=1e-4))["linearization"]
    assert found.level == "do not trust", found
    assert found.numbers["leave-one-out"] > 1


@pytest.mark.parametrize(("taken", "level"), [(False, "fine"), (True, "do not trust")])
def test_a_step_that_bends_matters_where_it_was_taken(taken: bool, level: str) -> None:
    found = checks.linearization(0.1, 0.1, 5.0, taken, 0.0)
    assert found.level == level
    assert ("recenter=True" in found.words) == taken


@pytest.mark.parametrize("far", [False, True])
def test_advice_does_not_contradict_itself(far: bool) -> None:
    """The step is recommended only where a linearization reaches as far."""
    found = checks.stationarity(0.1, 5.0, 9.0, recentered=False, far=far)
    assert found.level == "do not trust"
    assert "Standard errors may be about 2.1 times too large" in found.words
    assert ("recenter=True" in found.words) != far
    assert found.words.endswith("use the verdicts, and report no standard errors.")
    levels = {change: checks.stationarity(0.1, change, 1.1, recentered=False, far=far).level for change in (0.9, 5.0)}
    assert levels == {0.9: "fine", 5.0: "careful"}  # variances stay, predictions move
    assert checks.stationarity(0.1, 5.0, 0.3, recentered=False, far=far).level == "careful"
    assert (
        checks.stationarity(1.3, 0.9, 1.1, recentered=False, far=far).level == "do not trust"
    )  # longer than the weights


def test_a_linear_model_does_not_bend(generator: torch.Generator) -> None:
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(20, 2, generator=generator, dtype=torch.float64)
    model = networks.linear(torch.zeros(2, 3))
    found = look(fit(model, [(x, y)], ridge=0.1), x)["linearization"]
    assert found.level == "fine"
    assert max(found.numbers.values()) < 1e-9


def test_groups_are_left_out_together(converged: nn.Sequential) -> None:
    x, y = sine()
    tracer = fit(converged, [(x, y)], ridge=RIDGE, groups=[i // 3 for i in range(len(x))])
    found = look(tracer, tolerance=1e-10)
    assert found["distance"].numbers["hec3"] == pytest.approx(1.0, rel=1e-6)
    assert found["leave-one-out"].numbers["factor"] == pytest.approx(1.0, rel=1e-6)
    assert found["leverage"].numbers["of"] == 20
