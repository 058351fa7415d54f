"""The linearized problem of a fit in a file: likelihood, data by their fingerprints, outputs, groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from whence.curvature import Groups
from whence.data.batches import Batch, Batches
from whence.data.targets import Positions
from whence.errors import InputError, LoaderError
from whence.io.files import Draft, Saved
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import IGNORED, Network, Selection, next_labels
from whence.jacobian.sketches import OutputSketch, SketchedBatches
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.runtime.memory import Budget
from whence.runtime.progress import Progress


def write_likelihood(draft: Draft, likelihood: Likelihood) -> None:
    """Write its name and options."""
    own = _own_class(likelihood)
    draft.note(name=likelihood.name, own=own)
    if not own:
        draft.note(**{name: getattr(likelihood, name) for name in _option_names(type(likelihood))})


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
        found = kind(**{name: saved.fields[name] for name in _option_names(kind)})
    except (InputError, KeyError, TypeError) as error:
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


def write_outputs(draft: Draft, problem: Linearization) -> None:
    """Write positions and random mixtures of outputs, where there are any."""
    draft.note(positions=problem.units is not None, mixtures=problem.sketch is not None)
    if problem.units is not None:
        draft.note(shape=list(problem.units.shape), width=problem.units.width)
        draft.put("weights", problem.units.weights)
    if problem.sketch is not None:
        assert isinstance(problem.batches, SketchedBatches)
        sketch = problem.sketch
        draft.note(
            columns=sketch.columns,
            width=sketch.width,
            dense=sketch.dense,
            counted=sketch.counted,
            seed=problem.batches.seed,
        )
        draft.put("largest", problem.batches.largest)


def read_outputs(saved: Saved, n: int, k: int) -> tuple[Positions | None, OutputSketch | None, int, Tensor | None]:
    """Positions and mixtures, if any, the seed of these, and which columns they hold as they are."""
    units = sketch = largest = None
    seed = 0
    if saved.flag("mixtures"):
        columns, seed = saved.whole("columns", 1), saved.whole("seed", 0, 2**63)
        if columns + 1 != k:
            raise saved.wrong("columns", f"one less than {k}")
        sketch = OutputSketch(columns, saved.whole("width", 1), saved.flag("dense"), saved.whole("counted"))
        largest = saved.tensor("largest", (n, columns // 2), torch.int64, torch.int64)
        if not saved.target.empty and bool((largest < 0).any()):
            raise saved.wrong("largest", "positions of outputs")
    elif saved.flag("positions"):
        shape, width = tuple(saved.wholes("shape", 1)), saved.whole("width", 1)
        positions = math.prod(shape)
        if not shape or positions * width != k:
            raise saved.wrong("shape", f"positions of {k} outputs")
        weights = saved.algebra("weights", n, positions) if saved.has("weights") else None
        units = Positions(shape, width, weights)
    return units, sketch, seed, largest


@dataclass
class MissingData(Batches):
    """No training data: what does not need them works."""

    def __post_init__(self) -> None:
        """There is no loader to check."""

    def read(self, label: str | None) -> Iterator[Batch]:
        """Raise, and say what to do."""
        raise LoaderError(
            "expected the training data for this question, got a fit that was loaded without them. "
            "Pass them: whence.load(path, model, train_loader=...)."
        )


@dataclass
class SameData(Batches):
    """Training data that must be those of the fit."""

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


def write_data(draft: Draft, batches: Batches | SketchedBatches) -> None:
    """Write fingerprints of all batches, by which the data are recognised; nothing of the data themselves."""
    plain = batches.plain if isinstance(batches, SketchedBatches) else batches
    draft.note(positional=plain.positional, notes=plain.notes, next_labels=plain.target_transform is not None)
    draft.put("sizes", torch.tensor([len(one) for one in batches.fingerprints], dtype=torch.int64, device="cpu"))
    fingerprints = [fingerprint for batch in batches.fingerprints for fingerprint in batch]
    draft.put("fingerprints", torch.tensor(fingerprints, dtype=torch.int64, device="cpu"))


def read_data(saved: Saved, loader: Iterable[Any] | None, progress: Progress, likelihood: Likelihood) -> Batches:
    """The batches of a loader, or none."""
    retarget = None
    if saved.flag("next_labels"):  # the model predicts the next token
        ignored = getattr(likelihood, "ignore_index", IGNORED)
        retarget = partial(next_labels, ignore_index=ignored)
    sizes = saved.tensor("sizes", saved.sizes("sizes", 1), torch.int64, torch.int64)
    fingerprints = saved.tensor("fingerprints", saved.sizes("fingerprints", 1), torch.int64, torch.int64)
    notes, positional = saved.texts("notes"), saved.whole("positional", 1)
    prints: list[tuple[int, ...]] = []
    if not saved.target.empty:
        lengths = sizes.tolist()
        if any(length < 1 for length in lengths) or sum(lengths) != len(fingerprints):
            raise saved.wrong("sizes", f"{len(fingerprints)} in all")
        prints = [tuple(part.tolist()) for part in fingerprints.split(lengths)]
    if loader is None or saved.target.empty:
        return MissingData((), saved.target.device, progress, notes, prints, True, positional, retarget)
    found = SameData(loader, saved.target.device, progress, [], prints, True, positional, retarget)
    found.notes = notes  # what was told about the loader at the fit
    return found


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
    """Write a problem."""
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
    """Read a problem."""
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
        batches = SketchedBatches(
            plain, network, likelihood, sketch.columns, seed, saved.target.algebra, largest, (residuals, roots)
        )
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
    """Write which examples belong together."""
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
