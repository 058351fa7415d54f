"""The demonstration: the task is what it says, the signs point the right way, the report holds what was found."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console
from sklearn.datasets import load_digits

import whence
from whence_paper.demo_classes import OURS, THEIRS, Classes
from whence_paper.demo_figures import draw_figures
from whence_paper.demo_page import grade
from whence_paper.demo_run import run
from whence_paper.demo_task import Task, draw_task
from whence_paper.demo_trial import QUESTIONS, SCORES, Trial, areas


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Trial], list[Classes], str, str]:
    """Trials, printed text and report of the quick mode."""
    console = Console(file=io.StringIO(), width=140)
    path = tmp_path_factory.mktemp("demo") / "report.html"
    trials, classes = run(out=path, quick=True, console=console)
    return trials, classes, console.file.getvalue(), path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outcome(demonstration: tuple[list[Trial], list[Classes], str, str]) -> tuple[list[Trial], str, str]:
    """Trials with two groups of digits, printed text and report."""
    trials, _, printed, html = demonstration
    return trials, printed, html


def digits_of(inputs: torch.Tensor) -> torch.Tensor:
    """Which digit each row of pixels is, looked up in the data set."""
    data = load_digits()
    known = {tuple(row): int(digit) for row, digit in zip(data.data.tolist(), data.target, strict=True)}
    return torch.tensor([known[tuple(row)] for row in (inputs * 16).tolist()])


def test_task_has_the_two_faults_and_no_other(generator: torch.Generator) -> None:
    task = draw_task(generator, 1200)
    digits = digits_of(task.train_inputs)
    assert set(digits.tolist()) == set(range(10)) - {task.missing}
    assert set(task.test_digits.tolist()) == set(range(10))
    truth = torch.where(torch.isin(digits, torch.tensor(task.plus)), 1.0, -1.0).double().unsqueeze(1)
    wrong = (truth != task.train_targets).squeeze(1)
    assert set(digits[wrong].tolist()) == {task.noisy}
    assert 0.3 < float(wrong[digits == task.noisy].double().mean()) < 0.7
    assert int(wrong.sum()) == task.flipped
    assert len(task.plus) == 5
    assert digits_of(task.test_inputs).equal(task.test_digits)
    seen = {tuple(row) for row in task.train_inputs.tolist()}
    assert not any(tuple(row) in seen for row in task.test_inputs.tolist())


def test_noise_and_scarcity_are_told_apart(outcome: tuple[list[Trial], str, str]) -> None:
    for trial in outcome[0]:
        assert trial.accuracy > 0.9
        assert trial.auroc["noisy"]["HeC3/Ho"] > 0.85
        assert trial.auroc["missing"]["Ho"] > 0.65
        assert trial.auroc["noisy or missing"]["HeC3/Ho"] > 0.75
        assert trial.auroc["noisy or missing"]["Ho"] < 0.4


def test_table_and_report_hold_every_draw(outcome: tuple[list[Trial], str, str]) -> None:
    trials, printed, html = outcome
    assert len(trials) == 2
    for trial in trials:
        for question in QUESTIONS:
            for name in SCORES:
                assert f"{trial.auroc[question][name]:.2f}" in printed
                assert f"<td>{trial.auroc[question][name]:.2f}</td>" in html
    first = trials[0].task
    assert f"each {first.noisy} got its label from a coin, and no {first.missing} was shown" in html
    assert html.count("data:image/png;base64,") > 500


def test_an_ordinary_classifier_beside_what_needs_no_whence(
    demonstration: tuple[list[Trial], list[Classes], str, str],
) -> None:
    _, classes, printed, html = demonstration
    assert "Ten digits, cross-entropy" in printed
    assert "Ten digits, cross-entropy" in html
    for draw in classes:
        assert draw.accuracy > 0.9
        assert draw.verdicts["noisy"]["noisy labels nearby"] > 0.8
        assert draw.verdicts["others"]["confident"] > 0.8
        assert draw.verdicts["missing"]["confident"] < 0.5
        assert draw.auroc["noisy or missing"]["source"] > 0.65
        for areas_of in draw.auroc.values():
            assert set(areas_of) == {*OURS, *THEIRS}
            assert all(f"<td>{area:.2f}</td>" in html for area in areas_of.values())
    for question in classes[0].auroc:
        for name in (*OURS, *THEIRS):
            assert f"{sum(draw.auroc[question][name] for draw in classes) / len(classes):.2f}" in printed


def test_same_seed_same_report(tmp_path: Path, outcome: tuple[list[Trial], str, str]) -> None:
    state = torch.random.get_rng_state()
    run(out=tmp_path / "again.html", quick=True, console=Console(file=io.StringIO()))
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == outcome[2]
    assert torch.random.get_rng_state().equal(state)


def test_figures_are_drawn(tmp_path: Path, outcome: tuple[list[Trial], str, str]) -> None:
    paths = draw_figures(outcome[0][0], tmp_path / "new")
    assert [path.name for path in paths] == ["demo-sources.png"]
    assert paths[0].read_bytes().startswith(b"\x89PNG")


def test_areas_by_hand() -> None:
    """Four test digits, noisy 1 and missing 2: counted pair by pair."""
    one = torch.ones(4, 1)
    task = Task((1, 2, 3, 4, 5), 1, 2, one, one, one, one, torch.tensor([1, 2, 3, 4]), 0)
    variances = {"ho": [1.0, 4.0, 2.0, 3.0], "hec3": [8.0, 4.0, 1.0, 3.0]}
    covariances = {name: torch.tensor(value).reshape(4, 1, 1) for name, value in variances.items()}
    found = areas(whence.Uncertainty(torch.tensor([[0.1], [-0.5], [0.3], [0.9]]), covariances), task)
    assert found["noisy"] == {"Ho": 0.0, "HeC3": 1.0, "HeC3/Ho": 1.0, "margin": 1.0}
    assert found["missing"] == pytest.approx({"Ho": 1.0, "HeC3": 2 / 3, "HeC3/Ho": 0.5, "margin": 1 / 3})
    assert found["noisy or missing"] == {"Ho": 0.0, "HeC3": 1.0, "HeC3/Ho": 1.0, "margin": 1.0}


def test_words_follow_the_numbers() -> None:
    assert [grade(value) for value in (0.97, 0.85, 0.7, 0.5)] == [
        "found almost without fail",
        "found well",
        "found, but not reliably",
        "not found",
    ]
