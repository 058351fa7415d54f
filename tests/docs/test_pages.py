"""The pages of the documentation: their code runs as printed, and prints what is shown; their links lead somewhere.

What the blocks of a page print must say what is shown; `tests/pages.py` tells what that means.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import whence
from pages import DOCS, PAGES, ROOT, blocks, printed, same_words
from whence.jacobian.rules import READERS

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
                    same_words(out, block["shown"], about=bool(block["about"]))
    finally:
        READERS.clear()
        READERS.update(known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_links_lead_somewhere(page: Path) -> None:
    links = LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


TABLE = "    clean  HeC3 0.10  7 wrong\n    noisy  HeC3 0.31  40 wrong\n"


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ("ratio 2.07", "    ratio 2.10"),
        ("ratio 1.75", "    ratio 2.10"),
        ("ratio 0.01", "    ratio 0.00"),
        ("[-0.15, 0.14]", "    [-0.16, 0.15]"),
        ("1,024 names, 51%", "    1,024 names,\t55%"),
        ("p = 1.1e-03", "    p = 1.2e-03"),
    ],
)
def test_numbers_from_another_machine_are_taken(found: str, shown: str) -> None:
    same_words(found, shown)
    same_words(found, shown, about=True)


@pytest.mark.parametrize("about", [False, True])
@pytest.mark.parametrize(
    ("found", "shown"),
    [
        ("ratio 2.07", "    ratio 4.50"),  # size
        ("ratio 0.207", "    ratio 2.07"),  # order of magnitude
        ("ratio -2.07", "    ratio 2.07"),  # sign
        ("ratio -0.01", "    ratio 0.01"),
        ("ratio nan", "    ratio 2.07"),
        ("1,024 names", "    2,100 names"),
        ("ratio 2.07", "    Ratio 2.07"),  # words
        ("ratio 2.07  confident", "    ratio 2.07  scarce data"),
        ("ratio 2.07  fine", "    ratio 2.07  careful"),
        ("ratio 2.07 more", "    ratio 2.07"),
        ("ratio 2.07\nratio 2.07", "    ratio 2.07"),
        ("clean  HeC3 0.20  7 wrong\nnoisy  HeC3 0.19  40 wrong", TABLE),  # order
    ],
)
def test_what_says_something_else_is_noticed(found: str, shown: str, about: bool) -> None:
    with pytest.raises(AssertionError):
        same_words(found, shown, about)


@pytest.mark.parametrize("found", ["ratio 2.60 of 40", "ratio 2.10 of 41", "ratio 1.60 of 40"])
def test_only_marked_blocks_are_about_right(found: str) -> None:
    same_words(found, "    ratio 2.10 of 40", about=True)
    with pytest.raises(AssertionError):
        same_words(found, "    ratio 2.10 of 40")


def test_marks_say_why() -> None:
    marks = [mark for page in PAGES for mark in re.findall(r"<!-- about.*", page.read_text(encoding="utf-8"))]
    assert marks
    assert all(re.fullmatch(r"<!-- about: (\w+[\s,;]*){3,} -->", mark) for mark in marks)
    assert sum(bool(block["about"] and block["shown"]) for page in PAGES for block in blocks(page)) == len(marks)


def test_every_page_has_its_place_in_the_site() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2]
    assert [page.name for page in PAGES if str(page.relative_to(DOCS)) not in nav] == []


def test_every_public_name_is_in_the_reference() -> None:
    shown = set(re.findall(r"^::: whence\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert {"errors", "plots"} <= shown  # whole modules
    errors = {name for name in whence.__all__ if getattr(whence, name).__class__ is type and name.endswith("Error")}
    assert set(whence.__all__) - shown - errors == {"__version__"}
