"""Predictions in order of their uncertainty."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.ordering import largest_first
from whence.results import Uncertainty

SCORES = {"ho": "Ho", "hec3": "HeC3", "ratio": "HeC3/Ho"}


def score(uncertainty: Uncertainty, by: str) -> Tensor:
    """(m,) the ratio, or the total variance of an estimator: the sum over outputs."""
    return uncertainty.ratio if by == "ratio" else uncertainty.variance(by).sum(1)


def ranks(values: Tensor) -> Tensor:
    """Place of each value among all, from 0 for the smallest, or NaN, to 1 for the largest; equal ones as they come.

    Examples:
        >>> import torch
        >>> ranks(torch.tensor([5.0, 1.0, 3.0]))
        tensor([1.0000, 0.0000, 0.5000])
    """
    known = torch.where(values.isnan(), -torch.inf, values)
    return known.argsort(stable=True).argsort() / max(len(values) - 1, 1)


def top(values: Tensor, count: int) -> list[int]:
    """Places of the largest values, the largest first; equal ones keep their order, NaN comes last.

    Examples:
        >>> import torch
        >>> top(torch.tensor([1.0, 3.0, 2.0]), 2)
        [1, 2]
    """
    return [int(place) for place in largest_first(values)[:count]]
