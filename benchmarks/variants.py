"""Structures by name on the command line: `core:size=1024`, `ekfac:leverage=clip`, `ekfac:precision=fp16`.

`ekfac:everything=1` takes bases and eigenvalues from all outputs of all examples, however many they are, and
`ekfac:n=5000` is fitted to the first so many.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import whence
from whence.curvature import kronecker

KINDS = {
    "exact": whence.Exact,
    "ekfac": whence.EKFAC,
    "kfac": whence.KFAC,
    "diagonal": whence.Diagonal,
    "core": whence.Core,
    "sketch": whence.Sketch,
}
OPTIONS = ("leverage", "loo", "noise", "recenter", "parameters")
"""What goes to `whence.fit` instead of the structure."""


@dataclass(frozen=True)
class Variant:
    """A structure with its options, those of `fit`, and in what precision products and the network compute."""

    name: str
    structure: whence.Structure
    options: dict[str, Any] = field(default_factory=dict)
    tf32: bool | None = None  # `None` for torch's defaults, by which convolutions may be rounded to TF32
    bfloat16: bool = False
    everything: bool = False
    n: int | None = None  # of the training examples, the first so many


def parse(text: str) -> Variant:
    """From `name` or `name:option=value,option=value`."""
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        raise SystemExit(f"expected one of {', '.join(KINDS)} before the colon, got {text!r}.")
    given = dict(part.split("=", 1) for part in rest.split(",") if part)
    values = {key: _literal(value) for key, value in given.items()}
    tf32 = values.pop("tf32", None)
    half, everything = (bool(values.pop(key, False)) for key in ("bfloat16", "everything"))
    n = values.pop("n", None)
    options = {key: values.pop(key) for key in OPTIONS if key in values}
    execution = {key: values.pop(key) for key in ("chunk_size", "max_memory", "precision") if key in values}
    if execution:
        options["execution"] = whence.Execution(**execution)
    return Variant(text, KINDS[kind](**values), options, None if tf32 is None else bool(tf32), half, everything, n)


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@contextmanager
def precision(tf32: bool | None) -> Iterator[None]:
    """Let products and convolutions use TF32, or not; as torch has it where that is not said."""
    if tf32 is None:
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def sampling(everything: bool) -> Iterator[None]:
    """Let bases and eigenvalues come from some outputs of many examples, or from everything."""
    before = kronecker.MANY_EXAMPLES
    kronecker.MANY_EXAMPLES = 10**12 if everything else before
    try:
        yield
    finally:
        kronecker.MANY_EXAMPLES = before
