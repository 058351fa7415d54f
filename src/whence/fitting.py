"""A fit: its options, checked, and the steps from a trained network to a tracer."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Integral
from operator import length_hint
from pathlib import Path
from typing import Any, Literal

from torch import nn

from whence.curvature import Groups, Structure
from whence.curvature.accumulate import LayerGradients
from whence.curvature.base import NO_GROUPS, AdditiveStructure, times_hessian
from whence.curvature.cost import clock_work, measure_sizes
from whence.curvature.plan import require_plan
from whence.curvature.ridge import check_search, default_ridge
from whence.data.batches import Batches
from whence.data.targets import example_fingerprints
from whence.errors import InputError, TooLargeError, did_you_mean, first_line, shortly
from whence.estimators import LeaveOneOut, Policy, Unit, assemble, hc1_factor
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import LEAST_MEMORY, Linearization, default_columns, linearize, with_less_memory
from whence.jacobian.network import Choice, Network, Selection, follow_own_loss, select, unwrap
from whence.likelihoods import Likelihood
from whence.results import Diagnostics, Finding
from whence.runtime.checkpoint import open_checkpoint, option_text
from whence.runtime.execution import Execution, Passes, Progress, clock
from whence.runtime.memory import Budget, is_full, readable
from whence.runtime.model_state import check_model, fingerprint, preserved, rounded_products
from whence.runtime.processes import ProcessGroup
from whence.tracer import Tracer
from whence.trust import trust_of_fit
from whence.trust.checks import MEANING


def check_ridge(ridge: Any) -> float | Literal["auto", "loo"]:
    """The ridge as a number, or the name of the method that chooses it."""
    if isinstance(ridge, str) and ridge in ("auto", "loo"):
        return "auto" if ridge == "auto" else "loo"
    with suppress(TypeError, ValueError):
        if not isinstance(ridge, str) and 0.0 <= float(ridge) < math.inf:
            return float(ridge)
    raise InputError(
        f'expected ridge to be a finite number >= 0, "auto" or "loo", got {shortly(ridge)}. It is lambda in sum of '
        "squared errors + lambda ||w||^2; see whence.ridge_from_weight_decay."
    )


def check_columns(columns: Any) -> int | None:
    """Number of columns of the loss's Hessian to use: 0 to decide by the number of outputs, `None` for all."""
    if isinstance(columns, str) and columns in ("auto", "all"):
        return 0 if columns == "auto" else None
    if isinstance(columns, bool) or not isinstance(columns, Integral) or int(columns) < 1:
        raise InputError(
            'expected hessian_columns to be "auto", "all", or how many columns of each example\'s Hessian to use, at '
            f"least 1, got {columns!r}. Single outputs are chosen in predict(x, outputs=[...])."
        )
    return int(columns)


HINTS = {
    **dict.fromkeys(
        ("classification", "crossentropy", "crossentropyloss", "softmax"), ' Cross-entropy is "categorical".'
    ),
    **dict.fromkeys(("bce", "binary", "bcewithlogitsloss", "sigmoid"), ' Binary cross-entropy is "bernoulli".'),
    **dict.fromkeys(("regression", "mse", "mseloss", "squarederror", "normal"), ' Squared error is "gaussian".'),
    **dict.fromkeys(("full", "dense"), ' Without approximation it is "exact".'),
    **dict.fromkeys(("kron", "kronecker"), ' Kronecker factors are "kfac".'),
    "diag": ' The diagonal is "diagonal".',
}
"""Names used elsewhere, and the names used here."""


def by_name(given: Any, known: Mapping[str, Any], kind: type, what: str) -> Any:
    """An object of a kind, given as such or by its name."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given in known:
        return known[given]()
    hint = HINTS.get(str(given).lower().removesuffix("()").replace("_", ""), "") or did_you_mean(given, known)
    if getattr(given, "shape", None):
        hint = " Inputs and targets are passed together: whence.fit(model, [(x, y)]), or a DataLoader."
    raise InputError(
        f"expected {what} to be one of {', '.join(map(repr, known))} or a {kind.__name__}, got {shortly(given)}.{hint}"
    )


CHOICES = {
    "noise": ("mle", "unbiased"),
    "loo": ("example", "position", "output"),
    "leverage": ("auto", "exact", "one_plus_q", "clip"),
}


@dataclass(frozen=True)
class FitOptions:
    """Options of a fit, checked; see `whence.fit`."""

    likelihood: Likelihood
    structure: Structure
    parameters: Choice
    ridge: float | Literal["auto", "loo"]  # lambda, or how it is chosen
    recenter: bool
    noise: str
    loo: Unit
    groups: Any  # labels of this process's training examples
    leverage: Literal["auto"] | Policy
    columns: int | None  # of the loss's Hessian to use; 0 to decide by the number of outputs, `None` for all
    execution: Execution

    def __post_init__(self) -> None:
        """Raise for options that do not exist or cannot be combined."""
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                raise InputError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, got {given!r}.")
        if self.loo == "output" and self.likelihood.couples_outputs:
            raise InputError(
                f'expected loo="example" with likelihood {self.likelihood.name!r}, whose outputs depend on each other, '
                'got "output". A single class cannot be left out.'
            )
        if self.groups is not None and self.loo != "example":
            raise InputError(f'expected loo="example" with groups, which are left out as a whole, got "{self.loo}".')
        if self.groups is not None and not self.structure.takes_groups:
            raise InputError(NO_GROUPS.format(repr(self.structure)))
        if self.execution.checkpoint is not None:
            self.require_sums("no checkpoint")

    def require_sums(self, expected: str) -> None:
        """Raise if the passes of the structure are not all sums over examples."""
        if not self.structure.additive:
            raise InputError(
                f"expected {expected} with {self.structure!r}, whose passes over the data are not all sums over "
                "examples. Use Exact(road='primal'), 'core', 'sketch', 'ekfac', 'kfac' or 'diagonal'."
            )

    @property
    def policy(self) -> Policy:
        """How to treat leverages near one."""
        return self.structure.policy if self.leverage == "auto" else self.leverage

    def as_texts(self, selection: Selection) -> dict[str, str]:
        """Everything that a result depends on, in addition to model and data."""
        names = ("chunk_size", "max_memory", "dtype", "precision", "seed")
        execution = {name: getattr(self.execution, name) for name in names}
        own = {name: value for name, value in vars(self).items() if name != "execution"}
        groups = None if self.groups is None else hashlib.sha256(repr(self.groups).encode()).hexdigest()
        everything = {**own, **execution, "parameters": ", ".join(selection.parameters), "groups": groups}
        return {name: option_text(value) for name, value in everything.items()}


def run_fit(
    options: FitOptions, model: nn.Module, loader: Iterable[Any], processes: ProcessGroup, progress: bool
) -> Tracer:
    """Fit a trained network on its training data, or on this process's shard of them."""
    if options.groups is not None:  # each process has the labels of its own examples
        groups = options.groups.tolist() if hasattr(options.groups, "tolist") else options.groups
        listed = list(groups) if isinstance(groups, Iterable) else [groups]
        gathered = processes.all_gather_object("the groups", listed)
        options = replace(options, groups=[label for labels in gathered for label in labels])
    if not processes.alone:
        options.require_sums("one process, or Execution(distributed=False),")
    model = unwrap(model)
    check_model(model)
    fingerprints = fingerprint(model)
    with preserved(model):
        network, bar = Network(model), Progress(progress and processes.rank == 0)
        batches = Batches(loader, network.device, bar, passes=Passes(processes))
        first = batches.first()
        batches.notes += model.ensemble.notes if isinstance(model, LeafSum) else []
        batches.notes += network.check_repeatable(first.inputs)
        selection = select(network, options.parameters, first.inputs)
        follow_own_loss(network, batches, first, getattr(options.likelihood, "ignore_index", None))
        budget = _prepare_passes(batches, model, options, selection)
        columns = default_columns(network, batches) if options.columns == 0 else options.columns
        if columns is not None:
            sizes = (columns + 1, first.targets[0].numel(), (length_hint(batches.loader) or 1) * first.size)
            require_plan(options.structure, network, selection, first.inputs, *sizes, budget)
        planned = (options.likelihood, options.execution, budget, columns, options.execution.seed)
        problem = linearize(network, selection, batches, *planned)
        tracer = _fit_within_memory(options, problem, fingerprints)
        if batches.passes.shared:  # afterwards this process works alone, and the data of the others are elsewhere
            gathered = processes.all_gather_object("the fingerprints of the data", batches.fingerprints)
            batches.fingerprints[:] = [one for each in gathered for one in each]
        batches.passes.close()
        return _with_trust(tracer, bar)


def _prepare_passes(batches: Batches, model: nn.Module, options: FitOptions, selection: Selection) -> Budget:
    """Find which process has which examples, and open the checkpoint; all must fit the same network in the same way.

    Returns the memory budget: the same in every process, and the same as when the checkpoint was begun.
    """
    passes, execution = batches.passes, options.execution
    processes = passes.process_group
    limit = Budget(batches.device, execution.max_memory).limit
    passes.memory_limited, passes.scratch = execution.max_memory is not None, execution.scratch
    if not passes.shared and execution.checkpoint is None:
        return Budget(batches.device, limit)
    described = options.as_texts(selection)
    same = {**described, "checkpoint": execution.checkpoint is not None}, fingerprint(model)
    first, *others = processes.all_gather_object("the options", same)
    for rank, other in enumerate(others, start=1):
        for what, mine, theirs in zip(("option", "weights of"), first, other, strict=True):
            name = next((one for one in mine.keys() | theirs.keys() if mine.get(one) != theirs.get(one)), None)
            if name is not None:
                raise InputError(
                    f"expected the same {what} {name} in all processes, got another in rank {rank} than in rank 0. "
                    "Give all of them the same options, and the same trained weights."
                )
    examples = example_fingerprints(batches)
    if execution.max_memory is None and batches.device.type == "cpu":  # processes on one machine share its memory
        limit = limit // processes.local_size
    limit = min(processes.all_gather_object("the memory", limit))
    if execution.checkpoint is not None:
        passes.checkpointed = True
        if processes.rank == 0:
            folder, every = Path(execution.checkpoint), float(execution.checkpoint_seconds)
            opened = open_checkpoint(folder, every, described, model, examples, limit, batches.progress.say)
            passes.checkpoint, limit = opened
        limit = processes.all_gather_object("the checkpoint", limit)[0]
    return Budget(batches.device, limit)


def _fit_within_memory(options: FitOptions, planned: Linearization, fingerprints: Mapping[str, int]) -> Tracer:
    """Fit. If the device runs out of memory, plan with less, and then use smaller chunks."""
    keeps_plan = planned.passes.checkpointed or not planned.passes.process_group.alone
    problem, before, full, least = planned, planned, "", LEAST_MEMORY
    while True:
        refused = False
        try:
            return _fit(options, problem, fingerprints)
        except RuntimeError as error:
            if not is_full(error):
                raise
            full = first_line(error)
            if problem.passes.shared:  # the other processes follow the same plan
                raise TooLargeError(
                    f"expected this process's part of the fit to fit on its device, got out of memory ({full}). Give "
                    "all processes a smaller max_memory or chunk_size."
                ) from error
            before = problem
        except TooLargeError:  # raised by the plan: the reduced memory is too small for it
            if not full:
                raise
            refused = problem.budget.limit == before.budget.limit
            before = replace(before, chunk_size=problem.chunk_size)
            least = before.budget.limit
        # The tensors that did not fit are freed by now, together with the error that held them.
        smaller = None if keeps_plan or refused else with_less_memory(before, least)
        if smaller is None:
            why = "A fit that is shared by processes or writes checkpoints keeps its plan. " if keeps_plan else ""
            raise TooLargeError(
                f"expected the fit to take {readable(planned.budget.limit)} at most on {planned.device}, got out of "
                f"memory ({full}){'' if problem is planned else ', with smaller chunks as well'}. {why}"
                "Select fewer parameters, use a sketch, fewer columns (hessian_columns=...), smaller batches, or a "
                "smaller max_memory or chunk_size."
            )
        problem = smaller


def _fit(options: FitOptions, problem: Linearization, fingerprints: Mapping[str, int]) -> Tracer:
    """Compute the curvature, and everything that follows from it."""
    if options.loo != "example" and problem.sketch is not None:
        raise InputError(
            f'expected loo="example" in a fit of {problem.sketch.columns} mixtures of the outputs, got '
            f'{options.loo!r}. Fit with hessian_columns="all" to leave out single {options.loo}s.'
        )
    if options.loo == "position" and not problem.dense:
        raise InputError(
            'expected a network with outputs at several positions, (n, positions, k), for loo="position", got one row '
            f'of {problem.k} outputs for each example. Use loo="example".'
        )
    ridge: float | None = None  # to be chosen by leave-one-out
    source = ""
    if options.ridge == "auto":
        ridge, source = default_ridge(problem)
    elif options.ridge != "loo":
        ridge, source = options.ridge, "given"
    structure, why = options.structure.resolve(problem, ridge)
    if ridge is None:
        check_search(structure, problem)
    _announce(problem, structure, several_ridges=ridge is None and not problem.identity_hessians)
    problem = replace(problem, precision=options.execution.precision if structure.tf32 else "float32")
    members = None if options.groups is None else Groups.of(options.groups, problem)
    loo = LeaveOneOut(problem, options.policy, options.recenter, options.loo, members)
    problem = replace(problem, folds=loo.folds)
    with rounded_products(True if problem.precision != "float32" else None):
        bread = structure.fit(problem, ridge, loo.meat_roots)
        found = assemble(problem, bread, loo, unbiased=options.noise == "unbiased")
        groups = None if loo.groups is None else found["meats"].deletions
        chosen = Finding("structure", structure.name, why)
        if bread.path is not None:
            source = f"leave-one-out error of {loo.unit_name} over {len(bread.path.ridges)} values"
        factor, none = hc1_factor(problem, bread, groups), Diagnostics(())
        tracer = Tracer(problem, loo=loo, hc1_factor=factor, diagnostics=none, fingerprints=fingerprints, **found)
        return replace(tracer, diagnostics=Diagnostics((chosen, *_diagnose(tracer, source))))


SHORT = 5e7  # numbers in all gradients (examples x outputs x weights) below which the time of a fit is not estimated
LASTS = 5.0  # fits that take at least so many seconds are announced


def _announce(problem: Linearization, structure: Structure, several_ridges: bool) -> None:
    """Print the time and memory that a long fit by one process on a CPU will take, before it starts."""
    shown = problem.progress.enabled and problem.device.type == "cpu" and problem.passes.process_group.alone
    small = problem.n * problem.k * problem.selection.size < SHORT
    if small or not shown or type(structure).cost is Structure.cost:
        return
    start = time.perf_counter()
    first = problem.batches.first()
    read = (time.perf_counter() - start) / first.size
    layers = isinstance(structure, AdditiveStructure) and not isinstance(problem.network.model, LeafSum)
    gradients = LayerGradients(problem) if layers else None
    cost = structure.cost(measure_sizes(problem, gradients, first.inputs, problem.n, first.size))
    seconds = clock_work(problem, gradients, first.inputs, read)(cost, problem.n)
    if seconds >= LASTS:
        most = "about" if cost.least is None else "up to"
        more = '; ridge="loo" then tries about ten ridges, each of which takes about as long' if several_ridges else ""
        problem.progress.say(
            f"whence: {cost.name} takes about {clock(seconds)} and {most} {readable(cost.memory)}{more}"
        )


SHARES = {"outside the core": "HeC3 inside the core", "diagonal meat": "HeC3 in the eigenbasis"}
"""Checks of a share of HeC3, and the names of their findings in the diagnostics."""


def _with_trust(tracer: Tracer, bar: Progress) -> Tracer:
    """Add to the diagnostics how far to trust the fit, from the fit alone; print it if it is not fine."""
    trust = trust_of_fit(tracer)
    flagged = ", ".join(check.name for check in trust.not_fine)
    if trust.not_fine:
        bar.say(f"whence: {trust.level} ({flagged}). {trust.not_fine[0].words}")
    shares = [
        Finding(SHARES[check.name], next(iter(check.numbers.values()), "not checked"), check.words)
        for check in trust
        if check.name in SHARES
    ]
    finding = Finding("trust", trust.level, MEANING[trust.level] + (f" ({flagged})" if flagged else ""))
    return replace(tracer, diagnostics=Diagnostics((*tracer.diagnostics.findings, *shares, finding)))


def _diagnose(tracer: Tracer, source: str) -> list[Finding]:
    """What a fit shows of itself; `source` says where its ridge is from."""
    problem, bread, loo, step, adjusted = tracer.problem, tracer.bread, tracer.loo, tracer.step, tracer.adjusted
    scale, moved = (
        float(problem.isometric(one).square().mean().sqrt())
        for one in (problem.residuals, times_hessian(step.change, problem.hessian_roots))
    )
    numbers, freedom, fitted = problem.numbers, bread.degrees_of_freedom, problem.selection.size
    largest, names = float(adjusted.leverage.max()), list(problem.selection.parameters)
    off = "; more than there are: the approximation or lambda is off" if freedom > numbers else ""
    step_words = "size of the step to the optimum of the linearized model, over the size of the weights"
    change_words = "how far that step would move the training residuals, over their size (root mean squares)"
    guarded = f"{loo.unit_name} at the guard, of {loo.deletions}"
    if loo.policy == "exact" and adjusted.guarded > 0:
        guarded += "; without them their predictions are not determined, and HeC3 is rounding error: raise ridge"
    findings = [
        Finding("parameters", fitted, f"selected weights: {', '.join(names[:6])}{', ...' * (len(names) > 6)}"),
        Finding("ridge", bread.ridge, f"lambda on the sum scale: {source}"),
        Finding("degrees of freedom", freedom, f"of {numbers} numbers{off}"),
        Finding("Newton step", step.relative, step_words + "; taken" * loo.recenter),
        Finding("Newton change", moved / scale if scale > 0 else 0.0, change_words),
        Finding("leverage policy", loo.policy, ""),
        Finding("largest leverage", largest, "1 means that the example determines its own prediction"),
        Finding("guarded leverages", adjusted.guarded, guarded),
    ]
    notes = [*problem.batches.notes, *bread.notes]
    trained = sum(one.numel() for one in problem.network.model.parameters() if one.requires_grad)
    if fitted < trained:
        part = (
            f"Verdicts compare predictions by the fitted weights alone, {fitted:,} of {trained:,} that can be trained. "
            "Up to a tenth of the verdicts differed from those of all weights: for verdicts fit all of them."
        )
        notes.insert(0, part)
    return findings + [Finding("note", note, "") for note in notes]
