"""The pages of the documentation: their code runs as printed, and prints what is shown; their links lead somewhere.

What the blocks of a page print (see `tests/pages.py`) is compared with what is shown, word by word, numbers to a few
per cent.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import whence
from pages import DOCS, PAGES, ROOT, blocks, printed, same_words
from whence.tangents.rules import READERS

LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
# Pages with tests of their own, which know more of what they should print.
TESTED_APART = {"classification.md", "extending-likelihood.md"}

WITH_CODE = [page for page in PAGES if blocks(page) and page.name not in TESTED_APART]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_prints_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    known = dict(READERS)
    try:
        with torch.random.fork_rng(devices=[]):
            for block, out in printed(page):
                if block["shown"]:
                    same_words(out, block["shown"])
    finally:
        READERS.clear()
        READERS.update(known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_a_wrong_number_is_noticed() -> None:
    same_words("ratio 2.07", "    ratio 2.10")
    with pytest.raises(AssertionError):
        same_words("ratio 2.07", "    ratio 3.10")
    with pytest.raises(AssertionError):
        same_words("ratio 2.07", "    Ratio 2.07")
    with pytest.raises(AssertionError):
        same_words("ratio 2.07 more", "    ratio 2.07")


def test_every_page_has_its_place_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert [page.name for page in PAGES if str(page.relative_to(DOCS)) not in nav] == []


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"^::: whence\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"errors", "plots"} <= shown  # whole modules
    errors = {name for name in whence.__all__ if getattr(whence, name).__class__ is type and name.endswith("Error")}
    assert set(whence.__all__) - shown - errors == {"__version__"}
