"""The options of a fit, checked at the door."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

from torch import nn

from whence.curvature import FittedCurvature, Groups, NewtonStep, Structure
from whence.curvature.base import NO_GROUPS
from whence.curvature.ridge_search import fit_at_best
from whence.data.batches import Batches, differ
from whence.data.targets import all_prints, roll_call
from whence.errors import InputError, TooLargeError
from whence.estimators import LeftOut, Policy, Weighing, assemble
from whence.io.checkpoint import described, open_checkpoint
from whence.jacobian.linearization import LEAST_MEMORY, Linearization, linearize, with_less_memory
from whence.jacobian.network import Choice, Network, Selection, bare, first_line, follow_own_loss, select
from whence.likelihoods import Likelihood
from whence.results import Diagnostics, Finding
from whence.runtime.execution import Execution, Passes
from whence.runtime.memory import Budget, is_full
from whence.runtime.model_state import check_model, fingerprint, preserved, rounded_products
from whence.runtime.processes import Processes
from whence.runtime.progress import Progress
from whence.tracer import Tracer
from whence.trust import trust_of_fit


def check_ridge(ridge: float | str) -> float | None:
    """The ridge as a number, or `None` for "loo"."""
    if isinstance(ridge, str) and ridge == "loo":
        return None
    try:
        value = float(ridge) if not isinstance(ridge, str) else None
    except (TypeError, ValueError):
        value = None
    if value is None:
        raise InputError(
            f'expected ridge to be a number or "loo", got {ridge!r}. It is lambda in sum of squared errors + lambda '
            "||w||^2; see whence.ridge_from_weight_decay."
        )
    if not math.isfinite(value) or value < 0:
        raise InputError(
            f"expected ridge >= 0 and finite, got {ridge}. It is lambda in sum of squared errors + lambda ||w||^2; "
            "see whence.ridge_from_weight_decay."
        )
    return value


def check_apart(loss: Likelihood, loo: str) -> None:
    """Raise when outputs are to be left out one by one that cannot be."""
    if loo == "output" and loss.couples_outputs:
        raise InputError(
            f'expected loo="example" with likelihood {loss.name!r}, whose outputs depend on each other, got "output". '
            "A single class cannot be left out."
        )


def check_groups(groups: Any, loo: str, structure: Structure) -> None:
    """Raise when whole groups are to be left out and cannot be."""
    if groups is None:
        return
    if loo != "example":
        raise InputError(f'expected loo="example" with groups, which are left out as a whole, got "{loo}".')
    if not structure.takes_groups:
        raise InputError(NO_GROUPS.format(repr(structure)))


def check_positions(problem: Linearization, loo: str) -> None:
    """Raise when positions are to be left out and there are none."""
    if loo != "example" and problem.sketch is not None:
        raise InputError(
            f'expected loo="example" where only {problem.sketch.columns} mixtures of the outputs are looked at, got '
            f'{loo!r}. Fit with hessian_columns="all" to leave out single {loo}s.'
        )
    if loo == "position" and problem.units is None:
        raise InputError(
            'expected a network that answers at several positions, (n, positions, k), for loo="position", got one row '
            f'of {problem.k} outputs an example. Use loo="example".'
        )


def check_columns(columns: Any) -> int | None:
    """How many columns of the loss's Hessian are used: 0 to decide by the number of outputs, `None` for all."""
    if isinstance(columns, str) and columns in ("auto", "all"):
        return 0 if columns == "auto" else None
    if isinstance(columns, bool) or not isinstance(columns, Integral) or int(columns) < 1:
        raise InputError(
            'expected hessian_columns to be "auto", "all", or how many columns of each example\'s Hessian to use, at '
            f"least 1, got {columns!r}. Single outputs are chosen in predict(x, outputs=[...])."
        )
    return int(columns)


def check_choices(**choices: tuple[str, tuple[str, ...]]) -> None:
    """Raise unless each option is one of those allowed."""
    for name, (given, allowed) in choices.items():
        if given not in allowed:
            raise InputError(f"expected {name} to be one of {', '.join(map(repr, allowed))}, got {given!r}.")


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
"""What people call things elsewhere, and what they are called here."""


def named(given: Any, known: dict[str, Any], kind: type, what: str) -> Any:
    """An object of a kind, given itself or by its name."""
    if isinstance(given, kind):
        return given
    if isinstance(given, str) and given in known:
        return known[given]()
    hint = HINTS.get(str(given).lower().removesuffix("()").replace("_", ""), "")
    raise InputError(
        f"expected {what} to be one of {', '.join(map(repr, known))} or a {kind.__name__}, got {given!r}.{hint}"
    )


def check_sharing(structure: Structure, processes: Processes) -> None:
    """Raise where processes cannot share a fit."""
    if not processes.alone and not structure.additive:
        raise InputError(_whole("one process, or distributed=False,", structure))


def check_checkpoint(execution: Execution, structure: Structure) -> None:
    """Raise where the structure cannot resume from a checkpoint."""
    if execution.checkpoint is not None and not structure.additive:
        raise InputError(_whole("no checkpoint", structure))


def _whole(instead: str, structure: Structure) -> str:
    return (
        f"expected {instead} with {structure!r}, whose passes over the data are not all sums over examples. Use "
        "Exact(road='primal'), 'core', 'sketch', 'ekfac', 'kfac' or 'diagonal'."
    )


def begin(
    batches: Batches,
    model: nn.Module,
    execution: Execution,
    options: Mapping[str, Any],
) -> Budget:
    """Learn which process has which examples, and whether some of the work is done already.

    Args:
        batches: the training data.
        model: the network.
        execution: how the fit runs.
        options: everything that the result depends on, beside model and data.

    Returns:
        The memory to plan with: the same in every process, and the same as when the checkpoint was begun.
    """
    passes = batches.passes
    process_group, max_memory = passes.process_group, execution.max_memory
    folder = None if execution.checkpoint is None else Path(execution.checkpoint)
    limit = Budget(batches.device, max_memory).limit
    passes.thrifty = max_memory is not None
    if not passes.shared and folder is None:
        return Budget(batches.device, limit)
    told = {name: described(option) for name, option in options.items()}
    _check_alike(process_group, {**told, "checkpoint": folder is not None}, fingerprint(model))
    marks = roll_call(batches)
    if max_memory is None and batches.device.type == "cpu":  # what was found free is for all on this machine
        limit = limit // process_group.neighbours
    limit = min(process_group.tell("the memory", limit))
    if folder is not None:
        passes.kept = True
        if process_group.rank == 0:
            passes.keeper, limit = open_checkpoint(
                folder, float(execution.checkpoint_seconds), told, model, marks, limit, batches.progress
            )
        limit = process_group.tell("the checkpoint", limit)[0]
    return Budget(batches.device, limit)


def _check_alike(process_group: Processes, options: Mapping[str, Any], weights: Mapping[str, int]) -> None:
    """Raise unless all processes fit the same network with the same options."""
    first, *others = process_group.tell("the options", (options, weights))
    for rank, (given, marks) in enumerate(others, start=1):
        for what, mine, theirs in (("option", first[0], given), ("weights of", first[1], marks)):
            name = next((one for one in mine.keys() | theirs.keys() if mine.get(one) != theirs.get(one)), None)
            if name is not None:
                raise InputError(
                    f"expected the same {what} {name} in all processes, got another in rank {rank} than in rank 0. "
                    "Give all of them the same options, and the same trained weights."
                )


def labels_of(groups: Any, process_group: Processes) -> Any:
    """Labels of all training examples, where each process has those of its own."""
    if groups is None or process_group.alone:
        return groups
    return [label for told in process_group.tell("the groups", _listed(groups)) for label in told]


def digest_of(groups: Any) -> str | None:
    """A short word for labels."""
    if groups is None:
        return None
    return hashlib.sha256(repr(_listed(groups)).encode()).hexdigest()


def _listed(groups: Any) -> list[Any]:
    """Labels as a list; whether they are as many as examples is checked where these are known."""
    if hasattr(groups, "tolist"):
        groups = groups.tolist()
    return list(groups) if isinstance(groups, Iterable) else [groups]


def end(batches: Batches) -> None:
    """The fit is done: from now on this process is on its own, and the data of the others are elsewhere."""
    if not batches.passes.process_group.alone:
        batches.prints[:] = all_prints(batches)
    batches.fitted()
    batches.passes.close()


@dataclass(frozen=True)
class FitOptions:
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
    columns: int | None
    execution: Execution
    seed: int

    def facts(self, selection: Selection) -> dict[str, Any]:
        """Everything that a result depends on, beside model and data."""
        execution = {name: getattr(self.execution, name) for name in ("chunk_size", "max_memory", "dtype", "tf32")}
        own = {name: value for name, value in vars(self).items() if name != "execution"}
        return {**own, **execution, "parameters": ", ".join(selection.parameters), "groups": digest_of(self.groups)}


def run(
    asked: FitOptions,
    model: nn.Module,
    loader: Iterable[Any],
    passes: Passes,
    progress: bool,
) -> Tracer:
    """Fit.

    Args:
        asked: the options.
        model: trained network.
        loader: of its training data, or of this process's shard of them.
        passes: how the passes of the fit go, and which processes share them.
        progress: show how far it is.
    """
    model = bare(model)
    check_model(model)
    marks = fingerprint(model)
    with preserved(model):
        network = Network(model)
        bar = Progress(progress and passes.process_group.rank == 0)
        batches = Batches(loader, network.device, bar, passes=passes, fitting=True)
        selection = _first_look(network, batches, asked.likelihood, asked.parameters)
        budget = begin(batches, model, asked.execution, asked.facts(selection))
        problem = linearize(
            network,
            selection,
            batches,
            asked.likelihood,
            dtype=asked.execution.dtype,
            budget=budget,
            progress=bar,
            chunk_size=asked.execution.chunk_size,
            columns=asked.columns,
            seed=asked.seed,
        )
        tracer = _within_memory(asked, problem, marks)
        end(batches)
        return _told(tracer, bar)


def _within_memory(asked: FitOptions, problem: Linearization, marks: dict[str, int]) -> Tracer:
    """Fit, and plan with less memory for as long as the device runs out of it; then with smaller chunks alone."""
    before, full, least = problem, "", LEAST_MEMORY
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
        problem = with_less_memory(before, full, least)  # what did not fit is gone by now, with the error that held it


def out_of_memory(error: Exception) -> TooLargeError:
    """The error for a device that is full where several processes share a fit."""
    return TooLargeError(
        f"expected this process's part of the fit to fit on its device, got out of memory ({first_line(error)}). "
        "Give all processes a smaller max_memory or chunk_size."
    )


def _fitted(asked: FitOptions, problem: Linearization, marks: dict[str, int]) -> Tracer:
    """The curvature, and all that follows from it."""
    check_positions(problem, asked.loo)
    chosen, why = asked.structure.resolve(problem, asked.ridge)
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
    with rounded_products(True if asked.execution.tf32 and chosen.tf32 else None):
        if asked.ridge is None and problem.hessian_roots is not None:
            bread = fit_at_best(chosen, problem, weighing.columns)
        else:
            bread = chosen.fit(problem, asked.ridge, weighing.columns)
        bread = replace(bread, tf32=asked.execution.tf32 and chosen.tf32)
        return _assemble(problem, bread, weighing, asked.noise, marks, Finding("structure", chosen.name, why))


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
    bread: FittedCurvature,
    weighing: Weighing,
    noise: str,
    marks: dict[str, int],
    structure: Finding,
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
        diagnostics=Diagnostics((structure, *_diagnose(problem, bread, parts.step, parts.left_out, weighing))),
        marks=marks,
    )


def _told(tracer: Tracer, bar: Progress) -> Tracer:
    """Add what can be said at once about how far to trust the fit, and say so where it is not fine."""
    trust = trust_of_fit(tracer)
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
    problem: Linearization, bread: FittedCurvature, step: NewtonStep, left_out: LeftOut, weighing: Weighing
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
    findings += [Finding("note", fact, "") for fact in [*problem.batches.notes, *bread.notes]]
    return Diagnostics(tuple(findings))


def _listing(names: Iterable[str], most: int = 6) -> str:
    shown = list(names)
    return ", ".join(shown[:most]) + (f", ... ({len(shown)} tensors)" if len(shown) > most else "")
