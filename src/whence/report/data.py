"""What a report is made from: a fit, test inputs with or without targets, and the training data, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from whence.data.batches import TARGET_KEYS, Inputs, batch_size, in_order, take, without_targets
from whence.errors import InputError, ShapeError

CHUNK = 512
"""Rows of one large batch that are read together."""


@dataclass(frozen=True)
class DataSource:
    """Batches of examples that can be read several times, for a model with so many positional inputs."""

    batches: Iterable[Any]
    positional: int

    @classmethod
    def of(cls, data: Any, positional: int, argument: str) -> DataSource:
        """From a batch, a pair of inputs and targets, or a loader, which was passed as `argument`."""
        if isinstance(data, (Tensor, Mapping, tuple)):
            return cls([data], positional)
        if isinstance(data, Iterator):
            return cls(list(data), positional)  # it can be read once only
        if isinstance(data, Iterable) and not isinstance(data, (str, bytes, numpy.ndarray, Dataset)):
            return cls(in_order(data, []), positional)
        raise InputError(
            f"expected {argument} to be a batch (a tensor, a pair of inputs and targets, a dict) or a loader, got "
            f"{type(data).__name__}. Convert arrays with torch.as_tensor, and wrap a data set in a DataLoader."
        )

    def read(self) -> Iterator[tuple[int, Inputs, Tensor | None]]:
        """Yield (number of the first example, inputs, targets if there are any), a few hundred examples at a time."""
        start = 0
        for number, batch in enumerate(self.batches):
            inputs, targets = without_targets(batch, self.positional), targets_in(batch, self.positional)
            size = batch_size(inputs, f"batch {number}")
            if targets is not None and len(targets) != size:
                raise ShapeError(f"expected {size} targets for {size} inputs in batch {number}, got {len(targets)}.")
            for low in range(0, size, CHUNK):
                rows = slice(low, min(low + CHUNK, size))
                yield start + low, take(inputs, rows), None if targets is None else targets[rows]
            start += size

    def select(self, examples: Sequence[int]) -> DataSource:
        """The inputs of some examples, in the order of the data."""
        wanted = torch.tensor(sorted(examples), dtype=torch.long, device="cpu")
        batches = []
        for start, inputs, _ in self.read():
            end = start + batch_size(inputs, "this batch")
            rows = wanted[(wanted >= start) & (wanted < end)] - start
            if len(rows):
                batches.append(tree_map(lambda x, at=rows: x[at.to(x.device)] if isinstance(x, Tensor) else x, inputs))
        return DataSource(batches, self.positional)


def targets_in(batch: Any, positional: int) -> Tensor | None:
    """The targets of a batch, where it has any; the counterpart of `without_targets`.

    Examples:
        >>> targets_in((torch.zeros(2, 3), torch.ones(2)), 1)
        tensor([1., 1.])
        >>> targets_in(torch.zeros(2, 3), 1) is None
        True
    """
    targets: Any = None
    if isinstance(batch, Mapping):
        targets = next((batch[key] for key in TARGET_KEYS if key in batch), None)
    elif isinstance(batch, (tuple, list)):
        nested = any(isinstance(part, (tuple, list, Mapping)) for part in batch)
        weighted = len(batch) == 3 and positional != 3
        if (len(batch) == 2 or weighted) and (nested or positional == 1):
            targets = batch[1]
    return targets.detach() if isinstance(targets, Tensor) and targets.ndim else None


def training_targets(source: DataSource, n: int) -> Tensor:
    """The targets of all n training examples."""
    targets = [found for _, _, found in source.read() if found is not None]
    if not targets:
        raise InputError(
            "expected training data with targets in `train`, got none. Pass (inputs, targets), or leave it out: the "
            "report reads the data that the fit was made with."
        )
    joined = torch.cat([part.cpu() for part in targets])
    if len(joined) != n:
        raise ShapeError(f"expected the {n} training examples of the fit in `train`, got {len(joined)}.")
    return joined
