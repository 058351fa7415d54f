"""Tables of inputs, and what in a row is unusual beside the training rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from whence.errors import InputError, ShapeError

from .words import percent

MISSING = {"None", "nan", "<NA>", "NaT"}
"""How absent values of any library print themselves."""
RARE = 0.025
"""Share of training rows below which a value counts as unusually small, large or rare."""


@dataclass(frozen=True)
class Columns:
    """A table as columns: numbers, or words."""

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


def unusual(row: Columns, number: int, usual: Columns) -> list[tuple[int, str]]:
    """Columns in which a row is unusual, the rarest first, with words.

    Examples:
        >>> train = columns_of({"age": list(range(100)), "town": ["Ulm"] * 100})
        >>> unusual(columns_of({"age": [400], "town": ["Ulm"]}), 0, train)
        [(0, 'larger than every training value')]
    """
    found = []
    for place, name in enumerate(row.names):
        if name not in usual.names:
            continue
        known, value = usual.columns[usual.names.index(name)], row.columns[place][number]
        share, words = _rarity(value, known)
        if share <= RARE and words:
            found.append((share, place, words))
    return [(place, words) for _, place, words in sorted(found, key=lambda one: one[0])]


def _rarity(value: Any, known: np.ndarray) -> tuple[float, str]:
    if known.dtype.kind in "fiub":
        number = float(value) if np.issubdtype(type(value), np.number) else float("nan")
        seen = known[~np.isnan(known)] if known.dtype.kind == "f" else known
        if np.isnan(number) or len(np.unique(seen)) <= 2:
            return 1.0, ""
        below, above = float((seen <= number).mean()), float((seen >= number).mean())
        if below <= above:
            return below, "smaller than every training value" if below == 0 else f"among the lowest {percent(below)}"
        return above, "larger than every training value" if above == 0 else f"among the highest {percent(above)}"
    counts = Counter(map(str, known))
    share = counts[str(value)] / max(len(known), 1)
    return share, "never seen in training" if share == 0 else f"in {percent(share)} of the training rows"


def _column(values: Any) -> np.ndarray:
    array = np.asarray(values.detach().cpu() if isinstance(values, Tensor) else values)
    return array if array.dtype.kind in "fiub" else array.astype(object)


def _text(value: Any) -> str:
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (int, np.integer)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        return "missing" if np.isnan(value) else f"{float(value):.5g}"
    text = str(value)
    return "missing" if text in MISSING else text
