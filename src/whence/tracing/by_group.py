"""Shares of training examples summed over groups of them: which class, source or batch carries the doubt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.errors import InputError, ShapeError
from whence.ordering import largest, largest_first

from .tables import frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class GroupShares:
    """What groups of training examples carry of the variance of each prediction.

    Attributes:
        names: (g) groups, sorted where they can be.
        share: (m, g) share of the variance that each group's examples carry together; rows sum to one.
        count: (g,) how many training examples each group has.

    Examples:
        >>> found = GroupShares(("Ann", "Ben"), torch.tensor([[0.75, 0.25]]), torch.tensor([10, 30]))
        >>> found.largest, found.lift.round(decimals=2).tolist()
        (('Ann',), [[3.0, 0.33...]])
    """

    names: tuple[Any, ...]
    share: Tensor
    count: Tensor

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.share)

    @property
    def lift(self) -> Tensor:
        """(m, g) share over the group's part of the training set: above one, it carries more than its number."""
        return self.share * (self.count.sum() / self.count)

    @property
    def largest(self) -> tuple[Any, ...]:
        """The group with the largest share, for each prediction."""
        return tuple(self.names[at] for at in largest(self.share, 1)[1].squeeze(1).tolist())

    def to_frame(self) -> pandas.DataFrame:
        """One row a prediction, one column a group."""
        return frame({str(name): [self.share[:, at]] for at, name in enumerate(self.names)})

    def __repr__(self) -> str:
        """Means over predictions, largest first."""
        means = self.share.mean(0)
        order = largest_first(means).tolist()[:5]
        listed = ", ".join(f"{self.names[at]}: {float(means[at]):.0%}" for at in order)
        more = ", ..." if len(self.names) > 5 else ""
        return f"GroupShares({len(self)} predictions, {len(self.names)} groups; mean shares {listed}{more})"


def by_group(shares: Tensor | None, groups: Sequence[Any] | Tensor) -> GroupShares:
    """Sum shares over groups.

    Args:
        shares: (m, n) shares of all training examples.
        groups: n names, in the order of the training set.

    Examples:
        >>> found = by_group(torch.tensor([[0.5, 0.2, 0.3]]), ["cat", "dog", "cat"])
        >>> found.names, found.share.tolist()
        (('cat', 'dog'), [[0.800..., 0.200...]])
    """
    if shares is None:
        raise InputError(
            "expected the shares of all training examples to sum over groups, got the largest ones only. "
            "Ask for them: tracer.attribute(x, matrix=True)."
        )
    listed = _listed(groups)
    if len(listed) != shares.shape[1]:
        raise ShapeError(
            f"expected a group for each of the {shares.shape[1]} training examples, in their order, got {len(listed)}."
        )
    names = _sorted(dict.fromkeys(listed))
    place = {name: at for at, name in enumerate(names)}
    index = torch.tensor([place[name] for name in listed], device=shares.device)
    summed = shares.new_zeros(len(shares), len(names)).index_add_(1, index, shares)
    return GroupShares(tuple(names), summed, torch.bincount(index, minlength=len(names)))


def _listed(groups: Sequence[Any] | Tensor) -> list[Any]:
    if hasattr(groups, "tolist"):  # tensors, arrays, columns of tables
        found = groups.tolist()
        if not isinstance(found, list) or any(isinstance(one, list) for one in found):
            raise ShapeError("expected groups in one dimension, one for each training example.")
        return found
    return list(groups)


def _sorted(names: dict[Any, None]) -> list[Any]:
    try:
        return sorted(names)
    except TypeError:  # names of several kinds have no order: as they came
        return list(names)
