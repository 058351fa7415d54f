"""A fit, from checked options to a tracer: the first look at model and data, passes over the data, diagnostics."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .curvature import Bread, Groups, NewtonStep, Structure
from .curvature.loo_losses import fit_at_best
from .errors import TooLargeError
from .estimators import LeftOut, Policy, Weighing
from .likelihoods import Likelihood
from .memory import is_full
from .options import check_positions
from .progress import Progress
from .results import Diagnostics, Finding
from .starting import begin, digest_of, end
from .tangents.batches import Batches, differ
from .tangents.borrow import borrowed, check_model, fingerprint
from .tangents.forward import Network, first_line
from .tangents.gathering import linearize
from .tangents.language import follow_own_loss
from .tangents.lessening import LEAST, lessened
from .tangents.linearization import Linearization
from .tangents.passes import Passes
from .tangents.select import Choice, Selection, select
from .tangents.switches import rounded_products
from .tangents.wrapped import bare
from .tracer import Tracer
from .tracing.parts import assemble
from .tracing.trust import at_once


@dataclass(frozen=True)
class Asked:
    """Options of a fit, checked; see `whence.fit`.

    Attributes:
        ridge: lambda, or `None` to choose it.
        policy: what to do with leverages.
        columns: of the loss's Hessian to look at; 0 to decide by the number of outputs, `None` for all.
        seed: of what is random about these.
        groups: labels of all training examples, those of other processes included.
    """

    likelihood: Likelihood
    structure: Structure
    parameters: Choice
    ridge: float | None
    recenter: bool
    noise: str
    loo: str
    groups: Any
    policy: Policy
    chunk_size: int | None
    max_memory: float | None
    dtype: torch.dtype
    tf32: bool
    columns: int | None
    seed: int

    def facts(self, selection: Selection) -> dict[str, Any]:
        """Everything that a result depends on, beside model and data."""
        return {**vars(self), "parameters": ", ".join(selection.parameters), "groups": digest_of(self.groups)}


def run(
    asked: Asked,
    model: nn.Module,
    loader: Iterable[Any],
    passes: Passes,
    folder: Path | None,
    every: float,
    progress: bool,
) -> Tracer:
    """Fit.

    Args:
        asked: the options.
        model: trained network.
        loader: of its training data, or of this process's shard of them.
        passes: how the passes of the fit go, and which processes share them.
        folder: of the checkpoint, if there is to be one.
        every: seconds between two looks at the sums of a pass.
        progress: show how far it is.
    """
    model = bare(model)
    check_model(model)
    marks = fingerprint(model)
    with borrowed(model):
        network = Network(model)
        bar = Progress(progress and passes.crew.rank == passes.layers.rank == 0)
        batches = Batches(loader, network.device, bar, passes=passes, fitting=True)
        selection = _first_look(network, batches, asked.likelihood, asked.parameters)
        budget = begin(batches, model, asked.max_memory, folder, every, asked.facts(selection))
        problem = linearize(
            network,
            selection,
            batches,
            asked.likelihood,
            dtype=asked.dtype,
            budget=budget,
            progress=bar,
            chunk_size=asked.chunk_size,
            columns=asked.columns,
            seed=asked.seed,
        )
        tracer = _within_memory(asked, problem, marks)
        end(batches)
        return _told(tracer, bar)


def _within_memory(asked: Asked, problem: Linearization, marks: dict[str, int]) -> Tracer:
    """Fit, and plan with less memory for as long as the device runs out of it; then with smaller chunks alone."""
    before, full, least = problem, "", LEAST
    while True:
        try:
            return _fitted(asked, problem, marks)
        except RuntimeError as error:
            if not is_full(error):
                raise
            if problem.passes.shared:  # the others go by the same plan
                raise out_of_memory(error) from error
            before, full = problem, first_line(error)
        except TooLargeError:  # by the plan: less memory than last time is too little
            if not full or problem.budget.limit == before.budget.limit:
                raise
            before = replace(before, chunk_size=problem.chunk_size)
            least = before.budget.limit
        problem.passes.restart()
        problem = lessened(before, full, least)  # what did not fit is gone by now, with the error that held it


def out_of_memory(error: Exception) -> TooLargeError:
    """The error for a device that is full where several processes share a fit."""
    return TooLargeError(
        f"expected this process's part of the fit to fit on its device, got out of memory ({first_line(error)}). "
        "Give all processes a smaller max_memory or chunk_size, or use more of them with shard='layers'."
    )


def _fitted(asked: Asked, problem: Linearization, marks: dict[str, int]) -> Tracer:
    """The curvature, and all that follows from it."""
    check_positions(problem, asked.loo)
    chosen = asked.structure
    weighing = Weighing(
        problem.residuals,
        problem.hessian_roots,
        asked.policy,
        asked.recenter,
        asked.loo == "output",
        None if asked.groups is None else Groups.of(asked.groups, problem),
        problem.units if asked.loo == "position" else None,
    )
    problem = replace(problem, folds=weighing.folds)
    with rounded_products(True if asked.tf32 and chosen.tf32 else None):
        if asked.ridge is None and problem.hessian_roots is not None:
            bread = fit_at_best(chosen, problem, weighing.columns)
        else:
            bread = chosen.fit(problem, asked.ridge, weighing.columns)
        bread.tf32 = asked.tf32 and chosen.tf32
        return _assemble(problem, bread, weighing, asked.noise, marks)


def _first_look(network: Network, batches: Batches, loss: Likelihood, parameters: Choice) -> Selection:
    """What the first batch tells: that the model can be relied on, which parameters count, and what labels mean."""
    first = batches.first()
    batches.notes.extend(network.check_repeatable(first.inputs))
    if not differ(first.inputs):  # of one example, and of equal ones, a model that mixes them shows nothing
        batches.notes.extend(network.check_separate(batches.beginning()))
    selection = select(network.model, parameters, lambda: network.last_module(first.inputs))
    unused = network.check_connected(selection.parameters, first.inputs)
    if unused:
        batches.notes.append(f"selected, but not used by the outputs of the first examples: {', '.join(unused)}")
    follow_own_loss(network, batches, first, getattr(loss, "ignore_index", None))
    return selection


def _assemble(
    problem: Linearization,
    bread: Bread,
    weighing: Weighing,
    noise: str,
    marks: dict[str, int],
) -> Tracer:
    parts = assemble(problem, bread, weighing, unbiased=noise == "unbiased")
    return Tracer(
        problem=problem,
        bread=bread,
        sandwich=parts.sandwich,
        meats=parts.meats,
        left_out=parts.left_out,
        step=parts.step,
        weighing=weighing,
        sigma=parts.noise.covariance,
        noise_scale=parts.noise.scale,
        diagnostics=_diagnose(problem, bread, parts.step, parts.left_out, weighing),
        marks=marks,
    )


def _told(tracer: Tracer, bar: Progress) -> Tracer:
    """Add what can be said at once about how far to trust the fit, and say so where it is not fine."""
    trust = at_once(tracer)
    odd = ", ".join(check.name for check in trust if check.level not in ("fine", "not checked"))
    if odd:
        bar.say(f"whence: {trust.level} ({odd}); print(tracer.trust()) tells why and what to do")
    finding = Finding("trust", trust.level, f"{odd or 'as far as a fit can tell'}; tracer.trust() looks closer")
    beyond = [
        Finding("HeC3 inside the core", check.numbers["share"], "share of it, on a sample of training inputs")
        if check.numbers
        else Finding("HeC3 inside the core", "not checked", check.words)
        for check in trust
        if check.name == "outside the core"
    ]
    return replace(tracer, diagnostics=Diagnostics((*tracer.diagnostics, *beyond, finding)))


def _diagnose(
    problem: Linearization, bread: Bread, step: NewtonStep, left_out: LeftOut, weighing: Weighing
) -> Diagnostics:
    numbers = problem.numbers
    scale = float(problem.residuals.square().mean().sqrt())
    lost = weighing.lost(slice(0, problem.n), step.change)
    moved = float(lost.square().mean().sqrt()) / scale if scale > 0 else 0.0
    freedom = bread.degrees_of_freedom
    chosen = f", by leave-one-out of {weighing.left_out_name}" if bread.path else ""
    findings = [
        Finding("parameters", problem.selection.size, f"selected weights: {_listing(problem.selection.parameters)}"),
        Finding("ridge", bread.ridge, f"lambda on the sum scale{chosen}"),
        Finding(
            "degrees of freedom",
            freedom,
            f"of {numbers} numbers"
            + ("; more than there are: the approximation or lambda is off" * (freedom > numbers)),
        ),
        Finding(
            "Newton step",
            step.relative,
            "size of the step to the optimum of the linearized model, over the size of the weights"
            + ("; taken" if weighing.recenter else ""),
        ),
        Finding(
            "Newton change",
            moved,
            "how far that step would move the training residuals, over their size (root mean squares)"
            + ("; the network is not at its optimum: consider recenter=True" * (moved > 0.1 and not weighing.recenter)),
        ),
        Finding("leverage policy", weighing.policy, ""),
        Finding(
            "largest leverage", float(left_out.leverage.max()), "one means: the example decides its own prediction"
        ),
        Finding(
            "guarded leverages",
            left_out.guarded,
            f"{weighing.left_out_name} at the guard, of {weighing.deletions(problem)}",
        ),
    ]
    findings += [Finding("note", fact, "") for fact in [*problem.batches.notes, *bread.facts]]
    return Diagnostics(tuple(findings))


def _listing(names: Iterable[str], most: int = 6) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f", ... ({len(shown)} tensors)" if len(shown) > most else "")
