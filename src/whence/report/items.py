"""The inputs that a page shows, within bounds, ready to be written into it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .causes import Traced
from .exhibits import Exhibits, Form, encode_images, encode_texts
from .reading import Source
from .tables import Columns, Usual

PICTURES = 1500
"""Pictures in one page, of test and training inputs together."""
CELLS = 150_000
"""Cells of test rows in one page."""
TEXTS = 2_000
"""Texts in one page, of test and training inputs each."""

FAINT = 0.3
"""Words of less weight, beside the weightiest of a text, are not marked."""

WORD = re.compile(r"\w+", re.UNICODE)


@dataclass(frozen=True)
class Item:
    """One input as it is shown: a picture (a data URI), pieces of a text with weights, or cells of a row.

    Attributes:
        picture: a data URI.
        pieces: of a text, with a weight between 0 and 1 each.
        cells: values of a row, in the order of the columns.
        odd: columns in which the row is unusual, with words.
    """

    picture: str = ""
    pieces: tuple[tuple[str, float], ...] = ()
    cells: tuple[str, ...] = ()
    odd: tuple[tuple[int, str], ...] = ()

    @property
    def plain(self) -> Any:
        """For the page's data: a string, a list of pieces, or cells and what is odd about them."""
        if self.picture:
            return self.picture
        return (
            [list(piece) for piece in self.pieces] if self.pieces else [list(self.cells), [list(o) for o in self.odd]]
        )


@dataclass(frozen=True)
class Shown:
    """All inputs that are shown.

    Attributes:
        form: what they are shown as.
        columns: names of the columns of rows.
        test: by number of the prediction.
        train: by position in the training set.
    """

    form: Form
    columns: tuple[str, ...]
    test: Mapping[int, Item]
    train: Mapping[int, Item]


def collect(
    exhibits: Exhibits, test: Source, train: Source, sizes: tuple[int, int], traced: Traced, first: Sequence[int]
) -> Shown:
    """Make the items of a page.

    Args:
        exhibits: how to show inputs.
        test: test inputs.
        train: training inputs.
        sizes: how many of each there are.
        traced: which test inputs, and the training examples behind them.
        first: training examples that must be shown.
    """
    m, n = sizes
    wanted = traced.chosen.tolist()
    causes = Counter([*traced.check.index.flatten().tolist(), *traced.near.index[:, :3].flatten().tolist()])
    behind = list(dict.fromkeys([*first, *(number for number, _ in causes.most_common())]))
    if exhibits.form == "row":
        return _rows(exhibits, test, train, sizes, wanted, behind)
    room = PICTURES - len(wanted) if exhibits.form == "image" else TEXTS
    tests = exhibits.of_test(test, wanted, m)
    trains = exhibits.of_train(train, sorted(behind[: max(room, 0)]), n)
    if exhibits.form == "image":
        left, right = encode_images(tests, trains)
        return Shown("image", (), *({i: Item(picture=uri) for i, uri in some.items()} for some in (left, right)))
    if exhibits.form == "text":
        texts, others = encode_texts(tests), encode_texts(trains)
        marked = _mark_shared(texts, others, traced)
        return Shown("text", (), *({i: _text(pieces) for i, pieces in some.items()} for some in (marked, others)))
    return Shown("none", (), {}, {})


def _text(pieces: Sequence[Sequence[Any]]) -> Item:
    return Item(pieces=tuple((str(word), float(weight)) for word, weight in pieces))


def _rows(
    exhibits: Exhibits,
    test: Source,
    train: Source,
    sizes: tuple[int, int],
    wanted: Sequence[int],
    behind: Sequence[int],
) -> Shown:
    rows, usual = exhibits.table(test, sizes[0], "test"), exhibits.table(train, sizes[1], "train")
    assert rows is not None
    most = CELLS // max(len(rows.names), 1)
    chosen = list(range(sizes[0])) if sizes[0] <= most else list(wanted)[:most]
    traced, judge = set(wanted), None if usual is None else Usual.of(usual)

    def item(table: Columns, number: int, mark: bool) -> Item:
        odd = tuple(judge.odd(table, number)) if mark and judge is not None else ()
        return Item(cells=tuple(table.row(number)), odd=odd)

    tests = {number: item(rows, number, number in traced) for number in chosen}
    trains = {} if usual is None else {number: item(usual, number, False) for number in behind[:most]}
    return Shown("row", rows.names, tests, trains)


def _mark_shared(
    texts: Mapping[int, list[list[Any]]], others: Mapping[int, list[list[Any]]], traced: Traced
) -> dict[int, list[list[Any]]]:
    """Weigh the words of a text that it shares with the training texts behind its uncertainty, rare ones more."""
    bags = {number: set(_words(pieces)) for number, pieces in others.items()}
    spread = Counter(word for bag in bags.values() for word in bag)
    marked = {}
    for place, number in enumerate(traced.chosen.tolist()):
        pieces = texts.get(number, [])
        if len(pieces) != 1 or pieces[0][1]:  # it came with weights of its own
            marked[number] = pieces
            continue
        shared: Counter[str] = Counter()
        pairs = zip(traced.check.index[place].tolist(), traced.check.share[place].tolist(), strict=True)
        for example, share in pairs:
            for word in bags.get(example, ()):
                shared[word] += share * math.log((1 + len(bags)) / spread[word])
        marked[number] = _cut(pieces[0][0], shared)
    return marked


def _words(pieces: Sequence[Sequence[Any]]) -> list[str]:
    return [word.lower() for text, _ in pieces for word in WORD.findall(text)]


def _cut(text: str, weights: Mapping[str, float]) -> list[list[Any]]:
    """A text cut around its words, each with its weight over the largest."""
    most = max((weights.get(word.lower(), 0.0) for word in WORD.findall(text)), default=0.0)
    pieces: list[list[Any]] = []
    end = 0
    for found in WORD.finditer(text):
        weight = weights.get(found.group().lower(), 0.0) / most if most > 0 else 0.0
        if weight < FAINT:
            continue
        if found.start() > end:
            pieces.append([text[end : found.start()], 0.0])
        pieces.append([found.group(), round(weight, 2)])
        end = found.end()
    return [*pieces, [text[end:], 0.0]] if end < len(text) or not pieces else pieces
