"""The leave-one-out error of ridge regression in closed form, over a grid of ridges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from .base import RidgePath
from .eigen import eigenvectors

POINTS = 49
DECADES = (-9.0, 3.0)
"""The grid spans these powers of ten of the largest eigenvalue."""


def ridge_grid(values: Tensor) -> Tensor:
    """Ridges from far below to far above the eigenvalues of the curvature."""
    top = max(float(values.max()), torch.finfo(values.dtype).tiny)
    return top * torch.logspace(*DECADES, POINTS, dtype=values.dtype, device=values.device)


Rotated = Callable[[Mapping[str, Tensor], Sequence[Tensor]], Iterator[tuple[Tensor, Tensor]]]
"""From what a pass adds to and depends on to its rotated rows (n, k, r) and targets of the linearized model (n, k)."""


def path_from_eigenvectors(values: Tensor, chunks: Rotated) -> RidgePath:
    """Leave-one-out error from rows rotated into the eigenvectors of F.

    For each ridge: e_i = y_i - q_i b with b = (S + lambda)^-1 sum_i q_i^T y_i, H_ii = q_i (S + lambda)^-1 q_i^T and
    u_i = (I - H_ii)^-1 e_i.

    Args:
        values: (r,) eigenvalues of F.
        chunks: gives, each time it is called, all rotated rows and targets.
    """
    cross = torch.zeros_like(values)
    for rows, targets in chunks({"cross": cross}, ()):
        cross += torch.einsum("nkp,nk->p", rows, targets)
    ridges = ridge_grid(values)
    sums, count = torch.zeros_like(ridges), torch.zeros(1, dtype=torch.float64, device=values.device)
    for rows, targets in chunks({"sums": sums, "count": count}, [cross, ridges]):
        count += len(rows)
        eye = torch.eye(rows.shape[1], dtype=rows.dtype, device=rows.device)
        for g, ridge in enumerate(ridges):
            weights = 1.0 / (values + ridge)
            hats = (rows * weights) @ rows.transpose(1, 2)
            residuals = targets - rows @ (cross * weights)
            sums[g] += _squares(eye - hats, residuals)
    return RidgePath(ridges, sums / count.to(sums.dtype))


def path_from_kernel(kernel: Tensor, targets: Tensor, facts: list[str]) -> RidgePath:
    """Leave-one-out error from the kernel matrix.

    u_i = C_ii^-1 (C y)_i with C = (K + lambda)^-1 and C_ii its k x k diagonal blocks.

    Args:
        kernel: (n k, n k).
        targets: (n, k) of the linearized model.
        facts: what was done out of the ordinary is added here.
    """
    values, vectors = (part.to(kernel.dtype) for part in eigenvectors(kernel, "the kernel", facts))
    n, k = targets.shape
    rows = vectors.reshape(n, k, -1)
    along = vectors.T @ targets.reshape(-1)
    ridges = ridge_grid(values)
    errors = torch.empty_like(ridges)
    for g, ridge in enumerate(ridges):
        weights = 1.0 / (values + ridge)
        blocks = (rows * weights) @ rows.transpose(1, 2)
        inner = rows @ (along * weights)
        errors[g] = _squares(blocks, inner) / n
    return RidgePath(ridges, errors)


def _squares(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Sum of squares of the solutions, infinite where a leverage reaches one to machine precision."""
    solved: Tensor = torch.linalg.solve_ex(matrices, vectors.unsqueeze(-1)).result
    return solved.square().sum().nan_to_num(nan=torch.inf)
