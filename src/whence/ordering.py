"""Orders of scores in which no NaN comes before a number: torch's own sorts take NaN for the largest of all."""

from __future__ import annotations

import torch
from torch import Tensor


def largest_first(scores: Tensor, ties: Tensor | None = None) -> Tensor:
    """Places of the scores (n,) from the largest to the smallest, NaN last; equal ones in the order they come in.

    Args:
        scores: what to sort by.
        ties: (n,) what orders equal scores, the largest first.

    Examples:
        >>> largest_first(torch.tensor([0.5, float("nan"), 2.0, 1.0])).tolist()
        [2, 3, 0, 1]
    """
    if ties is None:
        return (-scores).argsort(stable=True)
    first = (-ties).argsort(stable=True)
    return first[(-scores[first]).argsort(stable=True)]


def largest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row (m, n) and their places, (m, count) each; NaN only where there is nothing else.

    Examples:
        >>> largest(torch.tensor([[0.5, float("nan"), 2.0]]), 2)[1].tolist()
        [[2, 0]]
    """
    found = scores.topk(count, dim=-1)
    if not bool(found.values[..., :1].isnan().any()):  # a NaN would lead
        return found.values, found.indices
    index = scores.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).topk(count, dim=-1).indices
    return scores.gather(-1, index), index
