"""Training data of a fit that was saved: given again and recognised, or not given."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from whence.errors import LoaderError
from whence.likelihoods import Likelihood
from whence.progress import Progress
from whence.tangents.batches import Batch, Batches
from whence.tangents.language import IGNORED, next_labels
from whence.tangents.sketches import SketchedBatches

from .record import Draft, Saved


@dataclass
class Absent(Batches):
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
class Recalled(Batches):
    """Training data that must be those of the fit."""

    def _remember(self, number: int, found: tuple[int, ...]) -> None:
        try:
            super()._remember(number, found)
        except LoaderError:
            raise _others(f"other data in batch {number}") from None

    def _finish(self, count: int, examples: int) -> None:
        if count < len(self.prints):
            raise _others(f"{count} batches instead of {len(self.prints)}")
        super()._finish(count, examples)


def _others(got: str) -> LoaderError:
    return LoaderError(
        f"expected the training data of the saved fit, in the same order and batches, got {got}. Pass a loader with "
        "the same examples and the same batch_size, not shuffled."
    )


def write_data(draft: Draft, batches: Batches | SketchedBatches) -> None:
    """Write marks of all batches down, by which the data are recognised; nothing of the data themselves."""
    plain = batches.plain if isinstance(batches, SketchedBatches) else batches
    draft.note(positional=plain.positional, notes=plain.notes, next_labels=plain.retarget is not None)
    draft.put("sizes", torch.tensor([len(one) for one in batches.prints], dtype=torch.int64, device="cpu"))
    draft.put("marks", torch.tensor([mark for one in batches.prints for mark in one], dtype=torch.int64, device="cpu"))


def read_data(saved: Saved, loader: Iterable[Any] | None, progress: Progress, likelihood: Likelihood) -> Batches:
    """The batches of a loader, or none."""
    retarget = None
    if saved.flag("next_labels"):  # the model predicts the next token
        ignored = getattr(likelihood, "ignore_index", IGNORED)
        retarget = partial(next_labels, ignore_index=ignored)
    sizes = saved.tensor("sizes", saved.sizes("sizes", 1), torch.int64, torch.int64)
    marks = saved.tensor("marks", saved.sizes("marks", 1), torch.int64, torch.int64)
    notes, positional = saved.texts("notes"), saved.whole("positional", 1)
    prints: list[tuple[int, ...]] = []
    if not saved.target.empty:
        lengths = sizes.tolist()
        if any(length < 1 for length in lengths) or sum(lengths) != len(marks):
            raise saved.wrong("sizes", f"{len(marks)} in all")
        prints = [tuple(part.tolist()) for part in marks.split(lengths)]
    if loader is None or saved.target.empty:
        return Absent((), saved.target.device, progress, notes, prints, True, positional, retarget)
    found = Recalled(loader, saved.target.device, progress, [], prints, True, positional, retarget)
    found.notes = notes  # what was told about the loader at the fit
    return found
