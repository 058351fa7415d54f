"""Networks trained the ordinary way: what trust says about them, against real retraining."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import ordinary  # noqa: E402


@pytest.mark.parametrize("recipe", ["early", "decay", "short"])
def test_levels_are_what_retraining_says(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"N": 100, "TESTED": 60, "BOOTSTRAPS": 8, "EPOCHS": 30}.items():
        monkeypatch.setattr(ordinary, name, value)
    fit = ordinary.study("mlp", recipe, planted=False, seed=3)["fit"]
    if recipe == "short":  # five epochs: near no optimum
        assert fit["level"] == "do not trust"
    else:
        assert fit["level"] in ("fine", "careful")
        assert 0.5 < fit["hec3_over_retrained"] ** 0.5 < 2.5


def test_the_record_agrees_with_the_bounds_and_the_page() -> None:
    rows = json.loads((ROOT / "results" / "ordinary.json").read_text())["rows"]
    assert ordinary.table(rows) in (ROOT / "docs" / "trust.md").read_text(encoding="utf-8")
    trusted = [row["fit"] for row in rows if ordinary.level_now(row["fit"]) != "do not trust"]
    off = [one["hec3_over_retrained"] ** 0.5 for one in trusted]
    assert sum(0.5 < one < 2.25 for one in off) >= 0.9 * len(off)
    for row in rows:
        for one in (row["fit"], row["recentered"]):
            assert not one["confident_accuracy"] <= one["others_accuracy"]
