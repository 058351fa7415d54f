"""Usual values in the columns of a table: the cells of a row that stand out, and impossible inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from whence.display import number, percent
from whence.errors import InputError, ShapeError

if TYPE_CHECKING:
    import pandas

RARE = 0.025  # share of training rows below which a value counts as unusually small, large or rare
CENTRE = 0.005  # share of the training values of a column, on each side, left out of its range; at least one value
BEYOND, ACROSS_ZERO = 3.0, 0.5
"""A number is impossible if its distance from the nearest training value is this many times the range of its column.
Zero and below, in a column of positive numbers, from the second factor on: zeros often stand for missing values."""
CONSTANT = 0.001
"""A row with one number in all its columns is impossible if at most this share of training rows are like that."""


@dataclass(frozen=True)
class UsualValues:
    """Usual values of each column of the training rows.

    Examples:
        >>> usual = UsualValues.of(frame_of({"age": list(range(20, 120)), "town": ["Ulm"] * 100}))
        >>> asked = frame_of({"age": [130], "town": ["Ulm"]})
        >>> usual.unusual(asked, usual.tails(asked)[:, 0])
        [(0, 'larger than every training value')]
        >>> usual.impossible(frame_of({"age": [1e6, 130], "town": ["Ulm", "Ulm"]}))
        ['age is 1,000,000, far from every training value: the nearest is 119', '']
    """

    numbers: Mapping[str, NDArray[np.float64]]  # sorted values of columns with more than two different numbers or dates
    counts: Mapping[str, Counter[str]]  # how often each value occurs in the other columns
    dates: frozenset[str]  # columns of dates
    constant: float  # share of rows with the same number in all columns of numbers

    @classmethod
    def of(cls, train: pandas.DataFrame) -> UsualValues:
        """From the training rows."""
        values = {str(name): ordered_values(column) for name, column in train.items()}
        known = {name: np.sort(one[np.isfinite(one)]) for name, one in values.items() if one is not None}
        dates = frozenset(str(name) for name, column in train.items() if column.dtype.kind == "M" and name in known)
        return cls(
            {name: one for name, one in known.items() if len(np.unique(one)) > 2},
            {name: Counter(map(cell_text, train[name])) for name, one in values.items() if one is None},
            dates,
            float(np.mean(_constant_rows(values, dates, len(train)))) if len(train) else 0.0,
        )

    def measured(self) -> dict[str, NDArray[np.float64]]:
        """The sorted values of the columns of numbers, without those of dates."""
        return {name: values for name, values in self.numbers.items() if name not in self.dates}

    def tails(self, frame: pandas.DataFrame) -> NDArray[np.float64]:
        """(2, rows, columns) shares of training values at most and at least as large; for categories, equal ones."""
        found = np.ones((2, len(frame), len(frame.columns)))
        for place, (name, column) in enumerate(frame.items()):
            values = ordered_values(column)
            if name in self.counts:
                counts = self.counts[str(name)]
                found[:, :, place] = [counts[cell_text(value)] / max(counts.total(), 1) for value in column]
            elif name in self.numbers and values is not None and (name in self.dates) == (column.dtype.kind == "M"):
                known, there = self.numbers[str(name)], np.isfinite(values)
                found[0, there, place] = np.searchsorted(known, values[there], "right") / len(known)
                found[1, there, place] = 1.0 - np.searchsorted(known, values[there], "left") / len(known)
        return found

    def unusual(self, frame: pandas.DataFrame, tails: NDArray[np.float64]) -> list[tuple[int, str]]:
        """Columns in which a row with such tails (2, columns) is unusual, the rarest first, with the reason."""
        below, above = tails
        shares = np.minimum(below, above)
        found = []
        for place in np.argsort(shares, kind="stable")[: int((shares <= RARE).sum())].tolist():
            share, low = float(shares[place]), below[place] <= above[place]
            if frame.columns[place] in self.counts:
                reason = f"in {percent(share)} of the training rows" if share else "never seen in training"
            elif share:
                reason = f"among the {'lowest' if low else 'highest'} {percent(share)}"
            else:
                reason = f"{'smaller' if low else 'larger'} than every training value"
            found.append((place, reason))
        return found

    def impossible(self, frame: pandas.DataFrame) -> list[str]:
        """Why each row is an impossible input, or "": far from training values, one number throughout, or no value."""
        values = {str(name): ordered_values(column) for name, column in frame.items()}
        reasons = [""] * len(frame)
        for name, known in self.measured().items():
            found = values.get(name)
            edge = max(1, math.ceil(CENTRE * len(known)))
            if found is None or len(known) <= 2 * edge + 1:
                continue
            low, high = known[edge], known[-1 - edge]
            for row in np.flatnonzero((found < low) | (found > high)):
                reasons[row] = reasons[row] or _far(name, float(found[row]), known, low, high)
        if self.constant <= CONSTANT:
            for row in np.flatnonzero(_constant_rows(values, self.dates, len(frame))):
                reasons[row] = "the same number in all columns"
        for row in np.flatnonzero(frame.isna().all(axis=1).to_numpy()):
            reasons[row] = "no value in any column"
        return reasons


def _far(name: str, value: float, known: NDArray[np.float64], low: float, high: float) -> str:
    """Why a value outside the range of its column is impossible, or ""."""
    at = np.searchsorted(known, value, "right") if value < low else np.searchsorted(known, value, "left") - 1
    nearest = float(known[at])
    across = value <= 0 < low or high < 0 <= value
    if abs(nearest - value) < (ACROSS_ZERO if across else BEYOND) * (high - low) or high <= low:
        return ""
    return f"{name} is {cell_text(value)}, far from every training value: the nearest is {cell_text(nearest)}"


def _constant_rows(values: Mapping[str, Any], dates: frozenset[str], rows: int) -> NDArray[np.bool_]:
    """(rows,) whether a row has the same number in all of at least three columns of numbers."""
    numbers = [one for name, one in values.items() if one is not None and name not in dates]
    if len(numbers) < 3:
        return np.zeros(rows, dtype=bool)
    stacked = np.stack(numbers)
    same: NDArray[np.bool_] = (stacked == stacked[0]).all(0)
    return same


def frame_of(table: Any) -> pandas.DataFrame:
    """A data frame with rows numbered from zero, from a data frame, a mapping of columns, or an array of two axes."""
    import pandas  # an extra: only tables need it

    if isinstance(table, pandas.DataFrame):
        return table.set_axis([str(name) for name in table.columns], axis=1).reset_index(drop=True)
    if isinstance(table, Mapping):
        columns = {str(name): pandas.Series(_on_cpu(values)).reset_index(drop=True) for name, values in table.items()}
        lengths = [len(column) for column in columns.values()]
        if len(set(lengths)) > 1:
            raise InputError(f"expected columns of one length, got {', '.join(map(str, lengths))}.")
        return pandas.DataFrame(columns)
    values = np.asarray(_on_cpu(table))
    if values.ndim != 2:
        raise ShapeError(
            f"expected a table as a data frame, a dict of columns or an array (rows, columns), got {values.shape}."
        )
    return pandas.DataFrame(values, columns=[f"x{place}" for place in range(values.shape[1])])


def rows_as_text(frame: pandas.DataFrame) -> list[tuple[str, ...]]:
    """The cells of each row, as text."""
    return list(zip(*(map(cell_text, column) for _, column in frame.items()), strict=True))


def ordered_values(column: pandas.Series) -> NDArray[np.float64] | None:
    """A column of numbers, or of dates in seconds, with NaN for missing ones; `None` for other columns."""
    import pandas  # an extra: only tables need it

    if pandas.api.types.is_numeric_dtype(column):
        return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan))
    if pandas.api.types.is_datetime64_dtype(column):
        seconds = column.to_numpy().astype("datetime64[s]").astype(np.float64)
        return np.where(column.isna().to_numpy(), np.nan, seconds)
    return None


def _on_cpu(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def cell_text(value: Any) -> str:
    """A cell as text."""
    import pandas  # an extra: only tables need it

    if pandas.api.types.is_scalar(value) and pandas.isna(value):
        return "missing"
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return f"{float(value):.5g}" if abs(float(value)) < 1e5 else number(float(value), 5)  # 2024 may be a year
    return str(value).removesuffix(" 00:00:00")
