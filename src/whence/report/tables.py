"""Inputs as rows of a table, and what in a row is unusual beside the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.report.text import number, percent

if TYPE_CHECKING:
    import pandas

RARE = 0.025
"""Share of training rows below which a value counts as unusually small, large or rare."""


def frame_of(table: Any) -> pandas.DataFrame:
    """A data frame with rows numbered from zero, from a data frame, a mapping of columns, or an array of two axes.

    Examples:
        >>> frame_of({"age": [31, 45], "town": ["Ulm", "Bonn"]}).columns.tolist()
        ['age', 'town']
    """
    import pandas  # an extra: only tables need it

    if isinstance(table, pandas.DataFrame):
        return table.set_axis([str(name) for name in table.columns], axis=1).reset_index(drop=True)
    if isinstance(table, Mapping):
        columns = {str(name): pandas.Series(_on_cpu(values)).reset_index(drop=True) for name, values in table.items()}
        if len({len(column) for column in columns.values()}) > 1:
            lengths = ", ".join(str(len(column)) for column in columns.values())
            raise InputError(f"expected columns of one length, got {lengths}.")
        return pandas.DataFrame(columns)
    values = np.asarray(_on_cpu(table))
    if values.ndim != 2:
        raise ShapeError(
            f"expected a table as a data frame, a dict of columns or an array (rows, columns), got {values.shape}."
        )
    return pandas.DataFrame(values, columns=[f"x{place}" for place in range(values.shape[1])])


def rows_as_text(frame: pandas.DataFrame, rows: Sequence[int]) -> list[tuple[str, ...]]:
    """The cells of some rows, as text.

    Examples:
        >>> rows_as_text(frame_of({"age": [31, 45], "town": ["Ulm", None]}), [1])
        [('45', 'missing')]
    """
    chosen = frame.iloc[list(rows)]
    return list(zip(*(map(_cell_text, column) for _, column in chosen.items()), strict=True))


@dataclass(frozen=True)
class UsualValues:
    """What is usual in each column of the training rows.

    Examples:
        >>> usual = UsualValues.of(frame_of({"age": list(range(100)), "town": ["Ulm"] * 100}))
        >>> usual.unusual(frame_of({"age": [400], "town": ["Ulm"]}), 0)
        [(0, 'larger than every training value')]
    """

    numbers: Mapping[str, pandas.Series]  # columns of numbers or dates, of which more than two differ
    counts: Mapping[str, Counter[str]]  # how often each value occurs in the other columns

    @classmethod
    def of(cls, train: pandas.DataFrame) -> UsualValues:
        """From the training rows."""
        columns = dict(train.items())
        ordered = {str(name): column.dropna() for name, column in columns.items() if _order(column)}
        return cls(
            {name: column for name, column in ordered.items() if column.nunique() > 2},
            {str(name): Counter(map(_cell_text, column)) for name, column in columns.items() if not _order(column)},
        )

    def unusual(self, frame: pandas.DataFrame, row: int) -> list[tuple[int, str]]:
        """Columns in which a row is unusual, the rarest first, with the reason."""
        import pandas  # an extra: only tables need it

        found = []
        for place, (name, column) in enumerate(frame.items()):
            value = column.iat[row]
            share, reason = 1.0, ""
            if name in self.counts:
                counts = self.counts[str(name)]
                share = counts[_cell_text(value)] / max(counts.total(), 1)
                reason = f"in {percent(share)} of the training rows" if share else "never seen in training"
            elif name in self.numbers and _order(column) == _order(self.numbers[str(name)]) and not pandas.isna(value):
                share, reason = _extremity(value, self.numbers[str(name)])
            if share <= RARE:
                found.append((share, place, reason))
        return [(place, reason) for _, place, reason in sorted(found, key=lambda one: one[0])]


def _extremity(value: Any, known: pandas.Series) -> tuple[float, str]:
    """The share of training values at least as far out, on the side where they are fewer."""
    below, above = float((known <= value).mean()), float((known >= value).mean())
    if below <= above:
        return below, f"among the lowest {percent(below)}" if below else "smaller than every training value"
    return above, f"among the highest {percent(above)}" if above else "larger than every training value"


def _order(column: pandas.Series) -> str:
    """What orders the values of a column: "numbers", "dates", or nothing."""
    import pandas  # an extra: only tables need it

    if pandas.api.types.is_numeric_dtype(column):
        return "numbers"
    return "dates" if pandas.api.types.is_datetime64_dtype(column) else ""


def _on_cpu(values: Any) -> Any:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else values


def _cell_text(value: Any) -> str:
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
