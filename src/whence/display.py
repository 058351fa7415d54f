"""Small tables for terminals and notebooks. Every cell is text: HTML in it is shown, never run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

WIDTH = 80
"""Columns of a terminal that tables keep to."""

NARROW = 24
"""The least width that text is wrapped to."""

SHOWN = 10
"""Rows that are shown of a longer table."""

# Colours of the sources that read on white and on black alike.
DOTS = {"noise": "#3a8fc4", "scarcity": "#d9772b", "both": "#b0609a", "plain": "#8a9097"}
BAR = "rgba(58,143,196,.28)"
LINE = "1px solid rgba(128,128,128,.35)"
CELL = "padding:2px 8px;border:none;background:none"

LARGE, HUGE = 999.5, 1e9
"""Amounts between these are written in full."""


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes:
        name: stands above it.
        cells: one text a row.
        left: whether words start at the left; numbers end at the right.
        bars: a number between 0 and 1 for each row, drawn as a bar behind the cell in a notebook.
        dots: a tone for each row ("noise", "scarcity", "both", "plain"), drawn as a dot before the cell in a notebook.
    """

    name: str
    cells: tuple[str, ...]
    left: bool = False
    bars: tuple[float, ...] = ()
    dots: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A title, columns of equal length, and a note below."""

    title: str
    columns: tuple[Column, ...] = ()
    note: str = ""

    def text(self) -> str:
        """For a terminal of 80 columns; the last column goes on below where it does not fit.

        Examples:
            >>> print(Table("Two", (Column("no.", ("0", "10")), Column("word", ("a", "b"), left=True))).text())
            Two
            no.  word
              0  a
             10  b
        """
        lines = wrap(self.title, WIDTH)
        widths = [max(map(len, (column.name, *column.cells))) for column in self.columns]
        named = any(column.name for column in self.columns)
        for row in range(-1 if named else 0, len(self.columns[0].cells) if self.columns else -1):
            cells = [column.name if row < 0 else column.cells[row] for column in self.columns]
            lines += self._row(cells, widths)
        notes = [part for line in self.note.splitlines() for part in wrap(line, WIDTH)]
        return "\n".join([*lines, *notes])

    def _row(self, cells: list[str], widths: list[int]) -> list[str]:
        padded = [
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        ]
        line = "  ".join(padded).rstrip()
        start = len("  ".join(padded[:-1])) + 2
        if len(line) <= WIDTH or not self.columns[-1].left or start > WIDTH - NARROW:
            return [cut(line)]
        first, *rest = wrap(cells[-1], WIDTH - start)
        return [f"{line[:start]}{first}", *(" " * start + part for part in rest)]

    def html(self) -> str:
        """For a notebook, light or dark: colours are those of the page around it.

        Examples:
            >>> "<b>" in Table("<b>").html()
            False
        """
        head = "".join(_cell("th", column, column.name) for column in self.columns)
        rows = "".join(
            f"<tr>{''.join(_cell('td', column, column.cells[row], row) for column in self.columns)}</tr>"
            for row in range(len(self.columns[0].cells) if self.columns else 0)
        )
        named = any(column.name for column in self.columns)
        body = (f"<thead><tr>{head}</tr></thead>" if named else "") + (f"<tbody>{rows}</tbody>" if rows else "")
        table = f'<table style="border-collapse:collapse;margin:4px 0">{body}</table>' if body else ""
        note = (
            f'<div style="opacity:.75;font-size:90%;white-space:pre-line">{escape(self.note)}</div>'
            if self.note
            else ""
        )
        return f'<div style="font-size:90%"><div>{escape(self.title)}</div>{table}{note}</div>'


class Shown:
    """What prints as a table in a terminal and shows as one in a notebook."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        """A table of at most 80 columns."""
        return self._table().text()

    def _repr_html_(self) -> str:
        """A table for a notebook."""
        return self._table().html()


def number(value: float, digits: int = 3) -> str:
    """A few digits, as short as may be; large amounts in full, for they are read as amounts.

    Examples:
        >>> number(0.00123456), number(1234.5), number(5e5), number(1.0), number(0.0), number(2e12)
        ('0.00123', '1,234', '500,000', '1', '0', '2e+12')
    """
    return f"{value:,.0f}" if LARGE <= abs(value) < HUGE else f"{value:.{digits}g}"


def numbers(values: Iterable[float]) -> tuple[str, ...]:
    """Three digits each."""
    return tuple(number(value) for value in values)


def count(amount: int, one: str, many: str | None = None) -> str:
    """An amount with its noun.

    Examples:
        >>> count(1, "output"), count(2000, "output"), count(2, "class", "classes")
        ('1 output', '2,000 outputs', '2 classes')
    """
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def rows_shown(total: int, how: str) -> tuple[int, str]:
    """How many rows to show of so many, and a note that tells how to see the rest.

    Examples:
        >>> rows_shown(3, "to_frame()"), rows_shown(12, "to_frame()")
        ((3, ''), (10, '... and 2 more: to_frame()'))
    """
    return (total, "") if total <= SHOWN else (SHOWN, f"... and {total - SHOWN:,} more: {how}")


def places(total: int) -> Column:
    """The column that numbers the rows."""
    return Column("no.", tuple(map(str, range(total))))


def listing(items: Sequence[object], most: int = 5) -> str:
    """The first few, with commas.

    Examples:
        >>> listing([3, 1, 2], most=2)
        '3, 1, ...'
    """
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def cut(line: str, width: int = WIDTH) -> str:
    """A line of at most so many characters.

    Examples:
        >>> cut("a long line", 7)
        'a lo...'
    """
    return line if len(line) <= width else line[: width - 3] + "..."


def _cell(tag: str, column: Column, text: str, row: int | None = None) -> str:
    style = f"{CELL};text-align:{'left' if column.left else 'right'}"
    dot = ""
    if row is None:
        style += f";border-bottom:{LINE}"
    else:
        if column.bars:
            share = 100 * min(max(column.bars[row], 0.0), 1.0)
            style += f";background:linear-gradient(90deg,{BAR} {share:.0f}%,transparent {share:.0f}%)"
        if column.dots:
            dot = f'<span aria-hidden="true" style="color:{DOTS[column.dots[row]]}">&#9679;</span> '
    return f'<{tag} style="{style}">{dot}{escape(text)}</{tag}>'
