"""What is odd about the columns of a table: copies of each other or of the target, leaks, and ids that repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy

from whence.tabular.columns import IDENTIFIER, UNIT, Column, ExcludedColumn
from whence.tabular.files import TextTable
from whence.tabular.target import Target

LEAK = 0.995
"""Share of the target's variance, or of what the most frequent class gets wrong, that one column alone explains."""

FEWEST = 10
"""Different values of an id that repeats: a column with fewer is a category."""

MOST_ROWS, MIN_KNOWN = 5_000, 20
"""That are looked at for leaks, evenly spaced, and that must have a value."""


def drop_copies(
    found: Sequence[Column | ExcludedColumn], table: TextTable, target: str
) -> list[Column | ExcludedColumn]:
    """Leave out columns whose cells are those of the target, or of a column before them."""
    first = {tuple(map(_bare, table.columns[target])): f"a copy of the target {target!r}"}
    kept: list[Column | ExcludedColumn] = []
    for one in found:
        if not isinstance(one, ExcludedColumn):
            cells = tuple(map(_bare, table.columns[one.name]))
            if cells in first:
                one = ExcludedColumn(one.name, first[cells])
            else:
                first[cells] = f"the same values as {one.name!r}"
        kept.append(one)
    return kept


def _bare(cell: str) -> float | str:
    """Equal for 1 and 1.0."""
    try:
        return float(cell)
    except ValueError:
        return cell.strip()


def suspicious_columns(columns: Sequence[Column], table: TextTable, target: Target, grouped: bool) -> list[str]:
    """Notes on columns that may give the target away, and on ids that repeat where rows are not grouped."""
    values = target.parse(table.columns[target.name])
    some = numpy.linspace(0, len(values) - 1, min(MOST_ROWS, len(values))).round().astype(int)
    notes = []
    for column in columns:
        cells = table.columns[column.name]
        share = explained_alone(column.features(cells[some])[:, 0], values[some], bool(target.classes))
        if share > LEAK and len(columns) > 1:
            notes.append(
                f"{column.name!r} alone predicts {target.name!r} nearly perfectly: if it is not known before "
                f"{target.name!r} is, it is a leak; leave it out with --ignore {column.name!r}"
            )
        different = len(set(cells))
        if not grouped and FEWEST <= different <= len(cells) / 2 and _looks_like_id(column, cells[some]):
            notes.append(
                f"{column.name!r} looks like an id, and repeats ({different:,} different ones in {len(cells):,} rows): "
                "where rows of one id are alike, some are trained on and others held out, and scores are too good; "
                f"--groups {column.name!r} keeps them together"
            )
    return notes


def _looks_like_id(column: Column, cells: Any) -> bool:
    """By its name; numbers must be whole."""
    named = any(names.search(column.name) for names in (IDENTIFIER, UNIT)) and column.kind != "date"
    return named and (column.kind == "category" or bool((numpy.nan_to_num(column.features(cells)) % 1 == 0).all()))


def explained_alone(feature: Any, values: Any, classes: bool) -> float:
    """How much of the target one column explains: the mean of the others with the same value, or of both neighbours.

    One is all of the variance, or of the errors that the most frequent class makes; zero or less is none.

    Examples:
        >>> x = numpy.arange(100.0)
        >>> round(explained_alone(x, x**2, False), 3), explained_alone(x % 3, x, False) < 0
        (1.0, True)
    """
    known = numpy.isfinite(feature)
    if known.sum() < MIN_KNOWN or known.mean() < 0.5:
        return 0.0
    feature, values = feature[known], values[known]
    order = numpy.lexsort((numpy.random.default_rng(0).random(len(feature)), feature))
    ordered = values[order]
    _, codes, counts = numpy.unique(feature, return_inverse=True, return_counts=True)
    if classes:
        ordered, values = numpy.eye(int(values.max()) + 1)[ordered.astype(int)], values.astype(int)
    else:
        ordered = ordered[:, None]
    near = numpy.empty_like(ordered)
    near[order] = (numpy.roll(ordered, 1, 0) + numpy.roll(ordered, -1, 0)) / 2
    near[order[0]], near[order[-1]] = ordered[1], ordered[-2]
    own = numpy.empty_like(ordered)
    own[order] = ordered
    sums = numpy.stack([numpy.bincount(codes, column) for column in own.T], axis=1)
    several = counts[codes] > 1
    near[several] = ((sums[codes] - own) / numpy.maximum(counts[codes] - 1, 1)[:, None])[several]
    if classes:
        wrong, base = (near.argmax(1) != values).mean(), 1 - numpy.bincount(values).max() / len(values)
        return float(1 - wrong / base) if base > 0 else 0.0
    spread = values.var()
    return float(1 - ((own - near) ** 2).mean() / spread) if spread > 0 else 0.0
