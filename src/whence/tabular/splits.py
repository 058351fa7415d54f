"""Which rows train the network, which choose its weight decay, and which are kept apart for honest numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy

from whence.errors import InputError
from whence.tabular.targets import Target

FEWEST_ROWS = 20
VALIDATION = 0.15
SMALL = 2_000
"""Training rows up to which three sets of validation rows are drawn instead of one."""

MOST_TESTED = 10_000


@dataclass(frozen=True)
class Parts:
    """Places of the rows in the table.

    Attributes:
        train: what the final network is trained on; the validation rows are among them.
        validation: sets of rows that choose the weight decay, in trainings without them; several for small tables.
        test: never trained on.
        unknown: rows without a target, which are predicted only.
    """

    train: Any
    validation: tuple[Any, ...]
    test: Any
    unknown: Any

    def names(self, rows: int) -> list[str]:
        """The part of each row, in words."""
        words = numpy.full(rows, "train", dtype=object)
        words[self.test] = "held out"
        words[self.unknown] = "no target"
        return [str(word) for word in words]


def split(values: Any, target: Target, share: float, seed: int) -> Parts:
    """Draw the parts at random, classes in equal shares.

    Args:
        values: (m,) targets as numbers, NaN where there is none.
        target: what they are.
        share: of the rows with a target that are held out.
        seed: of the draw.

    Examples:
        >>> parts = split(numpy.arange(100.0), Target("y", "regression", ()), 0.2, 0)
        >>> len(parts.train), [len(rows) for rows in parts.validation], len(parts.test)
        (80, [12, 12, 12], 20)
    """
    known = numpy.flatnonzero(numpy.isfinite(values))
    check_enough(len(known), target.name)
    generator = numpy.random.default_rng(seed)
    groups = _groups(values, known, target)
    test = _draw(groups, min(share, MOST_TESTED / len(known)), generator)
    left = [group[~numpy.isin(group, test)] for group in groups]
    validation, open_ = [], left
    for _ in range(3 if sum(map(len, left)) <= SMALL else 1):
        drawn = _draw(open_, VALIDATION * sum(map(len, left)) / sum(map(len, open_)), generator)
        open_ = [group[~numpy.isin(group, drawn)] for group in open_]
        validation.append(drawn)
    return Parts(
        train=numpy.sort(numpy.concatenate(left)),
        validation=tuple(validation),
        test=test,
        unknown=numpy.flatnonzero(~numpy.isfinite(values)),
    )


def check_enough(known: int, name: str) -> None:
    """Raise where there are too few rows with a target."""
    if known < FEWEST_ROWS:
        raise InputError(
            f"expected at least {FEWEST_ROWS} rows with a value of {name!r}, got {known}. "
            "A network cannot be trained and tested on fewer."
        )


def _groups(values: Any, known: Any, target: Target) -> list[Any]:
    if target.task == "regression":
        return [known]
    return [known[values[known] == place] for place in range(len(target.classes))]


def _draw(groups: list[Any], share: float, generator: numpy.random.Generator) -> Any:
    """A share of each group, at least one where the share is not zero and the group has two."""
    drawn = []
    for group in groups:
        count = round(share * len(group))
        if share > 0 and len(group) >= 2:
            count = max(1, count)
        drawn.append(generator.permutation(group)[:count])
    return numpy.sort(numpy.concatenate(drawn))
