"""What is printed: text for people on a terminal, or one JSON object for scripts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from whence.display import number


class Output:
    """Prints for people, or gathers for scripts.

    Args:
        as_json: print nothing but one JSON object, at the end.
    """

    def __init__(self, as_json: bool) -> None:
        """Remember for whom it is."""
        self.as_json = as_json
        self.console = Console(quiet=as_json, highlight=False)

    def fact(self, name: str, words: str) -> None:
        """One line of a summary: a name and what is to be said."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold", width=9)
        grid.add_column(overflow="fold")
        grid.add_row(name, Text(words))
        self.console.print(grid)

    def say(self, words: str = "") -> None:
        """A paragraph."""
        self.console.print(escape(words))

    def head(self, words: str) -> None:
        """A line above a table."""
        self.console.print(f"\n[bold]{escape(words)}[/]")

    def rows(self, heads: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[int] = ()) -> None:
        """A table without lines."""
        table = Table(box=None, pad_edge=False, show_header=any(heads), header_style="dim", padding=(0, 2, 0, 0))
        for place, name in enumerate(heads):
            table.add_column(name, justify="right" if place in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        self.console.print(Padding(table, (0, 0, 0, 2)))

    def file(self, name: str, path: Path) -> None:
        """Where something was written; never broken into two lines, so that it can be copied."""
        self.console.print(f"[bold]{name:<9}[/]  {escape(str(path))}", soft_wrap=True)

    def finish(self, content: Any) -> None:
        """The JSON object, where it was asked for."""
        if self.as_json:
            print(json.dumps(plain(content), ensure_ascii=False, indent=1))


def plain(value: Any) -> Any:
    """What JSON can hold: no NaN, no arrays, no paths.

    Examples:
        >>> plain({"a": float("nan"), "b": (1, Path("x"))})
        {'a': None, 'b': [1, 'x']}
    """
    if isinstance(value, dict):
        return {str(name): plain(item) for name, item in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def figure(value: float) -> str:
    """A number for people.

    Examples:
        >>> figure(0.81234), figure(48123.4), figure(3.0), figure(0.000123)
        ('0.8123', '48,123', '3', '0.000123')
    """
    return number(value, 4) if math.isfinite(value) else "-"


def percent(share: float) -> str:
    """A share for people.

    Examples:
        >>> percent(0.051), percent(0.004)
        ('5 %', '0.4 %')
    """
    return f"{100 * share:.0f} %" if share >= 0.01 or share == 0 else f"{100 * share:.1f} %"
