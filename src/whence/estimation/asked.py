"""Ask what a fit would take."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import nn

from whence.api import LIKELIHOODS, STRUCTURES
from whence.curvature import EKFAC, KFAC, Core, Diagonal, Exact, Sketch, Structure
from whence.curvature.kronecker.stream import LayerStream
from whence.errors import InputError
from whence.likelihoods import Likelihood
from whence.memory import Budget
from whence.options import check_columns, check_sizes, named
from whence.progress import Progress
from whence.tangents.batches import Batch, Batches, take
from whence.tangents.borrow import borrowed, check_model
from whence.tangents.forward import Network
from whence.tangents.gathering import linearize
from whence.tangents.linearization import Linearization
from whence.tangents.select import Choice, select

from .needs import road_of, stages_of
from .result import Alternative, Estimate
from .sizes import SAMPLE, Sizes, count, measure_sizes
from .times import Speed, measure_speed, steps_of

KNOWN = (Exact, EKFAC, KFAC, Diagonal, Core, Sketch)


def estimate(
    model: nn.Module,
    train_loader: Iterable[Any],
    likelihood: str | Likelihood = "gaussian",
    structure: str | Structure = "exact",
    parameters: Choice = "all",
    *,
    chunk_size: int | None = None,
    max_memory: float | None = None,
    dtype: torch.dtype = torch.float64,
    outputs: Literal["auto", "all"] | int = "auto",
) -> Estimate:
    """Tell what memory and time `whence.fit` would take, without fitting.

    A few examples of the first batch are run to measure; everything else is counted. The data are not read beyond that
    where their loader knows how many there are. Memory is that of the fit, beside the model and the data; structures
    that choose their size from the data (EKFAC with a tolerance, the core) are told at their largest. Times are good to
    a factor of two or three, on a machine with nothing else to do.

    Args:
        model: as for `whence.fit`.
        train_loader: as for `whence.fit`.
        likelihood: as for `whence.fit`.
        structure: as for `whence.fit`; the others are told beside it.
        parameters: as for `whence.fit`.
        chunk_size: as for `whence.fit`.
        max_memory: as for `whence.fit`.
        dtype: as for `whence.fit`.
        outputs: as for `whence.fit`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> found = whence.estimate(net, [(x, 2 * x + 1)], max_memory=2**30)
        >>> found.fits, found.examples, found.parameters
        (True, 20, 2)
    """
    loss: Likelihood = named(likelihood, LIKELIHOODS, Likelihood, "likelihood")
    chosen: Structure = named(structure, STRUCTURES, Structure, "structure")
    if not isinstance(chosen, KNOWN):
        raise InputError(
            f"expected a structure of whence itself, got {type(chosen).__name__}, whose needs only its author knows."
        )
    check_sizes(chunk_size, max_memory)
    columns = check_columns(outputs)
    check_model(model)
    with borrowed(model):
        network = Network(model)
        quiet = Progress(enabled=False)
        batches = Batches(train_loader, network.device, quiet)
        start = time.perf_counter()
        first = next(batches.read(None))
        reading = (time.perf_counter() - start) / first.size
        selection = select(model, parameters, lambda: network.last_module(first.inputs))
        small = linearize(
            network,
            selection,
            Batches([_few(first)], network.device, quiet),
            loss,
            dtype=dtype,
            budget=Budget(network.device, max_memory),
            progress=quiet,
            chunk_size=chunk_size,
            columns=columns,
        )
        n, batch = count(batches)
        stream = LayerStream(small)
        seen = next(iter(small.batches)).inputs  # with the mixtures that are looked at, where not all outputs are
        sizes = measure_sizes(small, stream, first.inputs, n, batch)
        return _estimate(chosen, small, sizes, measure_speed(small, stream, seen, reading))


def _few(first: Batch) -> tuple[Any, ...]:
    few = slice(0, SAMPLE)
    pair = take(first.inputs, few), first.targets[few]
    return pair if first.weights is None else (*pair, first.weights[few])


def _estimate(chosen: Structure, problem: Linearization, sizes: Sizes, speed: Speed) -> Estimate:
    limit = problem.budget.limit
    stages, bounded = stages_of(chosen, sizes, limit)
    steps, prediction = steps_of(chosen, sizes, speed, limit)
    return Estimate(
        structure=_name(chosen, sizes),
        examples=sizes.n,
        outputs=problem.width,
        parameters=sizes.d,
        stages=stages,
        bounded=bounded,
        limit=limit,
        steps=steps,
        prediction=prediction,
        alternatives=tuple(_alternatives(chosen, sizes, speed, limit)),
        one_layer=problem.selection.one_layer,
    )


def _alternatives(chosen: Structure, sizes: Sizes, speed: Speed, limit: int) -> Iterable[Alternative]:
    others: tuple[Structure, ...] = (Exact("primal"), Exact("dual"), Core(), EKFAC(), Sketch(), KFAC(), Diagonal())
    here = _name(chosen, sizes)
    for other in others:
        name = _name(other, sizes)
        if name != here:
            stages, _ = stages_of(other, sizes, limit)
            seconds = sum(steps_of(other, sizes, speed, limit)[0].values())
            yield Alternative(name, max(stages.values()), seconds)


def _name(structure: Structure, sizes: Sizes) -> str:
    if isinstance(structure, Exact):
        return f"exact ({road_of(structure, sizes).replace('_', '-')} road)"
    return structure.name
