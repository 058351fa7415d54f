"""The exact algebra on the kernel of the training set: n k x n k, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.accumulate import Features, TrainingRows, groups_within_memory
from whence.curvature.base import (
    AlignedCurvature,
    Groups,
    MeatRoots,
    NewtonStep,
    RidgePath,
    singular,
    times_hessian,
    trace_of_hat,
)
from whence.curvature.primal import path_from_kernel
from whence.data.batches import Inputs
from whence.jacobian.linearization import Linearization

LEAST_ROUNDING = 32  # additions, at least, whose rounding error hides a pivot; as many as there are pivots if more


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedDual(AlignedCurvature):
    """K = J J^T over all training examples; J F_lam^-1 J^T = K (lambda + L K)^-1 with L the output Hessians.

    For squared error L is the identity and the factored matrix is K + lambda; else it is lambda + R^T K R with
    L = R R^T.
    """

    features: Features  # rows of the Jacobian
    rows: TrainingRows  # those of the training examples
    kernel: Tensor  # (n k, n k) K
    inner_weights: Tensor  # (n, k) J w
    factor: Tensor  # the Cholesky factor

    @classmethod
    def fit(cls, problem: Linearization, features: Features, ridge: float | None) -> FittedDual:
        """Assemble the kernel, factor it, and read the leverages off it."""
        rows = TrainingRows(problem, features)
        rows.bring_together()  # every pair of examples is needed
        (kernel, inner_weights), path = rows.kernel(), None
        if ridge is None:
            path = path_from_kernel(kernel, problem.residuals + inner_weights, problem, features.notes)
            ridge = path.best
        return cls.of(rows, kernel, inner_weights, ridge, path)

    @classmethod
    def of(
        cls, rows: TrainingRows, kernel: Tensor, inner_weights: Tensor, ridge: float, path: RidgePath | None = None
    ) -> FittedDual:
        """Factor a kernel for a ridge above zero."""
        problem = rows.problem
        factor = factor_kernel(kernel, problem.hessian_roots, ridge)
        projected = project(kernel, kernel, factor, problem.hessian_roots, ridge)  # K (lambda + L K)^-1
        blocks = projected.reshape(problem.n, problem.k, problem.n, problem.k)
        leverage_blocks = torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1).contiguous()
        return cls(
            problem=problem,
            ridge=ridge,
            leverage_blocks=leverage_blocks,
            degrees_of_freedom=trace_of_hat(leverage_blocks, problem.hessian_roots),
            notes=rows.features.notes,
            path=path,
            features=rows.features,
            rows=rows,
            kernel=kernel,
            inner_weights=inner_weights,
            factor=factor,
        )

    def project(self, cross: Tensor) -> Tensor:
        """X (lambda + L K)^-1 for rows X (a, n k)."""
        return project(cross, self.kernel, self.factor, self.problem.hessian_roots, self.ridge)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = J^T alpha - w with alpha = (lambda + L K)^-1 (r + L J w)."""
        problem = self.problem
        pseudo = problem.residuals + times_hessian(self.inner_weights, problem.hessian_roots)
        alpha = self._solve_left(pseudo.reshape(-1))
        change = (self.kernel @ alpha).reshape(problem.n, problem.k) - self.inner_weights
        weights = self.features.weights()
        squared = alpha @ self.kernel @ alpha - 2 * alpha @ self.inner_weights.reshape(-1) + weights @ weights
        size = float(squared.clamp_min(0.0).sqrt() / weights.norm().clamp_min(torch.finfo(weights.dtype).tiny))
        direction = None
        if with_direction:
            direction = -weights
            for where, rows in self.rows.read("Newton step"):
                part = alpha.reshape(problem.n, problem.k)[where]
                direction = direction + torch.einsum("nkp,nk->p", rows, part)
        return NewtonStep(change, size, direction)

    def group_leverage_blocks(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of K (lambda + L K)^-1."""
        problem, outputs = self.problem, torch.arange(self.problem.k, device=self.problem.device)
        for members in groups_within_memory(groups.index, problem, 3.0 * problem.n * problem.k):
            at = (members.unsqueeze(2) * problem.k + outputs).flatten(1)  # (g, size k)
            projected = self.project(self.kernel[at.reshape(-1)]).reshape(*at.shape, -1)
            yield members, projected.gather(2, at.unsqueeze(1).expand(-1, at.shape[1], -1))

    def aligned(self, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Alignments a = K_x (lambda + L K)^-1 for K_x = J J_train^T; J F_lam^-1 J^T = (J J^T - a L K_x^T) / lambda."""
        problem = self.problem
        for rows, cross in self.rows.crossed(inputs):
            aligned = self.project(cross.flatten(0, 1)).reshape(*cross.shape[:2], problem.n, problem.k)
            curved = times_hessian(cross.view_as(aligned), problem.hessian_roots).flatten(2)
            products = (rows @ rows.mT - aligned.flatten(2) @ curved.mT) / self.ridge
            yield aligned, (products + products.mT) / 2  # a small difference: rounding shows

    def precondition(self, vectors: Tensor) -> Tensor:
        """The inverse itself."""
        return self.solve(vectors)

    def solve(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v = (v - J^T L a) / lambda with a = J F_lam^-1 v, for vectors (q, d)."""
        problem = self.problem
        aligned = self.project(self.rows.times(vectors)).reshape(len(vectors), problem.n, problem.k)
        curved = times_hessian(aligned, problem.hessian_roots)
        inside = torch.zeros_like(vectors)
        for where, rows in self.rows.read("solves"):
            inside += curved[:, where].flatten(1) @ rows.flatten(0, 1)
        return (vectors - inside) / self.ridge

    def at(self, ridge: float, meat_roots: MeatRoots | None) -> FittedDual:
        """Factor the same kernel anew."""
        need = 5.0 * self.kernel.numel() * self.kernel.element_size()
        self.problem.budget.require(need, "a second factor of the kernel", f"Fit again with ridge={ridge:g}.")
        return FittedDual.of(self.rows, self.kernel, self.inner_weights, ridge)

    def blocks(self, inputs: Inputs) -> Iterator[Tensor]:
        """Rows (m, k, d) of a batch, as many at once as fit."""
        return self.rows.blocks(inputs)

    def _solve_left(self, vector: Tensor) -> Tensor:
        """(lambda + L K)^-1 v."""
        roots = self.problem.hessian_roots
        if roots is None:
            return torch.cholesky_solve(vector.unsqueeze(1), self.factor).squeeze(1)
        n, k, q = roots.shape
        inner = torch.einsum("nkq,nk->nq", roots, (self.kernel @ vector).reshape(n, k)).reshape(-1, 1)
        solved = torch.cholesky_solve(inner, self.factor).reshape(n, q)
        return (vector - torch.einsum("nkq,nq->nk", roots, solved).reshape(-1)) / self.ridge


def factor_kernel(kernel: Tensor, roots: Tensor | None, ridge: float) -> Tensor:
    """The Cholesky factor of lambda + R^T K R."""
    if roots is None:
        matrix = kernel.clone()
    else:
        n, k, q = roots.shape
        right = torch.einsum("anj,njq->anq", kernel.reshape(n * k, n, k), roots).reshape(n, k, n * q)
        matrix = torch.einsum("nkp,nkb->npb", roots, right).reshape(n * q, n * q)
    matrix.diagonal().add_(ridge)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().abs()
    tiny = (torch.finfo(factor.dtype).eps * max(len(pivots), LEAST_ROUNDING)) ** 0.5
    null = len(pivots) - int(info) + 1 if int(info) else int((pivots <= tiny * pivots.max()).sum())
    if null:
        raise singular(ridge, null, len(pivots), " Exact(road='primal') separates more of them from rounding.")
    return factor


def project(cross: Tensor, kernel: Tensor, factor: Tensor, roots: Tensor | None, ridge: float) -> Tensor:
    """X (lambda + L K)^-1 for rows X (a, n k)."""
    if roots is None:
        return torch.cholesky_solve(cross.T, factor).T
    n, k, q = roots.shape
    right = torch.einsum("anj,njq->anq", cross.reshape(-1, n, k), roots).reshape(-1, n * q)
    solved = torch.cholesky_solve(right.T, factor).T.reshape(-1, n, q)
    back = torch.einsum("anq,njq->anj", solved, roots).reshape(-1, n * k)
    return (cross - back @ kernel) / ridge
