"""The column to predict: numbers or classes, and what is wrong with it."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Literal

import numpy

from whence.errors import InputError, TargetError
from whence.tabular.columns import label
from whence.tabular.texts import missing, number_style, read_numbers

Task = Literal["regression", "classification"]
MOST_CLASSES = 50
FEW_NUMBERS = 10
"""Whole numbers 0, 1, ... or 1, 2, ... are taken for classes up to this many."""


@dataclass(frozen=True)
class Target:
    """What is predicted.

    Attributes:
        name: of the column.
        task: regression or classification.
        classes: in the order of the network's outputs; none for regression.
        style: spelling of the numbers.
        shift: mean of the training targets; zero for classes.
        scale: their standard deviation; one for classes.
    """

    name: str
    task: Task
    classes: tuple[str, ...]
    style: str = "plain"
    shift: float = 0.0
    scale: float = 1.0

    @property
    def outputs(self) -> int:
        """Outputs of the network: one logit for two classes."""
        return len(self.classes) if len(self.classes) > 2 else 1

    @property
    def likelihood(self) -> str:
        """As `whence.fit` calls it."""
        if self.task == "regression":
            return "gaussian"
        return "categorical" if len(self.classes) > 2 else "bernoulli"

    def read(self, cells: Any) -> Any:
        """(m,) numbers or places among the classes; NaN where there is none, or a class that was never seen."""
        if self.task == "regression":
            return read_numbers(cells, self.style)
        places = {name: float(place) for place, name in enumerate(self.classes)}
        return numpy.array([places.get(_class(cell), numpy.nan) for cell in cells])

    def to_json(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Target:
        """Back from JSON."""
        return cls(**{**fields, "classes": tuple(fields["classes"])})


def find_column(name: str, names: list[str]) -> str:
    """The column of a name, or an error that tells the nearest."""
    if name in names:
        return name
    folded = {other.lower().strip(): other for other in names}
    near = get_close_matches(name.lower(), list(folded), n=3, cutoff=0.5)
    meant = f" Was {' or '.join(repr(folded[one]) for one in near)} meant?" if near else ""
    shown = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    raise InputError(f"expected the name of a column, got {name!r}, which is none.{meant} Columns: {shown}.")


def settle_target(name: str, cells: Any, task: Task | None, notes: list[str]) -> Target:
    """What the target is, by all cells that hold a value.

    Args:
        name: of the column.
        cells: all of them, as text.
        task: if it was told.
        notes: is told what was guessed.
    """
    filled = cells[~missing(cells)]
    if not len(filled):
        raise TargetError(f"expected values in the target {name!r}, got none in {len(cells)} rows.")
    style, values = number_style(filled)
    unreadable = ~numpy.isfinite(values)
    chosen = task or _guess(name, values, unreadable, notes)
    if chosen == "classification":
        return _classes(name, filled, task)
    if unreadable.any():
        strange = list(dict.fromkeys(filled[unreadable]))
        raise TargetError(
            f"expected numbers in the target {name!r}, got text in {int(unreadable.sum())} of {len(filled)} rows, such "
            f"as {', '.join(map(repr, strange[:3]))}. Correct or empty these cells, or pass --task classification."
        )
    if numpy.ptp(values) == 0:
        raise TargetError(f"expected a target that varies, got {values[0]:g} in all rows of {name!r}.")
    return Target(name, "regression", (), style)


def _guess(name: str, values: Any, unreadable: Any, notes: list[str]) -> Task:
    if unreadable.mean() > 0.5:
        return "classification"
    known = numpy.unique(values[~unreadable])
    if unreadable.any():
        return "regression"  # mostly numbers: the error tells about the rest
    if len(known) == 2:
        return "classification"
    whole = bool((known == numpy.round(known)).all())
    codes = whole and len(known) <= FEW_NUMBERS and known[0] in (0, 1) and numpy.ptp(known) == len(known) - 1
    if codes:
        notes.append(
            f"{name!r} holds the whole numbers {known[0]:g} to {known[-1]:g}, taken for classes; "
            "if they are amounts, pass --task regression"
        )
        return "classification"
    if whole and len(known) <= 2 * FEW_NUMBERS and len(values) > 10 * len(known):
        notes.append(
            f"{name!r} holds {len(known)} different whole numbers, taken for amounts; "
            "if they are classes, pass --task classification"
        )
    return "regression"


def _classes(name: str, filled: Any, task: Task | None) -> Target:
    counts = Counter(_class(cell) for cell in filled)
    if len(counts) < 2:
        raise TargetError(f"expected at least two classes in the target {name!r}, got only {next(iter(counts))!r}.")
    rare = [one for one, count in counts.items() if count < 3]
    if len(counts) > MOST_CLASSES or len(rare) > len(counts) / 2:
        shown = ", ".join(map(repr, list(counts)[:3]))
        advice = "" if task is None else " If they are amounts, pass --task regression."
        raise TargetError(
            f"expected a target of numbers, or of at most {MOST_CLASSES} classes with several rows each, got "
            f"{len(counts):,} different values in {len(filled):,} rows of {name!r}, such as {shown}.{advice} "
            "Is it the right column?"
        )
    if rare:
        raise TargetError(
            f"expected at least three rows of each class of {name!r}, got fewer of {', '.join(map(repr, rare[:5]))}. "
            "Empty these cells, merge them with another class, or add rows."
        )
    return Target(name, "classification", tuple(sorted(counts, key=_order)))


def _class(cell: str) -> str:
    """Numbers that are equal are one class: 1 and 1.0."""
    bare = label(cell)
    try:
        number = float(bare)
    except ValueError:
        return bare
    return str(int(number)) if number.is_integer() else bare


def _order(name: str) -> tuple[int, float, str]:
    try:
        return 0, float(name), name
    except ValueError:
        return 1, 0.0, name
