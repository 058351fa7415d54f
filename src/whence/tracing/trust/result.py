"""What the checks say, in numbers and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from whence.display import Column, Shown, Table
from whence.tracing.tables import frame

if TYPE_CHECKING:
    import pandas

FINE, CAREFUL, NOT, SKIPPED = "fine", "careful", "do not trust", "not checked"
LEVELS = (FINE, CAREFUL, NOT)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: what.
        level: "fine", "careful", "do not trust", or "not checked" where it could not be looked at.
        numbers: what was found, by name.
        words: why that level, and what to do about it.

    Examples:
        >>> Check("lambda", "careful", {"same": 0.75, "ten times": 1.0}, "Verdicts change with lambda.").figures
        'same 0.75, ten times 1'
    """

    name: str
    level: str
    numbers: Mapping[str, float]
    words: str

    @property
    def figures(self) -> str:
        """The numbers on one line."""
        return ", ".join(f"{name} {value:.3g}" for name, value in self.numbers.items())

    @property
    def told(self) -> str:
        """The numbers, where there are any, and the words."""
        return f"{self.figures}. {self.words}" if self.numbers else self.words


@dataclass(frozen=True, repr=False)
class Trust(Shown):
    """How far to trust a fit.

    Attributes:
        checks: one after the other, all independent of each other.
        sample: how many predictions were looked at.
        seconds: how long it took.

    Examples:
        >>> trust = Trust((Check("linearization", "careful", {"error": 0.2}, "Outputs bend."),), sample=8, seconds=1.0)
        >>> trust.level, trust["linearization"].numbers["error"]
        ('careful', 0.2)
        >>> print(trust)
        careful: 1 of 1 checks is not fine (8 predictions, 1.0 s)
        level    check          why, and what to do
        careful  linearization  error 0.2. Outputs bend.
    """

    checks: tuple[Check, ...]
    sample: int = 0
    seconds: float = field(default=0.0, compare=False)

    def __iter__(self) -> Iterator[Check]:
        """All checks in order."""
        return iter(self.checks)

    def __getitem__(self, name: str) -> Check:
        """A check by its name."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    @property
    def level(self) -> str:
        """The worst level of all checks."""
        return worst(check.level for check in self.checks)

    def to_frame(self) -> pandas.DataFrame:
        """One row a check."""
        parts = ("name", "level", "figures", "words")
        return frame({part: [[str(getattr(check, part)) for check in self.checks]] for part in parts})

    @property
    def headline(self) -> str:
        """The level, and how many checks are behind it."""
        odd = sum(check.level in (CAREFUL, NOT) for check in self.checks)
        skipped = sum(check.level == SKIPPED for check in self.checks)
        rest = f", {skipped} not checked" if skipped else ""
        verb = "is" if odd == 1 else "are"
        looked = f" ({self.sample} predictions, {self.seconds:.1f} s)" if self.sample else ""
        return f"{self.level}: {odd} of {len(self.checks)} checks {verb} not fine{rest}{looked}"

    def __repr__(self) -> str:
        """The headline."""
        return f"Trust({self.headline})"

    def _table(self) -> Table:
        words = tuple(check.told for check in self.checks)
        levels, names = (tuple(str(getattr(check, part)) for check in self.checks) for part in ("level", "name"))
        cells = {"level": levels, "check": names, "why, and what to do": words}
        return Table(self.headline, tuple(Column(name, column, left=True) for name, column in cells.items()))


def worst(levels: Iterator[str]) -> str:
    """The worst of some levels; those not checked do not count.

    Examples:
        >>> worst(iter(["fine", "not checked", "careful"]))
        'careful'
    """
    return max((level for level in levels if level in LEVELS), key=LEVELS.index, default=SKIPPED)
