"""The inputs shown on a page, in readable form: images, texts, or rows of a table."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.data.batches import batch_size
from whence.errors import InputError, ShapeError
from whence.report.task import DataSource
from whence.report.traced import Traced
from whence.report.usual import UsualValues, frame_of, rows_as_text

Form = Literal["image", "text", "row", "none"]
IMAGES = 1500  # images in one page, of test and training inputs together
TEXTS = 2_000  # training texts in one page
CELLS = 150_000  # cells of test rows in one page
WIDEST_ROW = 64  # numbers that an input may have to be shown as a row of a table by default
LONGEST_TEXT = 600  # characters of a text that are shown
SIDE = 64  # the longer side of a thumbnail, in pixels
FIRST_CELLS = 8  # cells of a row that are shown first: those furthest from the usual values


@dataclass(frozen=True)
class ShownInput:
    """One input: an image (a data URI), a text, or cells of a row and those that stand out."""

    image: str = ""
    text: str = ""
    cells: tuple[str, ...] = ()
    unusual: tuple[tuple[int, str], ...] = ()  # columns, with the reason
    first: tuple[int, ...] = ()  # columns to show before the others, the most unusual first
    impossible: str = ""  # why the input is impossible, if it is

    @property
    def order(self) -> list[int]:
        """All columns, in the order in which they are shown."""
        return list(dict.fromkeys([*self.first, *range(len(self.cells))]))

    @property
    def data(self) -> Any:
        """For the script of the page: a string, or cells and which are unusual."""
        return self.image or self.text or (self.cells, self.unusual, self.first)


@dataclass(frozen=True)
class ShownInputs:
    """All inputs that are shown."""

    form: Form
    columns: tuple[str, ...] = ()  # names, for rows of a table
    test: Mapping[int, ShownInput] = field(default_factory=dict)  # by number of the prediction
    train: Mapping[int, ShownInput] = field(default_factory=dict)  # by position in the training set


def as_pair(given: Any) -> tuple[Any, Any]:
    """The values given for test and training inputs: a pair, or a value for the test inputs only."""
    pair = isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str)
    return (given[0], given[1]) if pair else (given, None)


@dataclass(frozen=True)
class InputView:
    """How to show inputs: by a function that makes images, texts or a table from a batch of them, or as given."""

    form: Form
    make: Callable[[Any], Any] | None = None
    test: Any = None  # images, texts or a table of the test inputs
    train: Any = None  # the same of the training inputs

    @classmethod
    def of(cls, images: Any, texts: Any, table: Any, first_batch: Any) -> InputView:
        """From the arguments of a report; without any, from the shape of a batch of inputs."""
        given: list[tuple[Form, Any]] = [("image", images), ("text", texts), ("row", table)]
        given = [(form, value) for form, value in given if value is not None]
        if len(given) > 1:
            raise InputError("expected one of images, texts and table, got several. Choose how inputs are to be shown.")
        if not given:
            form = _guess_form(first_batch)
            return cls(form, make=None if form == "none" else lambda inputs: inputs)
        form, value = given[0]
        if callable(value):
            return cls(form, make=value)
        return cls(form, None, *as_pair(value))

    def show(
        self, test: DataSource, train: DataSource, sizes: tuple[int, int], traced: Traced, first: list[int]
    ) -> ShownInputs:
        """The traced test inputs, the training examples `first`, and as many as fit of those behind the traced ones."""
        m, n = sizes
        behind = Counter([*traced.check.examples.flatten().tolist(), *traced.near.examples[:, :3].flatten().tolist()])
        examples = list(dict.fromkeys([*first, *(example for example, _ in behind.most_common())]))
        chosen = traced.chosen.tolist()
        if self.form == "none":
            return ShownInputs("none")
        if self.form == "row":
            return self._rows(test, train, sizes, chosen, examples)
        room = max(IMAGES - len(chosen), 0) if self.form == "image" else TEXTS
        tests = self._of_examples(self.test, test, chosen, m, "test")
        trains = self._of_examples(self.train, train, sorted(examples[:room]), n, "training")
        if self.form == "image":
            shown = [{i: ShownInput(image=uri) for i, uri in part.items()} for part in thumbnails(tests, trains)]
        else:
            shown = [{i: ShownInput(text=shortened(text)) for i, text in part.items()} for part in (tests, trains)]
        return ShownInputs(self.form, (), *shown)

    def _of_examples(
        self, given: Any, source: DataSource, wanted: Sequence[int], total: int, which: str
    ) -> dict[int, Any]:
        """Images or texts of some examples; none for training examples if only those of the test were given."""
        if given is not None:
            if len(given) != total:
                raise ShapeError(f"expected {total} {self.form}s, one for each {which} input, got {len(given)}.")
            return {i: given[i] for i in wanted}
        if self.make is None:
            return {}
        found: dict[int, Any] = {}
        chosen = set(wanted)
        for start, inputs, _ in source.read():
            here = chosen.intersection(range(start, start + batch_size(inputs, "this batch")))
            made = self.make(inputs) if here else ()
            found |= {i: made[i - start].clone() if isinstance(made, Tensor) else made[i - start] for i in here}
        return dict(sorted(found.items()))

    def _rows(
        self, test: DataSource, train: DataSource, sizes: tuple[int, int], traced: list[int], examples: list[int]
    ) -> ShownInputs:
        rows = self._table(self.test, test, sizes[0], "test")
        assert rows is not None
        most = CELLS // max(len(rows.columns), 1)
        chosen = list(range(sizes[0])) if sizes[0] <= most else traced[:most]
        usual, trains = self.train, {}
        if not isinstance(usual, UsualValues):  # otherwise only the usual values are known, not the training rows
            train_rows = self._table(self.train, train, sizes[1], "train")
            usual = None if train_rows is None else UsualValues.of(train_rows)
            trains = {} if usual is None else _shown_rows(usual, train_rows, examples[:most])
        tests = _shown_rows(usual, rows, chosen)
        if usual is not None:
            reasons = zip(chosen, usual.impossible(rows.iloc[chosen]), strict=True)
            tests = {i: replace(tests[i], impossible=reason) for i, reason in reasons}
        return ShownInputs("row", tuple(rows.columns), tests, trains)

    def _table(self, given: Any, source: DataSource, total: int, which: str) -> Any:
        """The whole table as a data frame; `None` for training inputs if only that of the test inputs was given."""
        import pandas  # an extra: only tables need it

        if given is None and self.make is None:
            return None
        made = [given] if self.make is None else (self.make(inputs) for _, inputs, _ in source.read())
        frame = pandas.concat(map(frame_of, made), ignore_index=True)
        if len(frame) != total:
            raise ShapeError(f"expected {total} rows in the table, one for each {which} input, got {len(frame)}.")
        return frame


def _shown_rows(usual: UsualValues | None, table: Any, chosen: Sequence[int]) -> dict[int, ShownInput]:
    """Rows of a table, with the cells that stand out if the usual values are known."""
    some = table.iloc[list(chosen)]
    texts = rows_as_text(some)
    if usual is None:
        return {i: ShownInput(cells=cells) for i, cells in zip(chosen, texts, strict=True)}
    tails, found = usual.tails(some), {}
    for place, (i, cells) in enumerate(zip(chosen, texts, strict=True)):
        first = tuple(tails[:, place].min(0).argsort(kind="stable")[:FIRST_CELLS].tolist())
        found[i] = ShownInput(cells=cells, unusual=tuple(usual.unusual(some, tails[:, place])), first=first)
    return found


def _guess_form(first: Any) -> Form:
    """Inputs that look like images are shown as such, short rows of numbers as rows of a table."""
    if isinstance(first, Tensor) and first.is_floating_point():
        if first.ndim == 4 and first.shape[1] in (1, 3) and min(first.shape[2:]) >= 8:
            return "image"
        if first.ndim == 2 and first.shape[1] <= WIDEST_ROW:
            return "row"
    return "none"


def channels_first(images: Any) -> Tensor:
    """(n, 1 or 3, h, w) from grey (n, h, w), or (n, c, h, w) or (n, h, w, c) with 1 or 3 channels.

    Bytes are scaled to the range from 0 to 1; other numbers stay as they are.
    """
    given = torch.as_tensor(images, device="cpu").detach()
    found = given.float() / (255.0 if given.dtype == torch.uint8 else 1.0)
    found = found.unsqueeze(1) if found.ndim == 3 else found
    if found.ndim == 4 and found.shape[1] not in (1, 3):
        found = found.permute(0, 3, 1, 2)
    if not found.numel() or found.ndim != 4 or found.shape[1] not in (1, 3):
        raise ShapeError(
            "expected images of shape (n, height, width), (n, channels, height, width) or (n, height, width, channels) "
            f"with 1 or 3 channels, got {tuple(given.shape)}."
        )
    return found


def thumbnail(image: Tensor, side: int = SIDE) -> str:
    """An image (c, h, w) with numbers between 0 and 1 as a data URI: PNG, or WebP if that is smaller."""
    from PIL import Image  # an extra: only reports need it

    if max(image.shape[1:]) > side:
        size = [max(1, round(length * side / max(image.shape[1:]))) for length in image.shape[1:]]
        image = F.interpolate(image.unsqueeze(0), size=size, mode="area").squeeze(0)
    pixels = (image.double().nan_to_num(0.0).clamp(0.0, 1.0) * 255).round().byte()
    picture = Image.fromarray(pixels.squeeze(0).numpy() if len(pixels) == 1 else pixels.permute(1, 2, 0).numpy())
    file, smaller = io.BytesIO(), io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    kind, data = "png", file.getvalue()
    if len(data) > 1000:
        picture.convert("RGB").save(smaller, "WEBP", quality=72, method=4)
        kind, data = min((kind, data), ("webp", smaller.getvalue()), key=lambda one: len(one[1]))
    return f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"


def thumbnails(*collections: Mapping[int, Any]) -> list[dict[int, str]]:
    """Thumbnails of several collections of images, all on one scale from black to white.

    The scale goes from 0 to 1, or, if numbers lie outside, from the smallest to the largest.
    """
    parts = [
        {i: channels_first(torch.as_tensor(one, device="cpu")[None])[0] for i, one in part.items()}
        for part in collections
    ]
    ends = [float(end) for part in parts for image in part.values() for end in image.aminmax()]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    return [{i: thumbnail((image - low) / max(high - low, 1e-12)) for i, image in part.items()} for part in parts]


def shortened(text: Any) -> str:
    """A text, cut where it is long; a space if it is empty, so that something is shown."""
    if not isinstance(text, str):
        raise InputError(f"expected texts as strings, got {type(text).__name__}.")
    return text[:LONGEST_TEXT] + " …" * (len(text) > LONGEST_TEXT) or " "
