"""Find out what kind each column is, which are left out, and why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy

from whence.tabular.columns import DAY, FEWEST, MOST_LEVELS, WEEK, YEAR, Category, Column, Date, Number, Scale, label
from whence.tabular.texts import MOSTLY, date_format, missing, number_style, read_dates

MOSTLY_MISSING = 0.98
"""Columns with fewer values than the rest of this are left out."""

_IDENTIFIER = re.compile(r"(?i:(^|[_\s-])(id|uuid|guid|key|index|rowid|rownum|identifier)$)|[a-z](Id|ID|Key)$")


class Left(NamedTuple):
    """A column that is left out, and why; identifiers are still written beside the results."""

    name: str
    reason: str
    identifier: bool = False


def settle(name: str, cells: Any, notes: list[str], rows: Any = None) -> Column | Left:
    """The kind of a column by the cells of the training rows.

    Args:
        name: of the column.
        cells: of the training rows, as text.
        notes: is told what was guessed.
        rows: number of each row in the file, to notice columns that only repeat it.
    """
    gaps = missing(cells)
    filled = cells[~gaps]
    counts = Counter(cell.strip() for cell in filled)
    if not len(filled):
        return Left(name, "no value in any row")
    if gaps.mean() > MOSTLY_MISSING:
        return Left(name, f"no value in {gaps.mean():.1%} of the rows")
    if len(counts) == 1 and not gaps.any():
        return Left(name, f"the same value in all rows ({_short(next(iter(counts)))})")
    style, values = number_style(filled)
    readable = numpy.isfinite(values)
    if readable.mean() >= MOSTLY:
        if readable.all() and _counts_rows(name, values, None if rows is None else rows[~gaps]):
            return Left(name, "numbers the rows", identifier=True)
        return _number(name, style, filled, values, readable, bool(gaps.any()), notes)
    format_ = date_format(filled)
    if format_ is not None:
        return _date(name, format_, filled, bool(gaps.any()), notes)
    if readable.mean() >= 0.5:
        notes.append(
            f"{name!r} mixes numbers ({readable.mean():.0%}) and text (such as {_examples(filled[~readable])}); "
            "taken as categories"
        )
    return _category(name, cells, counts, len(filled))


def encoded(columns: list[Column], cells: Mapping[str, Any]) -> Any:
    """(m, inputs) all columns, side by side, as float32."""
    parts = [column.encode(cells[column.name]) for column in columns]
    return numpy.concatenate(parts, axis=1).astype(numpy.float32)


def styles(columns: Iterable[Column]) -> list[str]:
    """How numbers were read that are not written as in Python, in one line for each way."""
    found: dict[str, list[str]] = {}
    for column in columns:
        if isinstance(column, Number) and column.style != "plain":
            found.setdefault(column.style + " separator" * (column.style == "thousands"), []).append(repr(column.name))
    return [
        f"{names[0]} was read with a {style}"
        if len(names) == 1
        else f"{len(names)} columns were read with a {style}: {', '.join(names[:3])}" + ", ..." * (len(names) > 3)
        for style, names in found.items()
    ]


def _number(name: str, style: str, filled: Any, values: Any, readable: Any, gaps: bool, notes: list[str]) -> Column:
    strange = filled[~readable]
    whole = values[readable]
    if len(strange):
        notes.append(
            f"{name!r} holds text in {len(strange)} of {len(filled)} cells (such as {_examples(strange)}); "
            "taken as missing numbers"
        )
    return Number(name, style, Scale.of(whole), gaps or bool(len(strange)))


def _counts_rows(name: str, values: Any, rows: Any) -> bool:
    """Whether whole numbers, all different, only number the rows: by name, without a gap, or as the file does."""
    if not (values == numpy.round(values)).all() or len(values) < 5 or len(numpy.unique(values)) < len(values):
        return False
    dense = values.max() - values.min() == len(values) - 1
    in_order = rows is not None and numpy.ptp(values - rows) == 0
    return bool(dense or in_order or _IDENTIFIER.search(name))


def _date(name: str, format_: str, filled: Any, gaps: bool, notes: list[str]) -> Column:
    days = read_dates(filled, format_)
    known = days[numpy.isfinite(days)]
    if format_.startswith("%m/%d") and numpy.isfinite(read_dates(filled, format_.replace("%m/%d", "%d/%m"))).all():
        notes.append(f"{name!r} could be month/day or day/month; month/day was taken")
    if len(known) < len(days):
        strange = filled[~numpy.isfinite(days)]
        notes.append(f"{name!r} holds {len(strange)} cells that are no dates (such as {_examples(strange)})")
    span = float(known.max() - known.min())
    cycles = [cycle for cycle in (YEAR, WEEK) if span >= cycle and _varies(known, cycle)]
    if bool((known % 1 != 0).any()):
        cycles.append(DAY)
    return Date(name, format_, Scale.of(known), gaps or len(known) < len(days), tuple(cycles))


def _varies(days: Any, cycle: float) -> bool:
    return bool(numpy.ptp(days % cycle) > 0.01 * cycle)


def _category(name: str, cells: Any, counts: Counter[str], filled: int) -> Column | Left:
    if len(counts) > 20 and len(counts) > 0.5 * filled:
        alike = "a different text in nearly every row" if len(counts) > 0.9 * filled else "too many different texts"
        return Left(name, f"{alike} ({len(counts):,})", identifier=len(counts) > 0.9 * filled)
    levels = Counter(label(cell) for cell in cells)
    fewest = FEWEST if len(cells) >= 100 else 1
    frequent = [level for level, count in levels.most_common(MOST_LEVELS) if count >= fewest]
    if len(levels) == 1:
        return Left(name, f"the same value in all rows ({_short(next(iter(levels)))})")
    return Category(name, tuple(sorted(frequent)), len(frequent) < len(levels))


def _examples(cells: Any) -> str:
    return ", ".join(_short(cell) for cell in list(dict.fromkeys(cells))[:3])


def _short(cell: str) -> str:
    bare = " ".join(cell.split())
    return repr(bare if len(bare) <= 24 else bare[:21] + "...")
