"""Figure 1 and bank marketing, quick: they run, their tables and figure are drawn, and the paper's finding shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from whence_paper.records import Record
from whence_paper.tabular import bank, figure1
from whence_paper.tabular.fitting import neighbours
from whence_paper.tabular.problems import cut, invented_customers, invented_land, of_bank, of_housing


@pytest.mark.parametrize("experiment", [figure1, bank], ids=["figure1", "bank"])
def test_the_direction_of_the_finding(experiment, tmp_path: Path) -> None:
    record: Record = experiment.main(["--quick", "--out", str(tmp_path)])  # ends the test where a finding is lost
    groups = record.runs()[0].results["groups"]
    assert groups["HeC3-uncertain"]["HeC3 / Ho"] > 1.5 > 1.0 > groups["Ho-uncertain"]["HeC3 / Ho"]
    name = experiment.EXPERIMENT.name
    assert "HeC3-uncertain" in (tmp_path / f"{name}-quick.md").read_text()
    assert (tmp_path / f"{name}-quick.png").exists() == (name == "figure1")


def test_who_is_uncertain_among_the_invented(tmp_path: Path) -> None:
    found = bank.main(["--quick", "--out", str(tmp_path)]).runs()[0].results["groups"]
    assert found["HeC3-uncertain"]["values"][0][0] == "job = manager"  # who answer by a coin
    assert found["Ho-uncertain"]["values"][0][0] == "job = astronaut"  # of whom there are few


def test_a_lost_finding_is_told(tmp_path: Path) -> None:
    record = Record(tmp_path / "figure1.json", "figure1")
    near = {"km to the 20th nearest district": 1.0, "HeC3 / Ho": 1.0}
    groups = {
        "neither": {**near, "deviation of the 20 nearest values, 100,000 $": 1.0},
        "HeC3-uncertain": {**near, "deviation of the 20 nearest values, 100,000 $": 0.5},
        "Ho-uncertain": {**near, "deviation of the 20 nearest values, 100,000 $": 0.5},
    }
    record.add({"seed": 0}, {"groups": groups}, 0.0)
    lost = figure1.check(None, record)
    assert len(lost) == 2
    assert "HeC3-uncertain 0.5" in lost[1]


def test_test_rows_are_not_trained_on() -> None:
    train, test = cut(50, seed=3, size=None)
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(50))
    assert len(test) == 10


def test_housing_is_standardised_by_its_training_part() -> None:
    data = invented_land(200)
    problem = of_housing(data, seed=0)
    torch.testing.assert_close(problem.inputs[:, 6:].mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(problem.inputs[:, 6:].std(0), torch.ones(2), atol=1e-5, rtol=0)
    again = problem.test_targets.squeeze(1) * problem.unit + data.targets[problem.train_rows].mean().float()
    torch.testing.assert_close(again, data.targets[problem.rows].float(), atol=1e-5, rtol=1e-5)


def test_the_duration_of_the_call_is_not_shown_to_the_network() -> None:
    data = invented_customers(100)
    problem = of_bank(data, seed=0)
    jobs = {
        value for row in problem.rows.tolist() + problem.train_rows.tolist() for value in [data.columns["job"][row]]
    }
    assert problem.inputs.shape[1] == 2 + len(jobs)  # age, balance, and a column for each job
    assert set(problem.targets.flatten().tolist()) == {-1.0, 1.0}
    yes = data.targets[problem.rows]
    assert torch.equal(problem.test_targets.squeeze(1) > 0, yes)


def test_neighbours_are_the_nearest() -> None:
    draw = torch.Generator().manual_seed(0)
    among, places = torch.randn(40, 3, generator=draw), torch.randn(7, 3, generator=draw)
    near, which = neighbours(places, among, count=5, batch=3)
    for place, distances, chosen in zip(places, near, which, strict=True):
        every = (among - place).square().sum(1).sqrt()
        torch.testing.assert_close(distances, every.sort().values[:5], atol=1e-4, rtol=1e-4)
        assert set(chosen.tolist()) == set(every.argsort()[:5].tolist())
