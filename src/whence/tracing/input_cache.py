"""The inputs of predictions, so that what is computed later is about them and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from whence.errors import InputError, LoaderError
from whence.memory import Budget
from whence.tangents.batches import Inputs, tensors_of
from whence.tangents.marks import mark

MOST = 256 * 2**20
"""Inputs of one call are kept up to so many bytes, and up to a share of the memory that a fit may take."""

SHARE = 0.05

Fingerprint = tuple[tuple[tuple[int, ...], torch.dtype, int], ...]
"""Shape, dtype and bits of every tensor of a batch."""


class InputCache:
    """Copies of the inputs of one call, as long as they are small; of more, a fingerprint of each batch.

    Args:
        x: what the user asked about.
        budget: of the fit, of whose memory a share may be taken.
    """

    def __init__(self, x: Any, budget: Budget) -> None:
        self.x = x
        self._room = min(MOST, int(SHARE * budget.limit))
        self._kept: list[Inputs] | None = []
        self._prints: list[Fingerprint] = []

    @property
    def readable(self) -> bool:
        """Whether the inputs can be had again: from the copies, or by reading anew what is no iterator."""
        return self._kept is not None or not isinstance(self.x, Iterator)

    def add(self, inputs: Inputs) -> None:
        """Take down one batch, without targets."""
        if self._kept is not None:
            self._room -= sum(leaf.numel() * leaf.element_size() for leaf in tensors_of(inputs))
            if self._room >= 0:
                self._kept.append(tree_map(_copied, inputs))
                return
            self._prints, self._kept = [fingerprint(one) for one in self._kept], None
        self._prints.append(fingerprint(inputs))

    def read(self, batches: Callable[[Any], Iterator[Inputs]]) -> Iterator[Inputs]:
        """The same batches again; an error where what the user gave is no longer what it was.

        Args:
            batches: reads batches, without targets, from what a user asks about.
        """
        if self._kept is not None:
            yield from self._kept
            return
        count = 0
        for inputs in batches(self.x):
            if count == len(self._prints) or fingerprint(inputs) != self._prints[count]:
                raise self._changed(f"other inputs in batch {count}")
            count += 1
            yield inputs
        if count < len(self._prints):
            raise self._changed(f"{count} batches for {len(self._prints)}")

    def _changed(self, got: str) -> InputError | LoaderError:
        at_once = "Ask for covariances at once, with predict(x, covariance=True)"
        if isinstance(self.x, Tensor | Mapping | tuple | list):
            return InputError(
                f"expected the inputs that were predicted, to compute their covariances, got {got}: they were changed "
                f"since. {at_once}, or predict again."
            )
        return LoaderError(
            f"expected the inputs that were predicted, to compute their covariances, got {got}: this loader gives "
            f"others each time. {at_once}, or use shuffle=False and no random augmentation."
        )


def fingerprint(inputs: Inputs) -> Fingerprint:
    """What changes when any tensor of the inputs does.

    Examples:
        >>> one = torch.tensor([1.0, 2.0])
        >>> fingerprint(one) == fingerprint(one.clone()), fingerprint(one) == fingerprint(one.flip(0))
        (True, False)
    """
    return tuple((tuple(leaf.shape), leaf.dtype, mark(leaf)) for leaf in tensors_of(inputs))


def _copied(leaf: Any) -> Any:
    """A copy in the memory of the CPU, which devices have less of."""
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf
