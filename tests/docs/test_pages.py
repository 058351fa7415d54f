"""The pages of the documentation: their code runs as printed, and prints what is shown; their links lead somewhere.

Blocks marked `python` are run one after the other, page by page. What they print is compared with the indented text
that follows a block, word by word, numbers to a few per cent. A block that cannot run here is marked in the line above:
<!-- not run: why -->
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from whence.tangents.rules import READERS

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```\n(?:\n(?P<shown>(?: {4}[^\n]*\n)+))?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?$")
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)(?:#[^)]*)?\)")
# Pages with tests of their own, which know more of what they should print.
TESTED_APART = {"classification.md", "extending-likelihood.md"}


def blocks(page: Path) -> list[re.Match[str]]:
    return [found for found in BLOCK.finditer(page.read_text(encoding="utf-8")) if not found["skip"]]


WITH_CODE = [page for page in PAGES if blocks(page) and page.name not in TESTED_APART]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_prints_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = ModuleType("page")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "page", module)
    known = dict(READERS)
    try:
        with torch.random.fork_rng(devices=[]):
            for block in blocks(page):
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(block["code"], str(page.name), "exec"), module.__dict__)
                if block["shown"]:
                    same_words(printed.getvalue(), block["shown"])
    finally:
        READERS.clear()
        READERS.update(known)


def same_words(found: str, shown: str) -> None:
    got, wanted = found.split(), shown.split()
    assert len(got) == len(wanted), f"printed {found!r}, shown {shown!r}"
    for one, other in zip(got, wanted, strict=True):
        bare, expected = one.strip("[](),%"), other.strip("[](),%")
        if NUMBER.match(expected):
            assert float(bare) == pytest.approx(float(expected), rel=0.15, abs=1e-3), found
        else:
            assert one == other, found


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
