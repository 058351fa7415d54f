"""The studies of tracing run on a few digits, and their records become tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import whence

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def run(module: str, monkeypatch: pytest.MonkeyPatch, out: Path, *arguments: str) -> dict:
    from importlib import import_module  # benchmarks are importable from the root only

    monkeypatch.setattr(sys, "argv", [f"{module}.py", "--out", str(out), "--keep", str(out.parent), *arguments])
    import_module(f"benchmarks.{module}").main()
    return json.loads(out.read_text())


def test_verdicts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = ("--cases", "digits", "--n", "150", "--epochs", "3", "--structures", "core:size=64", "--optimisers", "adam")
    out = tmp_path / "verdicts.json"
    run("verdicts", monkeypatch, out, *small, "--seeds", "0")
    record = run("verdicts", monkeypatch, out, *small, "--seeds", "100", "--append")
    assert [(row["seed"], row["stage"]) for row in record["rows"]] == [(0, "development"), (100, "unseen")]
    first, second = record["commands"]
    assert (first.endswith("--seeds 0"), second.endswith("--seeds 100 --append")) == (True, True)
    row = record["rows"][1]
    assert sum(map(sum, row["confusion"].values())) == row["test"] == 497
    assert 0 <= row["noisy_from_missing"] <= 1
    from benchmarks.tracing_tables import verdicts

    told = verdicts(record)
    assert "| 100 |" in told
    assert "| 0 |" not in told  # development draws are not published
    assert " / ".join(map(str, row["confusion"]["missing"])) in told


def test_verdicts_of_points_that_were_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What was kept is judged as the fit itself explains its predictions."""
    small = ("--cases", "digits", "--n", "150", "--epochs", "3", "--structures", "exact", "--optimisers", "adam")
    kept, again = tmp_path / "points", tmp_path / "again.json"
    first = run("verdicts", monkeypatch, tmp_path / "first.json", *small, "--seeds", "100", "--points", str(kept))
    second = run("verdicts", monkeypatch, again, "--judge", str(kept))
    differ = {"commit", "when"}
    assert [{k: v for k, v in row.items() if k not in differ} for row in first["rows"]] == [
        {k: v for k, v in row.items() if k not in differ} for row in second["rows"]
    ]

    from benchmarks.verdict_points import points_of

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 3, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + x[:, :1].exp() * torch.randn(80, 1, generator=generator, dtype=torch.float64)
    network = torch.nn.Linear(3, 1, dtype=torch.float64)
    tracer = whence.fit(network, [(x, y)], ridge=0.1, recenter=True, progress=False)
    tests = 3 * torch.randn(50, 3, generator=generator, dtype=torch.float64)
    wanted, found = tracer.explain(tests), points_of(tracer, [tests]).explained(0.95)
    assert found.verdicts == wanted.verdicts
    assert len(set(found.verdicts)) > 1
    torch.testing.assert_close(found.source, wanted.source)


def test_label_errors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("cleanlab")
    small = ("--cases", "digits", "--n", "150", "--epochs", "3", "--structures", "ekfac", "--seeds", "100")
    record = run("label_errors", monkeypatch, tmp_path / "label_errors.json", *small)
    assert [row["loss"] for row in record["rows"]] == ["squared error", "cross-entropy"]
    for row in record["rows"]:
        assert row["cleanlab_issues"]["flipped"] == 15
        assert all(0 <= area <= 1 for area in row["auroc"].values())
        assert {"whence ekfac", "loss, in-sample", "cleanlab self-confidence, cross-validated"} <= row["auroc"].keys()
        assert row["did_not_run"].keys() <= {"kronfluence"}  # a peer that `make bench` installs
    from benchmarks.tracing_tables import label_errors

    assert label_errors(record).count("whence ekfac |") == 4


def test_label_errors_without_peers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for absent in ("cleanlab", "cleanlab.filter", "cleanlab.rank", "kronfluence", "kronfluence.analyzer"):
        monkeypatch.setitem(sys.modules, absent, None)  # as if it were not installed
    small = ("--cases", "digits", "--n", "150", "--epochs", "1", "--structures", "ekfac", "--seeds", "100")
    record = run("label_errors", monkeypatch, tmp_path / "label_errors.json", *small, "--losses", "cross-entropy")
    (row,) = record["rows"]
    assert set(row["auroc"]) == {"whence ekfac", "loss, in-sample", "loss, cross-validated"}
    assert row["fits"][0]["hits_among_first"] <= row["cleanlab_issues"]["called"] == 15
    said = capsys.readouterr().out
    assert "did not run: cleanlab: not installed: " in said
    assert "did not run: kronfluence: not installed: " in said


def test_attribution(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    small = ("--cases", "small", "--n", "60", "--points", "1", "4", "--structures", "core:size=32")
    record = run("attribution", monkeypatch, tmp_path / "attribution.json", *small)
    (row,) = record["rows"]
    assert row["gap_ho"] < 1e-5  # a core's shares sum to its variance, in the single precision of the network
    assert row["forward_passes_per_point"].keys() == {"1", "4"}
    from benchmarks.tables import replaced
    from benchmarks.tracing_tables import attribution

    page = replaced("a\n<!-- attribution -->\nold\n<!-- end -->\nb", "attribution", attribution(record))
    assert "MLP 64-32" in page
    assert "old" not in page
