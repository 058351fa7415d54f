"""What tracing needs to know of a fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from whence.curvature import FittedCurvature, Meats, NewtonStep, Sandwich
from whence.curvature.base import Alignments
from whence.data.batches import Inputs, batch_size, check_finite, length, take, tensors_of, to_device, without_targets
from whence.errors import InputError, LoaderError, StaleModelError
from whence.estimators import LeftOut, Weighing
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network, SelectedOutputs
from whence.runtime.execution import Chunks
from whence.runtime.memory import Budget
from whence.runtime.model_state import check_evaluation_mode, checksum, fingerprint, locked, preserved, rounded_products

if TYPE_CHECKING:
    import pandas


class Fitted(Protocol):
    """A fitted network as `Tracer` offers it; tracing sits below the tracer, which offers it as methods."""

    @property
    def problem(self) -> Linearization:
        """The linearized training problem."""

    @property
    def bread(self) -> FittedCurvature:
        """The inverse curvature."""

    @property
    def sandwich(self) -> Sandwich:
        """Variances of predictions."""

    @property
    def meats(self) -> Meats:
        """Weights of the training examples in each estimator."""

    @property
    def step(self) -> NewtonStep:
        """The way to the optimum of the linearized model."""

    @property
    def left_out(self) -> LeftOut:
        """Leave-one-out residuals and leverages."""

    @property
    def weighing(self) -> Weighing:
        """How leave-one-out residuals came from leverages."""

    @property
    def residuals(self) -> Tensor:
        """(n, k) residuals of the training examples."""

    @property
    def loo_residuals(self) -> Tensor:
        """(n, k) the same after leaving each out."""

    @property
    def leverage(self) -> Tensor:
        """(n, k) leverages of the training examples."""

    @property
    def sigma(self) -> Tensor:
        """(k, k) noise covariance."""

    @property
    def fingerprints(self) -> Mapping[str, int]:
        """Of the model's parameters and buffers when it was fitted."""

    @property
    def noise_scale(self) -> float:
        """Noise variance, or dispersion."""

    @property
    def hc1_factor(self) -> float:
        """HeC1 over HeC0."""


def check_count(given: Any, name: str) -> None:
    """Raise unless a number of examples is a whole number above zero."""
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 1:
        raise InputError(f"expected {name} to be a whole number of examples, at least 1, got {given!r}.")


def check_level(given: Any) -> None:
    """Raise unless a level lies between zero and one."""
    if not isinstance(given, Real) or not 0.0 < float(given) < 1.0:
        raise InputError(f"expected a level between 0 and 1, got {given!r}. For 5 % of false alarms pass 0.95.")


def check_ungrouped(fitted: Fitted) -> None:
    """Raise where examples were left out in groups: their leave-one-out residuals are not their own."""
    if fitted.weighing.groups is not None:
        raise InputError(
            "expected a fit without groups to attribute variances to single examples, got one with groups, whose "
            "members count together. Fit again without groups."
        )


T = TypeVar("T")


def for_each_batch(
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
    pieces = Chunks(notes, "predictions")

    def parts(inputs: Inputs, where: str) -> Iterator[T]:
        size = batch_size(inputs, where)
        for _, found in pieces.of(
            size, size, lambda rows: work(inputs if rows == slice(0, size) else take(inputs, rows), where)
        ):
            yield found

    with using_model(fitted):
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
    return SelectedOutputs(inputs, every if best is None else best)


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
def using_model(fitted: Fitted) -> Iterator[None]:
    """Use the model as it was fitted, and leave it as found."""
    model = fitted.problem.network.model
    with locked(model):
        _check_fresh(fitted)
        with preserved(model), rounded_products(True if fitted.bread.tf32 else None):
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
    check_evaluation_mode(model)
    here = Network(model).device
    if here != fitted.problem.device:
        raise StaleModelError(
            f"expected the model on {fitted.problem.device}, where it was fitted, got it on {here}. "
            "Move it back, or call whence.fit again."
        )
    now = fingerprint(model)
    before = fitted.fingerprints
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        shown = ", ".join(changed[:5]) + (", ..." if len(changed) > 5 else "")
        raise StaleModelError(
            f"expected the weights and buffers that were fitted, got changes in {shown}. "
            "Call whence.fit again, or load the weights of that time."
        )


MOST = 256 * 2**20
"""Inputs of one call are kept up to so many bytes, and up to a share of the memory that a fit may take."""

SHARE = 0.05

Fingerprint = tuple[tuple[tuple[int, ...], torch.dtype, int], ...]
"""Shape, dtype and bits of every tensor of a batch."""


class InputCache:
    """Copies of the inputs of one call, as long as they are small; of more, a fingerprint of each batch.

    Args:
        x: what the user asked about.
        budget: of the fit, of whose memory a share may be taken.
    """

    def __init__(self, x: Any, budget: Budget) -> None:
        self.x = x
        self._room = min(MOST, int(SHARE * budget.limit))
        self._kept: list[Inputs] | None = []
        self._prints: list[Fingerprint] = []

    @property
    def readable(self) -> bool:
        """Whether the inputs can be had again: from the copies, or by reading anew what is no iterator."""
        return self._kept is not None or not isinstance(self.x, Iterator)

    def add(self, inputs: Inputs) -> None:
        """Take down one batch, without targets."""
        if self._kept is not None:
            self._room -= sum(leaf.numel() * leaf.element_size() for leaf in tensors_of(inputs))
            if self._room >= 0:
                self._kept.append(tree_map(_copied, inputs))
                return
            self._prints, self._kept = [inputs_fingerprint(one) for one in self._kept], None
        self._prints.append(inputs_fingerprint(inputs))

    def read(self, batches: Callable[[Any], Iterator[Inputs]]) -> Iterator[Inputs]:
        """The same batches again; an error where what the user gave is no longer what it was.

        Args:
            batches: reads batches, without targets, from what a user asks about.
        """
        if self._kept is not None:
            yield from self._kept
            return
        count = 0
        for inputs in batches(self.x):
            if count == len(self._prints) or inputs_fingerprint(inputs) != self._prints[count]:
                raise self._changed(f"other inputs in batch {count}")
            count += 1
            yield inputs
        if count < len(self._prints):
            raise self._changed(f"{count} batches for {len(self._prints)}")

    def _changed(self, got: str) -> InputError | LoaderError:
        at_once = "Ask for covariances at once, with predict(x, covariance=True)"
        if isinstance(self.x, Tensor | Mapping | tuple | list):
            return InputError(
                f"expected the inputs that were predicted, to compute their covariances, got {got}: they were changed "
                f"since. {at_once}, or predict again."
            )
        return LoaderError(
            f"expected the inputs that were predicted, to compute their covariances, got {got}: this loader gives "
            f"others each time. {at_once}, or use shuffle=False and no random augmentation."
        )


def inputs_fingerprint(inputs: Inputs) -> Fingerprint:
    """What changes when any tensor of the inputs does.

    Examples:
        >>> one = torch.tensor([1.0, 2.0])
        >>> [inputs_fingerprint(one) == inputs_fingerprint(other) for other in (one.clone(), one.flip(0))]
        [True, False]
    """
    return tuple((tuple(leaf.shape), leaf.dtype, checksum(leaf)) for leaf in tensors_of(inputs))


def _copied(leaf: Any) -> Any:
    """A copy in the memory of the CPU, which devices have less of."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def alignments(fitted: Fitted, inputs: Inputs) -> Alignments:
    """As `Bread.alignments` yields them, which is in the precision they were computed in."""
    for where, chunks in fitted.bread.alignments(inputs):
        yield where, _precise(fitted, chunks)


def _precise(fitted: Fitted, chunks: Iterator[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    return ((there, aligned.to(fitted.problem.dtype)) for there, aligned in chunks)


def frame(columns: Mapping[str, Sequence[Tensor | list[str]]]) -> pandas.DataFrame:
    """A data frame from columns that come in pieces.

    Examples:
        >>> frame({"index": [torch.tensor([3]), torch.tensor([5])], "word": [["a"], ["b"]]})["index"].tolist()
        [3, 5]
    """
    try:
        import pandas  # an extra: only tables need it
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("expected pandas for a table. Install it: pip install 'whence[report]'.") from error

    joined = {}
    for name, pieces in columns.items():
        tensors = [piece for piece in pieces if isinstance(piece, Tensor)]
        words = [word for piece in pieces if not isinstance(piece, Tensor) for word in piece]
        joined[name] = torch.cat(tensors).cpu().numpy() if tensors else words
    return pandas.DataFrame(joined)
