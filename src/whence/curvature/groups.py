"""Training examples that belong together: documents, patients, sequences, left out as a whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.tangents.linearization import Linearization


@dataclass(frozen=True)
class Groups:
    """Which training examples belong together.

    Attributes:
        index: (n,) number of each example's group, counted from zero.
        total: number of groups.
        counted: number of groups with an example of weight above zero.
    """

    index: Tensor
    total: int
    counted: int

    @classmethod
    def of(cls, labels: Any, problem: Linearization) -> Groups:
        """From n labels of any kind that can be sorted: numbers or words."""
        given = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else labels
        try:
            array = numpy.asarray(given)
            names, index = numpy.unique(array, return_inverse=True)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"expected groups as labels of one kind, numbers or words, got a {type(labels).__name__} that cannot "
                "be sorted. Number the groups, or make all labels strings."
            ) from error
        if array.shape != (problem.n,):
            raise ShapeError(
                f"expected groups of shape ({problem.n},), one label for each training example in the order of the "
                f"data set, got {array.shape}."
            )
        if array.dtype.kind == "f" and not numpy.isfinite(array).all():
            at = int(numpy.flatnonzero(~numpy.isfinite(array))[0])
            raise InputError(
                f"expected groups without missing labels, got {array[at]} for training example {at}. Give examples "
                "that stand alone a label of their own."
            )
        number = torch.as_tensor(index.reshape(-1), device=problem.device)
        weights = problem.sample_weights
        counted = len(names) if weights is None else len(number[weights > 0].unique())
        if counted < 2:
            raise InputError(
                f"expected at least two groups with examples that count, got {counted}. A label is for each group, "
                "not for the whole data set."
            )
        return cls(number, len(names), counted)

    def members(self) -> Iterator[Tensor]:
        """Positions of the members, (groups, size) for all groups of one size after the other."""
        return members_of(self.index)


def members_of(index: Tensor) -> Iterator[Tensor]:
    """The same for numbers (n,) of groups, each of which has an example."""
    order = torch.argsort(index, stable=True)
    sizes = torch.bincount(index)
    starts = sizes.cumsum(0) - sizes
    for size in sizes.unique().tolist():
        first = starts[sizes == size]
        yield order[first.unsqueeze(1) + torch.arange(size, device=order.device)]


def pieces(every: Iterator[Tensor], problem: Linearization, numbers_each: float) -> Iterator[Tensor]:
    """Members (groups, size) of so many groups at once as memory allows.

    Args:
        every: members of all groups, those of one size together.
        problem: whose memory budget counts.
        numbers_each: numbers held for each output of a member, beside the square of the group's own.
    """
    item = problem.outputs.element_size()
    for members in every:
        wide = members.shape[1] * problem.k
        need = item * wide * (numbers_each + 6.0 * wide)
        problem.budget.require(
            need, f"a group of {members.shape[1]} examples", "Make smaller groups, or select fewer parameters."
        )
        yield from members.split(max(1, int(0.1 * problem.budget.limit / need)))
