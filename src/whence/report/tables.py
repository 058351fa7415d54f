"""Tables of inputs, and what in a row is unusual beside the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from whence.errors import InputError, ShapeError

from .words import number, percent

MISSING = {"None", "nan", "<NA>", "NaT"}
"""How absent values of any library print themselves."""
RARE = 0.025
"""Share of training rows below which a value counts as unusually small, large or rare."""


@dataclass(frozen=True)
class Columns:
    """A table as columns: numbers, dates, or words."""

    names: tuple[str, ...]
    columns: tuple[np.ndarray, ...]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.columns[0]) if self.columns else 0

    def row(self, number: int) -> list[str]:
        """One row as text."""
        return [_text(column[number]) for column in self.columns]


def columns_of(given: Any) -> Columns:
    """From a data frame, a mapping of columns, or an array of two axes.

    Examples:
        >>> columns_of({"age": [31, 45], "town": ["Ulm", "Bonn"]}).row(1)
        ['45', 'Bonn']
        >>> columns_of({"born": np.array(["1931-05-30", "NaT"], "datetime64[s]")}).row(0)
        ['1931-05-30']
    """
    if isinstance(given, Columns):
        return given
    if hasattr(given, "columns") and hasattr(given, "iloc"):  # a data frame, without importing pandas
        names = [str(name) for name in given.columns]
        columns = [_column(given.iloc[:, place]) for place in range(len(names))]
    elif isinstance(given, Mapping):
        names, columns = [str(name) for name in given], [_column(values) for values in given.values()]
    else:
        values = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
        if values.ndim != 2:
            raise ShapeError(
                f"expected a table as a data frame, a dict of columns or an array (rows, columns), got {values.shape}."
            )
        names, columns = [f"x{place}" for place in range(values.shape[1])], list(values.T)
    if len({len(column) for column in columns}) > 1:
        raise InputError(f"expected columns of one length, got {', '.join(str(len(column)) for column in columns)}.")
    return Columns(tuple(names), tuple(columns))


def join(parts: Sequence[Columns]) -> Columns:
    """Several tables of the same columns as one."""
    joined = (np.concatenate([part.columns[place] for part in parts]) for place in range(len(parts[0].names)))
    return Columns(parts[0].names, tuple(joined))


@dataclass(frozen=True)
class Usual:
    """What is usual in each column of the training rows: its numbers or dates in order, or how often each word occurs.

    Examples:
        >>> usual = Usual.of(columns_of({"age": list(range(100)), "town": ["Ulm"] * 100}))
        >>> usual.odd(columns_of({"age": [400], "town": ["Ulm"]}), 0)
        [(0, 'larger than every training value')]
    """

    numbers: Mapping[str, np.ndarray]
    words: Mapping[str, Counter[str]]

    @classmethod
    def of(cls, table: Columns) -> Usual:
        """From the training rows; columns of one or two numbers are left out, in which nothing is far from others."""
        numbers, words = {}, {}
        for name, column in zip(table.names, table.columns, strict=True):
            if column.dtype.kind not in "fiubM":
                words[name] = Counter(map(str, column))
                continue
            known = np.sort(column[~_absent(column)])
            if len(np.unique(known)) > 2:
                numbers[name] = known
        return cls(numbers, words)

    def odd(self, table: Columns, row: int) -> list[tuple[int, str]]:
        """Columns in which a row is unusual, the rarest first, with words."""
        found = []
        for place, name in enumerate(table.names):
            value = table.columns[place][row]
            share, told = 1.0, ""
            if name in self.words:
                share, told = _rarity(str(value), self.words[name])
            elif name in self.numbers and isinstance(value, (np.number, np.datetime64)):
                share, told = _extremity(value, self.numbers[name])
            if share <= RARE:
                found.append((share, place, told))
        return [(place, told) for _, place, told in sorted(found, key=lambda one: one[0])]


def _rarity(word: str, counts: Counter[str]) -> tuple[float, str]:
    share = counts[word] / max(sum(counts.values()), 1)
    return share, f"in {percent(share)} of the training rows" if share else "never seen in training"


def _absent(values: Any) -> Any:
    """Which numbers or dates are none."""
    return np.isnat(values) if values.dtype.kind == "M" else np.isnan(values)


def _extremity(value: np.number[Any] | np.datetime64, known: np.ndarray) -> tuple[float, str]:
    """The share of training values at least as far out, on the side where they are fewer."""
    if _absent(value):
        return 1.0, ""
    below = float(np.searchsorted(known, value, "right")) / len(known)
    above = 1.0 - float(np.searchsorted(known, value, "left")) / len(known)
    if below <= above:
        return below, f"among the lowest {percent(below)}" if below else "smaller than every training value"
    return above, f"among the highest {percent(above)}" if above else "larger than every training value"


def _column(values: Any) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    return array if array.dtype.kind in "fiubM" else array.astype(object)


def _text(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        amount = float(value)
        if np.isnan(amount):
            return "missing"
        return f"{amount:.5g}" if abs(amount) < 1e5 else number(amount, 5)  # 2024 may be a year
    text = str(value)
    if text in MISSING:
        return "missing"
    if isinstance(value, np.datetime64):
        day, _, time = text.partition("T")
        return f"{day} {time}" if time.strip("0:.") else day
    return text
