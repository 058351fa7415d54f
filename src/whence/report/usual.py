"""Usual values in the columns of a table: the cells of a row that stand out, and impossible inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
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
FIRST_CELLS = 8  # cells of a row that are shown first: those furthest from the usual values
CENTRE = 0.005  # share of the training values of a column, on each side, left out of its range; at least one value
BEYOND, ACROSS_ZERO = 3.0, 0.5
"""A number is impossible if its distance from the nearest training value is this many times the range of its column.
Zero and below, in a column of positive numbers, from the second factor on: zeros often stand for missing values."""


@dataclass(frozen=True)
class UsualValues:
    """Usual values of each column of the training rows. Dates have none.

    Examples:
        >>> usual = UsualValues.of(frame_of({"age": list(range(20, 120)), "town": ["Ulm"] * 100}))
        >>> usual.standing_out(frame_of({"age": [130], "town": ["Ulm"]}))
        [([(0, 'larger than every training value')], [0, 1])]
        >>> usual.impossible(frame_of({"age": [1e6, 130], "town": ["Ulm", "Ulm"]}))
        ['age is 1,000,000, far from every training value: the nearest is 119', '']
    """

    numbers: Mapping[str, NDArray[np.float64]]  # sorted values of columns with more than two different numbers
    counts: Mapping[str, Counter[str]] = field(default_factory=dict)  # how often each text occurs in the other columns
    complete: frozenset[str] = frozenset()  # columns of numbers and dates in which every training row has a value

    @classmethod
    def of(cls, train: pandas.DataFrame) -> UsualValues:
        """From the training rows."""
        numbers: dict[str, NDArray[np.float64]] = {}
        counts: dict[str, Counter[str]] = {}
        complete = set()
        for name, column in train.items():
            values = numbers_of(column)
            if values is not None:
                known = np.sort(values[np.isfinite(values)])
                numbers |= {str(name): known} if len(np.unique(known)) > 2 else {}
            elif column.dtype.kind != "M":
                counts[str(name)] = Counter(map(cell_text, column))
            if str(name) not in counts and not column.isna().any():
                complete.add(str(name))
        return cls(numbers, counts, frozenset(complete))

    def standing_out(self, frame: pandas.DataFrame) -> list[tuple[list[tuple[int, str]], list[int]]]:
        """For each row the columns in which it is unusual, with the reason, and those to show first; rarest first."""
        below, above = np.ones((2, *frame.shape))  # shares of training values at most and at least as large
        for place, (name, column) in enumerate(frame.items()):
            values = numbers_of(column)
            if name in self.counts:
                counts = self.counts[str(name)]
                shares = [counts[cell_text(value)] / max(counts.total(), 1) for value in column]
                below[:, place] = above[:, place] = shares
            elif name in self.numbers and values is not None:
                known, there = self.numbers[str(name)], np.isfinite(values)
                below[there, place] = np.searchsorted(known, values[there], "right") / len(known)
                above[there, place] = 1.0 - np.searchsorted(known, values[there], "left") / len(known)
        found = []
        for low, high in zip(below, above, strict=True):
            shares = np.minimum(low, high)
            order = np.argsort(shares, kind="stable").tolist()
            unusual = [
                (place, self._reason(frame.columns[place], float(shares[place]), low[place] <= high[place]))
                for place in order[: int((shares <= RARE).sum())]
            ]
            found.append((unusual, order[:FIRST_CELLS]))
        return found

    def _reason(self, column: str, share: float, low: bool) -> str:
        if column in self.counts:
            return f"in {percent(share)} of the training rows" if share else "never seen in training"
        if share:
            return f"among the {'lowest' if low else 'highest'} {percent(share)}"
        return f"{'smaller' if low else 'larger'} than every training value"

    def impossible(self, frame: pandas.DataFrame) -> list[str]:
        """Why each row is an impossible input, or "".

        A number is far from the training values, or a value is missing that every training row has, or all are.
        """
        reasons = self.far(frame)
        lacking = frame.isna()
        for name in frame.columns.intersection(list(self.complete)):
            for row in np.flatnonzero(lacking[name]):
                reasons[row] = reasons[row] or f"{name} has no value that can be read; every training row has one"
        for row in np.flatnonzero(lacking.all(axis=1)):
            reasons[row] = "no value in any column"
        return reasons

    def far(self, frame: pandas.DataFrame) -> list[str]:
        """Which number of each row is far from the training values of its column, or ""."""
        reasons = [""] * len(frame)
        for name, column in frame.items():
            known, found = self.numbers.get(str(name), np.empty(0)), numbers_of(column)
            edge = max(1, math.ceil(CENTRE * len(known)))
            if found is None or len(known) <= 2 * edge + 1:
                continue
            low, high = known[edge], known[-1 - edge]
            for row in np.flatnonzero((found < low) | (found > high)):
                reasons[row] = reasons[row] or _far(str(name), float(found[row]), known, low, high)
        return reasons


def _far(name: str, value: float, known: NDArray[np.float64], low: float, high: float) -> str:
    """Why a value outside the range of its column is impossible, or ""."""
    at = np.searchsorted(known, value, "right") if value < low else np.searchsorted(known, value, "left") - 1
    nearest = float(known[at])
    across = value <= 0 < low or high < 0 <= value
    if abs(nearest - value) < (ACROSS_ZERO if across else BEYOND) * (high - low) or high <= low:
        return ""
    return f"{name} is {cell_text(value)}, far from every training value: the nearest is {cell_text(nearest)}"


def frame_of(table: Any) -> pandas.DataFrame:
    """A data frame with rows numbered from zero, from a data frame, a mapping of columns, or an array of two axes."""
    import pandas  # an extra: only tables need it

    if isinstance(table, Mapping):
        columns = {str(name): pandas.Series(_on_cpu(values)).reset_index(drop=True) for name, values in table.items()}
        if len(lengths := {len(column) for column in columns.values()}) > 1:
            raise InputError(f"expected columns of one length, got {', '.join(map(str, sorted(lengths)))}.")
        return pandas.DataFrame(columns)
    if not isinstance(table, pandas.DataFrame):
        values = np.asarray(_on_cpu(table))
        if values.ndim != 2:
            raise ShapeError(
                f"expected a table as a data frame, a dict of columns or an array (rows, columns), got {values.shape}."
            )
        table = pandas.DataFrame(values).add_prefix("x")
    return table.set_axis(table.columns.map(str), axis=1).reset_index(drop=True)


def rows_as_text(frame: pandas.DataFrame) -> list[tuple[str, ...]]:
    """The cells of each row, as text."""
    return list(zip(*(map(cell_text, column) for _, column in frame.items()), strict=True))


def numbers_of(column: pandas.Series) -> NDArray[np.float64] | None:
    """A column of numbers, with NaN for missing ones; `None` for other columns."""
    import pandas  # an extra: only tables need it

    numeric = pandas.api.types.is_numeric_dtype(column)
    return np.asarray(column.to_numpy(dtype=np.float64, na_value=np.nan)) if numeric else None


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
