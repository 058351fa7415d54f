"""Quality beside the peers: measures against known values, and a small run with tables."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_measures_of_a_normal_distribution() -> None:
    from benchmarks.peers_uci import Told, measures  # importable from the root only

    draw = torch.Generator().manual_seed(0)
    mean = torch.randn(5_000, generator=draw, dtype=torch.float64)
    targets = mean + 0.5 * torch.randn(5_000, generator=draw, dtype=torch.float64)
    right = Told(mean, torch.full_like(mean, 0.16), torch.ones_like(mean))
    found = measures(right, 0.09, targets, unit=3.0)
    assert found["nll"] == pytest.approx(0.5 * math.log(2 * math.pi * 0.25) + 0.5 + math.log(3.0), abs=0.03)
    assert found["coverage"] == pytest.approx(0.95, abs=0.03)
    assert found["width"] == pytest.approx(2 * 1.959964 * 0.5, abs=1e-6)
    assert found["calibration"] < 0.02
    assert measures(right, 4.0, targets, unit=3.0)["nll"] > found["nll"]


def test_the_likeliest_noise_completes_the_variance() -> None:
    from benchmarks.peers_uci import Told, likeliest_noise

    draw = torch.Generator().manual_seed(1)
    targets = 0.5 * torch.randn(5_000, generator=draw, dtype=torch.float64)
    zero = torch.zeros_like(targets)
    assert likeliest_noise(Told(zero, zero + 0.16, zero + 1), targets) == pytest.approx(0.09, rel=0.1)
    assert likeliest_noise(Told(zero, zero + 0.05, zero + 2), targets) == pytest.approx(0.10, rel=0.1)


def test_splits_are_the_published_ones(tmp_path: Path) -> None:
    from benchmarks.peers_uci import read

    folder = _table(tmp_path)
    table = read(folder, "yacht", 1)
    assert len(table.test) == 14
    assert len(table.held) == 25
    assert len(table.data) == 101
    with np.load(folder / "uci" / "yacht.npz") as found:
        wanted = found["y"][found["test_index"][1]]
    mean = wanted.mean() - table.test.targets.double().mean().item() * table.unit
    again = table.test.targets.double().squeeze(1) * table.unit + mean
    np.testing.assert_allclose(again.numpy(), wanted, rtol=1e-4)


def _table(folder: Path) -> Path:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(140, 3))
    y = x.sum(1) + 0.3 * draw.normal(size=140)
    tests = np.array([draw.permutation(140)[:14] for _ in range(2)])
    (folder / "uci").mkdir()
    np.savez(folder / "uci" / "yacht.npz", X=x, y=y, test_index=tests)
    return folder


def test_a_small_run_and_its_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("mapie")
    pytest.importorskip("laplace")
    from benchmarks.quality_tables import quality_peers as tables

    from benchmarks import quality_peers

    out = tmp_path / "quality_peers.json"
    arguments = ["--data", str(_table(tmp_path)), "--parts", "uci", "--sets", "yacht", "--steps", "20"]
    monkeypatch.setattr(sys, "argv", ["quality_peers.py", *arguments, "--splits", "0", "--out", str(out)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the peers
        quality_peers.main()
    record = json.loads(out.read_text())
    (run,) = record["uci"]
    for method in ("whence exact, HeC3", "laplace-torch kron, all", "deep ensemble of 5", "MC dropout", "SWAG"):
        assert 0 <= run["methods"][method]["held_out"]["coverage"] <= 1
        assert math.isfinite(run["methods"][method]["own"]["nll"])
    assert run["methods"]["MAPIE CV+ of 5"]["held_out"]["coverage"] >= 0.5
    told = tables(quality_peers.merged([record]))
    assert "| whence core, HeC3 | own noise |" in told
    assert "Did not run: laplace-torch lowrank" in told


def test_without_data_and_without_peers_the_rest_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import peers_images, peers_uci, quality_peers

    for absent in ("mapie", "mapie.regression", "mapie.classification", "laplace"):
        monkeypatch.setitem(sys.modules, absent, None)  # as if it were not installed
    for part in (peers_uci, peers_images):
        few = [name for name in part.FAMILIES if name.startswith(("laplace-torch kron, all", "deep ensemble"))]
        monkeypatch.setattr(part, "FAMILIES", {name: part.FAMILIES[name] for name in few})
    monkeypatch.setattr(peers_images, "EPOCHS", 1)
    out = tmp_path / "quality_peers.json"
    given = ["--splits", "0", "--draws", "100", "--steps", "20", "--n", "200", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["quality_peers.py", *given])
    quality_peers.main()
    record = json.loads(out.read_text())
    assert [run["set"] for run in record["uci"] + record["images"]] == ["diabetes", "digits"]
    assert record["images"][0]["test"] == 497
    said = capsys.readouterr().out
    assert "| digits: AUROC, outside | deep ensemble of 5" in said
    assert "| diabetes: calibration error, with held-out data | deep ensemble of 5" in said
    assert "did not run: MAPIE: not installed: " in said
    assert "did not run: laplace-torch" in said
    assert "expected laplace-torch for" in said


def test_areas_compare_each_kind_with_ordinary_points() -> None:
    from benchmarks.peers_images import Task, areas, of_quality

    from whence_paper.baselines import Data

    empty = Data(torch.zeros(0, 1), torch.zeros(0, dtype=torch.long))
    labels = torch.tensor([0, 1, 2, 3, 4, 5])
    kinds = {
        "ordinary": torch.tensor([1, 1, 1, 1, 0, 0, 0, 0]).bool(),
        "noisy": torch.tensor([0, 0, 0, 0, 1, 0, 0, 0]).bool(),
        "missing": torch.tensor([0, 0, 0, 0, 0, 1, 0, 0]).bool(),
        "outside": torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]).bool(),
    }
    task = Task(empty, empty, labels, kinds, torch.zeros(8, 1))
    score = torch.tensor([0.1, 0.2, 0.3, 0.9, 0.95, 0.05, 0.25, 1.0])
    predicted = torch.tensor([0, 1, 2, 0, 0, 0, 0, 0])  # the fourth is a mistake
    found = areas(score, task, predicted=predicted)
    assert found == {"misclassified": 1.0, "noisy": 1.0, "missing": 0.0, "outside": 0.75}
    given = torch.full((8, 10), 0.02)
    given[torch.arange(8), predicted] = 0.82
    quality = of_quality(given, task)
    assert quality["accuracy"] == 0.75
    assert quality["ece"] == pytest.approx(0.07, abs=1e-6)
    assert quality["nll"] == pytest.approx(-(3 * math.log(0.82) + math.log(0.02)) / 4, abs=1e-6)
