"""Predictions and findings as small tables, for terminals and notebooks."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import NormalDist
from typing import Protocol

from torch import Tensor

from .display import Column, Table, count, listing, number, numbers, rows_shown
from .tables import Predictions

LEVEL = 0.95


class Named(Protocol):
    """A finding."""

    @property
    def name(self) -> str:
        """What was found."""

    @property
    def value(self) -> float | str:
        """How much, or which."""

    @property
    def words(self) -> str:
        """What it means."""


def predictions(found: Predictions) -> Table:
    """The first few predictions: what was predicted, its bounds, the variances and their ratio."""
    *shape, k = found.mean.shape
    m, total = shape[0], found.mean.reshape(-1, k).shape[0]
    positions = "" if len(shape) == 1 else f" at {' x '.join(map(str, shape[1:]))} positions"
    sketches = found.chosen is not None and found.chosen.sketches
    title = f"{count(m, 'prediction')}{positions}, {'random sketches of ' * sketches}{count(k, 'output')}"
    if not total:
        return Table(title)
    rows, more = rows_shown(total, "to_frame()")
    columns = [_places(shape, rows)]
    if not sketches:
        columns += _answers(found, rows)
    for name, label in (("ho", "Ho"), ("hec3", "HeC3")):
        values = _first(found.trace(name), rows)
        largest = max((value for value in values if value == value), default=0.0)
        bars = tuple(value / largest if largest > 0 and value == value else 0.0 for value in values)
        columns.append(Column(label, numbers(values), bars=bars if name == "hec3" else ()))
    columns.append(Column("HeC3/Ho", tuple(f"{value:.2f}" for value in _first(found.ratio, rows))))
    note = "Variances of the prediction itself" + (", summed over outputs." if k > 1 else ".")
    return Table(title, tuple(columns), f"{note}\n{more}".strip())


def findings(found: Iterable[Named], title: str) -> Table:
    """What was found about a fit: name, value, meaning."""
    rows = list(found)
    pairs = [
        # what is words and nothing else stands among the words
        ("", row.value)
        if isinstance(row.value, str) and not row.words
        else (row.value if isinstance(row.value, str) else number(row.value), row.words)
        for row in rows
    ]
    columns = (
        Column("", tuple(row.name for row in rows), left=True),
        Column("", tuple(value for value, _ in pairs)),
        Column("", tuple(words for _, words in pairs), left=True),
    )
    return Table(title, columns)


def _places(shape: list[int], rows: int) -> Column:
    if len(shape) == 1:
        return Column("no.", tuple(map(str, range(rows))))
    each = 1
    for size in shape[1:]:
        each *= size
    return Column("no., position", tuple(f"{row // each}, {row % each}" for row in range(rows)))


def _answers(found: Predictions, rows: int) -> list[Column]:
    """What is predicted: a class with its probability, or numbers with bounds."""
    k = found.mean.shape[-1]
    likelihood = found.likelihood
    columns: list[Column] = []
    classes = likelihood is not None and likelihood.has_classes
    if found.chosen is not None and found.chosen.index is not None:
        index = found.chosen.index.expand(*found.mean.shape).reshape(-1, k)[:rows].tolist()
        columns.append(Column("output", tuple(listing(row, 3) for row in index), left=True))
    elif classes and k > 1 and likelihood is not None and likelihood.couples_outputs:
        chances = found.probabilities.reshape(-1, k)[:rows]
        best = chances.max(dim=1)
        columns.append(Column("class", tuple(map(str, best.indices.tolist()))))
        columns.append(Column("probability", tuple(f"{value:.3f}" for value in best.values.tolist())))
        return columns
    if classes:
        several = found.probabilities.reshape(-1, found.probabilities.shape[-1])[:rows].tolist()
        columns.append(Column("probability", tuple(_several(row) for row in several), left=k > 1))
        return columns
    mean = found.mean.reshape(-1, k)[:rows]
    columns.append(Column("mean", tuple(_several(row) for row in mean.tolist()), left=k > 1))
    if k == 1:
        reach = NormalDist().inv_cdf(0.5 + LEVEL / 2) * found.variance("hec3").reshape(-1)[:rows].sqrt()
        bounds = zip((mean[:, 0] - reach).tolist(), (mean[:, 0] + reach).tolist(), strict=True)
        columns.append(Column(f"{LEVEL:.0%} interval", tuple(f"{number(a)} to {number(b)}" for a, b in bounds)))
    return columns


def _several(values: list[float]) -> str:
    return listing(numbers(values), 3)


def _first(values: Tensor, rows: int) -> list[float]:
    found: list[float] = values.reshape(-1)[:rows].tolist()
    return found
