"""The inputs shown on a page, in readable form: images, texts, or rows of a table."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.report.task import Examples
from whence.report.traced import Traced
from whence.report.usual import UsualValues, frame_of, rows_as_text

if TYPE_CHECKING:
    import pandas

Form = Literal["image", "text", "row", "none"]
IMAGES = 1500  # images in one page, of test and training inputs together
TEXTS = 2_000  # training texts in one page
CELLS = 150_000  # cells of test rows in one page
WIDEST_ROW = 64  # numbers that an input may have to be shown as a row of a table by default
LONGEST_TEXT = 600  # characters of a text that are shown
SIDE = 64  # the longer side of a thumbnail, in pixels
SMALL = 1400  # characters of an image that need not be made smaller


@dataclass(frozen=True)
class ShownInputs:
    """All inputs that are shown: images (data URIs), texts, or rows.

    A row has its cells, the columns in which it is unusual with the reason, and the columns to show first.
    """

    form: Form
    columns: tuple[str, ...] = ()  # names, for rows of a table
    test: Mapping[int, Any] = field(default_factory=dict)  # by number of the prediction
    train: Mapping[int, Any] = field(default_factory=dict)  # by position in the training set
    impossible: Mapping[int, str] = field(default_factory=dict)  # test rows that cannot be right, with the reason


def as_pair(given: Any) -> tuple[Any, Any]:
    """The values given for test and training inputs: a pair, or a value for the test inputs only."""
    pair = isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], str)
    return (given[0], given[1]) if pair else (given, None)


def read_views(images: Any, texts: Any, table: Any, first_batch: Any) -> tuple[Form, Any, Any]:
    """The form in which inputs are shown, and what shows test and training inputs: data, or a function of a batch."""
    forms: dict[Form, Any] = {"image": images, "text": texts, "row": table}
    given = [(form, view) for form, view in forms.items() if view is not None]
    if len(given) > 1:
        raise InputError("expected one of images, texts and table, got several. Choose how inputs are to be shown.")
    form, view = given[0] if given else (_guess_form(first_batch), lambda inputs: inputs)
    return (form, view, view) if callable(view) else (form, *as_pair(view))


def show_inputs(
    views: tuple[Any, Any, Any],
    test: Examples,
    train: Examples,
    sizes: tuple[int, int],
    traced: Traced,
    first: list[int],
) -> ShownInputs:
    """The traced test inputs, the training examples `first`, and as many as fit of those behind the traced ones."""
    form, test_view, train_view = read_views(*views, next(iter(traced.inputs))[0])
    behind = Counter([*traced.check.examples.flatten().tolist(), *traced.near.examples[:, :3].flatten().tolist()])
    examples = list(dict.fromkeys([*first, *(example for example, _ in behind.most_common())]))
    chosen = traced.chosen.tolist()
    if form == "none":
        return ShownInputs("none")
    if form == "row":
        table, training = _frame(test_view, test, sizes[0], "test"), None
        if train_view is not None and not isinstance(train_view, UsualValues):
            training = _frame(train_view, train, sizes[1], "training")
        usual = train_view or UsualValues({}) if training is None else UsualValues.of(training)
        return _show_rows(usual, table, training, chosen, examples)
    room = max(IMAGES - len(chosen), 0) if form == "image" else TEXTS
    tests = _of_examples(form, test_view, test, chosen, sizes[0], "test")
    trains = _of_examples(form, train_view, train, sorted(examples[:room]), sizes[1], "training")
    shown = thumbnails(tests, trains) if form == "image" else [shortened(tests), shortened(trains)]
    return ShownInputs(form, (), *shown)


def _of_examples(
    form: Form, view: Any, source: Examples, wanted: Sequence[int], total: int, which: str
) -> dict[int, Any]:
    """Images or texts of some examples, in ascending order; none if none were given."""
    if view is None:
        return {}
    if callable(view):
        made = [one for inputs in source.select(wanted) for one in view(inputs)]
        return dict(zip(wanted, made, strict=True))
    if len(view) != total:
        raise ShapeError(f"expected {total} {form}s, one for each {which} input, got {len(view)}.")
    return {i: view[i] for i in wanted}


def _show_rows(
    usual: UsualValues,
    table: pandas.DataFrame,
    training: pandas.DataFrame | None,
    traced: list[int],
    examples: list[int],
) -> ShownInputs:
    """All test rows, or the traced ones if they are many, and training rows if they are known."""
    most = CELLS // max(len(table.columns), 1)
    chosen = list(range(len(table))) if len(table) <= most else traced[:most]
    reasons = zip(chosen, usual.impossible(table.iloc[chosen]), strict=True)
    impossible = {i: reason for i, reason in reasons if reason}
    trains = {} if training is None else _cells(usual, training, examples[:most])
    return ShownInputs("row", tuple(table.columns), _cells(usual, table, chosen), trains, impossible)


def _frame(given: Any, source: Examples, total: int, which: str) -> pandas.DataFrame:
    """The whole table as a data frame."""
    import pandas  # an extra: only tables need it

    parts = (given(inputs) for inputs, _ in source) if callable(given) else [given]
    frame = pandas.concat(map(frame_of, parts), ignore_index=True)
    if len(frame) != total:
        raise ShapeError(f"expected {total} rows in the table, one for each {which} input, got {len(frame)}.")
    return frame


def _cells(usual: UsualValues, table: pandas.DataFrame, chosen: Sequence[int]) -> dict[int, Any]:
    """Cells of some rows, and those that stand out."""
    some = table.iloc[list(chosen)]
    found = zip(chosen, rows_as_text(some), usual.standing_out(some), strict=True)
    return {i: (cells, *standing_out) for i, cells, standing_out in found}


def _guess_form(first: Any) -> Form:
    """Inputs that look like images are shown as such, short rows of numbers as rows of a table."""
    if isinstance(first, Tensor) and first.is_floating_point():
        if first.ndim == 4 and first.shape[1] in (1, 3) and min(first.shape[2:]) >= 8:
            return "image"
        if first.ndim == 2 and first.shape[1] <= WIDEST_ROW:
            return "row"
    return "none"


def channels_last(image: Any) -> Tensor:
    """(h, w, 1 or 3) from (h, w), (c, h, w) or (h, w, c); bytes are scaled to the range from 0 to 1."""
    given = torch.as_tensor(image, device="cpu").detach()
    found = given.float() / (255.0 if given.dtype == torch.uint8 else 1.0)
    found = found.unsqueeze(2) if found.ndim == 2 else found
    if found.ndim == 3 and found.shape[0] in (1, 3):
        found = found.permute(1, 2, 0)
    if not found.numel() or found.ndim != 3 or found.shape[2] not in (1, 3):
        raise ShapeError(
            "expected images of shape (n, height, width), (n, channels, height, width) or (n, height, width, channels) "
            f"with 1 or 3 channels, got {tuple(given.shape)} for one."
        )
    return found


def thumbnail(image: Tensor, side: int = SIDE) -> str:
    """An image (h, w, c) with numbers between 0 and 1 as a data URI: PNG, or WebP if that is smaller."""
    from PIL import Image  # an extra: only reports need it

    pixels = (image.double().nan_to_num(0.0).clamp(0.0, 1.0) * 255).round().byte()
    picture = Image.fromarray(pixels.squeeze(2).numpy())
    picture.thumbnail((side, side))
    png = _data_uri(picture, "png", optimize=True)
    return png if len(png) < SMALL else min(png, _data_uri(picture.convert("RGB"), "webp", quality=72), key=len)


def _data_uri(picture: Any, kind: str, **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode('ascii')}"


def thumbnails(*collections: Mapping[int, Any]) -> list[dict[int, str]]:
    """Thumbnails of several collections of images, all on one scale from black to white.

    The scale goes from 0 to 1, or, if numbers lie outside, from the smallest to the largest.
    """
    parts = [{i: channels_last(one) for i, one in part.items()} for part in collections]
    ends = [float(end) for part in parts for image in part.values() for end in image.aminmax()]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    if low >= 0.0 and high <= 1.0:
        low, high = 0.0, 1.0
    return [{i: thumbnail((image - low) / max(high - low, 1e-12)) for i, image in part.items()} for part in parts]


def shortened(texts: Mapping[int, Any]) -> dict[int, str]:
    """Texts, cut where they are long; a space for an empty one, so that something is shown."""
    for text in texts.values():
        if not isinstance(text, str):
            raise InputError(f"expected texts as strings, got {type(text).__name__}.")
    return {i: text[:LONGEST_TEXT] + " …" * (len(text) > LONGEST_TEXT) or " " for i, text in texts.items()}
