"""The studies of tracing run on a few digits, and their records become tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

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
    small = ("--cases", "digits", "--n", "300", "--epochs", "5", "--structures", "core:size=64")
    out = tmp_path / "verdicts.json"
    run("verdicts", monkeypatch, out, *small, "--seeds", "0")
    record = run("verdicts", monkeypatch, out, *small, "--seeds", "100", "--append")
    assert [(row["seed"], row["stage"]) for row in record["rows"]] == [(0, "development"), (100, "unseen")]
    first, second = record["commands"]
    assert (first.endswith("--seeds 0"), second.endswith("--seeds 100 --append")) == (True, True)
    row = record["rows"][1]
    assert sum(map(sum, row["verdicts"].values())) == row["test"] == 497
    assert all(0 <= area <= 1 for areas in row["auroc"].values() for area in areas.values())
    from benchmarks.tracing_tables import verdicts

    told = verdicts(record)
    assert "| 100 |" in told
    assert "| 0 |" not in told  # development draws are not published
    assert " / ".join(map(str, row["verdicts"]["missing"])) in told


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
