"""Sections that anyone can add to a report, as plain data. Every `str` in here is shown as text, never read as HTML."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar, Literal

Tone = Literal["noise", "scarcity", "plain"]


@dataclass(frozen=True)
class Group:
    """Some of the predictions, under one name. The tone sets colour and shape: noise, scarcity, or neither."""

    name: str
    tone: Tone = "plain"


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
    group: str = ""  # consecutive rows of the same group stand together under its name
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
        """Consecutive rows of the same group, under its name."""
        return [(group, list(rows)) for group, rows in groupby(self.rows, key=lambda row: row.group)]


@dataclass(frozen=True)
class Facts:
    """Names, values and a sentence about each."""

    kind: ClassVar[str] = "facts"
    rows: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs, and blocks below them."""

    title: str
    paragraphs: tuple[str, ...] = ()
    blocks: tuple[Words | Table | Facts, ...] = ()
    tone: Tone = "plain"
