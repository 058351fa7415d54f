"""Everything a report says, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .curves import Chart
from .health import Check
from .items import Item, Shown
from .page import Facts, Section, Table

TONES = ("plain", "noise", "scarcity", "both")
"""Of the verdicts, in the order of `whence.tracing.verdicts.VERDICTS`."""


@dataclass(frozen=True)
class Tile:
    """A count at the top."""

    count: int
    words: str
    tone: str


@dataclass(frozen=True)
class Card:
    """An input with a title and lines below it; `prediction` is the number of the prediction it shows, or -1."""

    title: str
    lines: tuple[str, ...]
    tone: str
    item: Item | None
    prediction: int = -1
    badge: str = ""


@dataclass(frozen=True)
class Gallery:
    """Cards under a heading."""

    title: str
    intro: str
    tone: str
    cards: tuple[Card, ...]


@dataclass(frozen=True)
class Suspects:
    """Training examples whose labels to doubt, and their positions in the training set."""

    cards: tuple[Card, ...]
    index: tuple[int, ...]


@dataclass(frozen=True)
class Content:
    """A whole report.

    Attributes:
        title: of the page.
        about: paragraphs below it, by whoever asked for the report.
        answer: how many predictions are uncertain, and why.
        tiles: the same as counts.
        actions: what would help most.
        together: what the actions come to.
        classes: how many are uncertain class by class, where there are classes.
        galleries: the most uncertain by source.
        suspects: training examples to doubt.
        charts: calibration and risk-coverage, where targets are known.
        checks: whether to trust all this.
        facts: how it was computed.
        sections: of whoever asked for the report.
        shown: inputs.
        data: what the script needs.
        bound: what was left out, in words.
        footer: who made it.
    """

    title: str
    about: tuple[str, ...]
    answer: tuple[str, ...]
    tiles: tuple[Tile, ...]
    actions: tuple[Card, ...]
    together: str
    classes: Table | None
    galleries: tuple[Gallery, ...]
    suspects: Suspects
    charts: tuple[Chart, ...]
    checks: Sequence[Check]
    facts: Facts
    sections: tuple[Section, ...]
    shown: Shown
    data: dict[str, Any]
    bound: str
    footer: str
