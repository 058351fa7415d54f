"""Inputs as a person sees them: pictures, texts, or rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.tangents.batches import batch_size

from .reading import Source
from .tables import Columns, columns_of, join
from .thumbnails import pictures, stretch, thumbnail

Form = Literal["image", "text", "row", "none"]
WIDEST = 64
"""Numbers an input may have to be shown as a row of a table without being asked for."""
LONGEST = 600
"""Characters of a text that are shown."""


@dataclass(frozen=True)
class Exhibits:
    """How to show inputs.

    Attributes:
        form: what they are shown as.
        make: makes pictures, texts or rows from a batch of inputs; `None` where both were given.
        test: those of the test inputs, where given.
        train: those of the training inputs, where given.
    """

    form: Form
    make: Callable[[Any], Any] | None = None
    test: Any = None
    train: Any = None

    @classmethod
    def of(cls, images: Any, texts: Any, table: Any, first: Any) -> Exhibits:
        """From the arguments of a report; `first` is a batch of inputs, which may speak for itself."""
        given = {"image": images, "text": texts, "row": table}
        chosen: list[Any] = [(form, value) for form, value in given.items() if value is not None]
        if len(chosen) > 1:
            raise InputError("expected one of images, texts and table, got several. Choose how inputs are to be shown.")
        if not chosen:
            return _guess(first)
        form, value = chosen[0]
        if callable(value):
            return cls(form, make=value)
        if isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], str):
            return cls(form, test=value[0], train=value[1])
        return cls(form, test=value)

    def of_test(self, source: Source, wanted: Sequence[int], m: int) -> dict[int, Any]:
        """Pictures, texts or rows of some test inputs, raw."""
        return self._collect(self.test, source, wanted, m, "test")

    def of_train(self, source: Source, wanted: Sequence[int], n: int) -> dict[int, Any]:
        """The same of training inputs; none where only those of the test inputs were given."""
        if self.make is None and self.train is None:
            return {}
        return self._collect(self.train, source, wanted, n, "training")

    def table(self, source: Source, m: int, which: Literal["test", "train"]) -> Columns | None:
        """All rows of a table."""
        given = self.test if which == "test" else self.train
        if self.form != "row" or (given is None and self.make is None):
            return None
        if given is None:
            assert self.make is not None
            given = join([columns_of(self.make(inputs)) for _, inputs, _ in source.read()])
        found = columns_of(given)
        if len(found) != m:
            raise ShapeError(f"expected {m} rows in the table, one for each {which} input, got {len(found)}.")
        return found

    def _collect(self, given: Any, source: Source, wanted: Sequence[int], m: int, what: str) -> dict[int, Any]:
        if self.form in ("none", "row"):
            return {}
        if given is not None:
            if len(given) != m:
                raise ShapeError(f"expected {m} {self.form}s, one for each {what} input, got {len(given)}.")
            return {number: _one(given, number) for number in wanted}
        assert self.make is not None
        found: dict[int, Any] = {}
        chosen = set(wanted)
        for start, inputs, _ in source.read():
            here = [number for number in range(start, start + batch_size(inputs, "this batch")) if number in chosen]
            if here:
                made = self.make(inputs)
                found.update({number: _one(made, number - start) for number in here})
        return found


def _one(many: Any, number: int) -> Any:
    return many[number].clone() if isinstance(many, Tensor) else many[number]


def _guess(first: Any) -> Exhibits:
    """Inputs that look like pictures are shown as such, short rows of numbers as rows of a table."""
    if isinstance(first, Tensor) and first.is_floating_point():
        if first.ndim == 4 and first.shape[1] in (1, 3) and min(first.shape[2:]) >= 8:
            return Exhibits("image", make=lambda inputs: inputs)
        if first.ndim == 2 and first.shape[1] <= WIDEST:
            return Exhibits("row", make=lambda inputs: inputs)
    return Exhibits("none")


def encode_images(*collections: Mapping[int, Any]) -> list[dict[int, str]]:
    """Data URIs of pictures, all on one scale from black to white."""
    every = [
        {number: pictures(torch.as_tensor(one, device="cpu")[None])[0] for number, one in some.items()}
        for some in collections
    ]
    flat = [image for some in every for image in some.values()]
    low = min((float(image.min()) for image in flat), default=0.0)
    high = max((float(image.max()) for image in flat), default=1.0)
    return [{number: thumbnail(stretch(image, low, high)) for number, image in some.items()} for some in every]


def encode_texts(some: Mapping[int, Any]) -> dict[int, list[list[Any]]]:
    """Texts as pieces with a weight each, between 0 and 1; a plain text is one piece of weight 0.

    Examples:
        >>> encode_texts({3: "good film", 4: [("good", 2.0), (" film", -1.0)]})
        {3: [['good film', 0.0]], 4: [['good', 1.0], [' film', 0.5]]}
    """
    return {number: _pieces(text) for number, text in some.items()}


def _pieces(text: Any) -> list[list[Any]]:
    if isinstance(text, str):
        return [[text if len(text) <= LONGEST else text[:LONGEST] + " …", 0.0]]
    if not isinstance(text, Iterable):
        raise InputError(f"expected a text, or pairs of a token and its weight, got {type(text).__name__}.")
    pairs = [(str(token), float(weight)) for token, weight in text]
    most = max((abs(weight) for _, weight in pairs), default=0.0) or 1.0
    kept, length = [], 0
    for token, weight in pairs:
        length += len(token)
        if length > LONGEST:
            kept.append([" …", 0.0])
            break
        kept.append([token, round(abs(weight) / most, 3)])
    return kept or [["", 0.0]]
