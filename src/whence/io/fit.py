"""Write a fit to a file, and read it back."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from whence._version import __version__
from whence.curvature import Groups, Meats, NewtonStep
from whence.curvature.accumulate import working_precision
from whence.errors import InputError, StaleModelError
from whence.estimators import AdjustedResiduals, LeaveOneOut
from whence.influence.fitted import Fitted, using_model
from whence.io.curvature import KINDS, read, write, write_curvature
from whence.io.files import Container, Draft, Saved, damaged, number, opened, plain, printable, write_file
from whence.io.model import check_same, write_model
from whence.io.problem import Given, read_budget, read_problem, write_problem
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network
from whence.results import Diagnostics, Finding
from whence.runtime.memory import Budget
from whence.runtime.model_state import check_model, fingerprint, preserved

T = TypeVar("T")

COMPARED = 5
"""Batches of the training data on which the model must say what it said, spread over them where that is possible."""

PRECISIONS = {"float64": torch.float64, "float32": torch.float32}


def save(fitted: Fitted, step: NewtonStep, diagnostics: Diagnostics, path: Path) -> None:
    """Write a fit to a file; see `Tracer.save`."""
    structure = next((name for name, (kind, _) in KINDS.items() if kind is type(fitted.bread)), None)
    if structure is None:
        raise InputError(
            f"expected a structure of whence itself to save, got {type(fitted.bread).__name__}, which only its author "
            "knows how to write down. Fit with one of whence's structures, or save the model and fit again."
        )
    draft = Draft()
    with using_model(fitted):
        write_model(draft.part("model"), fitted.problem.network.model)
    problem, loo = fitted.problem, fitted.loo
    draft.put(
        whence=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        structure=structure,
        algebra=str(problem.dtype),
        working=str(working_precision(problem)),
        policy=loo.policy,
        recenter=loo.recenter,
        by_output=loo.by_output,
        by_position=loo.units is not None,
        noise_scale=fitted.noise_scale,
        hc1_factor=fitted.hc1_factor,
        diagnostics=[[one.name, plain(one.value), one.words] for one in diagnostics],
        sigma=fitted.sigma,
        noise_roots=fitted.meats.roots["ho"],
    )
    write_problem(draft.part("problem"), problem)
    for name, value in {"groups": loo.groups, "step": step, "adjusted": fitted.adjusted}.items():
        write(draft, name, value)
    write_curvature(draft, "bread", fitted.bread, fitted.sandwich)
    write_file(path, {**draft.fields, "orders": draft.orders}, draft.tensors)


def restore(path: Path, given: Given, build: Callable[..., T]) -> T:
    """A fit from a file, which `build` makes of its parts; see `whence.load`."""
    with opened(path) as container:
        check_model(given.model)
        with preserved(given.model):
            return _read(container, given, build)


def _read(container: Container, given: Given, build: Callable[..., T]) -> T:
    """Check the model, then all shapes on tensors without memory, then read the numbers."""
    floats = {str(dtype): dtype for dtype in (torch.float64, torch.float32)}
    unread = Saved(container, container.manifest, torch.device("meta"), {})
    check_same(unread.part("model"), given.model, unread.text("torch") == torch.__version__)
    dtypes: dict[str, tuple[torch.dtype, ...]] = {
        name: (floats[unread.text(name, *floats)],) for name in ("algebra", "working")
    }
    dtypes |= {"double": (torch.float64,), "float": tuple(floats.values()), "index": (torch.int64,)}
    unread = replace(unread, dtypes=dtypes, sizes={"one": (1,)})
    _build(unread, given, build)
    unknown = sorted(set(container.entries) - unread.used)
    if unknown:
        raise damaged(container.path, f"it holds tensors that do not belong to it, {unknown[0][:80]!r} first")
    device = Network(given.model).device
    Budget(device, given.limit).require(
        container.size, f"the fit in {container.path}", "Load it where there is more memory."
    )
    return _build(replace(unread, device=device, sizes={"one": (1,)}), given, build)


def _build(saved: Saved, given: Given, build: Callable[..., T]) -> T:
    """Put a fit together again."""
    problem = read_problem(saved.part("problem"), given)
    n, k = problem.n, problem.k
    each = problem.width if problem.sketch is None else 1
    saved.sizes.update(n=(n,), k=(k,), each=(each,), parameters=(problem.selection.size,))
    groups = _read_groups(saved.part("groups"), n) if saved.has("groups") else None
    policy: Any = saved.text("policy", "exact", "one_plus_q", "clip")
    recenter, by_output = saved.flag("recenter"), saved.flag("by_output")
    units = problem.units if saved.flag("by_position") else None
    loo = LeaveOneOut(problem.residuals, problem.hessian_roots, policy, recenter, by_output, groups, units)
    problem = replace(problem, folds=loo.folds)
    adjusted = read(saved.part("adjusted"), AdjustedResiduals)
    step = read(saved.part("step"), NewtonStep)
    if (step.direction is not None) != recenter:
        raise saved.wrong("step.direction", "there for a recentered fit alone")
    noise_roots = saved.tensor("noise_roots", "algebra", "examples", "k", "columns")
    if len(noise_roots) not in (1, n):
        raise saved.wrong("noise_roots", f"for {n} examples, or one for all")
    residuals = loo.residuals(slice(0, n), step.change)
    roots = {"ho": noise_roots, **loo.roots_from(residuals, adjusted)}
    deletions = 1 if saved.unread else loo.deletions(problem)  # stand-ins have no weights to count
    meats = Meats(roots, adjusted.hec3, deletions, groups)
    part = saved.part("bread")
    _, read_curvature = KINDS[saved.text("structure", *KINDS)]
    problem_of_bread = replace(problem, budget=read_budget(part, given, problem.device))
    bread, sandwich = read_curvature(part, problem_of_bread, meats)
    if given.loader is not None and not saved.unread:
        _compare(problem, bread)
    return build(
        problem=problem,
        bread=bread,
        sandwich=sandwich,
        meats=meats,
        adjusted=adjusted,
        step=step,
        loo=loo,
        sigma=saved.tensor("sigma", "algebra", "each", "each"),
        noise_scale=saved.number("noise_scale", 0.0),
        hc1_factor=saved.number("hc1_factor", 0.0),
        diagnostics=_diagnostics(saved),
        fingerprints={} if saved.unread else fingerprint(given.model),
    )


def _read_groups(saved: Saved, n: int) -> Groups:
    total = saved.whole("total", 2, n)
    index, counted = saved.index("index", "n", below=total), saved.whole("counted", 2, total)
    return Groups(index, total, counted)


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


def _diagnostics(saved: Saved) -> Diagnostics:
    found = []
    for name, given, words in saved.table("diagnostics", 3):
        value = given if type(given) in (str, int) else number(given)
        if value is None or not isinstance(name, str) or not isinstance(words, str):
            raise saved.wrong("diagnostics", "rows of a name, a value and words")
        shown = printable(value) if isinstance(value, str) else value
        found.append(Finding(printable(name), shown, printable(words)))
    return Diagnostics(tuple(found))
