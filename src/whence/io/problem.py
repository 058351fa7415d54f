"""The linearized problem of a fit in a file: likelihood, data by their fingerprints, outputs, selected parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from whence.data.batches import Batch, Batches
from whence.data.targets import Positions
from whence.errors import InputError, LoaderError
from whence.io.curvature import read, write
from whence.io.files import Draft, Saved
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import IGNORED, Network, Selection, next_labels
from whence.jacobian.sketches import OutputSketch, SketchedBatches
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.runtime.memory import Budget
from whence.runtime.progress import Progress


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
    """Write a problem; of the data only fingerprints of all batches, by which they are recognised."""
    likelihood, batches = problem.likelihood, problem.batches
    own = _own_class(likelihood)
    options = {} if own else {one: getattr(likelihood, one) for one in _option_names(type(likelihood))}
    draft.part("likelihood").put(name=likelihood.name, own=own, **options)
    sketched = batches if isinstance(batches, SketchedBatches) else None
    data = batches.plain if isinstance(batches, SketchedBatches) else batches
    prints = batches.fingerprints
    draft.part("data").put(
        positional=data.positional,
        notes=data.notes,
        next_labels=data.target_transform is not None,
        sizes=torch.tensor([len(batch) for batch in prints], dtype=torch.int64, device="cpu"),
        fingerprints=torch.tensor([one for batch in prints for one in batch], dtype=torch.int64, device="cpu"),
    )
    write(draft, "units", problem.units)
    write(draft, "sketch", problem.sketch)
    draft.put(
        n=problem.n,
        k=problem.k,
        parameters=list(problem.selection.parameters),
        chunk_size=problem.chunk_size,
        limit=problem.budget.limit,
        outputs=problem.outputs,
        residuals=problem.residuals,
        hessian_roots=problem.hessian_roots,
        sample_weights=problem.sample_weights,
        seed=None if sketched is None else sketched.seed,
        largest=None if sketched is None else sketched.largest,
    )


def read_problem(saved: Saved, given: Given) -> Linearization:
    """Read a problem."""
    n, k = saved.whole("n", 1), saved.whole("k", 1)
    saved.sizes.update({"n": (n,), "k": (k,)})
    network, progress = Network(given.model), Progress(given.progress)
    likelihood = read_likelihood(saved.part("likelihood"), given.likelihood)
    data = read_data(saved.part("data"), given.loader, progress, likelihood)
    batches: Batches | SketchedBatches = data
    residuals = saved.tensor("residuals", "algebra", "n", "k")
    roots = saved.tensor("hessian_roots", "algebra", "n", "k", "q") if saved.has("hessian_roots") else None
    sketch = read(saved.part("sketch"), OutputSketch) if saved.has("sketch") else None
    if sketch is not None:
        if roots is None or sketch.columns + 1 != k:
            raise saved.wrong("sketch", f"one of {k - 1} columns with roots of the Hessian")
        saved.sizes["largest"] = (sketch.columns // 2,)
        seed, largest = saved.whole("seed", 0, 2**63), saved.index("largest", "n", "largest")
        batches = SketchedBatches(
            data, network, likelihood, sketch.columns, seed, residuals.dtype, largest, (residuals, roots)
        )
    return Linearization(
        network=network,
        selection=read_selection(saved, given.model),
        batches=batches,
        likelihood=likelihood,
        outputs=saved.tensor("outputs", "algebra", "n", "k"),
        residuals=residuals,
        hessian_roots=roots,
        sample_weights=saved.tensor("sample_weights", "algebra", "n") if saved.has("sample_weights") else None,
        dtype=residuals.dtype,
        budget=read_budget(saved, given, network.device),
        progress=progress,
        chunk_size=saved.whole("chunk_size", 1) if saved.has("chunk_size") else None,
        units=_read_units(saved.part("units"), k) if saved.has("units") else None,
        sketch=sketch,
    )


def _read_units(saved: Saved, k: int) -> Positions:
    shape, width = tuple(saved.wholes("shape", 1)), saved.whole("width", 1)
    saved.sizes["positions"] = (k // width,)
    found = read(saved, Positions, shape=shape)
    if not shape or found.positions * width != k:
        raise saved.wrong("shape", f"positions of {k} outputs")
    return found


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


def read_likelihood(saved: Saved, given: Likelihood | None) -> Likelihood:
    """The likelihood of the fit: made again, or the one given, where a user wrote it."""
    own = saved.text("own")
    if own:
        if given is None or _own_class(given) != own:
            got = "none" if given is None else f"a {type(given).__name__}"
            raise InputError(
                f"expected the likelihood that was fitted with, {own!r}, got {got}. It is not part of whence, so that "
                "it is not in the file: whence.load(path, model, likelihood=...)."
            )
        return given
    kind = LIKELIHOODS[saved.text("name", *LIKELIHOODS)]
    try:
        found = kind(**{name: saved.fields[name] for name in _option_names(kind) if name in saved.fields})
    except (InputError, TypeError) as error:
        raise saved.wrong("options", f"those of the {kind.name} likelihood ({error})") from error
    if given is not None and given != found:
        raise InputError(f"expected the likelihood that was fitted with, {found!r}, got {given!r}. Leave it out.")
    return found


def _own_class(likelihood: Likelihood) -> str:
    """Where a user's own class lives; empty for those of whence."""
    kind = type(likelihood)
    return "" if kind in LIKELIHOODS.values() else f"{kind.__module__}.{kind.__qualname__}"


def _option_names(kind: type[Likelihood]) -> list[str]:
    """The options of a likelihood of whence: the fields of its dataclass."""
    return [field.name for field in fields(kind)]  # type: ignore[arg-type]  # those of whence are dataclasses


NO_DATA: list[Any] = []
"""Stands for training data that were not handed over."""


@dataclass
class SavedBatches(Batches):
    """Training data that must be those of the fit, or `NO_DATA`: what does not need them works."""

    def read(self, label: str | None) -> Iterator[Batch]:
        """Read all batches once, or say that there are none."""
        if self.loader is NO_DATA:
            raise LoaderError(
                "expected the training data for this question, got a fit that was loaded without them. "
                "Pass them: whence.load(path, model, train_loader=...)."
            )
        return super().read(label)

    def _check_fingerprint(self, number: int, found: tuple[int, ...]) -> None:
        try:
            super()._check_fingerprint(number, found)
        except LoaderError:
            raise _other_data(f"other data in batch {number}") from None

    def _check_count(self, count: int, examples: int) -> None:
        if count < len(self.fingerprints):
            raise _other_data(f"{count} batches instead of {len(self.fingerprints)}")
        super()._check_count(count, examples)


def _other_data(got: str) -> LoaderError:
    return LoaderError(
        f"expected the training data of the saved fit, in the same order and batches, got {got}. Pass a loader with "
        "the same examples and the same batch_size, not shuffled."
    )


def read_data(saved: Saved, loader: Iterable[Any] | None, progress: Progress, likelihood: Likelihood) -> Batches:
    """The batches of a loader, or none."""
    retarget = None
    if saved.flag("next_labels"):  # the model predicts the next token
        retarget = partial(next_labels, ignore_index=getattr(likelihood, "ignore_index", IGNORED))
    sizes, fingerprints = saved.tensor("sizes", "index", "batches"), saved.tensor("fingerprints", "index", "examples")
    notes, positional = saved.texts("notes"), saved.whole("positional", 1)
    prints: list[tuple[int, ...]] = []
    if not saved.unread:
        lengths = sizes.tolist()
        if any(length < 1 for length in lengths) or sum(lengths) != len(fingerprints):
            raise saved.wrong("sizes", f"{len(fingerprints)} in all")
        prints = [tuple(part.tolist()) for part in fingerprints.split(lengths)]
    data = NO_DATA if loader is None or saved.unread else loader
    found = SavedBatches(data, saved.device, progress, [], prints, True, positional, retarget)
    found.notes = notes  # what was told about the loader at the fit
    return found
