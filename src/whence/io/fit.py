"""Write a fit to a file, and read it back."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from whence._version import __version__
from whence.curvature import FittedCurvature, Meats, NewtonStep, Sandwich
from whence.curvature.accumulate import working_precision
from whence.curvature.dual import FittedDual
from whence.curvature.iterative import FittedIterative
from whence.curvature.primal import FittedPrimal
from whence.curvature.spectral import FittedSpectral
from whence.errors import InputError, StaleModelError
from whence.estimators import AdjustedResiduals, LeaveOneOut
from whence.influence.fitted import Fitted, using_model
from whence.io.curvature import (
    read_dual,
    read_free,
    read_primal,
    read_spectral,
    write_dual,
    write_free,
    write_primal,
    write_spectral,
)
from whence.io.files import (
    Container,
    Draft,
    Saved,
    Target,
    damaged,
    number,
    opened,
    plain,
    printable,
    write,
)
from whence.io.model import check_same, write_model
from whence.io.problem import Given, read_groups, read_problem, read_selection, write_groups, write_problem
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network
from whence.results import Diagnostics, Finding
from whence.runtime.memory import Budget
from whence.runtime.model_state import check_model, fingerprint, preserved

T = TypeVar("T")
Writer = Callable[[Draft, Any, Any], None]
Restorer = Callable[[Saved, Linearization, Meats, Given], tuple[FittedCurvature, Sandwich]]

KINDS: dict[str, tuple[type[FittedCurvature], Writer, Restorer]] = {
    "primal": (FittedPrimal, write_primal, read_primal),
    "dual": (FittedDual, write_dual, read_dual),
    "matrix_free": (FittedIterative, write_free, read_free),
    "spectral": (FittedSpectral, write_spectral, read_spectral),
}
"""Every curvature of whence, with the way to a file and back."""

COMPARED = 5
"""Batches of the training data on which the model must say what it said, spread over them where that is possible."""

PRECISIONS = {"float64": torch.float64, "float32": torch.float32}


def save(fitted: Fitted, step: NewtonStep, diagnostics: Diagnostics, path: Path) -> None:
    """Write a fit to a file; see `Tracer.save`."""
    kinds = {kind: name for name, (kind, _, _) in KINDS.items()}
    name = kinds.get(type(fitted.bread))
    if name is None:
        raise InputError(
            f"expected a structure of whence itself to save, got {type(fitted.bread).__name__}, which only its author "
            "knows how to write down. Fit with one of whence's structures, or save the model and fit again."
        )
    draft = Draft()
    with using_model(fitted):
        write_model(draft.part("model"), fitted.problem.network.model)
    problem, loo = fitted.problem, fitted.loo
    draft.note(
        whence=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        structure=name,
        algebra=_precision_name(problem.dtype),
        working=_precision_name(working_precision(problem)),
        policy=loo.policy,
        recenter=loo.recenter,
        by_output=loo.by_output,
        by_position=loo.units is not None,
        guarded=fitted.adjusted.guarded,
        noise_scale=fitted.noise_scale,
        hc1_factor=fitted.hc1_factor,
        relative=step.relative,
        diagnostics=[[one.name, plain(one.value), one.words] for one in diagnostics],
    )
    write_problem(draft.part("problem"), problem)
    write_groups(draft.part("groups"), loo.groups)
    draft.put("sigma", fitted.sigma)
    draft.put("noise_roots", fitted.meats.roots["ho"])
    draft.put("change", step.change)
    draft.put("direction", step.direction)
    for each in ("hec2", "hec3", "leverage"):
        draft.put(each, getattr(fitted.adjusted, each))
    KINDS[name][1](draft.part("bread"), fitted.bread, fitted.sandwich)
    write(path, {**draft.fields, "orders": draft.orders}, draft.tensors)


def restore(path: Path, given: Given, dtype: torch.dtype | None, build: Callable[..., T]) -> T:
    """A fit from a file, which `build` makes of its parts; see `whence.load`."""
    with opened(path) as container:
        check_model(given.model)
        with preserved(given.model):
            return _read(container, given, dtype, build)


def _read(container: Container, given: Given, dtype: torch.dtype | None, build: Callable[..., T]) -> T:
    """Check the model, then all shapes on tensors without memory, then read the numbers."""
    orders = container.manifest.get("orders")
    if not isinstance(orders, dict):
        raise damaged(container.path, "it does not say in which order axes are stored")
    saved = Saved(container, container.manifest, orders, _NOWHERE, set())
    notes = check_same(saved.part("model"), given.model, saved.text("torch") == torch.__version__)
    target = _target(saved, given, dtype)
    empty = replace(saved, target=replace(target, device=_NOWHERE.device, empty=True))
    _build(empty, given, notes, build)
    unknown = sorted(set(container.entries) - empty.used)
    if unknown:
        raise damaged(container.path, f"it holds tensors that do not belong to it, {unknown[0][:80]!r} first")
    _require_memory(container, target, given)
    return _build(replace(saved, target=target), given, notes, build)


def _require_memory(container: Container, target: Target, given: Given) -> None:
    """Raise when the tensors do not fit in memory."""
    pairs = zip((target.algebra, target.working), target.stored, strict=True)
    wider = any(wanted.itemsize > stored.itemsize for wanted, stored in pairs)
    budget = Budget(target.device, given.limit)
    need = container.size * (2 if wider else 1)
    budget.require(need, f"the fit in {container.path}", "Load it where there is more memory.")


def _build(saved: Saved, given: Given, notes: list[str], build: Callable[..., T]) -> T:
    """Put a fit together again."""
    problem = read_problem(saved.part("problem"), given)
    n, k = problem.n, problem.k
    groups = read_groups(saved.part("groups"), n)
    policy: Any = saved.text("policy", "exact", "one_plus_q", "clip")
    recenter, by_output = saved.flag("recenter"), saved.flag("by_output")
    units = problem.units if saved.flag("by_position") else None
    loo = LeaveOneOut(problem.residuals, problem.hessian_roots, policy, recenter, by_output, groups, units)
    problem = replace(problem, folds=loo.folds)
    adjusted = AdjustedResiduals(
        saved.algebra("hec2", n, k),
        saved.algebra("hec3", n, k),
        saved.algebra("leverage", n, k),
        saved.whole("guarded"),
    )
    direction = saved.algebra("direction", problem.selection.size) if recenter else None
    step = NewtonStep(saved.algebra("change", n, k), saved.number("relative", 0.0), direction)
    examples, _, q = saved.sizes("noise_roots", 3)
    if examples not in (1, n):
        raise saved.wrong("noise_roots", f"for {n} examples, or one for all")
    roots = {"ho": saved.algebra("noise_roots", examples, k, q)}
    residuals = loo.residuals(slice(0, n), step.change)
    roots.update(loo.roots_from(residuals, adjusted))
    deletions = 1 if saved.target.empty else loo.deletions(problem)  # stand-ins have no weights to count
    meats = Meats(roots, adjusted.hec3, deletions, groups)
    each = problem.width if problem.sketch is None else 1
    name = saved.text("structure", *KINDS)
    bread, sandwich = KINDS[name][2](saved.part("bread"), problem, meats, given)
    if given.loader is not None and not saved.target.empty:
        _compare(problem, bread)
    return build(
        problem=problem,
        bread=bread,
        sandwich=sandwich,
        meats=meats,
        adjusted=adjusted,
        step=step,
        loo=loo,
        sigma=saved.algebra("sigma", each, each),
        noise_scale=saved.number("noise_scale", 0.0),
        hc1_factor=saved.number("hc1_factor", 0.0),
        diagnostics=_diagnostics(saved, notes),
        fingerprints={} if saved.target.empty else fingerprint(given.model),
    )


def _compare(problem: Linearization, bread: Any) -> None:
    """Compare a few batches: these must be the training data, and the model must say about them what it said.

    Mixtures of outputs are looked at in every batch, whenever it is read: see `SketchedBatches`.
    """
    first = None
    for place, batch in problem.batches.sample(COMPARED):
        first = batch if first is None else first
        if problem.sketch is not None:
            continue
        with torch.no_grad():
            outputs = problem.network(batch.inputs, f"batch {place}").to(problem.dtype)
        wanted = problem.outputs[batch.rows]
        gap = float((outputs - wanted).abs().max()) if outputs.shape == wanted.shape else float("inf")
        if not gap <= problem.network.tolerance * float(wanted.abs().max()):
            raise StaleModelError(
                f"expected the model to say about batch {place} what it said when it was fitted, got a difference of "
                f"{gap:.3g}. Its weights are the same, its forward is not: build it as it was then."
            )
    stream = getattr(bread, "stream", None) or getattr(getattr(bread, "features", None), "stream", None)
    if stream is not None and first is not None:
        stream.capture(first.inputs)


def _target(saved: Saved, given: Given, dtype: torch.dtype | None) -> Target:
    """Where tensors go, and in which precision."""
    algebra, working = (PRECISIONS[saved.text(name, *PRECISIONS)] for name in ("algebra", "working"))
    if dtype not in (None, *PRECISIONS.values()):
        raise InputError(f"expected dtype torch.float64 or torch.float32 for the algebra, got {dtype!r}.")
    selection = read_selection(saved.part("problem"), given.model)
    doubles = any(p.dtype == torch.float64 for p in selection.parameters.values())
    mine = torch.float64 if doubles else torch.float32
    return Target(Network(given.model).device, dtype or algebra, mine, (algebra, working), empty=False)


_NOWHERE = Target(torch.device("meta"), torch.float64, torch.float64, (torch.float64, torch.float64), empty=True)


def _diagnostics(saved: Saved, notes: list[str]) -> Diagnostics:
    rows = saved.fields.get("diagnostics")
    if not isinstance(rows, list):
        raise saved.wrong("diagnostics", "a table")
    found = []
    for row in rows:
        sound = isinstance(row, list) and len(row) == 3 and isinstance(row[0], str) and isinstance(row[2], str)
        value = row[1] if sound and type(row[1]) in (str, int) else number(row[1]) if sound else None
        if value is None:
            raise saved.wrong("diagnostics", "rows of a name, a value and words")
        shown = printable(value) if isinstance(value, str) else value
        found.append(Finding(printable(row[0]), shown, printable(row[2])))
    return Diagnostics((*found, *(Finding("note", note, "") for note in notes)))


def _precision_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
