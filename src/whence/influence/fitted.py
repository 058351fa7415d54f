"""A fitted network, and what its methods share: batches of inputs, alignments, and the terms of a variance.

Every method of a tracer iterates over batches of inputs with the model as it was fitted (`for_each_batch`), gets their
alignments with the training examples from the curvature (`whole_alignments`, `variance_terms`), and joins the results
of the batches (`join_batches`).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral, Real
from operator import length_hint
from typing import Any, TypeVar

import torch
from torch import Tensor

from whence.curvature import FittedCurvature, Meats, NewtonStep, Sandwich
from whence.data.batches import (
    Inputs,
    batch_size,
    batches_of,
    check_finite,
    combine,
    split_targets,
    take,
    to_device,
)
from whence.display import Shown, listing
from whence.errors import InputError, LoaderError, StaleModelError, shortly
from whence.estimators import POLICIES, AdjustedResiduals, LeaveOneOut, hat_blocks, hat_roots, out_of_range
from whence.jacobian.functionals import SelectedOutputs
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network
from whence.results import Diagnostics, Uncertainty
from whence.runtime.execution import Chunks
from whence.runtime.model_state import check_evaluation_mode, fingerprint, locked, preserved, rounded_products


@dataclass(frozen=True, repr=False)
class Fitted(Shown):
    """A trained network with its curvature and the weights of its training examples; `Tracer` adds the methods.

    Attributes:
        problem: the linearized training problem.
        bread: the inverse curvature.
        sandwich: covariances of predictions.
        meats: weights of the training examples in each estimator.
        adjusted: leave-one-out residuals and leverages.
        step: the Newton step to the optimum of the linearized model.
        loo: the units that are left out, one after the other.
        sigma: (k, k) covariance of the residuals, as defined by the likelihood.
        noise_scale: factor of the inverse curvature in Laplace's variance: noise variance, or dispersion.
        hc1_factor: HeC1 over HeC0.
        diagnostics: what was approximated, guarded or repaired.
        fingerprints: fingerprints of the model's parameters and buffers when it was fitted.
        held_out: (n,) for classes, the squared errors of models of the same kind that were trained without the example,
            summed over the classes; NaN if there was none. `None` if they are not known.
    """

    problem: Linearization
    bread: FittedCurvature
    sandwich: Sandwich
    meats: Meats
    adjusted: AdjustedResiduals
    step: NewtonStep
    loo: LeaveOneOut
    sigma: Tensor
    noise_scale: float
    hc1_factor: float
    diagnostics: Diagnostics
    fingerprints: Mapping[str, int]
    held_out: Tensor | None = None

    @property
    def degrees_of_freedom(self) -> float:
        """Effective degrees of freedom, the trace of the hat matrix; at most n k for an exact structure."""
        return self.bread.degrees_of_freedom

    @property
    def residuals(self) -> Tensor:
        """(n, k) residuals of the training examples; those of the recentered model if `recenter` was set.

        Minus the gradient of the loss in the outputs: y - f(x) for squared error, y - p for classes. They do not
        contain sample weights; an example of weight zero has none.
        """
        return self.problem.unweighted(self.problem.isometric(self.weighted_residuals))

    @property
    def weighted_residuals(self) -> Tensor:
        """(n, k) residuals times the sample weights, from which leave-one-out residuals are computed."""
        return self.meats.roots["hec0"].sum(2)

    @property
    def loo_residuals(self) -> Tensor:
        """(n, k) residuals that each training example would have if it were left out."""
        return self.problem.unweighted(self.problem.isometric(self.adjusted.hec3))

    @property
    def leverage(self) -> Tensor:
        """(n, k) leverage of each output of each training example."""
        return self.adjusted.leverage

    @property
    def noise_variance(self) -> Tensor:
        """(n,) trace of the noise covariance of each training example."""
        return self.problem.isometric(self.meats.roots["ho"]).square().sum((1, 2)).expand(self.problem.n)

    @property
    def counted(self) -> Tensor:
        """(n,) which training examples count in the loss: those with a positive sample weight."""
        weights = self.problem.sample_weights
        if weights is None:
            return torch.ones(self.problem.n, dtype=torch.bool, device=self.problem.device)
        return weights > 0

    @property
    def all_outputs(self) -> bool:
        """Whether the network has one output vector per example, and the fit used all outputs."""
        return not self.problem.dense and self.problem.sketch is None

    @abstractmethod
    def predict(self, x: Any, *, covariance: bool | None = None) -> Uncertainty:
        """Predictions with variances."""

    @abstractmethod
    def explain(self, x: Any, level: float = 0.95, top: int = 5, examples: Any = None, pool: Any = None) -> Any:
        """Verdicts."""


def leave_one_out_leverage(fitted: Fitted) -> Tensor:
    """(n, k, k) leverage J_i F_(-i)^-1 J_i^T = (I - Q_i L_i)^-1 Q_i of each training example in the fit without it.

    An approximate curvature behaves as if it did not contain the example, so its blocks Q_i are used as they are.
    """
    blocks = fitted.bread.leverage_blocks
    if fitted.loo.policy != "exact":
        return blocks
    roots, hats = hat_roots(hat_blocks(blocks, fitted.problem.hessian_roots), fitted.problem.hessian_roots)
    pulled = blocks @ roots
    return blocks + pulled * POLICIES["exact"].inflation(hats).unsqueeze(1) @ pulled.mT


def check_level(given: Any) -> None:
    """Raise unless a level lies between zero and one."""
    if not isinstance(given, Real) or not 0.0 < float(given) < 1.0:
        raise InputError(f"expected a level between 0 and 1, got {shortly(given)}. For 95 % pass 0.95.")


def check_count(given: Any, name: str, instead: str = "", least: int = 1) -> None:
    """Raise unless a number of examples is an integer; an array may have been meant for another argument."""
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < least:
        hint = instead if hasattr(given, "shape") else ""
        raise InputError(
            f"expected {name} to be a whole number of examples, at least {least}, got {shortly(given)}.{hint}"
        )


def read_numbers(given: Any, what: str, least: int, most: int) -> list[int]:
    """The numbers of a list or tensor. Raises unless there are some, and all are whole ones from `least` to `most`."""
    listed = given.tolist() if isinstance(given, Tensor) and given.ndim == 1 else given
    several = isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) > 0
    if not several or not all(isinstance(one, Integral) and not isinstance(one, bool) for one in listed):
        raise InputError(f"expected {what} or a list of numbers such as [0, 3], got {given!r}.")
    if wrong := [one for one in listed if not least <= one <= most]:
        raise InputError(f"expected {what} or a list of numbers between {least} and {most}, got {wrong[0]}.")
    return [int(one) for one in listed]


def check_ungrouped(fitted: Fitted) -> None:
    """Raise if examples were left out in groups: their leave-one-out residuals are not their own."""
    if fitted.loo.groups is not None:
        raise InputError(
            "expected a fit without groups to attribute variances to single examples, got one with groups, whose "
            "members count together. Fit again without groups."
        )


def check_variances(
    problem: Linearization, found: Mapping[str, Tensor], where: str, inputs: Inputs | None = None
) -> None:
    """Raise if variances of predictions overflow; HeC1 may be infinite by its definition.

    An input with a non-finite gradient, as of a square root at zero, may have variances (m, ...) that are NaN. That is
    not a problem of scale.
    """
    for name, values in found.items():
        if name == "hec1" or bool(torch.isfinite(values).all()):
            continue
        bad = ~torch.isfinite(values).flatten(1).all(1)
        if inputs is not None:
            bad &= _finite_gradients(problem, inputs)
        if bool(bad.any()):
            count = f"{int(bad.sum())} of {len(values)}"
            raise out_of_range(problem, f"{name} of {count} predictions in {where} infinite or NaN")


def _finite_gradients(problem: Linearization, inputs: Inputs) -> Tensor:
    """(m,) which inputs have finite gradients of their outputs."""
    rows = problem.jacobian().rows(inputs, problem.output_count(inputs))
    return torch.cat([torch.isfinite(some).flatten(1).all(1) for _, some in rows])


@contextmanager
def using_model(fitted: Fitted) -> Iterator[None]:
    """Use the model as it was fitted, and restore its state afterwards."""
    model = fitted.problem.network.model
    with locked(model):
        _check_unchanged(fitted)
        with preserved(model), rounded_products(True if fitted.bread.problem.precision != "float32" else None):
            for parameter in fitted.problem.selection.parameters.values():
                parameter.requires_grad_(True)  # the model may have been frozen after its fit; restored on exit
            yield


def _check_unchanged(fitted: Fitted) -> None:
    model = fitted.problem.network.model
    check_evaluation_mode(model)
    here = Network(model).device
    if here != fitted.problem.device:
        raise StaleModelError(
            f"expected the model on {fitted.problem.device}, where it was fitted, got it on {here}. "
            "Move it back, or call whence.fit again."
        )
    if isinstance(model, LeafSum):
        model.check_unchanged()
    before, now = fitted.fingerprints, fingerprint(model)
    changed = sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))
    if changed:
        raise StaleModelError(
            f"expected the weights and buffers that were fitted, got changes in {listing(changed)}. "
            "Call whence.fit again, or load the fitted weights."
        )


T = TypeVar("T")


def for_each_batch(
    fitted: Fitted, x: Any, work: Callable[[Inputs, str], T], *, plain: bool = False, what: str = "to predict"
) -> list[T]:
    """Apply `work` to every batch, checked and on the model's device; in halves if the device cannot hold it.

    Inputs are a batch as in training, or a loader or list of batches. `work` gets a batch and its name. The batch is
    unchanged if `plain`, else a view of the predicted classes if all outputs would be too many. `what` says in
    messages which inputs they are.
    """
    notes: list[str] = []
    chunks = Chunks(notes, "predictions")

    def in_chunks(inputs: Inputs, where: str) -> Iterator[tuple[slice, T]]:
        size = batch_size(inputs, where)
        whole = slice(0, size)
        return chunks.of(size, size, lambda rows: work(inputs if rows == whole else take(inputs, rows), where))

    with using_model(fitted):
        done = [one for inputs, where in inputs_of(fitted, x, plain, what) for _, one in in_chunks(inputs, where)]
    for note in notes:
        fitted.problem.progress.say(f"whence: {note}")
    return done


def inputs_of(fitted: Fitted, x: Any, plain: bool = False, what: str = "to predict") -> Iterator[tuple[Inputs, str]]:
    """Yield every batch, checked and on the model's device, and its name; within `using_model`."""
    number = -1
    for number, inputs in enumerate(_batches(fitted, x)):
        where = f"batch {number} of the inputs {what}"
        moved = to_device(inputs, fitted.problem.device)
        if batch_size(moved, where) == 0:
            raise InputError(f"expected at least one input, got an empty {where}.")
        check_finite(moved, "inputs", where)
        yield moved if plain or fitted.all_outputs else _predicted_view(fitted, moved), where
    if number < 0:
        raise InputError(f"expected at least one batch {what}, got an empty loader.")


def _batches(fitted: Fitted, x: Any) -> Iterator[Inputs]:
    positional, model = fitted.problem.batches.positional, fitted.problem.network.model
    if isinstance(model, LeafSum):
        yield from model.inputs(x)
        return
    loader = batches_of(x, "to predict")
    if loader is x:  # several batches
        loader = fitted.problem.progress.track(x, "predictions, batch", length_hint(x) or None)
    yield from (split_targets(raw, positional)[0] for raw in loader)


def _predicted_view(fitted: Fitted, inputs: Inputs) -> Inputs:
    """A view of the predicted class at all positions; of all outputs if there are no classes."""
    with torch.no_grad():
        outputs = fitted.problem.network.shaped(inputs)
    best = predicted_outputs(fitted, outputs)
    every = torch.arange(outputs[0].numel(), device=outputs.device).expand(len(outputs), -1)
    return SelectedOutputs(inputs, every if best is None else best)


def predicted_outputs(fitted: Fitted, outputs: Tensor) -> Tensor | None:
    """(m, t) index of the predicted class at each of t positions, among all outputs of an example (m, ..., k).

    `None` unless the outputs are classes of a single choice.
    """
    likelihood, k = fitted.problem.likelihood, outputs.shape[-1]
    if not (likelihood.has_classes and likelihood.couples_outputs):
        return None
    best = likelihood.predicted(outputs.reshape(-1, k)).reshape(len(outputs), -1)
    return best + k * torch.arange(best.shape[1], device=outputs.device)


def whole_alignments(fitted: Fitted, inputs: Inputs) -> Iterator[tuple[slice, Tensor]]:
    """Yield (which inputs, their alignments (m, k, n, k) with all training examples), in the dtype of the problem."""
    for which, chunks in fitted.bread.alignments(inputs):
        yield which, torch.cat([aligned for _, aligned in chunks], dim=2).to(fitted.problem.dtype)


@dataclass(frozen=True)
class Terms:
    """The contribution of every training example to the variance of each prediction.

    With alignments a_i = J F_lam^-1 J_i^T, noise covariance Sigma and leave-one-out residuals u_i.
    """

    ho: Tensor  # (m, n) trace of a_i Sigma a_i^T
    hec3: Tensor  # (m, n) |a_i u_i|^2
    pull: Tensor  # (m, n, k) a_i u_i = f(x) - f_(-i)(x), how far the example moves the prediction


def variance_terms(fitted: Fitted, inputs: Inputs, per_output: bool = False) -> Iterator[tuple[slice, Terms]]:
    """Yield (which predictions, their terms) for as many inputs of a batch as a tenth of the memory budget holds.

    With `per_output`, each visible output is a prediction of its own, ordered by input; else those of an input are one
    prediction.
    """
    problem = fitted.problem
    k = problem.output_count(inputs)
    each = k if per_output else 1
    most = max(1, int(0.1 * problem.budget.limit) // (8 * problem.n * (k + 3 * each)))
    size = batch_size(inputs, "this batch")
    for low in range(0, size, most):
        some = take(inputs, slice(low, min(low + most, size)))
        for which, chunks in fitted.bread.alignments(some):
            m = (which.stop - which.start) * each
            first = (low + which.start) * each
            if per_output:  # (m, c, n, k) to (m c, 1, n, k)
                chunks = ((rows, aligned.flatten(0, 1).unsqueeze(1)) for rows, aligned in chunks)
            terms = _terms(fitted, chunks, m, k // each)
            found = {"ho": terms.ho.sum(1, keepdim=True), "hec3": terms.hec3.sum(1, keepdim=True)}
            check_traced(problem, found, take(some, which))
            yield slice(first, first + m), terms


def _terms(fitted: Fitted, chunks: Iterator[tuple[slice, Tensor]], m: int, k: int) -> Terms:
    problem, n = fitted.problem, fitted.problem.n
    ho, hec3 = (torch.empty(m, n, dtype=problem.dtype, device=problem.device) for _ in range(2))
    pull = torch.empty(m, n, k, dtype=problem.dtype, device=problem.device)
    noise, loo = (fitted.meats.roots[name].expand(n, -1, -1).mT for name in ("ho", "hec3"))  # (n, q, k)

    def norms(values: Tensor) -> Tensor:  # (n, q, m k) to (m, n)
        found: Tensor = torch.linalg.vector_norm(values.unflatten(2, (m, -1)), dim=(1, 3))
        return found.T

    for rows, aligned in chunks:  # (m, k, n, k), in the precision of their computation: squares and sums keep it
        by_example = aligned.permute(2, 3, 0, 1).flatten(2)  # (n, k, m k)
        pulls = loo[rows].to(aligned.dtype) @ by_example  # a_i u_i
        ho[:, rows] = norms(noise[rows].to(aligned.dtype) @ by_example).square()
        hec3[:, rows] = norms(pulls).square()
        pull[:, rows] = pulls.sum(1).reshape(-1, m, k).transpose(0, 1)
    return Terms(ho, hec3, pull)


def check_traced(problem: Linearization, found: Mapping[str, Tensor], inputs: Inputs) -> None:
    """Raise if variances (m, 1) by name are NaN, either because gradients are or because of their scale."""
    if all(bool(torch.isfinite(one).all()) for one in found.values()):
        return
    bad = (~_finite_gradients(problem, inputs)).nonzero().squeeze(1).tolist()
    if bad:
        raise InputError(
            "expected finite gradients of the outputs in the weights to trace predictions, got NaN or infinity for "
            f"{len(bad)} of {batch_size(inputs, 'this batch')} inputs of a batch, first for number {bad[0]}. Look for "
            "a square root, a norm or a division at zero in the model; leave these inputs out: predict returns NaN."
        )
    check_variances(problem, found, "a batch")


def training_examples(
    fitted: Fitted, index: Tensor, label: str | None = None
) -> Iterator[tuple[Tensor, Inputs, Tensor]]:
    """Yield (which of these training examples, their inputs, their targets), batch by batch; `label` names progress."""
    for batch in fitted.problem.batches.read(label):
        here = index[(index >= batch.start) & (index < batch.start + batch.size)]
        if len(here):
            rows = here - batch.start
            yield here, take(batch.inputs, rows), batch.targets[rows]


def evenly_spaced(index: Tensor, most: int) -> Tensor:
    """At most `most` of some examples, evenly spaced.

    Examples:
        >>> evenly_spaced(torch.arange(10), 4)
        tensor([0, 3, 6, 9])
    """
    if len(index) <= most:
        return index
    return index[torch.linspace(0, len(index) - 1, most, device=index.device).round().long()]


def divide(numerator: Tensor, denominator: Tensor, otherwise: float) -> Tensor:
    """The ratio where the denominator is positive, and `otherwise` elsewhere."""
    ratio = numerator / denominator.clamp_min(torch.finfo(denominator.dtype).tiny)
    return torch.where(denominator > 0, ratio, otherwise)


def join_batches(results: Sequence[T]) -> T:
    """Join the results of several batches."""
    return combine(results, torch.cat)


def check_same(before: Tensor, again: Tensor, tolerance: float = 1e-3, advice: str = "") -> None:
    """Raise unless two passes over the same inputs give the same numbers, up to rounding."""
    before, again = before.double(), again.double()
    size = tolerance * float(before.nan_to_num(0.0).abs().max())
    if before.shape != again.shape or not torch.allclose(before, again, tolerance, size, equal_nan=True):
        raise LoaderError(
            "expected the same inputs in every pass, got different predictions in the second pass. Use "
            f"shuffle=False and switch random augmentation off, or pass the inputs as one tensor{advice}."
        )
