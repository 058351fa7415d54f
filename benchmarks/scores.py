"""How two rankings, or a ranking and a label, agree."""

from __future__ import annotations

from torch import Tensor

from whence_paper.scores import auroc, ranks, spearman

__all__ = ["auroc", "median_scale", "ranks", "spearman"]


def median_scale(found: Tensor, wanted: Tensor) -> float:
    """Median of found / wanted."""
    return float((found / wanted).median())
