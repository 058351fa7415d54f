"""Tables of the page on the reproduction are those of the records."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from whence_paper import summary
from whence_paper.cifar import beyond, table3
from whence_paper.disentanglement import experiment as disentanglement
from whence_paper.images import label_noise, lambda_sweep, table1, table2
from whence_paper.pages import filled, main
from whence_paper.tabular import bank, figure1

ROOT = Path(__file__).resolve().parents[2]
PAGE, README = ROOT / "docs" / "reproduction.md", ROOT / "README.md"
RECORDS = ROOT / "results" / "paper"


def test_tables_are_put_between_the_marks(tmp_path):
    (tmp_path / "one.md").write_text("**First**\n\n| a |\n\n**Second**\n\n| b |\n")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- one 1 -->\nold\n<!-- end -->\nafter <!-- a note -->\n")
    main([str(page), str(tmp_path)])
    assert page.read_text() == "before\n<!-- one 1 -->\n\n**Second**\n\n| b |\n\n<!-- end -->\nafter <!-- a note -->\n"
    assert filled(page.read_text(), tmp_path) == page.read_text()


def test_marks_may_name_what_they_end(tmp_path):
    (tmp_path / "one.md").write_text("**First**\n\n| a |\n")
    text = "<!-- one -->\n<!-- /one -->\n"
    assert filled(text, tmp_path) == "<!-- one -->\n\n**First**\n\n| a |\n\n<!-- /one -->\n"


@pytest.mark.skipif(not RECORDS.exists(), reason="records are not part of this distribution")
@pytest.mark.parametrize("page", [PAGE, README], ids=lambda page: page.name)
def test_pages_show_what_the_records_say(page):
    text = page.read_text(encoding="utf-8")
    assert filled(text, RECORDS) == text


@pytest.mark.skipif(not RECORDS.exists(), reason="records are not part of this distribution")
@pytest.mark.parametrize(
    "module",
    [figure1, bank, table1, table2, table3, beyond, lambda_sweep, label_noise, disentanglement],
    ids=lambda module: module.EXPERIMENT.name,
)
def test_tables_are_drawn_from_the_records(module, tmp_path):
    name = module.EXPERIMENT.name
    shutil.copy(RECORDS / f"{name}.json", tmp_path)
    module.main(["--redraw", "--out", str(tmp_path)])
    assert (tmp_path / f"{name}.md").read_text(encoding="utf-8") == (RECORDS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.skipif(not RECORDS.exists(), reason="records are not part of this distribution")
def test_the_summary_is_that_of_the_records():
    tables = [summary.sources(RECORDS), summary.mistakes(RECORDS)]
    written = (RECORDS / "reproduction.md").read_text(encoding="utf-8")
    assert written == "\n\n".join(table.markdown() for table in tables) + "\n"
