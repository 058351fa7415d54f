"""One column of a table as numbers for a network: what kind it is, and how its cells are encoded.

A column is settled by the training rows, saved as JSON, and then encodes any rows.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import numpy

from whence.tabular.texts import MISSING, missing, read_dates, read_numbers

MOST_LEVELS = 24
"""Categories that get an input of their own; the others share one."""

FEWEST = 3
"""Rows that a category needs for an input of its own, unless there are few rows at all."""

FAR = 8.0
"""Robust standard deviations beyond which a column counts as heavy-tailed and is compressed."""

OTHER = "(other)"
NONE = "(missing)"
YEAR, WEEK, DAY = 365.2425, 7.0, 1.0


@dataclass(frozen=True)
class Scale:
    """To mean zero and variance one, after compressing heavy tails: sinh^-1 of robust standard deviations."""

    middle: float
    spread: float
    compressed: bool
    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Any) -> Scale:
        """Settled by values without NaN.

        Examples:
            >>> scale = Scale.of(numpy.array([1.0, 2.0, 3.0]))
            >>> scale.apply(numpy.array([2.0])).tolist()
            [0.0]
        """
        if not len(values):
            return cls(0.0, 1.0, False, 0.0, 1.0)
        low, middle, high = numpy.percentile(values, [25, 50, 75])
        spread = (high - low) / 1.349 or float(values.std()) or 1.0
        compressed = bool(numpy.abs((values - middle) / spread).max() > FAR)
        rough = cls(float(middle), float(spread), compressed, 0.0, 1.0).apply(values)
        deviation = float(rough.std())
        if not deviation > 1e-9 * max(1.0, float(numpy.abs(rough).max())):
            deviation = 1.0
        return cls(float(middle), float(spread), compressed, float(rough.mean()), deviation)

    def apply(self, values: Any) -> Any:
        """Values of any size, NaN staying NaN."""
        rough = (values - self.middle) / self.spread
        return ((numpy.arcsinh(rough) if self.compressed else rough) - self.mean) / self.deviation


@dataclass(frozen=True)
class Number:
    """A column of numbers. A missing one takes the middle, and a second input tells that it was missing."""

    kind: ClassVar[str] = "number"
    name: str
    style: str
    scale: Scale
    gaps: bool

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return [self.name] + [f"{self.name} {NONE}"] * self.gaps

    def encode(self, cells: Any) -> Any:
        """(m, inputs)."""
        values = read_numbers(cells, self.style)
        return _with_gaps(self.scale.apply(values), self.gaps, numpy.isfinite(values))

    def strange(self, cells: Any) -> Any:
        """Which cells hold something that is no number."""
        return ~numpy.isfinite(read_numbers(cells, self.style)) & ~missing(cells)

    def words(self) -> str:
        """For people."""
        return "number" + ", heavy-tailed" * self.scale.compressed + ", with gaps" * self.gaps


@dataclass(frozen=True)
class Category:
    """A column of categories, one input for each that is frequent enough and one for all others."""

    kind: ClassVar[str] = "category"
    name: str
    levels: tuple[str, ...]
    other: bool

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        return [f"{self.name} = {level}" for level in self.levels] + [f"{self.name} = {OTHER}"] * self.other

    def encode(self, cells: Any) -> Any:
        """(m, inputs); a category never seen is like the rare ones, or nothing where there were none."""
        places = {level: place for place, level in enumerate(self.levels)}
        rest = len(self.levels) if self.other else -1
        at = numpy.fromiter((places.get(label(cell), rest) for cell in cells), dtype=numpy.int64, count=len(cells))
        encoded = numpy.zeros((len(cells), len(self.inputs)))
        known = at >= 0
        encoded[numpy.flatnonzero(known), at[known]] = 1.0
        return encoded

    def strange(self, cells: Any) -> Any:
        """Which cells hold a category that training never had; rare ones cannot be told from new ones."""
        if self.other:
            return numpy.zeros(len(cells), dtype=bool)
        return numpy.fromiter((label(cell) not in self.levels for cell in cells), dtype=bool, count=len(cells))

    def words(self) -> str:
        """For people."""
        return f"{len(self.levels)} categories" + " and others" * self.other


@dataclass(frozen=True)
class Date:
    """A column of dates: time itself, and the place in the year, the week and the day where these vary."""

    kind: ClassVar[str] = "date"
    name: str
    format: str
    scale: Scale
    gaps: bool
    cycles: tuple[float, ...]

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs."""
        waves = [f"{self.name} {wave} {cycle:g} days" for cycle in self.cycles for wave in ("sin", "cos")]
        return [self.name, *waves] + [f"{self.name} {NONE}"] * self.gaps

    def encode(self, cells: Any) -> Any:
        """(m, inputs)."""
        days = read_dates(cells, self.format)
        known = numpy.isfinite(days)
        turns = [2 * math.pi * numpy.where(known, days, 0.0) / cycle for cycle in self.cycles]
        waves = [numpy.where(known, wave(turn), 0.0) for turn in turns for wave in (numpy.sin, numpy.cos)]
        time = _with_gaps(self.scale.apply(days), self.gaps, known)
        return numpy.concatenate([time[:, :1], *(wave[:, None] for wave in waves), time[:, 1:]], axis=1)

    def strange(self, cells: Any) -> Any:
        """Which cells hold something that is no date."""
        return ~numpy.isfinite(read_dates(cells, self.format)) & ~missing(cells)

    def words(self) -> str:
        """For people."""
        return f"date, {self.format.replace('%', '')}" + ", with gaps" * self.gaps


Column = Number | Category | Date


def label(cell: str) -> str:
    """The category of a cell.

    Examples:
        >>> label(" red "), label("?")
        ('red', '(missing)')
    """
    bare = cell.strip()
    return NONE if bare.lower() in MISSING else bare


def to_json(column: Column) -> dict[str, Any]:
    """As JSON.

    Examples:
        >>> to_json(Category("colour", ("red",), False))
        {'kind': 'category', 'name': 'colour', 'levels': ('red',), 'other': False}
    """
    return {"kind": column.kind, **asdict(column)}


def from_json(fields: dict[str, Any]) -> Column:
    """Back from JSON."""
    given = dict(fields)
    kind = given.pop("kind")
    if kind == "category":
        return Category(str(given["name"]), tuple(map(str, given["levels"])), bool(given["other"]))
    scale = Scale(**given.pop("scale"))
    if kind == "number":
        return Number(**given, scale=scale)
    if kind == "date":
        return Date(**{**given, "cycles": tuple(given["cycles"])}, scale=scale)
    raise ValueError(f"expected a column of kind number, category or date, got {kind!r}")


def _with_gaps(values: Any, gaps: bool, known: Any) -> Any:
    """Missing values in the middle, and a second column that tells, if wanted."""
    filled = numpy.where(known, values, 0.0)
    return numpy.stack([filled, (~known).astype(float)] if gaps else [filled], axis=1)
