"""Put tables of results into a page: `python -m whence_paper.pages docs/reproduction.md results/paper`.

Between `<!-- NAME -->` and `<!-- end -->`, or `<!-- /NAME -->`, stands what `NAME.md` of the folder has;
`<!-- NAME 0 2 -->` takes the tables of these numbers only.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

PLACE = re.compile(
    r"<!-- (?P<name>[\w-]+)(?P<which>(?: \d+)*) -->\n(?P<old>.*?)<!-- (?P<end>end|/(?P=name)) -->", re.DOTALL
)


def filled(page: str, folder: Path) -> str:
    """The page with the tables as they are in a folder now."""

    def put(found: re.Match[str]) -> str:
        tables = (folder / f"{found['name']}.md").read_text(encoding="utf-8").strip().split("\n\n**")
        tables = [tables[0], *(f"**{table}" for table in tables[1:])]
        wanted = [int(number) for number in found["which"].split()] or range(len(tables))
        text = "\n\n".join(tables[number] for number in wanted)
        return f"<!-- {found['name']}{found['which']} -->\n\n{text}\n\n<!-- {found['end']} -->"

    return PLACE.sub(put, page)


def main(arguments: list[str] | None = None) -> None:
    """Rewrite a page."""
    page, folder = map(Path, sys.argv[1:] if arguments is None else arguments)
    page.write_text(filled(page.read_text(encoding="utf-8"), folder), encoding="utf-8")


if __name__ == "__main__":
    main()
