"""The leave-one-out error of ridge regression in closed form, over a grid of ridges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from whence.tangents.linearization import Linearization

from .base import RidgePath
from .eigen import eigenvectors
from .groups import members_of, pieces

POINTS = 49
DECADES = (-9.0, 3.0)
"""The grid spans these powers of ten of the largest eigenvalue."""


def ridge_grid(values: Tensor) -> Tensor:
    """Ridges from far below to far above the eigenvalues of the curvature."""
    top = max(float(values.max()), torch.finfo(values.dtype).tiny)
    return top * torch.logspace(*DECADES, POINTS, dtype=values.dtype, device=values.device)


Rotated = Callable[[Mapping[str, Tensor], Sequence[Tensor]], Iterator[tuple[slice, Tensor, Tensor]]]
"""From what a pass adds to and depends on to places, rows (n, k, r) and the linearized model's targets (n, k)."""


def path_from_eigenvectors(values: Tensor, chunks: Rotated, problem: Linearization) -> RidgePath:
    """Leave-one-out error from rows rotated into the eigenvectors of F.

    For each ridge: e_i = y_i - q_i b with b = (S + lambda)^-1 sum_i q_i^T y_i, H_ii = q_i (S + lambda)^-1 q_i^T and
    u_i = (I - H_ii)^-1 e_i, where i is an example, a position or an output of one, or a whole group.

    Args:
        values: (r,) eigenvalues of F.
        chunks: gives, each time it is called, all rotated rows and targets.
        problem: knows what is left out at once.
    """
    cross = torch.zeros_like(values)
    for _, rows, targets in chunks({"cross": cross}, ()):
        cross += torch.einsum("nkp,nk->p", rows, targets)
    ridges = ridge_grid(values)

    def add(sums: Tensor, rows: Tensor, targets: Tensor) -> None:
        for g, ridge in enumerate(ridges):
            weights = 1.0 / (values + ridge)
            hats = problem.folds.blocks((rows * weights) @ rows.transpose(1, 2))
            residuals = problem.folds.parts(targets - rows @ (cross * weights))
            eye = torch.eye(hats.shape[1], dtype=hats.dtype, device=hats.device)
            sums[g] += _squares(eye - hats, residuals)

    sums = torch.zeros_like(ridges)
    if problem.folds.groups is None:
        for _, rows, targets in chunks({"sums": sums}, [cross, ridges]):
            add(sums, rows, targets)
    else:
        for rows, targets in _whole_groups(problem.folds.groups, chunks, len(values), problem):
            add(sums, rows, targets)
    return RidgePath(ridges, sums / problem.n)


def _whole_groups(index: Tensor, chunks: Rotated, size: int, problem: Linearization) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows (g, members k, r) and targets (g, members k) of as many groups as memory allows, a pass for each."""
    for members in pieces(members_of(index), problem, size):
        place = torch.full((problem.n,), -1, device=problem.device)
        place[members.reshape(-1)] = torch.arange(members.numel(), device=problem.device)
        kept = problem.outputs.new_zeros(members.numel(), problem.k, size)
        aims = problem.outputs.new_zeros(members.numel(), problem.k)
        for where, rows, targets in chunks({"rows": kept, "targets": aims}, [members]):
            here = place[where] >= 0
            kept[place[where][here]] = rows[here].to(kept.dtype)
            aims[place[where][here]] = targets[here].to(aims.dtype)
        yield kept.reshape(len(members), -1, size), aims.reshape(len(members), -1)


def path_from_kernel(kernel: Tensor, targets: Tensor, problem: Linearization, facts: list[str]) -> RidgePath:
    """Leave-one-out error from the kernel matrix.

    u_i = C_ii^-1 (C y)_i with C = (K + lambda)^-1 and C_ii its diagonal blocks: of examples, of positions or outputs of
    them, or of whole groups.

    Args:
        kernel: (n k, n k).
        targets: (n, k) of the linearized model.
        problem: knows what is left out at once.
        facts: what was done out of the ordinary is added here.
    """
    values, vectors = (part.to(kernel.dtype) for part in eigenvectors(kernel, "the kernel", facts))
    n, k = targets.shape
    rows = vectors.reshape(n, k, -1)
    along = vectors.T @ targets.reshape(-1)
    ridges = ridge_grid(values)
    errors = torch.zeros_like(ridges)
    index, folds = problem.folds.groups, problem.folds
    whole = (
        [rows] if index is None else (rows[some].flatten(1, 2) for some in pieces(members_of(index), problem, n * k))
    )
    for part in whole:
        for g, ridge in enumerate(ridges):
            weights = 1.0 / (values + ridge)
            blocks = folds.blocks((part * weights) @ part.transpose(1, 2))
            errors[g] += _squares(blocks, folds.parts(part @ (along * weights))) / n
    return RidgePath(ridges, errors)


def _squares(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Sum of squares of the solutions, infinite where a leverage reaches one to machine precision."""
    solved: Tensor = torch.linalg.solve_ex(matrices, vectors.unsqueeze(-1)).result
    return solved.square().sum().nan_to_num(nan=torch.inf)
