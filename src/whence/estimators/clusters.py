"""Leave whole groups of training examples out, in closed form: cluster-robust residuals."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from whence.tangents.losses import block_diagonal

from .leave_one_out import LeftOut, Policy, leave_one_out


def leave_groups_out(
    residuals: Tensor, alone: LeftOut, roots: Tensor | None, policy: Policy, blocks: Iterable[tuple[Tensor, Tensor]]
) -> LeftOut:
    """u_g = (I - L_g Q_gg)^-1 r_g for each group g, with Q_gg = J_g F_lam^-1 J_g^T over all its members together.

    The heteroscedastic estimators then sum over groups: HeC0 is White's cluster-robust sandwich, HeC3 the jackknife
    over groups (CR3), HeC2 the one in between (CR2).

    Args:
        residuals: r (n, k).
        alone: the same with examples left out one by one, for its leverages.
        roots: R (n, k, q) with L = R R^T, or `None` for the identity.
        policy: what to do with the leverages.
        blocks: gives (members (groups, size), Q_gg (groups, size k, size k)).
    """
    hec2, hec3 = torch.empty_like(residuals), torch.empty_like(residuals)
    guarded = 0
    for members, hats in blocks:
        flat = residuals[members].flatten(1)
        joint = None if roots is None else block_diagonal(roots[members])
        found = leave_one_out(flat, hats.to(flat.dtype), joint, policy, by_output=False)
        hec2[members] = found.hec2.reshape(*members.shape, -1)
        hec3[members] = found.hec3.reshape(*members.shape, -1)
        guarded += found.guarded
    return LeftOut(hec2, hec3, alone.leverage, guarded)
