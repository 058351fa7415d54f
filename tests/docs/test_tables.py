"""The tables of the documentation are those of the records: no number is typed, no record newer than its table."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import quality_tables, sources_tables, tables, tracing_tables, worth_tables
from pages import DOCS, ROOT

PAGES = {
    "benchmarks.md": {**tables.TABLES, **quality_tables.TABLES},
    "classification.md": worth_tables.TABLES,
    "services.md": tables.TABLES,
    "tracing.md": tracing_tables.TABLES,
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


def test_an_old_table_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- scaling -->\nold\n<!-- end -->\nb\n", encoding="utf-8")
    tables.rewrite(page, tables.TABLES)
    text = page.read_text(encoding="utf-8")
    assert "old" not in text
    assert "| `ekfac` | 1,000,000 |" in text
