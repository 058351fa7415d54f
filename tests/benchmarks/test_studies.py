"""Formulas of the studies against retraining, people and other structures, on input small enough to check by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import whence

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def run(module: str, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict:
    from importlib import import_module  # benchmarks are importable from the root only

    monkeypatch.setattr(sys, "argv", [f"{module}.py", "--out", str(out), *arguments])
    import_module(f"benchmarks.{module}").main()
    return json.loads(out.read_text())


def logistic(generator: torch.Generator) -> tuple[nn.Linear, torch.Tensor, torch.Tensor]:
    network = nn.Linear(3, 4, dtype=torch.float64)
    with torch.no_grad():
        network.weight.copy_(torch.randn(4, 3, generator=generator, dtype=torch.float64))
    inputs = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    return network, inputs, torch.randint(4, (12,), generator=generator)


def test_log_odds_and_their_gradients(generator: torch.Generator) -> None:
    from benchmarks import trak

    network, inputs, labels = logistic(generator)
    (found,) = trak.gradients(network, inputs, labels)
    for at in range(len(inputs)):
        p = network(inputs[at]).softmax(0)[labels[at]]
        wanted = torch.autograd.grad((p / (1 - p)).log(), list(network.parameters()))
        for name, value in zip(("weight", "bias"), wanted, strict=True):
            torch.testing.assert_close(found[name][at], value)


def test_trak_is_a_newton_step_where_nothing_is_lost(generator: torch.Generator) -> None:
    from benchmarks import trak

    network, inputs, labels = logistic(generator)
    asked = (inputs[:2], labels[:2])
    phi = trak.projected(network, inputs, labels, 5, seed=0)
    tests = trak.projected(network, *asked, 5, seed=0)
    torch.testing.assert_close(tests, phi[:2])  # the same numbers in every call
    p = network(inputs).softmax(1)[torch.arange(12), labels].detach()
    wanted = (tests @ torch.linalg.inv(phi.T @ phi) @ phi.T * (1 - p)).double()
    torch.testing.assert_close(trak.scores([network], (inputs, labels), asked, 5), wanted, rtol=1e-6, atol=1e-8)


def test_halves_and_their_score() -> None:
    from benchmarks import datamodeling

    kept = datamodeling.halves(10, 7, seed=1)
    assert kept.shape == (7, 10)
    assert kept.sum(1).tolist() == [5] * 7
    assert len({tuple(row) for row in kept.tolist()}) > 1
    helpful = torch.randn(3, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    loss = datamodeling.from_scores(helpful, kept)
    torch.testing.assert_close(loss[2, 1], -helpful[1][kept[2]].sum())
    assert datamodeling.score(loss, loss.exp()) == pytest.approx(1)
    assert datamodeling.score(-loss, loss) == pytest.approx(-1)


def test_summed_pulls_are_refits_for_a_linear_model(generator: torch.Generator) -> None:
    """With one example left out, what `attribute` foresees is the loss of the refit of `what_if`, to first order."""
    from benchmarks import datamodeling

    network, inputs, labels = logistic(generator)
    tracer = whence.fit(
        network, [(inputs, labels)], likelihood="categorical", structure="exact", ridge=5.0, progress=False
    )
    task = datamodeling.Drawn(inputs, labels, inputs[:3], labels[:3])
    kept = ~torch.eye(12, dtype=torch.bool)[:4]
    pulls = tracer.attribute(inputs[:3], top=12).hec3
    found = datamodeling.by_pulls(tracer, task, kept)
    p = network(inputs[:3]).softmax(1).detach()
    slope = p - torch.nn.functional.one_hot(labels[:3], 4)
    place = (pulls.index[1] == 2).nonzero().item()  # the third example and the second test point
    torch.testing.assert_close(found["attribute"][2, 1], -(slope[1] * pulls.pull[1, place]).sum())
    together = datamodeling.by_what_if(tracer, task, kept)
    alone = found["attribute, loss of the summed change"]
    assert datamodeling.score(alone, together) > 0.9


def test_label_quality_is_cleanlabs() -> None:
    from benchmarks.people import label_quality

    rank = pytest.importorskip("cleanlab.rank")
    draw = torch.Generator().manual_seed(0)
    p = torch.rand(20, 4, generator=draw, dtype=torch.float64)
    p, labels = p / p.sum(1, keepdim=True), torch.randint(4, (20,), generator=draw)
    found = label_quality(p, labels)
    for ours, theirs in (("self-confidence", "self_confidence"), ("margin", "normalized_margin")):
        wanted = rank.get_label_quality_scores(labels.numpy(), p.numpy(), method=theirs)
        torch.testing.assert_close(1 - found[ours], torch.from_numpy(wanted))


def test_votes_of_neighbours_leave_the_example_out() -> None:
    from benchmarks.people import voting

    features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
    coded = torch.eye(2)[torch.tensor([0, 1, 1, 0])]
    assert voting(features, coded, count=1).argmax(1).tolist() == [1, 0, 0, 1]


def test_structures_agree_with_themselves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import structures, study_tables

    record = run(
        "structures", monkeypatch, tmp_path / "s.json", "--cases", "California housing", "--seeds", "0",
        "--structures", "ekfac", "exact@last_layer",
    )  # fmt: skip
    first, second = record["rows"]
    assert first["same_verdict"] == 1.0
    assert 0 <= second["same_verdict"] < 1
    assert sum(first["verdicts"]) == sum(second["verdicts"]) == 1000
    assert "| `exact@last_layer` | **" in study_tables.structures(record)
    assert structures.STRUCTURES[0] == "exact"


def test_price(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = ("--cases", "fashion-mnist", "--n", "60", "--test", "20", "--structures", "ekfac", "--repeats", "1")
    (row,) = run("price", monkeypatch, tmp_path / "p.json", *small)["rows"]
    assert row["explain_over_predict"] == pytest.approx(row["explain_s"] / row["predict_s"])


def test_datamodeling_runs_without_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for absent in ("kronfluence", "kronfluence.arguments", "kronfluence.analyzer"):
        monkeypatch.setitem(sys.modules, absent, None)
    small = ("--cases", "digits", "--tiny", "--seeds", "0", "--halves", "3", "--checkpoints", "1")
    record = run("datamodeling", monkeypatch, tmp_path / "d.json", *small)
    (row,) = record["rows"]
    assert {"whence exact, attribute", "whence exact, what_if", "TRAK of 1"} <= row["score"].keys()
    assert all(-1 <= value <= 1 for value in row["score"].values())
    assert list(row["did_not_run"]) == ["kronfluence EK-FAC"]
    from benchmarks.study_tables import datamodeling

    assert "| TRAK of 1 |" in datamodeling(record)


def test_datamodeling_of_texts_leaves_reviews_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for absent in ("kronfluence", "kronfluence.arguments", "kronfluence.analyzer"):
        monkeypatch.setitem(sys.modules, absent, None)
    small = ("--cases", "reviews", "--tiny", "--seeds", "0", "--halves", "3", "--checkpoints", "1")
    record = run("datamodeling", monkeypatch, tmp_path / "d.json", *small)
    (row,) = record["rows"]
    assert (row["n"], row["test"]) == (50, 5)
    assert row["score"].keys() == row["documents"].keys() == {f"whence {one}, attribute" for one in SMALL_GPT}
    assert all(-1 <= value <= 1 for value in row["documents"].values())
    from benchmarks.study_tables import datamodeling

    page = datamodeling(record)
    assert "| method | random halves: mean | every draw | without one review: mean | every draw |" in page


SMALL_GPT = ("ekfac", "sketch:size=32")


def test_gradients_layer_by_layer_are_those_of_examples(generator: torch.Generator) -> None:
    from benchmarks import networks, trak

    network = networks.resnet9(3, width=2).double().eval()
    with torch.no_grad():
        for value in network.state_dict().values():
            if value.is_floating_point():
                value.add_(0.3 * torch.rand(value.shape, generator=generator, dtype=torch.float64))
    inputs = torch.randn(4, 3, 32, 32, generator=generator, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1])
    assert all(map(trak.simple, network.modules()))
    found, wanted = (one(network, inputs, labels) for one in (trak.by_layers, trak.by_examples))
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value)
    assert not trak.simple(nn.Conv2d(2, 2, 3, groups=2))
    assert not trak.simple(nn.ReLU(inplace=True))
    assert not trak.simple(nn.LayerNorm(3))


def test_a_stopped_run_leaves_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.merge_records import merged

    from benchmarks import datamodeling, study_tables

    small = ("--cases", "digits", "--tiny", "--seeds", "0", "--halves", "3", "--checkpoints", "1")
    complete = run("datamodeling", monkeypatch, tmp_path / "whole.json", *small, "--structures", "exact")
    assert "missing" not in complete["rows"][0]

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(datamodeling.trak, "running_scores", stops)
    with pytest.raises(KeyboardInterrupt):
        run("datamodeling", monkeypatch, tmp_path / "d.json", *small, "--structures", "exact")
    record = json.loads((tmp_path / "d.json").read_text())
    (row,) = record["rows"]
    assert {"whence exact, attribute", "whence exact, what_if"} <= row["score"].keys()
    assert row["missing"] == ["TRAK of 1", *(f"kronfluence EK-FAC, {name}" for name in datamodeling.DAMPINGS)]
    assert "digits, seed 0, was stopped without TRAK of 1, kronfluence" in study_tables.datamodeling(record)
    assert merged([complete, record])["rows"] == complete["rows"]
    assert merged([record, complete])["rows"] == complete["rows"]


def test_people_keeps_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stopped in its cross-validation, which comes last."""
    from benchmarks.data import random_images

    from benchmarks import people, study_tables

    draw = torch.Generator().manual_seed(0)
    said = {name: torch.randint(10, (400,), generator=draw) for name in ("aggregate", "worst")}
    shares = torch.rand(200, 10, generator=draw, dtype=torch.float64)
    monkeypatch.setattr(people, "read_cifar", lambda folder, most: random_images(400, 200, (3, 32, 32)))
    monkeypatch.setattr(people, "people", lambda folder, n, m: (said, shares / shares.sum(1, keepdim=True)))
    small = ("--data", str(tmp_path), "--tiny", "--labels", "worst", "--epochs", "1", "--structure", "sketch:size=16")
    record = run("people", monkeypatch, tmp_path / "p.json", *small)
    (whole,) = record["rows"]
    assert "missing" not in whole
    assert sum(one["points"] for one in whole["verdicts"].values()) == 200
    assert "was stopped" not in study_tables.people(record)

    def stops(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(people, "cross_validated", stops)
    with pytest.raises(KeyboardInterrupt):
        run("people", monkeypatch, tmp_path / "s.json", *small, "--folds", "2")
    record = json.loads((tmp_path / "s.json").read_text())
    (row,) = record["rows"]
    assert row["missing"] == ["cross-validation"]
    assert row["auroc_wrong"].keys() == whole["auroc_wrong"].keys()
    assert row["spearman_people"].keys() == whole["spearman_people"].keys()
    assert "worst, seed 300, was stopped without cross-validation." in study_tables.people(record)
    monkeypatch.setattr(people, "label_scores", stops)
    with pytest.raises(KeyboardInterrupt):
        run("people", monkeypatch, tmp_path / "t.json", *small)
    record = json.loads((tmp_path / "t.json").read_text())
    assert record["rows"][0]["missing"] == ["label scores", "verdicts", "doubt scores"]
    assert "was stopped without label scores, verdicts, doubt scores." in study_tables.people(record)
