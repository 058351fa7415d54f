"""How two rankings, or a ranking and a label, agree."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1, ties shared.

    Examples:
        >>> ranks(torch.tensor([0.3, 0.1, 0.3]))
        tensor([2.5000, 1.0000, 2.5000], dtype=torch.float64)
    """
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    middle: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return middle[inverse]


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation."""
    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1])


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Area under the ROC curve: the chance that a positive's score exceeds a negative's.

    Examples:
        >>> auroc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
        0.75
    """
    hits = int(positive.sum())
    misses = len(positive) - hits
    return float((ranks(scores)[positive].sum() - hits * (hits + 1) / 2) / max(hits * misses, 1))
