"""Tables of results: printed, and written as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A title, columns, and rows of text.

    Examples:
        >>> table = Table("Squares", ("n", "n^2"))
        >>> table.add("2", "4")
        >>> print(table)
        Squares
        n   n^2
        2   4
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)

    def add(self, *cells: str) -> None:
        """A row."""
        if len(cells) != len(self.columns):
            raise ValueError(f"expected {len(self.columns)} cells, got {len(cells)} in {self.title!r}.")
        self.rows.append(cells)

    def __str__(self) -> str:
        """For a terminal."""
        lines = [self.columns, *self.rows]
        widths = [max(len(line[place]) for line in lines) for place in range(len(self.columns))]
        shown = ["   ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([self.title, *(line.rstrip() for line in shown)])

    def markdown(self) -> str:
        """For a page."""
        lines = [self.columns, ("---",) * len(self.columns), *self.rows]
        return "\n".join([f"**{self.title}**", "", *(f"| {' | '.join(line)} |" for line in lines)])


def mean_and_sd(values: Iterable[float], digits: int = 3) -> str:
    """Mean and standard deviation of runs.

    Examples:
        >>> mean_and_sd([0.9, 1.0], digits=2)
        '0.95±0.07'
    """
    kept = list(values)
    spread = f"±{statistics.stdev(kept):.{digits}f}" if len(kept) > 1 else ""
    return f"{statistics.fmean(kept):.{digits}f}{spread}"


def write_tables(path: Path, tables: list[Table]) -> list[Path]:
    """Print tables, and write them to a file."""
    for table in tables:
        print(table, end="\n\n")
    path.write_text("\n\n".join(table.markdown() for table in tables) + "\n", encoding="utf-8")
    return [path]
