"""All errors that `whence` raises on purpose.

Each is a `WhenceError` and also the built-in error that Python programmers expect, so both
`except whence.WhenceError` and `except ValueError` work. A message says what was expected, what it got, where, and what
to do about it.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class WhenceError(Exception):
    """Root of every error raised on purpose by `whence`.

    Examples:
        >>> import torch, whence
        >>> try:
        ...     whence.fit(torch.nn.Linear(1, 1), [(torch.ones(3, 1), torch.ones(4, 1))], progress=False)
        ... except whence.WhenceError as error:
        ...     print(type(error).__name__)
        ShapeError
    """


class InputError(WhenceError, ValueError):
    """A value passed to `whence` is not usable (an option, NaN in the data, an empty loader)."""


class ShapeError(WhenceError, ValueError):
    """Two shapes that must match do not."""


class TargetError(WhenceError, ValueError):
    """Targets do not match the likelihood."""


class LoaderError(WhenceError, RuntimeError):
    """The loader cannot be read twice, or does not yield the same number of examples each time."""


class NotDeterministicError(WhenceError, RuntimeError):
    """The model returns different outputs for the same input, or is in training mode."""


class UnsupportedLayerError(WhenceError, NotImplementedError):
    """The chosen structure cannot handle a layer of the model."""


class UncapturedParameterError(WhenceError, RuntimeError):
    """The gradient of a selected parameter could not be accounted for, example by example."""


class SingularCurvatureError(WhenceError, ArithmeticError):
    """The curvature has no inverse at this ridge."""


class StaleModelError(WhenceError, RuntimeError):
    """The model's weights changed after the tracer was fitted."""


class TooLargeError(WhenceError, MemoryError):
    """The computation would not fit in memory; nothing was allocated."""


class CorruptArtifactError(WhenceError, ValueError):
    """A saved file is damaged, hostile, or belongs to something else."""


class MissingFileError(WhenceError, FileNotFoundError):
    """There is no file at the path."""


class FormatError(WhenceError, ValueError):
    """A saved file has another format than this version reads."""


class ProcessError(WhenceError, RuntimeError):
    """Another process of the same fit failed, died or hangs."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, short enough for another message."""
    text = str(error).strip()
    return text.splitlines()[0][:160].rstrip(".") if text else type(error).__name__


def shortly(value: object) -> str:
    """A value for a message: the shape of an array, and the beginning of a long value.

    Examples:
        >>> import torch
        >>> shortly(torch.zeros(3, 2)), shortly("mse")
        ('a Tensor of shape (3, 2)', "'mse'")
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"a {type(value).__name__} of shape {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def did_you_mean(given: object, known: Iterable[str], most: int = 1) -> str:
    """A question with the names nearest to `given`, ignoring case; empty if none is near.

    Examples:
        >>> did_you_mean("Exakt", ["exact", "core"]), did_you_mean("ridge", ["exact", "core"])
        (" Did you mean 'exact'?", '')
    """
    folded = {name.lower().strip(): name for name in known}
    near = get_close_matches(str(given).lower().strip(), list(folded), n=most)
    return f" Did you mean {' or '.join(repr(folded[one]) for one in near)}?" if near else ""


def printable(text: str, most: int | None = None) -> str:
    """A text from a file, for a message: without control characters, and shortened.

    Examples:
        >>> printable(chr(27) + "[2J").isprintable(), printable("longer", 4)
        (True, 'long...')
    """
    shown = text if most is None or len(text) <= most else f"{text[:most]}..."
    return "".join(one if one.isprintable() else "\ufffd" for one in shown)
