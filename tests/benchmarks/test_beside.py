"""Two versions of whence, in turn."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import beside, tables


def test_this_version_beside_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(beside.SIZES, "M4", (40, 20, 1))
    monkeypatch.setattr("torch.set_num_threads", lambda threads: None)
    monkeypatch.setattr(beside, "child", lambda tree, *given: beside.measure(*given))
    out = tmp_path / "beside.json"
    given = [str(beside.ROOT), "--models", "M4", "--rounds", "2", "--threads", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["beside", *given])
    beside.main()
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert len(row["rounds"]) == 2
    assert row["fit"]["now"] > row["reference"]["now"] > 0
    assert "| M4 | 40 | 2 |" in tables.beside(record)
