"""The training data as batches that can be read again and again, in the same order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from whence.errors import InputError, LoaderError, ShapeError
from whence.progress import Progress

TARGET_KEYS = ("labels", "label", "targets", "target", "y")

Inputs = Any
"""What a model is called with: a tensor, a tuple of positional arguments, or a mapping of keyword arguments."""


@dataclass(frozen=True)
class Batch:
    """One batch of the loader; `start` is the index of its first example in the data set."""

    inputs: Inputs
    targets: Tensor
    start: int
    size: int

    @property
    def rows(self) -> slice:
        """Where these examples stand among all examples."""
        return slice(self.start, self.start + self.size)


@dataclass
class Batches:
    """Re-iterable batches of (inputs, targets), checked and moved to the model's device.

    Every pass must give the same examples in the same order, since leverages, residuals and shares are told by
    index; a pass that differs from the first raises `LoaderError`.
    """

    loader: Iterable[Any]
    device: torch.device
    progress: Progress
    notes: list[str] = field(default_factory=list)
    prints: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse a loader that can be read once only; read a shuffling DataLoader in order."""
        if iter(self.loader) is self.loader:
            raise LoaderError(
                f"expected a loader that can be read several times, got a one-shot {type(self.loader).__name__}. "
                "Pass a DataLoader or a list of batches instead of an iterator or generator."
            )
        self.loader = _in_order(self.loader, self.notes)

    def __iter__(self) -> Iterator[Batch]:
        """Read all batches once, without a progress bar."""
        return self.read(None)

    def read(self, label: str | None) -> Iterator[Batch]:
        """Read all batches once, showing progress under `label`."""
        first = not self.prints
        known: list[Tensor] = []
        start = 0
        for number, raw in enumerate(self._tracked(label)):
            where = f"batch {number}"
            inputs, targets = split(raw, where)
            inputs, targets = to_device(inputs, self.device), to_device(targets, self.device)
            size = batch_size(inputs, where)
            if not isinstance(targets, Tensor) or targets.ndim == 0 or len(targets) != size:
                got = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
                raise ShapeError(f"expected {size} targets for {size} inputs, got {got} in {where}.")
            check_finite(inputs, "inputs", where)
            check_finite(targets, "targets", where)
            mark = _fingerprint(inputs, targets)
            if not first:
                self._compare(number, mark)
            known.append(mark)
            yield Batch(inputs, targets, start, size)
            start += size
        if start == 0:
            raise InputError("expected a loader with at least one example, got an empty one. Check the data set.")
        if first:
            self.prints = known
        elif len(known) != len(self.prints):
            raise LoaderError(
                f"expected {len(self.prints)} batches as in the first pass, got {len(known)}. "
                "The loader must give the same examples in every pass."
            )

    def _tracked(self, label: str | None) -> Iterable[Any]:
        if label is None:
            return self.loader
        total = len(self.prints) or (len(self.loader) if isinstance(self.loader, Sized) else None)
        return self.progress.track(self.loader, f"{label}, batch", total)

    def _compare(self, number: int, mark: Tensor) -> None:
        if number < len(self.prints):
            before = self.prints[number]
            if before.shape == mark.shape and torch.equal(before, mark):
                return
        raise LoaderError(
            f"expected the same examples in every pass, got other data in batch {number} than in the first pass. "
            "Use shuffle=False and switch random augmentation off (a DataLoader with shuffle=True alone is put in "
            "order automatically)."
        )


def split(raw: Any, where: str) -> tuple[Inputs, Any]:
    """Cut a batch into inputs and targets.

    Examples:
        >>> split({"input_ids": [1], "labels": [0]}, "batch 0")
        ({'input_ids': [1]}, [0])
    """
    if isinstance(raw, Mapping):
        keys = [key for key in TARGET_KEYS if key in raw]
        if len(keys) != 1:
            raise InputError(
                f"expected exactly one of the keys {', '.join(TARGET_KEYS)} in {where}, got {sorted(map(str, raw))}."
            )
        return {key: value for key, value in raw.items() if key != keys[0]}, raw[keys[0]]
    if isinstance(raw, (tuple, list)) and len(raw) == 2:
        return raw[0], raw[1]
    got = f"{type(raw).__name__} of {len(raw)}" if isinstance(raw, (tuple, list)) else type(raw).__name__
    raise InputError(
        f"expected (inputs, targets) or a dict with labels in {where}, got {got}. "
        "Several inputs go into a tuple: ((a, b), targets)."
    )


def without_targets(raw: Any) -> Inputs:
    """The inputs of a batch to predict on, whether or not targets came with them."""
    if isinstance(raw, Mapping):
        return {key: value for key, value in raw.items() if key not in TARGET_KEYS}
    if isinstance(raw, (tuple, list)) and len(raw) == 2:
        return raw[0]
    return raw


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor inside `value`."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Every tensor inside the inputs."""
    return [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]


def batch_size(inputs: Inputs, where: str) -> int:
    """The number of examples: the first axis of every input tensor."""
    sizes = {len(leaf) if leaf.ndim else -1 for leaf in tensors_of(inputs)}
    if len(sizes) != 1 or -1 in sizes:
        shapes = [tuple(leaf.shape) for leaf in tensors_of(inputs)]
        raise ShapeError(f"expected input tensors with one common first axis (examples) in {where}, got {shapes}.")
    return sizes.pop()


def take(inputs: Inputs, rows: slice) -> Inputs:
    """The same inputs for fewer examples."""
    return tree_map(lambda leaf: leaf[rows] if isinstance(leaf, Tensor) else leaf, inputs)


def check_finite(value: Any, what: str, where: str) -> None:
    """Raise when a floating-point tensor holds NaN or infinity."""
    for leaf in tensors_of(value):
        if leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
            bad = (~torch.isfinite(leaf)).reshape(len(leaf), -1).any(1).nonzero()[0].item()
            raise InputError(
                f"expected finite {what}, got NaN or infinity in {where} (first at example {bad} of the batch). "
                "Remove or impute these examples."
            )


def _fingerprint(inputs: Inputs, targets: Tensor) -> Tensor:
    """Two numbers an example, (n, 2): enough to notice shuffling and random augmentation."""
    leaves = tensors_of(inputs)
    seen = sum((leaf.reshape(len(leaf), -1).double().mean(1) for leaf in leaves), torch.zeros(()))
    return torch.stack([torch.as_tensor(seen).cpu(), targets.reshape(len(targets), -1).double().mean(1).cpu()], 1)


def _in_order(loader: Iterable[Any], notes: list[str]) -> Iterable[Any]:
    if not isinstance(loader, DataLoader):
        return loader
    sampler: Any = loader.sampler
    size = len(loader.dataset) if isinstance(loader.dataset, Sized) else -1
    plain = type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == size
    if plain and loader.batch_size is not None:
        notes.append("the loader shuffles; it was read in the order of its data set, which indices refer to")
        return DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            shuffle=False,
            num_workers=loader.num_workers,
            collate_fn=loader.collate_fn,
            pin_memory=loader.pin_memory,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            persistent_workers=loader.persistent_workers,
        )
    if loader.drop_last and isinstance(loader.sampler, SequentialSampler):
        left = size % (loader.batch_size or 1)
        if left:
            notes.append(f"the loader drops its last, incomplete batch: {left} training examples were not seen")
    return loader
