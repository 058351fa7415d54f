"""The page at the end of `make bench`: all records of this run and none of another."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from benchmarks import together

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_published_records_become_one_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in together.PARTS:
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(sys, "argv", ["together.py", str(tmp_path)])
    together.main()
    page = (tmp_path / "bench.md").read_text()
    assert page.count("\n## ") == 3
    command = json.loads((RESULTS / "cost.json").read_text())["command"]
    assert f"`{command}`" in page
    assert str(tmp_path / "bench.md") in capsys.readouterr().out


def test_a_part_that_is_missing_or_old_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cost", "label_errors"):
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    os.utime(tmp_path / "cost.json", (1000, 1000))
    monkeypatch.setattr(sys, "argv", ["together.py", str(tmp_path), "--since", "2000", "--broken", "label_errors"])
    wanted = "label_errors stopped before its end; cost left no record; quality_peers left no record"
    with pytest.raises(SystemExit, match=wanted):
        together.main()
    page = (tmp_path / "bench.md").read_text()
    assert f"**Not whole: {wanted}.**" in page
    assert "## Wrong labels" in page


def test_a_run_without_faults_says_so_by_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in together.PARTS:
        (tmp_path / f"{name}.json").write_text((RESULTS / f"{name}.json").read_text())
    monkeypatch.setattr(sys, "argv", ["together.py", str(tmp_path), "--since", "0", "--broken"])  # as make calls it
    together.main()
    assert "Not whole" not in (tmp_path / "bench.md").read_text()
