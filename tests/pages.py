"""The code of the documentation's pages: found, run, and what it prints put back into the page.

    python tests/pages.py tutorials/labels.md      # runs a page: renews what it shows, and the pictures it draws
    python tests/pages.py --marked PAGE            # also the blocks that are marked as not run

Blocks marked `python` are run one after the other, page by page. What one prints is shown as indented text below it. A
block that cannot run everywhere is marked in the line above: <!-- not run: why -->

What is printed must say what is shown: the same words, signs and integers, other numbers to 20 per cent. A block whose
numbers differ more from one machine to another, as those of a trained network do, is marked in the line above:
<!-- about: why -->. Its numbers, integers too, are then right within a factor of two, and in the order that is shown.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
FIGURES = DOCS / "figures"
PAGES = sorted(DOCS.rglob("*.md"))
BLOCK = re.compile(
    r"(?P<skip><!-- not run: [^\n]+ -->\n)?(?P<about><!-- about: [^\n]+ -->\n)?^```python\n(?P<code>.*?)^```\n"
    r"(?:\n(?P<shown>(?: {4}[^\n]*\n|\n(?= {4}))+))?",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"[-+]?\d+(?:\.(?P<digits>\d+))?(?:e(?P<power>[-+]?\d+))?$")


@dataclass(frozen=True)
class Number:
    """A number as it is printed."""

    value: float
    unit: float  # of its last digit
    whole: bool  # an integer, and no percentage

    @classmethod
    def read(cls, word: str) -> Number | None:
        bare = re.sub(r"(?<=\d),(?=\d{3})", "", word.strip("[](),;%"))
        found = NUMBER.match(bare)
        if found is None:
            return None
        digits, power = found["digits"] or "", int(found["power"] or 0)
        whole = not digits and found["power"] is None and "%" not in word
        return cls(float(bare), 10.0 ** (power - len(digits)), whole)

    def near(self, shown: Number, about: bool) -> bool:
        """Whether this may be printed where the other one is shown."""
        if self.value * shown.value < 0:
            return False
        one, other = abs(self.value), abs(shown.value)
        if about:
            return other / 2 <= one <= 2 * other or abs(one - other) <= 5 * shown.unit
        if shown.whole:
            return one == other
        return abs(one - other) <= max(0.2 * other, 1.01 * shown.unit)

    def above(self, other: Number) -> bool:
        """Whether this is larger by so much that the page may speak of it."""
        return self.value - other.value > max(0.25 * abs(other.value), 5 * self.unit)


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


def same_words(found: str, shown: str, about: bool = False) -> None:
    """Fail unless what was found says what is shown: words, signs, sizes, and the order of the numbers in a column."""
    got, wanted = ([line.split() for line in text.splitlines() if line.strip()] for text in (found, shown))
    assert [len(line) for line in got] == [len(line) for line in wanted], f"printed {found!r}, shown {shown!r}"
    columns: dict[tuple[int, int], list[tuple[Number, Number]]] = {}  # by the words of a line, and the place in it
    for here, there in zip(got, wanted, strict=True):
        for at, (one, other) in enumerate(zip(here, there, strict=True)):
            mine, expected = Number.read(one), Number.read(other)
            if mine is None or expected is None:
                assert one == other, f"printed {one!r} for {other!r} in {found}"
            else:
                assert mine.near(expected, about), f"printed {one} for {other} in {found}"
                columns.setdefault((len(there), at), []).append((mine, expected))
    for column in columns.values():
        for (mine, expected), (another, its) in permutations(column, 2):
            if expected.above(its):
                assert mine.value > another.value, f"{mine.value:g} is not above {another.value:g} as shown, in {found}"


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
