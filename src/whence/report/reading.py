"""Reading what a report is about: test inputs with or without targets, and the training data, in a fixed order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

from whence.errors import InputError, ShapeError
from whence.tangents.batches import TARGET_KEYS, Inputs, batch_size, take, without_targets
from whence.tangents.loaders import in_order

SLICE = 512
"""Rows of one large batch that are taken at once."""


@dataclass(frozen=True)
class Source:
    """Examples that can be read several times.

    Attributes:
        batches: a list or loader of batches.
        positional: how many positional inputs the model takes.
        notes: what was done to read them.
    """

    batches: Iterable[Any]
    positional: int
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, given: Any, positional: int, name: str) -> Source:
        """From a batch, a pair of inputs and targets, or a loader."""
        notes: list[str] = []
        if isinstance(given, (Tensor, Mapping, tuple)):
            return cls([given], positional, notes)
        if isinstance(given, Iterator):
            return cls(list(given), positional, notes)  # it can be read once only
        if isinstance(given, Iterable) and not isinstance(given, (str, bytes, numpy.ndarray, Dataset)):
            return cls(in_order(given, notes), positional, notes)
        raise InputError(
            f"expected {name} to be a batch (a tensor, a pair of inputs and targets, a dict) or a loader, got "
            f"{type(given).__name__}. Convert arrays with torch.as_tensor, and wrap a data set in a DataLoader."
        )

    def read(self) -> Iterator[tuple[int, Inputs, Tensor | None]]:
        """Yield (number of the first example, inputs, targets if there are any), a few hundred examples at once."""
        start = 0
        for number, raw in enumerate(self.batches):
            inputs, targets = without_targets(raw, self.positional), targets_in(raw, self.positional)
            size = batch_size(inputs, f"batch {number}")
            if targets is not None and len(targets) != size:
                raise ShapeError(f"expected {size} targets for {size} inputs in batch {number}, got {len(targets)}.")
            for low in range(0, size, SLICE):
                rows = slice(low, min(low + SLICE, size))
                yield start + low, take(inputs, rows), None if targets is None else targets[rows]
            start += size

    def pick(self, wanted: Sequence[int]) -> Iterator[Inputs]:
        """The inputs of some examples, in the order of the data."""
        chosen = torch.tensor(sorted(wanted), dtype=torch.long, device="cpu")
        for start, inputs, _ in self.read():
            size = batch_size(inputs, "this batch")
            here = chosen[(chosen >= start) & (chosen < start + size)] - start
            if len(here):
                yield rows_of(inputs, here)


def rows_of(inputs: Inputs, rows: Tensor) -> Inputs:
    """The same inputs for some examples."""
    return tree_map(lambda leaf: leaf[rows.to(leaf.device)] if isinstance(leaf, Tensor) else leaf, inputs)


def targets_in(raw: Any, positional: int) -> Tensor | None:
    """The targets of a batch, where it has any; the counterpart of `without_targets`.

    Examples:
        >>> targets_in((torch.zeros(2, 3), torch.ones(2)), 1)
        tensor([1., 1.])
        >>> targets_in(torch.zeros(2, 3), 1) is None
        True
    """
    found: Any = None
    if isinstance(raw, Mapping):
        found = next((raw[key] for key in TARGET_KEYS if key in raw), None)
    elif isinstance(raw, (tuple, list)):
        nested = any(isinstance(item, (tuple, list, Mapping)) for item in raw)
        weighted = len(raw) == 3 and positional != 3
        if (len(raw) == 2 or weighted) and (nested or positional == 1):
            found = raw[1]
    return found.detach() if isinstance(found, Tensor) and found.ndim else None
