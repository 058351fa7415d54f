"""The linearized training problem: what the network said about its training examples, and which weights count."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from whence.curvature import Groups
from whence.errors import InputError
from whence.likelihoods import Likelihood
from whence.memory import Budget
from whence.progress import Progress
from whence.tangents.batches import Batches
from whence.tangents.forward import Network
from whence.tangents.linearization import Linearization
from whence.tangents.select import Selection
from whence.tangents.sketches import SketchedBatches

from .data import read_data, write_data
from .likelihoods import read_likelihood, write_likelihood
from .outputs import read_outputs, write_outputs
from .record import Draft, Saved


@dataclass(frozen=True)
class Given:
    """What a user hands over to load a fit.

    Attributes:
        model: the network that was fitted.
        loader: its training data, if they are at hand.
        likelihood: where a user wrote it.
        limit: bytes that may be taken; as at the fit, if there is as much, when `None`.
        progress: whether to show a progress line.
    """

    model: nn.Module
    loader: Iterable[Any] | None
    likelihood: Likelihood | None
    limit: float | None
    progress: bool


def write_problem(draft: Draft, problem: Linearization) -> None:
    """Write it down."""
    draft.note(
        n=problem.n,
        k=problem.k,
        parameters=list(problem.selection.parameters),
        chunk_size=problem.chunk_size or 0,
        limit=problem.budget.limit,
    )
    write_likelihood(draft.part("likelihood"), problem.likelihood)
    write_data(draft.part("data"), problem.batches)
    write_outputs(draft.part("seen"), problem)
    draft.put("outputs", problem.outputs)
    draft.put("residuals", problem.residuals)
    draft.put("hessian_roots", problem.hessian_roots)
    draft.put("sample_weights", problem.sample_weights)


def read_problem(saved: Saved, given: Given) -> Linearization:
    """Put it together again."""
    n, k = saved.whole("n", 1), saved.whole("k", 1)
    network = Network(given.model)
    progress = Progress(given.progress)
    roots = weights = None
    likelihood = read_likelihood(saved.part("likelihood"), given.likelihood)
    plain = read_data(saved.part("data"), given.loader, progress, likelihood)
    batches: Batches | SketchedBatches = plain
    units, sketch, seed, largest = read_outputs(saved.part("seen"), n, k)
    if saved.has("hessian_roots"):
        q = saved.sizes("hessian_roots", 3)[2]
        roots = saved.algebra("hessian_roots", n, k, q)
    if saved.has("sample_weights"):
        weights = saved.algebra("sample_weights", n)
    residuals = saved.algebra("residuals", n, k)
    if sketch is not None:
        if roots is None:
            raise saved.wrong("hessian_roots", "there")
        known = (largest, (residuals, roots))
        batches = SketchedBatches(plain, network, likelihood, sketch.columns, seed, saved.target.algebra, *known)
    return Linearization(
        network=network,
        selection=read_selection(saved, given.model),
        batches=batches,
        likelihood=likelihood,
        outputs=saved.algebra("outputs", n, k),
        residuals=residuals,
        hessian_roots=roots,
        sample_weights=weights,
        dtype=saved.target.algebra,
        budget=read_budget(saved, given, network.device),
        progress=progress,
        chunk_size=saved.whole("chunk_size") or None,
        units=units,
        sketch=sketch,
    )


def read_budget(saved: Saved, given: Given, device: torch.device) -> Budget:
    """The memory that was planned with, or what there is now, if less; chunks of equal size round alike."""
    planned = saved.whole("limit", 0, 2**62)
    if given.limit is not None:
        return Budget(device, given.limit)
    return Budget(device, min(planned, Budget(device).limit))


def read_selection(saved: Saved, model: nn.Module) -> Selection:
    """The parameters that were selected, which must be there and trainable."""
    names = saved.texts("parameters")
    known = dict(model.named_parameters())
    if not names or len(set(names)) != len(names) or any(name not in known for name in names):
        raise saved.wrong("parameters", "names of parameters of the model")
    frozen = [name for name in names if not known[name].requires_grad]
    if frozen:
        raise InputError(
            f"expected the parameters that were selected to require gradients, got frozen ones: "
            f"{', '.join(frozen[:5])}. Call requires_grad_(True) on them; whence leaves their .grad alone."
        )
    return Selection({name: known[name] for name in names})


def write_groups(draft: Draft, groups: Groups | None) -> None:
    """Write down which examples belong together."""
    if groups is not None:
        draft.note(total=groups.total, counted=groups.counted)
        draft.put("index", groups.index)


def read_groups(saved: Saved, n: int) -> Groups | None:
    """Which examples belong together, if any do."""
    if not saved.has("index"):
        return None
    total = saved.whole("total", 2, n)
    index = saved.tensor("index", (n,), torch.int64, torch.int64)
    if not saved.target.empty and not bool(((index >= 0) & (index < total)).all()):
        raise saved.wrong("index", f"numbers below {total}")
    return Groups(index, total, saved.whole("counted", 2, total))
