"""Writing and reading a fit: the linearized problem, the curvature and what follows from them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whence._version import __version__
from whence.curvature import Groups, Meats, NewtonStep
from whence.curvature.accumulate import working_precision
from whence.data.batches import NO_DATA, Batches
from whence.data.targets import Positions
from whence.display import listing
from whence.errors import InputError, StaleModelError
from whence.estimators import AdjustedResiduals, LeaveOneOut
from whence.influence.fitted import Fitted, using_model
from whence.io.curvature import KINDS, RECORDS, read, write
from whence.io.files import Draft, Saved, damaged, number, opened, plain, printable, write_file
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization, sketched_derivatives
from whence.jacobian.network import IGNORED, Network, Selection, next_labels
from whence.jacobian.sketches import HessianSketch, Labels
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.results import Diagnostics, Finding
from whence.runtime.execution import Progress
from whence.runtime.memory import Budget
from whence.runtime.model_state import as_bytes, check_model, fingerprint, preserved

T = TypeVar("T")

COMPARED = 5  # training batches whose outputs are compared with the fit's, evenly spaced if the loader allows it


def save(fitted: Fitted, step: NewtonStep, diagnostics: Diagnostics, path: Path) -> None:
    """Write a fit to a file; see `Tracer.save`."""
    structure = next((name for name, (kind, *_) in KINDS.items() if kind is type(fitted.bread)), None)
    if structure is None:
        raise InputError(
            f"expected a structure of whence itself to save, got {type(fitted.bread).__name__}, which whence cannot "
            "write. Fit with one of whence's structures, or save the model and fit again."
        )
    draft = Draft()
    with using_model(fitted):
        write_model(draft.part("model"), fitted.problem.network.model)
    problem, loo = fitted.problem, fitted.loo
    draft.put(
        whence=__version__,
        torch=torch.__version__,
        structure=structure,
        algebra=str(problem.dtype),
        working=str(working_precision(problem)),
        policy=loo.policy,
        recenter=loo.recenter,
        unit=loo.unit,
        noise_scale=fitted.noise_scale,
        hc1_factor=fitted.hc1_factor,
        diagnostics=[[one.name, plain(one.value), one.words] for one in diagnostics],
        sigma=fitted.sigma,
        noise_roots=fitted.meats.roots["ho"],
    )
    _write_problem(draft.part("problem"), problem)
    for name, value in {"groups": loo.groups, "step": step, "adjusted": fitted.adjusted}.items():
        write(draft, name, value)
    part, write_rest = write(draft, "bread", fitted.bread), KINDS[structure][1]
    part.put(limit=fitted.bread.problem.budget.limit)
    if write_rest is not None:
        write_rest(part, fitted.bread, fitted.sandwich)
    write_file(path, {**draft.fields, "orders": draft.orders}, draft.tensors)


def restore(
    path: Path,
    build: Callable[..., T],
    model: nn.Module,
    loader: Iterable[Any] | None,
    likelihood: Likelihood | None,
    limit: float | None,
    progress: bool,
) -> T:
    """Read a fit from a file; `build` makes a tracer from its parts; other arguments as in `whence.load`."""
    with opened(path) as saved:
        check_model(model)
        network = Network(model)
        saved = replace(saved, device=network.device, sizes={"one": (1,)})
        if isinstance(model, LeafSum):
            rescale(saved.part("model"), model)
        with preserved(model):
            check_same(saved.part("model"), model, saved.text("torch") == torch.__version__)
            size, what = sum(entry.nbytes for entry in saved.entries.values()), f"the fit in {saved.path}"
            Budget(network.device, limit).require(size, what, "Load it where there is more memory.")
            saved = replace(saved, dtypes=_dtypes(saved))
            part = saved.part("problem")
            loss = _read_likelihood(part.part("likelihood"), likelihood)
            batches = _read_data(part.part("data"), loader, Progress(progress), loss)
            found = _build(saved, _read_problem(part, network, batches, loss, limit), limit, build)
        unknown = sorted(set(saved.entries) - saved.used)
        if unknown:
            raise damaged(saved.path, f"it holds tensors that do not belong to it, {unknown[0][:80]!r} first")
        return found


def _dtypes(saved: Saved) -> dict[str, tuple[torch.dtype, ...]]:
    """Allowed dtypes of tensors, by the names that `Saved.tensor` takes."""
    floats = {str(dtype): dtype for dtype in (torch.float64, torch.float32)}
    return {
        **{name: (floats[saved.text(name, *floats)],) for name in ("algebra", "working")},
        "double": (torch.float64,),
        "float": tuple(floats.values()),
        "index": (torch.int64,),
        "label": (torch.int32,),
    }


def _build(saved: Saved, problem: Linearization, limit: float | None, build: Callable[..., T]) -> T:
    """Read the other parts of a fit and build it."""
    for parameter in problem.selection.parameters.values():
        parameter.requires_grad_(True)  # the model may be frozen now; restored on exit
    n, k = problem.n, problem.k
    each = problem.width if problem.sketch is None else 1
    saved.sizes.update(n=(n,), k=(k,), each=(each,), parameters=(problem.selection.size,))
    groups = None
    if saved.has("groups"):
        grouped = saved.part("groups")
        total = grouped.whole("total", 2, n)
        groups = Groups(grouped.index("index", "n", below=total), total, grouped.whole("counted", 2, total))
    policy: Any = saved.text("policy", "exact", "one_plus_q", "clip")
    unit: Any = saved.text("unit", "example", "position", "output")
    recenter = saved.flag("recenter")
    loo = LeaveOneOut(problem, policy, recenter, unit, groups)
    problem = replace(problem, folds=loo.folds)
    adjusted = read(saved.part("adjusted"), AdjustedResiduals)
    step = read(saved.part("step"), NewtonStep)
    if (step.direction is not None) != recenter:
        raise saved.wrong("step.direction", "there for a recentered fit alone")
    noise_roots = saved.tensor("noise_roots", "algebra", "examples", "k", "columns")
    if len(noise_roots) not in (1, n):
        raise saved.wrong("noise_roots", f"for {n} examples, or one for all")
    roots = {"ho": noise_roots, **loo.roots_from(loo.residuals(slice(0, n), step.change), adjusted)}
    meats = Meats(roots, adjusted.hec3, loo.deletions, groups)
    part = saved.part("bread")
    read_curvature = KINDS[saved.text("structure", *KINDS)][2]
    problem_of_bread = replace(problem, budget=_read_budget(part, limit, problem.device))
    bread, sandwich = read_curvature(part, problem_of_bread, meats)
    if problem.batches.loader is not NO_DATA:
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
        fingerprints=fingerprint(problem.network.model),
    )


def _compare(problem: Linearization, bread: Any) -> None:
    """Check on a few batches that these are the training data, and that the outputs equal those of the fit."""
    first = None
    for place, batch in problem.batches.sample(COMPARED):
        first = batch if first is None else first
        with torch.no_grad():
            outputs = problem.network(batch.inputs, f"batch {place}").to(problem.dtype)
        wanted = problem.outputs[batch.rows]
        gap = float((outputs - wanted).abs().max()) if outputs.shape == wanted.shape else float("inf")
        scale = float(wanted.abs().max())
        near = problem.network.tolerance * (1.0 if problem.sketch is None else 4.0 * (1.0 + scale))  # as logarithms do
        if not gap <= min(near, 0.5) * scale:
            raise StaleModelError(
                f"expected the outputs for batch {place} that the model had when it was fitted, got a difference of "
                f"{gap:.3g}. Its weights are the same, its forward is not: build the model as for the fit."
            )
    stream = getattr(bread, "stream", None) or getattr(getattr(bread, "features", None), "stream", None)
    if stream is not None and first is not None:
        stream.capture(first.inputs)


def _diagnostics(saved: Saved) -> Diagnostics:
    found = []
    for name, given, words in saved.table("diagnostics", 3):
        value = printable(given) if isinstance(given, str) else given if type(given) is int else number(given)
        if value is None or not isinstance(name, str) or not isinstance(words, str):
            raise saved.wrong("diagnostics", "rows of a name, a value and words")
        found.append(Finding(printable(name), value, printable(words)))
    return Diagnostics(tuple(found))


def _write_problem(draft: Draft, problem: Linearization) -> None:
    """Write a problem; training data are represented only by fingerprints."""
    likelihood, batches, sketch = problem.likelihood, problem.batches, problem.sketch
    own, options = _class_and_options(likelihood)
    draft.part("likelihood").put(name=likelihood.name, own=own, **options)
    prints = batches.fingerprints
    draft.part("data").put(
        positional=batches.positional,
        notes=batches.notes,
        next_labels=batches.target_transform is not None,
        sizes=torch.tensor([len(batch) for batch in prints], dtype=torch.int64, device="cpu"),
        fingerprints=torch.tensor([one for batch in prints for one in batch], dtype=torch.int64, device="cpu"),
    )
    write(draft, "units", problem.units)
    write(draft, "sketch", sketch)
    draft.put(n=problem.n, k=problem.k, parameters=list(problem.selection.parameters), limit=problem.budget.limit)
    derived = () if sketch is None else ("residuals", "hessian_roots")
    draft.put(**{name: getattr(problem, name) for name in RECORDS[Linearization] if name not in derived})
    if sketch is not None and sketch.labels is not None:
        draft.part("labels").put(seed=sketch.seed, **sketch.labels._asdict())


def _read_problem(
    saved: Saved, network: Network, batches: Batches, likelihood: Likelihood, limit: float | None
) -> Linearization:
    n, k = saved.whole("n", 1), saved.whole("k", 1)
    saved.sizes.update({"n": (n,), "k": (k,)})
    known: dict[str, Any] = {"network": network, "batches": batches, "likelihood": likelihood}
    known["outputs"] = outputs = saved.tensor("outputs", "algebra", "n", "k")
    sketch = None
    if saved.has("sketch"):
        known["sketch"] = sketch = _read_sketch(saved, network, likelihood, outputs)
        known["residuals"], known["hessian_roots"] = sketched_derivatives(outputs)
    if saved.has("units"):
        part = saved.part("units")
        shape, width = tuple(part.wholes("shape", 1)), part.whole("width", 1)
        part.sizes["positions"] = (k // width,)
        known["units"] = units = read(part, Positions, shape=shape)
        if not shape or units.positions * width != k:
            raise part.wrong("shape", f"positions of {k} outputs")
    names, parameters = saved.texts("parameters"), dict(network.model.named_parameters())
    if not names or len(set(names)) != len(names) or any(name not in parameters for name in names):
        raise saved.wrong("parameters", "names of parameters of the model")
    known["selection"] = Selection({name: parameters[name] for name in names})
    known["budget"] = _read_budget(saved, limit, network.device)
    found = read(saved, Linearization, dtype=outputs.dtype, progress=batches.progress, **known)
    if (sketch is None) != (found.gram is None):
        raise saved.wrong("gram", "there for a fit of some columns alone")
    if sketch is not None:
        batches.views = sketch.views
    return found


def _read_sketch(saved: Saved, network: Network, likelihood: Likelihood, outputs: Tensor) -> HessianSketch:
    """The sketch of a problem, with its sampled labels."""
    labels = saved.part("labels")
    known = {"network": network, "likelihood": likelihood, "dtype": outputs.dtype}
    found = read(saved.part("sketch"), HessianSketch, seed=labels.whole("seed", 0, 2**63), **known)
    if found.columns + 1 != outputs.shape[1]:
        raise saved.wrong("sketch", f"one of {outputs.shape[1] - 1} columns")
    labels.sizes["columns"] = (found.columns,)
    classes = labels.tensor("classes", "label", "n", "labelled", "columns")
    if classes.numel() and (int(classes.min()) < -1 or int(classes.max()) >= found.width):
        raise labels.wrong("classes", f"classes below {found.width}, or -1")
    found.labels = Labels(classes, labels.tensor("floors", "algebra", "n", "labelled"))
    return found


def _read_budget(saved: Saved, limit: float | None, device: torch.device) -> Budget:
    """The memory limit of the fit, or the free memory if less: equal chunks give equal rounding errors."""
    return Budget(device, min(saved.whole("limit", 0, 2**62), Budget(device).limit) if limit is None else limit)


def _read_likelihood(saved: Saved, given: Likelihood | None) -> Likelihood:
    """The likelihood of the fit: one of whence, or the given one if it is a user's own."""
    own = saved.text("own")
    if own:
        if given is None or _class_and_options(given)[0] != own:
            got = "none" if given is None else f"a {type(given).__name__}"
            raise InputError(
                f"expected the likelihood that was fitted with, {own!r}, got {got}. It is not part of whence, so that "
                "it is not in the file: whence.load(path, model, likelihood=...)."
            )
        return given
    kind = LIKELIHOODS[saved.text("name", *LIKELIHOODS)]
    options = {name: saved.fields[name] for name in inspect.signature(kind).parameters if name in saved.fields}
    try:
        found = kind(**options)
    except (InputError, TypeError) as error:
        raise saved.wrong("options", f"those of the {kind.name} likelihood ({error})") from error
    if given is not None and given != found:
        raise InputError(f"expected the likelihood that was fitted with, {found!r}, got {given!r}. Leave it out.")
    return found


def _class_and_options(likelihood: Likelihood) -> tuple[str, dict[str, Any]]:
    """Full name of a user's own class, without options; for whence's classes an empty name, and the options."""
    kind = type(likelihood)
    if kind not in LIKELIHOODS.values():
        return f"{kind.__module__}.{kind.__qualname__}", {}
    return "", {name: getattr(likelihood, name) for name in inspect.signature(kind).parameters}


def _read_data(saved: Saved, loader: Iterable[Any] | None, progress: Progress, likelihood: Likelihood) -> Batches:
    """The batches of a loader, or none."""
    retarget = None
    if saved.flag("next_labels"):  # the model predicts the next token
        retarget = partial(next_labels, ignore_index=getattr(likelihood, "ignore_index", IGNORED))
    lengths = saved.tensor("sizes", "index", "batches").tolist()
    fingerprints = saved.tensor("fingerprints", "index", "any")
    if any(length < 1 for length in lengths) or sum(lengths) != len(fingerprints):
        raise saved.wrong("sizes", f"{len(fingerprints)} in all")
    prints = [tuple(part.tolist()) for part in fingerprints.split(lengths)]
    data, positional = NO_DATA if loader is None else loader, saved.whole("positional", 1)
    found = Batches(data, saved.device, progress, [], prints, True, positional, retarget, saved=True)
    found.notes = saved.texts("notes")  # the fit's notes about the loader
    return found


ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def write_model(draft: Draft, model: nn.Module) -> None:
    """Write modules, and name, dtype, shape and checksum of every parameter and buffer."""
    draft.put(modules=_modules_of(model), tensors=_tensors_of(model))
    if isinstance(model, LeafSum):
        draft.put(scale=model.scale)


def _modules_of(model: nn.Module) -> list[list[str]]:
    """Name, class and options of every module; options as printed, which may differ between versions of torch."""
    return [
        [name, type(module).__name__, ADDRESS.sub("0x", module.extra_repr())]
        for name, module in model.named_modules(remove_duplicate=False)
    ]


def _tensors_of(model: nn.Module) -> list[list[Any]]:
    """Name, first name of the same tensor, dtype, shape and checksum of all parameters and buffers."""
    first: dict[int, str] = {}
    return [
        [name, first.setdefault(id(one), name), str(one.dtype), list(one.shape), sha256(as_bytes(one)).hexdigest()]
        for named in (model.named_parameters, model.named_buffers)
        for name, one in named(remove_duplicate=False)
    ]


def check_same(saved: Saved, model: nn.Module, same_torch: bool) -> None:
    """Raise unless this is the model that was fitted."""
    modules, rows = _modules_of(model), saved.table("modules", 3)
    for one, wanted in zip(modules, rows, strict=False):
        if one[:2] != wanted[:2] or (same_torch and one != wanted):
            got, was = (f"{_safe(row[0]) or 'the model'}: {_safe(row[1])}({_safe(row[2])})" for row in (one, wanted))
            raise _other_model(f"{got} where {was} was")
    if len(modules) != len(rows):
        raise _other_model(f"{len(modules)} modules instead of {len(rows)}")
    found, rows = _tensors_of(model), saved.table("tensors", 5)
    here, there = [row[0] for row in found], [row[0] for row in rows]
    if here != there:
        odd = [name for name in [*here, *there] if (name in here) != (name in there)] or here
        raise _other_model(f"another set of parameters and buffers ({listing([_safe(name) for name in odd])})")
    changed = []
    for (name, owner, *form, digest), (_, other, *saved_form, wanted) in zip(found, rows, strict=True):
        if owner != other:
            raise _other_model(f"{name}, which shared its weights with {_safe(other)} and now shares them with {owner}")
        if form[1] != saved_form[1]:
            raise _other_model(f"{name} of shape {tuple(form[1])} instead of {_safe(saved_form[1])}")
        if form != saved_form or digest != wanted:
            changed.append(name)
    if changed:
        raise StaleModelError(
            f"expected the weights and buffers that were fitted, got changes in {listing(changed)}. "
            "Load the fitted weights into the model, in the same dtype, or fit and save again."
        )


def rescale(saved: Saved, model: LeafSum) -> None:
    """Set the scale of the leaf values to that of the fit, which came from the training data."""
    if not saved.has("scale"):
        raise _other_model("trees where a network was")
    sizes = {"leaves": tuple(model.scale.shape)}
    here = replace(saved, device=model.scale.device, dtypes={"double": (torch.float64,)}, sizes=sizes)
    scale = here.tensor("scale", "double", "leaves")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise saved.wrong("scale", "numbers above zero")
    model.rescale(scale)


def _safe(thing: Any) -> str:
    """Text from a file, made safe for a message."""
    return printable(str(thing), 120)


def _other_model(got: str) -> StaleModelError:
    return StaleModelError(
        f"expected the model that was fitted, got {got}. Build the same model, and load the fitted weights."
    )
