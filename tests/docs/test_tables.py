"""The tables of the documentation are those of the records: no number is typed, no record newer than its table."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import (
    gpu_tables,
    language_tables,
    quality_tables,
    sources_tables,
    study_tables,
    tables,
    tracing_tables,
    tree_tables,
    worth_tables,
)
from pages import DOCS, ROOT

PAGES = {
    "benchmarks.md": {**tables.TABLES, **quality_tables.TABLES, **study_tables.TABLES, **gpu_tables.TABLES},
    "choosing.md": tables.TABLES,
    "classification.md": worth_tables.TABLES,
    "language-models.md": language_tables.TABLES,
    "many-outputs.md": language_tables.TABLES,
    "services.md": tables.TABLES,
    "sources.md": study_tables.TABLES,
    "tracing.md": {**tracing_tables.TABLES, **study_tables.TABLES},
    "trees.md": tree_tables.TABLES,
}


@pytest.mark.parametrize("page", PAGES)
def test_tables_are_those_of_the_records(page: str, tmp_path: Path) -> None:
    again = tmp_path / page
    text = (DOCS / page).read_text(encoding="utf-8")
    again.write_text(text, encoding="utf-8")
    assert any(f"<!-- {name} -->" in text and (tables.RESULTS / f"{name}.json").exists() for name in PAGES[page])
    tables.rewrite(again, PAGES[page])
    assert again.read_text(encoding="utf-8").splitlines() == text.splitlines(), (
        f"docs/{page} is not what results/ say: write its tables anew (the head of benchmarks/tables.py says how)"
    )


def test_the_tables_of_sources_are_on_their_page() -> None:
    shown = (DOCS / "sources.md").read_text(encoding="utf-8")
    for name, makers in sources_tables.TABLES.items():
        record = json.loads((ROOT / "results" / f"{name}.json").read_text(encoding="utf-8"))
        for make in makers:
            assert make(record) in shown


def test_the_comparison_says_what_the_cost_of_laplace_is() -> None:
    text = (DOCS / "comparison.md").read_text(encoding="utf-8")
    said = re.search(
        r"fit for \[([\d.]+) to ([\d.]+) times the cost.*predictions ([\d,]+) to ([\d,]+) times as expensive", text
    )
    assert said is not None
    rows = json.loads((ROOT / "results" / "cost.json").read_text(encoding="utf-8"))["rows"]
    cost = {(row["model"], row["subject"]): row for row in rows}
    found = []
    for key in ("fit_multiple", "predict_multiple"):
        over = [
            cost[model, "laplace"][key] / cost[model, "ekfac"][key] for model, _ in cost if (model, "laplace") in cost
        ]
        found += [min(over), max(over)]
    assert [float(one.replace(",", "")) for one in said.groups()] == pytest.approx(found, rel=0.15)


def test_choosing_says_how_far_ekfac_is_off() -> None:
    text = " ".join((DOCS / "choosing.md").read_text(encoding="utf-8").split())
    said = re.search(
        r"EKFAC's Ho is ([\d.]+) to ([\d.]+) times.*up to (\d+) times.*Ho ([\d.]+)\) or poorly \(([\d.]+),", text
    )
    assert said is not None
    cases = json.loads((ROOT / "results" / "quality.json").read_text(encoding="utf-8"))["cases"]
    rows = [row for case in cases for row in case["rows"] if row["structure"] == "ekfac"]
    sizes, ranks = ([row[key] for row in rows] for key in ("scale_ho", "rank_ho"))
    found = [min(sizes), max(sizes), max(row["scale_hec3"] for row in rows), max(ranks), min(ranks)]
    assert [float(one) for one in said.groups()] == pytest.approx(found, rel=0.05)


def test_an_old_table_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- scaling -->\nold\n<!-- end -->\nb\n", encoding="utf-8")
    tables.rewrite(page, tables.TABLES)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "| `ekfac` | 1,000,000 |" in text


def test_the_table_of_processes_is_that_of_its_record() -> None:
    shown = (DOCS / "distributed.md").read_text(encoding="utf-8")
    for row in json.loads((ROOT / "results" / "distributed.json").read_text(encoding="utf-8"))["rows"]:
        sizes = f"{row['bytes'] / 1e6:.0f} MB | {row['traffic'] / 1e6:.0f} MB"
        assert f"| {row['weights']:,} | {row['processes']} | {row['seconds']:.1f} | {sizes} |" in shown


def test_rows_have_as_many_cells_as_the_head() -> None:
    assert tables.table("a | b", [[1, 2]]) == "| a | b |\n|---|---|\n| 1 | 2 |"
    for row in ([1], [1, 2, 3]):
        with pytest.raises(ValueError, match="expected 2 cells, as in the head"):
            tables.table("a | b", [row])
