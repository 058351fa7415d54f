"""The functions that users call: `fit`, `estimate`, `load`, `gather` and `ridge_from_weight_decay`."""

from __future__ import annotations

import os
import time
from collections.abc import Sized
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import nn
from torch.utils.data import DataLoader

from whence.curvature import EKFAC, KFAC, Auto, Core, Diagonal, Exact, Sketch, Structure
from whence.curvature.accumulate import LayerGradients
from whence.curvature.cost import SAMPLE, clock_work, measure_sizes
from whence.curvature.leaves import LeafCore
from whence.data.batches import Batches, batch_size, combine, split, take
from whence.display import count
from whence.errors import InputError, did_you_mean
from whence.fitting import FitOptions, by_name, check_columns, check_ridge, run_fit
from whence.io import restore
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import linearize
from whence.jacobian.network import Choice, Network, select, unwrap
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.results import Uncertainty, join
from whence.runtime.execution import Execution, Progress, checked_execution, clock
from whence.runtime.memory import Budget, readable
from whence.runtime.model_state import check_model, preserved
from whence.runtime.processes import open_process_group
from whence.tracer import Tracer
from whence.trees import fitted_trees, leaf_sum, training_batches

Loss = Literal["mse", "sum_of_squares", "cross_entropy", "binary_cross_entropy"]


def ridge_from_weight_decay(weight_decay: float, n: float, *, outputs: int = 1, loss: Loss = "mse") -> float:
    """Convert the weight decay of the training to the ridge lambda.

    PyTorch's `weight_decay` adds weight_decay / 2 * ||w||^2 to the mean loss. `whence` uses sums, as the paper does.
    AdamW decouples the decay from the loss, so the result is then a starting point, not an identity.

    Args:
        weight_decay: weight decay of the optimiser.
        n: number of terms in the mean loss: training examples, or their tokens or pixels that count (for
            `CrossEntropyLoss` those whose label is not -100). For a weighted mean, the sum of the weights.
        outputs: number k of outputs. Needed only for losses that average over outputs too: "mse" and
            "binary_cross_entropy".
        loss: "mse" for `MSELoss()`, the mean over n k numbers; "sum_of_squares" for the mean over examples of the sum
            over outputs; "cross_entropy" for `CrossEntropyLoss()`, the mean over examples for any number of classes
            (objective: sum of cross-entropies plus lambda / 2 ||w||^2); "binary_cross_entropy" for
            `BCEWithLogitsLoss()`, the mean over n k logits (the same objective).

    Examples:
        >>> ridge_from_weight_decay(0.01, 1000, outputs=10)
        50.0
        >>> ridge_from_weight_decay(0.01, 1000, loss="cross_entropy")
        10.0
        >>> ridge_from_weight_decay(0.01, 1000, outputs=8, loss="binary_cross_entropy")
        80.0
    """
    if weight_decay < 0 or n < 1 or outputs < 1:
        raise InputError(f"expected weight_decay >= 0, n >= 1 and outputs >= 1, got {weight_decay}, {n} and {outputs}.")
    if loss == "cross_entropy" and outputs != 1:
        raise InputError(
            f'expected loss="cross_entropy" without outputs, got outputs={outputs}. CrossEntropyLoss is a mean over n '
            "examples whatever the number of classes: leave outputs out. BCEWithLogitsLoss is a mean over n k logits: "
            'loss="binary_cross_entropy" with outputs=k.'
        )
    factors = {"mse": outputs / 2, "sum_of_squares": 0.5, "cross_entropy": 1, "binary_cross_entropy": outputs}
    if loss not in factors:
        known = get_args(Loss)
        raise InputError(f"expected loss to be one of {str(known)[1:-1]}, got {loss!r}.{did_you_mean(loss, known)}")
    return n * weight_decay * factors[loss]


STRUCTURES: dict[str, type[Structure]] = {
    kind.name: kind for kind in (Auto, Exact, EKFAC, Core, Sketch, KFAC, Diagonal)
}


def fit(
    model: Any,
    train_loader: Any,
    likelihood: str | Likelihood | None = None,
    structure: str | Structure = "auto",
    parameters: Choice = "all",
    ridge: float | Literal["auto", "loo"] = "auto",
    progress: bool = True,
    *,
    recenter: bool = False,
    noise: Literal["mle", "unbiased"] = "mle",
    loo: Literal["example", "position", "output"] = "example",
    groups: Any = None,
    leverage: Literal["auto", "exact", "one_plus_q", "clip"] = "auto",
    hessian_columns: Literal["auto", "all"] | int = "auto",
    execution: Execution | None = None,
) -> Tracer:
    """Fit the uncertainty of a trained network, or of fitted trees, after the fact.

    The model is left exactly as found. The training data are read several times.

    Args:
        model: trained network, in evaluation mode, on any device and of any floating dtype; or fitted trees of
            scikit-learn, XGBoost, LightGBM or CatBoost, or a pipeline that ends in them.
        train_loader: yields (inputs, targets), (inputs, targets, sample weights), or dicts with the targets under
            "labels" and optional weights under "sample_weight". It must be possible to iterate over it several times.
            For trees (X, y) or (X, y, sample_weight), as the model takes them.
        likelihood: the loss of the training: "gaussian" (squared error, the default), "categorical" (softmax
            cross-entropy), "bernoulli" (cross-entropy of one or many logits), or a `Likelihood` with its own options.
            For trees it is known from the model.
        structure: structure of the curvature. "auto" takes "exact" if it fits in memory and needs at most about ten
            seconds, else "core" (dense algebra where it matters, honest scale). Other names are "ekfac" (the paper's,
            cheapest), "sketch", "kfac" and "diagonal". A `Structure` has options: `whence.Exact(road="dual")`.
        parameters: "all", "last_layer", names or patterns, or a function of name and parameter. Parameters with
            `requires_grad=False` are left out.
        ridge: lambda on the sum scale, as in "sum of squared errors + lambda ||w||^2" or "sum of cross-entropies +
            lambda / 2 ||w||^2". `whence.ridge_from_weight_decay` converts a weight decay. "auto" takes the ridge of a
            weight decay of 0.01, for squared error times the variance of the targets (of eleven rules none came
            nearer to the variances of retrained networks). "loo" takes the ridge with the smallest leave-one-out
            error, or leave-one-out loss for losses other than squared error, leaving out the units set by `loo` or
            `groups`. It needs a structure with true leverages ("exact", "core", "sketch").
        progress: show a progress line with the time left if the work takes over a second, and a line if the fit should
            not be trusted as it is (see `Tracer.trust`).
        recenter: use the residuals and predictions at the optimum of the linearized model (the paper's Delta w),
            for networks that were stopped before they converged.
        noise: "mle" estimates the covariance of the residuals as E^T E / n; "unbiased" divides by n minus the degrees
            of freedom per output.
        loo: leave out whole examples; single positions (tokens, pixels) of a network with outputs at several; or
            single outputs, as in the paper's stacked notation. With one output all are the same.
        groups: n labels in the order of the training data. Examples with the same label (a document, a patient, a
            sequence) are left out together, which makes HeC0 and HeC3 cluster-robust (CR0 and CR3). For the structures
            "exact", "core" and "sketch".
        leverage: "exact" for exact structures; "one_plus_q" or the paper's "clip" for approximate ones.
        hessian_columns: number of columns of a root of each example's loss Hessian. Each costs a backward pass. "all",
            or a number of random columns (sampled labels for classes, random signs for other losses); the residual
            is added and stays exact. "auto" takes all columns up to 64 outputs, and 16 for more outputs.
        execution: how the fit runs: chunk size, memory, precision of the algebra, checkpoints, processes. See
            `whence.Execution`.

    Returns:
        A `Tracer`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
        >>> tracer.predict(x[:3]).hec3.shape
        torch.Size([3, 1])
    """
    execution = checked_execution(execution)
    if not isinstance(model, nn.Module):
        found = fitted_trees(model, train_loader, likelihood, structure, parameters, ridge)
        model, train_loader, likelihood, structure = found
    processes = open_process_group(execution.distributed)
    with processes.reporting_errors():
        options = FitOptions(
            likelihood=by_name("gaussian" if likelihood is None else likelihood, LIKELIHOODS, Likelihood, "likelihood"),
            structure=by_name(structure, STRUCTURES, Structure, "structure"),
            parameters=parameters,
            ridge=check_ridge(ridge),
            recenter=recenter,
            noise=noise,
            loo=loo,
            groups=groups,
            leverage=leverage,
            columns=check_columns(hessian_columns),
            execution=execution,
        )
        return run_fit(options, model, train_loader, processes, progress)


def load(
    path: str | os.PathLike[str],
    model: Any,
    train_loader: Any = None,
    *,
    likelihood: Likelihood | None = None,
    max_memory: float | None = None,
    progress: bool = True,
) -> Tracer:
    """Load a fit that `Tracer.save` wrote.

    The file holds neither the model nor the training data. It is checked before use: its checksum, its format, the
    model's architecture and every weight, the shape of every tensor. No code in it is ever run.

    Args:
        path: path of the file.
        model: the fitted network with the same weights, in evaluation mode, on any device; or the fitted trees.
        train_loader: the training data of the fit, in the same batches; (X, y) for trees. `attribute`, `explain` and
            `what_if` need them. Without them you can use `predict` (except for `Exact` on its dual and matrix-free
            roads), residuals, leverages, `training_frame()` and `suggest`.
        likelihood: the likelihood of the fit, if it is not one of whence's own.
        max_memory: most bytes to use. By default as in the fit, or 80 % of the free memory if that is less.
        progress: show a progress line with the time left if the work takes over a second.

    Examples:
        >>> import tempfile, torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     tracer.save(f"{folder}/line.whence")
        ...     again = whence.load(f"{folder}/line.whence", net)
        >>> bool((again.predict(x).hec3 == tracer.predict(x).hec3).all())
        True
    """
    Execution(max_memory=max_memory)  # checks the value
    if likelihood is not None and not isinstance(likelihood, Likelihood):
        raise InputError(
            f"expected the likelihood as an object, such as Mine(), got {likelihood!r}. Leave it out if it is one of "
            "whence's own."
        )
    if not isinstance(model, nn.Module):
        model = leaf_sum(model)
        train_loader = None if train_loader is None else training_batches(model, train_loader)
    return restore(Path(path), Tracer, unwrap(model), train_loader, likelihood, max_memory, progress)


def gather(found: Uncertainty | None) -> Uncertainty:
    """Gather the predictions of all processes, in the order of ranks. Every process gets all of them.

    Call it in every process, with the result of `Tracer.predict` for its share of the inputs. Covariances are included
    if they were computed: by default where they cost little, or with `predict(x, covariance=True)`.

    Args:
        found: predictions of this process; `None` if it had no inputs.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], ridge=0.1)
        >>> len(gather(tracer.predict(x[:3])))  # one process
        3
    """
    processes = open_process_group("auto")
    with processes.reporting_errors():
        if processes.alone and found is not None:
            return found
        mine = None if found is None else combine([replace(found, later=None)], lambda values: values[0].cpu())
        parts = [one for one in processes.all_gather_object("the predictions", mine) if one is not None]
        if not parts:
            raise InputError("expected predictions of at least one process, got none.")
        device = torch.device("cpu") if found is None else found.mean.device
        return combine([join(parts)], lambda values: values[0].to(device))


class Alternative(NamedTuple):
    """Another structure for the same problem."""

    structure: str  # its name
    memory: float  # bytes at its peak
    seconds: float  # time of its fit


@dataclass(frozen=True)
class Estimate:
    """Memory and time of a fit, from sizes and from measurements on a small batch.

    Attributes:
        structure: the structure to fit.
        examples: number of training examples.
        outputs: number of outputs of the network.
        parameters: number of selected weights.
        memory: bytes at the peak, in addition to the model and the data.
        bounded: whether the memory is an upper bound, since the structure chooses its size from the data.
        limit: bytes that may be used.
        seconds: seconds of the whole fit.
        alternatives: the other structures.
        disk: bytes of features on disk, with `Execution(scratch=...)`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 50).unsqueeze(1)
        >>> found = whence.estimate(torch.nn.Linear(1, 1), [(x, 2 * x)])
        >>> found.structure, found.parameters, found.fits
        ('exact (primal road)', 2, True)
    """

    structure: str
    examples: int
    outputs: int
    parameters: int
    memory: float
    bounded: bool
    limit: int
    seconds: float
    alternatives: tuple[Alternative, ...]
    disk: float = 0.0

    @property
    def fits(self) -> bool:
        """Whether the peak is within the limit."""
        return self.memory <= self.limit

    def __str__(self) -> str:
        about = "at most " if self.bounded else "about "
        sizes = (self.examples, "example"), (self.outputs, "output"), (self.parameters, "parameter")
        fits = f"{'fits' if self.fits else 'does NOT fit'} in {readable(self.limit)}"
        lines = [
            f"{self.structure}: {', '.join(count(*size) for size in sizes)}",
            f"  memory   {about}{readable(self.memory)}, {fits}",
            *([f"  disk     {about}{readable(self.disk)}"] if self.disk else []),
            f"  time     about {duration(self.seconds)}",
            "  instead",
        ]
        for one in self.alternatives:
            fits = "" if one.memory <= self.limit else "  does not fit"
            lines.append(f"    {one.structure:<24} {readable(one.memory):>10} {duration(one.seconds):>14}{fits}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        memory = f"{'at most' if self.bounded else 'about'} {readable(self.memory)} of {readable(self.limit)}"
        return f"Estimate({self.structure}: {memory}, about {duration(self.seconds)})"


def duration(seconds: float) -> str:
    """Seconds in readable units, including small ones.

    Examples:
        >>> duration(0.012), duration(3.21), duration(125)
        ('0.01 s', '3.21 s', '2 min 05 s')
    """
    return f"{seconds:.2f} s" if seconds < 10 else clock(seconds)


ALTERNATIVES: tuple[Structure, ...] = (Exact("primal"), Exact("dual"), Core(), EKFAC(), Sketch(), KFAC(), Diagonal())
"""Structures that are listed beside the chosen one."""


def count_examples(batches: Batches) -> tuple[int, int]:
    """Number of training examples, and of those in the largest batch. Data of known length are not read."""
    given = batches.loader
    if isinstance(given, DataLoader) and given.batch_size and isinstance(given.dataset, Sized):
        size = len(given.dataset)
        whole = size - size % given.batch_size if given.drop_last else size
        return whole, min(given.batch_size, whole)
    sizes = [batch_size(split(raw, f"batch {at}")[0], f"batch {at}") for at, raw in enumerate(given)]
    return sum(sizes), max(sizes)


def estimate(
    model: Any,
    train_loader: Any,
    likelihood: str | Likelihood | None = None,
    structure: str | Structure = "auto",
    parameters: Choice = "all",
    *,
    hessian_columns: Literal["auto", "all"] | int = "auto",
    execution: Execution | None = None,
) -> Estimate:
    """Estimate what memory and time `whence.fit` would take, without fitting.

    A few examples of the first batch are run to measure; everything else is counted. If the loader has a length,
    nothing else is read. Memory is that of the fit, in addition to the model and the data. Structures that choose their
    size from the data (EKFAC with a tolerance, the core) are given at their largest. Times are accurate to a factor of
    two or three, on an idle machine. For trees, all training rows are sent to their leaves first.

    Arguments are those of `whence.fit`. The other structures are listed beside the one given.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> limited = whence.Execution(max_memory=2**30)
        >>> found = whence.estimate(torch.nn.Linear(1, 1), [(x, 2 * x + 1)], execution=limited)
        >>> found.fits, found.examples, found.parameters
        (True, 20, 2)
    """
    alternatives = ALTERNATIVES
    if not isinstance(model, nn.Module):
        trees = fitted_trees(model, train_loader, likelihood, structure, parameters, ridge=1.0)
        model, train_loader, likelihood, structure = trees
        alternatives = (Exact("primal"), Exact("dual"), LeafCore())
    likelihood = "gaussian" if likelihood is None else likelihood
    loss: Likelihood = by_name(likelihood, LIKELIHOODS, Likelihood, "likelihood")
    chosen: Structure = by_name(structure, STRUCTURES, Structure, "structure")
    execution = checked_execution(execution)
    columns = check_columns(hessian_columns)
    check_model(model)
    with preserved(model):
        network = Network(model)
        quiet = Progress(enabled=False)
        batches = Batches(train_loader, network.device, quiet)
        start = time.perf_counter()
        first = next(batches.read(None))
        read = (time.perf_counter() - start) / first.size
        selection = select(network, parameters, first.inputs)
        few = take((first.inputs, first.targets, *([] if first.weights is None else [first.weights])), slice(0, SAMPLE))
        sample, budget = Batches([few], network.device, quiet), Budget(network.device, execution.max_memory)
        small = linearize(network, selection, sample, loss, execution, budget, columns)
        n, batch = count_examples(batches)
        gradients = None if isinstance(model, LeafSum) else LayerGradients(small)
        seen = next(iter(small.batches)).inputs  # with the mixtures of outputs, if there are some
        sizes = measure_sizes(small, gradients, first.inputs, n, batch)
        sizes = replace(sizes, dual=execution.checkpoint is None, scratch=execution.scratch is not None)
        seconds, cost = clock_work(small, gradients, seen, read), chosen.cost(sizes)
        others = [one for one in (other.cost(sizes) for other in alternatives) if one.name != cost.name]
        return Estimate(
            structure=cost.name,
            examples=n,
            outputs=small.width,
            parameters=sizes.d,
            memory=cost.memory,
            bounded=cost.least is not None,
            limit=small.budget.limit,
            seconds=seconds(cost, n),
            alternatives=tuple(Alternative(one.name, one.memory, seconds(one, n)) for one in others),
            disk=cost.disk,
        )
