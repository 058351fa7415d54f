"""The toy experiments end to end, small: what the paper says of Ho and HeC3 shows, and nothing is computed twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from whence_paper.toys import limits, sinc, spirals
from whence_paper.toys.agreement import agreement, estimate
from whence_paper.toys.limits import linear_retraining
from whence_paper.toys.montecarlo import Plan, draw, initial_weights, retrain, scatter
from whence_paper.toys.network import Architecture
from whence_paper.toys.problems import Sinc

PLAN = Plan(hidden=12, examples=80, trials=20, ridge=0.05)
GRID = torch.linspace(-6, 6, 25, dtype=torch.float64)[:, None]
NEAR, FAR = GRID[:, 0].abs() <= 1, GRID[:, 0].abs() >= 3


@pytest.fixture(scope="module")
def noisy_centre():
    """Scenario 2: noise around 0."""
    trials = {source: retrain(Sinc(2), PLAN, source) for source in ("full", "label")}
    return trials, {source: estimate(rows, PLAN.ridge, GRID) for source, rows in trials.items()}


def test_ho_is_too_small_where_noise_is_large_and_too_large_elsewhere(noisy_centre):
    trials, estimates = noisy_centre
    ratio = estimates["label"].variances["ho"].mean(0) / scatter(trials["label"].predictions(GRID))
    assert float(ratio[NEAR].median()) < 0.7
    assert float(ratio[FAR].median()) > 3


def test_hec3_is_of_the_right_size_in_both_places(noisy_centre):
    trials, estimates = noisy_centre
    ratio = estimates["full"].variances["hec3"].mean(0) / scatter(trials["full"].predictions(GRID))
    assert 0.4 < float(ratio[NEAR].median()) < 2.5
    assert 0.4 < float(ratio[FAR].median()) < 2.5


def test_converged_networks_have_no_newton_step_left(noisy_centre):
    _, estimates = noisy_centre
    assert float(estimates["full"].newton.max()) < 1e-2


def test_a_network_stopped_early_has_one_and_recentering_takes_it():
    trials = retrain(Sinc(1), replace(PLAN, trials=2, optimiser="paper", steps=20), "full")
    plain, moved = (estimate(trials, PLAN.ridge, GRID, recenter=recenter) for recenter in (False, True))
    assert float(plain.newton.min()) > 0.05
    torch.testing.assert_close(plain.mean, trials.predictions(GRID), rtol=1e-5, atol=1e-6)
    assert float((moved.mean - plain.mean).abs().max()) > 1e-3


def test_linear_models_on_fixed_tangents_start_from_the_network_itself():
    trials = retrain(Sinc(1), replace(PLAN, trials=2), "full")
    straight = linear_retraining(trials, PLAN.ridge, GRID)
    torch.testing.assert_close(straight.mean[0], trials.predictions(GRID)[0], rtol=0, atol=5e-3)
    assert float((straight.mean[1] - trials.predictions(GRID)[0]).abs().max()) > 1e-2


def test_label_noise_keeps_the_inputs_of_the_first_full_draw():
    full, label = draw(Sinc(1), PLAN, "full"), draw(Sinc(1), PLAN, "label")
    assert bool((label[0] == full[0][0]).all())
    assert not bool((label[1][0] == label[1][1]).any())
    assert len(set(full[2]) | set(label[2])) == 2 * PLAN.trials


def test_more_trials_begin_with_the_same_ones():
    few, many = (draw(Sinc(3), replace(PLAN, trials=trials), "full") for trials in (2, 4))
    assert bool((many[0][:2] == few[0]).all())
    assert bool((many[1][:2] == few[1]).all())


def test_initial_weights_are_shared_or_fresh():
    net = Architecture(1, PLAN.hidden, 1)
    same, fresh = (initial_weights(Sinc(1), net, replace(PLAN, init=init)) for init in ("same", "fresh"))
    assert len(same.unique(dim=0)) == 1
    assert len(fresh.unique(dim=0)) == PLAN.trials


def test_agreement_of_an_estimator_that_is_right():
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.1, 2, 40, dtype=torch.float64)
    predictions = spread[None, :, None] * torch.randn(200, 40, 1, generator=generator, dtype=torch.float64)
    estimates = (spread**2).expand(5, -1)
    result = agreement(estimates, 2 * estimates[0], predictions, torch.ones(40, dtype=torch.bool))
    assert result.low < 1 < result.high
    assert result.average == pytest.approx(1, abs=0.1)
    assert result.one == pytest.approx(2 * result.average)
    assert result.correlation > 0.99


@pytest.mark.parametrize("command", [sinc, spirals])
def test_commands_write_records_and_read_them_again(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = command.__name__.rpartition(".")[2]
    small = ["--trials", "6", "--examples", "30", "--hidden", "4", "--ridge", "0.5", "--out", str(tmp_path)]
    command.main([*small, "--paper", "--steps", "10", "--no-figures"])
    first = capsys.readouterr().out.partition("not as in")[0]  # so small a version finds nothing
    assert "HeC3 / full" in first
    path = tmp_path / f"{name}-paper-10.json"
    record = json.loads(path.read_text())
    assert record["runs"][0]["configuration"]["steps"] == 10
    assert next(iter(record["surroundings"].values()))["versions"]["torch"] == torch.__version__
    before = path.stat().st_mtime_ns
    command.main([*small, "--paper", "--steps", "10", "--redraw"])
    assert capsys.readouterr().out.startswith(first)
    assert (tmp_path / f"toy-{name}-paper-10.png").stat().st_size > 10_000
    assert path.stat().st_mtime_ns == before
    command.main([*small, "--paper", "--steps", "10", "--seed", "1", "--no-figures"])
    assert [run["configuration"]["seed"] for run in json.loads(path.read_text())["runs"]] == [0, 1]
    with pytest.raises(SystemExit, match="without --redraw"):
        command.main([*small, "--paper", "--steps", "12", "--redraw"])


@pytest.mark.parametrize("command", [sinc, spirals, limits])
def test_quick_versions_fail_where_a_finding_is_lost(command, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    quick = ["--quick", "--out", str(tmp_path), *([] if command is limits else ["--trials", "8"])]
    command.main(quick)  # leaves by SystemExit where one is
    assert "not as in the paper" not in capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    record = json.loads(path.read_text())
    (results,) = (run["results"] for run in record["runs"])
    if command is limits:  # stopped early and at the optimum change places
        first, last = results["rows"][0], results["rows"][-1]
        first["HeC3 / full"], last["HeC3 / full"] = last["HeC3 / full"], first["HeC3 / full"]
    else:
        done = results["scenarios"][0] if command is sinc else results
        done["agreement"]["data"]["HeC3 / full"]["average"] = 9.0
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as stopped:
        command.main([*quick, "--redraw"])
    assert stopped.value.code == 1
    assert "not as in the paper" in capsys.readouterr().out
