"""From what a user asks about to batches on the model's device; the model is left as found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from whence.errors import InputError, StaleModelError
from whence.tangents.batches import Inputs, batch_size, check_finite, take, to_device, without_targets
from whence.tangents.borrow import borrowed, check_calm, fingerprint
from whence.tangents.claims import claimed
from whence.tangents.forward import Network
from whence.tangents.loaders import length
from whence.tangents.pieces import Pieces
from whence.tangents.switches import rounded_products
from whence.tangents.views import Picked

from .fitted import Fitted
from .input_cache import InputCache

T = TypeVar("T")


def each(
    fitted: Fitted,
    x: Any,
    work: Callable[[Inputs, str], T],
    *,
    plain: bool = False,
    cache: InputCache | None = None,
) -> list[T]:
    """Do something with every batch, checked and on the model's device; in halves, where the device cannot hold it.

    Args:
        fitted: whose model is asked.
        x: a batch as in training, or a loader or list of batches; or a cache, for the inputs of another call.
        work: gets a batch and words that name it.
        plain: give the batch as it is. Else it is a view of the predicted classes where all outputs would be too many.
        cache: takes down the inputs.
    """
    notes: list[str] = []
    pieces = Pieces(notes, "predictions")

    def parts(inputs: Inputs, where: str) -> Iterator[T]:
        size = batch_size(inputs, where)
        for _, found in pieces.of(
            size, size, lambda rows: work(inputs if rows == slice(0, size) else take(inputs, rows), where)
        ):
            yield found

    with borrowed_model(fitted):
        done = [part for inputs, where in inputs_of(fitted, x, plain, cache) for part in parts(inputs, where)]
    for note in notes:
        fitted.problem.progress.say(f"whence: {note}")
    return done


def inputs_of(
    fitted: Fitted, x: Any, plain: bool = False, cache: InputCache | None = None
) -> Iterator[tuple[Inputs, str]]:
    """Yield every batch, checked and on the model's device, and words that name it; the model is borrowed already."""
    number = -1
    for number, inputs in enumerate(_inputs(fitted, x)):
        where = f"batch {number} of the inputs to predict"
        moved = to_device(inputs, fitted.problem.device)
        if batch_size(moved, where) == 0:
            raise InputError(f"expected at least one input, got an empty {where}.")
        check_finite(moved, "inputs", where)
        if cache is not None:
            cache.add(inputs)
        yield moved if plain else _viewed(fitted, moved), where
    if number < 0:
        raise InputError("expected at least one batch to predict, got an empty loader.")


def _viewed(fitted: Fitted, inputs: Inputs) -> Inputs:
    """Inputs through which the outputs are looked at that predictions are told of by default, at all positions."""
    problem = fitted.problem
    if not problem.dense and problem.sketch is None:
        return inputs
    with torch.no_grad():
        outputs = problem.network.shaped(inputs)
    best = predicted_outputs(fitted, outputs)
    every = torch.arange(outputs[0].numel(), device=outputs.device).expand(len(outputs), -1)
    return Picked(inputs, every if best is None else best)


def predicted_outputs(fitted: Fitted, outputs: Tensor) -> Tensor | None:
    """(m, t) where among all outputs of an example (m, ..., k) the predicted class of each of its t positions is.

    `None` where outputs are not the classes of one choice.
    """
    likelihood, k = fitted.problem.likelihood, outputs.shape[-1]
    if not (likelihood.has_classes and likelihood.couples_outputs):
        return None
    best = likelihood.predicted(outputs.reshape(-1, k)).reshape(len(outputs), -1)
    return best + k * torch.arange(best.shape[1], device=outputs.device)


@contextmanager
def borrowed_model(fitted: Fitted) -> Iterator[None]:
    """Use the model as it was fitted, and leave it as found."""
    model = fitted.problem.network.model
    with claimed(model):
        _check_fresh(fitted)
        with borrowed(model), rounded_products(True if fitted.bread.tf32 else None):
            yield


def _inputs(fitted: Fitted, x: Any) -> Iterator[Inputs]:
    positional = fitted.problem.batches.positional
    if isinstance(x, InputCache):
        yield from x.read(lambda given: _inputs(fitted, given))
    elif isinstance(x, (Tensor, Mapping, tuple)):
        yield without_targets(x, positional)
    elif isinstance(x, Iterable) and not isinstance(x, (str, bytes, numpy.ndarray, Dataset)):
        track = fitted.problem.progress.track
        yield from (without_targets(raw, positional) for raw in track(x, "predictions, batch", length(x)))
    else:
        raise InputError(
            f"expected a batch (a tensor, a tuple, a dict) or a loader to predict, got {type(x).__name__}. "
            "Convert arrays with torch.as_tensor, and wrap a data set in a DataLoader."
        )


def _check_fresh(fitted: Fitted) -> None:
    model = fitted.problem.network.model
    check_calm(model)
    here = Network(model).device
    if here != fitted.problem.device:
        raise StaleModelError(
            f"expected the model on {fitted.problem.device}, where it was fitted, got it on {here}. "
            "Move it back, or call whence.fit again."
        )
    now = fingerprint(model)
    changed = sorted(name for name in fitted.marks.keys() | now.keys() if fitted.marks.get(name) != now.get(name))
    if changed:
        shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise StaleModelError(
            f"expected the weights and buffers that were fitted, got changes in {shown}. "
            "Call whence.fit again, or load the weights of that time."
        )
