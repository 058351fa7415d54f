"""Small tables for terminals and notebooks. Every cell is text: HTML in it is shown, never run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap

WIDTH = 80  # width of tables in a terminal, in characters
NARROW = 24  # the smallest width to which text is wrapped
SHOWN = 10  # rows shown of a longer table

# Colours that are readable on white and on black.
DOTS = {"noise": "#3a8fc4", "scarcity": "#d9772b", "both": "#b0609a", "plain": "#8a9097"}
BAR = "rgba(58,143,196,.28)"
LINE = "1px solid rgba(128,128,128,.35)"
CELL = "padding:2px 8px;border:none;background:none"


@dataclass(frozen=True)
class Column:
    """A column of a table: a name above one cell for each row."""

    name: str
    cells: tuple[str, ...]
    left: bool = False  # align left, for words; numbers are aligned right
    bars: tuple[float, ...] = ()  # between 0 and 1 for each row, drawn behind the cell in a notebook
    dots: tuple[str, ...] = ()  # a key of DOTS for each row, drawn before the cell in a notebook

    def html(self, named: bool) -> list[str]:
        """The name, if the columns have names, and each cell, as HTML."""
        style = f"{CELL};text-align:{'left' if self.left else 'right'}"
        found = [f'<th style="{style};border-bottom:{LINE}">{escape(self.name)}</th>'] * named
        for row, cell in enumerate(self.cells):
            back, dot = "", ""
            if self.bars:
                end = f"{100 * min(max(self.bars[row], 0.0), 1.0):.0f}%"
                back = f";background:linear-gradient(90deg,{BAR} {end},transparent {end})"
            if self.dots:
                dot = f'<span aria-hidden="true" style="color:{DOTS[self.dots[row]]}">&#9679;</span> '
            found.append(f'<td style="{style}{back}">{dot}{escape(cell)}</td>')
        return found


@dataclass(frozen=True)
class Table:
    """A title, columns of equal length, and a note below."""

    title: str
    columns: tuple[Column, ...] = ()
    note: str = ""

    def text(self) -> str:
        """Text for a terminal of 80 columns; the last column is wrapped if it does not fit.

        Examples:
            >>> print(Table("Two", (Column("no.", ("0", "10")), Column("word", ("a", "b"), left=True))).text())
            Two
            no.  word
              0  a
             10  b
        """
        lines = wrap(self.title, WIDTH)
        widths = [max(map(len, (column.name, *column.cells))) for column in self.columns]
        start = sum(widths[:-1]) + 2 * len(widths[:-1])  # of the last column
        wrapped = bool(self.columns) and self.columns[-1].left and start <= WIDTH - NARROW
        names = tuple(column.name for column in self.columns)
        rows = list(zip(*(column.cells for column in self.columns), strict=True))
        for cells in [names, *rows] if any(names) else rows:
            padded = [
                cell.ljust(width) if column.left else cell.rjust(width)
                for cell, width, column in zip(cells, widths, self.columns, strict=True)
            ]
            line = "  ".join(padded).rstrip()
            if wrapped and len(line) > WIDTH:
                first, *rest = wrap(cells[-1], WIDTH - start)
                lines += [f"{line[:start]}{first}", *(" " * start + part for part in rest)]
            else:
                lines.append(cut(line))
        return "\n".join([*lines, *(part for line in self.note.splitlines() for part in wrap(line, WIDTH))])

    def html(self) -> str:
        """HTML for a notebook, light or dark: colours follow the page.

        Examples:
            >>> "<b>" in Table("<b>").html()
            False
        """
        named = any(column.name for column in self.columns)
        rows = zip(*(column.html(named) for column in self.columns), strict=True)
        body = "".join(f"<tr>{''.join(cells)}</tr>" for cells in rows)
        table = f'<table style="border-collapse:collapse;margin:4px 0">{body}</table>' if body else ""
        style = "opacity:.75;font-size:90%;white-space:pre-line"
        note = f'<div style="{style}">{escape(self.note)}</div>' if self.note else ""
        return f'<div style="font-size:90%"><div>{escape(self.title)}</div>{table}{note}</div>'


class Shown:
    """Prints as a table in a terminal and shows as one in a notebook."""

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return self._table().text()

    def _repr_html_(self) -> str:
        """A table for a notebook."""
        return self._table().html()


def number(value: float, digits: int = 3) -> str:
    """Format with a few digits; amounts from a thousand to a billion in full.

    Examples:
        >>> number(0.00123456), number(1234.5), number(5e5), number(1.0), number(0.0), number(2e12), number(842, 2)
        ('0.00123', '1,234', '500,000', '1', '0', '2e+12', '842')
    """
    return f"{value:,.0f}" if min(999.5, 10**digits - 0.5) <= abs(value) < 1e9 else f"{value:.{digits}g}"


def percent(share: float) -> str:
    r"""A share in per cent, with a non-breaking space before the sign.

    Examples:
        >>> percent(0.1234), percent(0.0123), percent(0.00001), percent(0.0)
        ('12\xa0%', '1.2\xa0%', 'less than 0.1\xa0%', '0\xa0%')
    """
    if 0 < share < 0.001:
        return "less than 0.1\xa0%"
    return f"{100 * share:.1f}\xa0%" if 0 < share < 0.1 else f"{100 * max(share, 0.0):.0f}\xa0%"


def numbers(values: Iterable[float]) -> tuple[str, ...]:
    """Format each with three digits."""
    return tuple(number(value) for value in values)


def count(amount: int, one: str, many: str | None = None) -> str:
    """An amount with its noun.

    Examples:
        >>> count(1, "output"), count(2000, "output"), count(2, "class", "classes")
        ('1 output', '2,000 outputs', '2 classes')
    """
    return f"{amount:,} {one if amount == 1 else many or one + 's'}"


def rows_shown(total: int, how: str) -> tuple[int, str]:
    """How many of `total` rows to show, and a note on how to see the rest.

    Examples:
        >>> rows_shown(3, "to_frame()"), rows_shown(12, "to_frame()")
        ((3, ''), (10, '... and 2 more: to_frame()'))
    """
    return (total, "") if total <= SHOWN else (SHOWN, f"... and {total - SHOWN:,} more: {how}")


def places(total: int) -> Column:
    """The column that numbers the rows."""
    return Column("no.", tuple(map(str, range(total))))


def listing(items: Sequence[object], most: int = 5) -> str:
    """The first few items, with commas.

    Examples:
        >>> listing([3, 1, 2], most=2)
        '3, 1, ...'
    """
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")


def cut(line: str, width: int = WIDTH) -> str:
    """Cut a line to at most `width` characters."""
    return line if len(line) <= width else line[: width - 3] + "..."
