"""The code of the documentation's pages: found, run, and what it prints put back into the page.

    python tests/pages.py tutorials/labels.md      # runs a page: renews what it shows, and the pictures it draws
    python tests/pages.py --marked PAGE            # also the blocks that are marked as not run

Blocks marked `python` are run one after the other, page by page. What one prints is shown as indented text below it. A
block that cannot run everywhere is marked in the line above: <!-- not run: why -->
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```\n"
    r"(?:\n(?P<shown>(?: {4}[^\n]*\n|\n(?= {4}))+))?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?$")


def blocks(page: Path) -> list[re.Match[str]]:
    return [found for found in BLOCK.finditer(page.read_text(encoding="utf-8")) if not found["skip"]]


def printed(page: Path, some: Iterable[re.Match[str]] | None = None) -> Iterator[tuple[re.Match[str], str]]:
    """Each block with what it prints, or some of them. All blocks of a page share their names."""
    module = ModuleType("page")
    before = sys.modules.get("page")
    sys.modules["page"] = module  # dataclasses look their module up
    try:
        for block in blocks(page) if some is None else some:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(block["code"], str(page.name), "exec"), module.__dict__)
            yield block, out.getvalue()
    finally:
        sys.modules.pop("page")
        if before is not None:
            sys.modules["page"] = before


def same_words(found: str, shown: str) -> None:
    """Fail unless both say the same: words as they are, numbers to 15 per cent."""
    got, wanted = found.split(), shown.split()
    assert len(got) == len(wanted), f"printed {found!r}, shown {shown!r}"
    for one, other in zip(got, wanted, strict=True):
        bare, expected = one.strip("[](),%"), other.strip("[](),%")
        if NUMBER.match(expected) and NUMBER.match(bare):
            assert math.isclose(float(bare), float(expected), rel_tol=0.15, abs_tol=1e-3), found
        else:
            assert one == other, found


def renew(page: Path, marked: bool = False) -> None:
    """Run a page in an empty folder; write what it prints into it, and its pictures to docs/figures."""
    text, parts, last = page.read_text(encoding="utf-8"), [], 0
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block, out in printed(page, BLOCK.finditer(text) if marked else None):
                if block["shown"]:
                    start, end = block.span("shown")
                    lines = [f"    {line}".rstrip() + "\n" for line in out.rstrip().splitlines()]
                    parts.append(text[last:start] + "".join(lines))
                    last = end
        finally:
            os.chdir(here)
        for picture in Path(folder).glob("*.png"):
            (FIGURES / picture.name).write_bytes(picture.read_bytes())
    page.write_text("".join(parts) + text[last:], encoding="utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        if name != "--marked":
            renew(DOCS / name, "--marked" in sys.argv)
