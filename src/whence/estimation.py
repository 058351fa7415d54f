"""The cost of a fit before it is run: its memory and time, and the same for other structures."""

from __future__ import annotations

import time
from collections.abc import Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import nn
from torch.utils.data import DataLoader

from whence.api import STRUCTURES
from whence.curvature import EKFAC, KFAC, Core, Diagonal, Exact, Sketch, Structure
from whence.curvature.accumulate import LayerGradients
from whence.curvature.cost import SAMPLE, clock_work, measure_sizes
from whence.curvature.leaves import LeafCore
from whence.data.batches import Batches, batch_size, split, take
from whence.display import count
from whence.fitting import by_name, check_columns
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import linearize
from whence.jacobian.network import Choice, Network, select
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.runtime.execution import Execution, Progress, checked_execution, clock
from whence.runtime.memory import Budget, readable
from whence.runtime.model_state import check_model, preserved
from whence.trees import fitted_trees


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
