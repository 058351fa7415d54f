"""What a report says, as plain data. Every `str` in here is text and is shown as such, whatever it contains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

Tone = Literal["noise", "scarcity", "plain"]


@dataclass(frozen=True)
class Group:
    """Some of the predictions, under one name. The tone sets colour and shape: noise, scarcity, or neither."""

    name: str
    tone: Tone = "plain"


def in_order(groups: Iterable[Group]) -> list[Group]:
    """Each group once, those that stand for noise first and plain ones last."""
    tones = get_args(Tone)
    return sorted(dict.fromkeys(groups), key=lambda group: tones.index(group.tone))


@dataclass(frozen=True)
class Words:
    """Terms and what they mean."""

    kind: ClassVar[str] = "words"
    entries: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Row:
    """One row of a table: a name, and as many cells as the table has columns after the first."""

    name: str
    cells: tuple[str, ...]
    group: str = ""  # rows that follow each other with the same group stand together under it
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """Rows of text and numbers; `caption` says what is in it, `note` how to read it."""

    kind: ClassVar[str] = "table"
    caption: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    note: str = ""

    def grouped(self) -> list[tuple[str, list[Row]]]:
        """Rows that stand together, in order."""
        bodies: list[tuple[str, list[Row]]] = []
        for row in self.rows:
            if not bodies or bodies[-1][0] != row.group:
                bodies.append((row.group, []))
            bodies[-1][1].append(row)
        return bodies


@dataclass(frozen=True)
class Card:
    """One prediction in a gallery: a picture (bytes of a PNG file) or none, its title, and lines below it."""

    title: str
    lines: tuple[str, ...] = ()
    picture: bytes | None = None
    group: Group | None = None


@dataclass(frozen=True)
class Gallery:
    """Cards in order, the first one first."""

    kind: ClassVar[str] = "gallery"
    cards: tuple[Card, ...]
    caption: str = ""

    def groups(self) -> list[Group]:
        """The groups that occur, toned ones first."""
        return in_order(card.group for card in self.cards if card.group is not None)


@dataclass(frozen=True)
class Point:
    """One prediction in a scatter plot; both coordinates between 0 and 1."""

    x: float
    y: float
    group: Group
    label: str = ""


@dataclass(frozen=True)
class Scatter:
    """Points in the unit square, with a line from corner to corner where both ranks agree."""

    kind: ClassVar[str] = "scatter"
    points: tuple[Point, ...]
    x_label: str
    y_label: str
    caption: str
    left_hint: str = ""  # what it means to lie at the upper left
    right_hint: str = ""

    def groups(self) -> list[Group]:
        """The groups that occur, toned ones first."""
        return in_order(point.group for point in self.points)


@dataclass(frozen=True)
class Facts:
    """Names, values and a sentence about each."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str, str], ...]


Block = Words | Table | Gallery | Scatter | Facts


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and blocks below them."""

    title: str
    paragraphs: tuple[str, ...] = ()
    blocks: tuple[Block, ...] = ()
    tone: Tone = "plain"


@dataclass(frozen=True)
class Number:
    """A number worth a tile at the top, and the words that make it mean something."""

    value: str
    words: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Page:
    """A whole report: the answer first, then the sections."""

    title: str
    answer: tuple[str, ...]
    sections: tuple[Section, ...]
    numbers: tuple[Number, ...] = ()
    footer: str = ""
