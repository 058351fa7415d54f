"""Saving and loading a fit: its objects, and the model and the data that they belong to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from whence._version import __version__
from whence.curvature import FittedCurvature, Meats, Sandwich
from whence.curvature.spectral import SpectralSandwich
from whence.data.batches import NO_DATA, Batches
from whence.errors import InputError, StaleModelError
from whence.influence.fitted import Fitted, using_model
from whence.io.checks import check_curvature, check_fields, check_problem
from whence.io.objects import Reader, Writer, annotated
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import IGNORED, Network, Selection, next_labels
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.runtime.execution import Progress
from whence.runtime.files import damaged, fitting_together, opened, write_file
from whence.runtime.memory import Budget
from whence.runtime.model_state import (
    check_model,
    check_same_model,
    describe_model,
    fingerprint,
    other_model,
    preserved,
)

T = TypeVar("T")

FIELDS = ("loo", "adjusted", "step", "sigma", "noise_scale", "hc1_factor", "held_out", "diagnostics")
"""Fields of a fit that are saved as they are, besides those that need each other."""

COMPARED = 5  # first training batches, whose outputs are compared with the fit's


ATTACHED = "attached"


def save(fitted: Fitted, path: Path, about: Any = None, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write a fit to a file; see `Tracer.save`. `read_attached` gives `about`, which JSON can hold, and `tensors`."""
    problem, bread, model = fitted.problem, fitted.bread, fitted.problem.network.model
    batches, likelihood, writer = problem.batches, problem.likelihood, Writer()
    with using_model(fitted):
        described = describe_model(model)
    parts = {
        "likelihood": likelihood if type(likelihood) in LIKELIHOODS.values() else _full_name(likelihood),
        "positional": batches.positional,
        "loader_notes": batches.notes,
        "next_labels": batches.target_transform is not None,
        "fingerprints": torch.tensor(batches.fingerprints, dtype=torch.int64, device="cpu"),
        "scale": model.scale if isinstance(model, LeafSum) else None,
        "parameters": list(problem.selection.parameters),
        "limits": [problem.budget.limit, bread.problem.budget.limit],
        "dtype": str(problem.dtype),
        "problem": problem,
        "noise_roots": fitted.meats.roots["ho"],
        **{name: getattr(fitted, name) for name in ("bread", "sandwich", *FIELDS)},
    }
    written = {name: writer.write(part, name) for name, part in parts.items()}
    versions = {"whence": __version__, "torch": torch.__version__}
    attached = {f"{ATTACHED}.{name}": tensor for name, tensor in (tensors or {}).items()}
    if about is not None:
        written[ATTACHED] = about
    write_file(path, {**versions, "model": described, **written}, writer.tensors | attached)


def read_attached(path: Path) -> tuple[Any, dict[str, Tensor]]:
    """What was saved beside a fit, and its tensors; `None` and no tensors if there is nothing."""
    with opened(path) as saved:
        names = [name for name in saved.names if name.startswith(f"{ATTACHED}.")]
        tensors = {name.removeprefix(f"{ATTACHED}."): saved.tensor(name) for name in names}
        return saved.manifest.get(ATTACHED), tensors


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
        reader = Reader(saved, network.device)
        with fitting_together(saved.path):
            if isinstance(model, LeafSum):
                _rescale(reader, model)
        with preserved(model):
            with fitting_together(saved.path):
                check_same_model(saved.manifest["model"], model, reader.read(str, "torch") == torch.__version__)
            Budget(network.device, limit).require(
                path.stat().st_size, f"the fit in {saved.path}", "Load it where there is more memory."
            )
            with fitting_together(saved.path):
                loss = _likelihood(reader, likelihood)
                batches = _batches(reader, loader, Progress(progress), loss)
                parts = _parts(reader, network, batches, loss, limit)
                unknown = sorted(one for one in saved.names - saved.read if not one.startswith(f"{ATTACHED}."))
                if unknown:
                    raise damaged(saved.path, f"it holds tensors that do not belong to it, {unknown[0][:80]!r} first")
            if loader is not None:
                _compare(parts["problem"], parts["bread"])
            return build(**parts, fingerprints=fingerprint(model))


def _likelihood(reader: Reader, given: Likelihood | None) -> Likelihood:
    """The likelihood of the fit: one of whence, or the given one if it is a user's own."""
    found: Likelihood | str = reader.read(Likelihood | str, "likelihood")
    if isinstance(found, str):
        if given is None or _full_name(given) != found:
            got = "none" if given is None else f"a {type(given).__name__}"
            raise InputError(
                f"expected the likelihood that was fitted with, {found!r}, got {got}. It is not part of whence, so "
                "that it is not in the file: whence.load(path, model, likelihood=...)."
            )
        return given
    if given is not None and given != found:
        raise InputError(f"expected the likelihood that was fitted with, {found!r}, got {given!r}. Leave it out.")
    return found


def _full_name(likelihood: Likelihood) -> str:
    return f"{type(likelihood).__module__}.{type(likelihood).__qualname__}"


def _batches(reader: Reader, loader: Iterable[Any] | None, progress: Progress, likelihood: Likelihood) -> Batches:
    """The batches of a loader, or none."""
    retarget = None
    if reader.read(bool, "next_labels"):  # the model predicts the next token
        retarget = partial(next_labels, ignore_index=getattr(likelihood, "ignore_index", IGNORED))
    prints = reader.read(Tensor, "fingerprints").tolist()
    data, positional = NO_DATA if loader is None else loader, reader.read(int, "positional")
    found = Batches(data, reader.device, progress, [], prints, True, positional, retarget, saved=True)
    found.notes = reader.read(list[str], "loader_notes")  # the fit's notes about the loader
    return found


def _parts(
    reader: Reader, network: Network, batches: Batches, likelihood: Likelihood, limit: float | None
) -> dict[str, Any]:
    """Everything that a tracer consists of, by name."""
    weights, device, read = dict(network.model.named_parameters()), network.device, reader.read
    selection = Selection({name: weights[name] for name in read(list[str], "parameters")})
    for parameter in selection.parameters.values():
        parameter.requires_grad_(True)  # the model may be frozen now; restored by the caller
    # the memory limits of the fit, or the free memory if less: equal chunks give equal rounding errors
    limits = [min(one, Budget(device).limit) if limit is None else limit for one in read(list[int], "limits")]
    dtype = {"torch.float64": torch.float64, "torch.float32": torch.float32}[read(str, "dtype")]
    reader.live |= {Network: network, Selection: selection, Batches: batches, Likelihood: likelihood}
    reader.live |= {Progress: batches.progress, Budget: Budget(device, limits[0]), torch.dtype: dtype}
    reader.live |= {LeafSum: network.model}
    reader.sizes["d"] = selection.size
    problem: Linearization = read(Linearization, "problem")
    check_problem(reader, problem)
    reader.live[Linearization] = problem
    parts = {name: read(annotated(Fitted)[name], name) for name in FIELDS}
    loo, adjusted, step = parts["loo"], parts["adjusted"], parts["step"]
    problem = replace(problem, folds=loo.folds)
    residuals = loo.residuals(slice(0, problem.n), step.change)
    roots = {"ho": read(Tensor, "noise_roots"), **loo.roots_from(residuals, adjusted)}
    meats = reader.live[Meats] = Meats(roots, adjusted.hec3, loo.deletions, loo.groups)
    check_fields(reader, meats, **parts)
    reader.live[Linearization] = replace(problem, budget=Budget(device, limits[1]))
    bread = reader.live[FittedCurvature] = read(FittedCurvature, "bread")
    sandwich = read(Sandwich, "sandwich")
    check_curvature(reader, bread, sandwich, meats)
    split = isinstance(sandwich, SpectralSandwich) and any(w.basis.missing and not w.rounded for w in sandwich.weights)
    if split and device.type == "cuda":  # weights that are differences need exact products
        bread.gradients.problem = replace(bread.problem, precision="float32")
        bread = replace(bread, problem=bread.gradients.problem)
        sandwich = replace(sandwich, fitted=bread)
    if problem.sketch is not None:
        batches.sketch = problem.sketch
    return {**parts, "problem": problem, "bread": bread, "sandwich": sandwich, "meats": meats}


def _compare(problem: Linearization, bread: Any) -> None:
    """Check on the first batches that these are the training data, and that the outputs equal those of the fit."""
    first = None
    for place, batch in enumerate(islice(problem.batches.read(None), COMPARED)):
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


def _rescale(reader: Reader, model: LeafSum) -> None:
    """Set the scale of the leaf values to that of the fit, which came from the training data."""
    scale = reader.read(Tensor | None, "scale")
    if scale is None:
        raise other_model("trees where a network was")
    reader.check("scale", scale, len(model.scale), dtype=torch.float64)
    reader.require(bool((torch.isfinite(scale) & (scale > 0)).all()), "scale", "numbers above zero")
    reader.sizes["leaves"] = len(scale)
    model.rescale(scale)
