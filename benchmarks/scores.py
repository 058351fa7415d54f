"""How two rankings, or a ranking and a label, agree."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1, ties shared."""
    _, inverse, counts = torch.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts - 1) / 2)[inverse]


def spearman(first: Tensor, second: Tensor) -> float:
    """Rank correlation."""
    return float(torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1])


def auroc(scores: Tensor, positive: Tensor) -> float:
    """Chance that a positive's score exceeds a negative's."""
    hits = int(positive.sum())
    misses = len(positive) - hits
    return float((ranks(scores)[positive].sum() - hits * (hits + 1) / 2) / max(hits * misses, 1))


def median_scale(found: Tensor, wanted: Tensor) -> float:
    """Median of found / wanted."""
    return float((found / wanted).median())
