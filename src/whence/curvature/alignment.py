"""Variances from alignments: the estimators as sums over training examples."""

from __future__ import annotations

import torch
from torch import Tensor

from .base import Meats


def covariances_from_alignments(alignments: Tensor, meats: Meats) -> tuple[dict[str, Tensor], Tensor]:
    """sum_i a_i W_i W_i^T a_i^T for every estimator, or the same over groups, and sum_i a_i u_i.

    Args:
        alignments: a (m, k, n, k) with a_i = J F_lam^-1 J_i^T.
        meats: weights of the training examples.

    Returns:
        Covariances (m, k, k) by name, and the shift (m, k) of the full jackknife.
    """
    covariances = {}
    for name, root in meats.roots.items():
        weighted = torch.einsum("mkni,niq->mknq", alignments, root.expand(alignments.shape[2], -1, -1))
        groups = meats.pooled(name)
        if groups is not None:
            m, k, _, q = weighted.shape
            weighted = weighted.new_zeros(m, k, groups.total, q).index_add_(2, groups.index, weighted)
        flat = weighted.flatten(2)
        covariances[name] = flat @ flat.transpose(1, 2)
    return covariances, torch.einsum("mkni,ni->mk", alignments, meats.total)
