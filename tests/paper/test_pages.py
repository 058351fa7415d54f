"""Tables of the page on the reproduction are those of the records."""

from __future__ import annotations

from pathlib import Path

import pytest

from whence_paper.pages import filled, main

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reproduction.md"


def test_tables_are_put_between_the_marks(tmp_path):
    (tmp_path / "one.md").write_text("**First**\n\n| a |\n\n**Second**\n\n| b |\n")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- one 1 -->\nold\n<!-- end -->\nafter <!-- a note -->\n")
    main([str(page), str(tmp_path)])
    assert page.read_text() == "before\n<!-- one 1 -->\n\n**Second**\n\n| b |\n\n<!-- end -->\nafter <!-- a note -->\n"
    assert filled(page.read_text(), tmp_path) == page.read_text()


@pytest.mark.skipif(not PAGE.exists(), reason="the page is not part of this distribution")
def test_the_page_shows_what_the_records_say():
    text = PAGE.read_text(encoding="utf-8")
    assert filled(text, ROOT / "results" / "paper") == text
