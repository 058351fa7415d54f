"""The exact algebra on the kernel of the training set: n k x n k, whatever the number of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.base import (
    Alignments,
    FittedCurvature,
    Groups,
    Meats,
    NewtonStep,
    Predicted,
    RidgePath,
    Sandwich,
    Weigh,
    covariances_from_alignments,
    pieces,
)
from whence.curvature.primal import Features, TrainingRows, path_from_kernel, singular
from whence.data.batches import Inputs
from whence.jacobian.linearization import Linearization

LEAST_ROUNDING = 32
"""Pivots that are so many times the rounding of the largest are taken for nothing, or as many as there are examples."""


class FittedDual(FittedCurvature):
    """K = J J^T over all training examples; J F_lam^-1 J^T = K (lambda + L K)^-1 with L the output Hessians.

    For squared error L is the identity and the factored matrix is K + lambda; else it is lambda + R^T K R with
    L = R R^T.
    """

    rows: TrainingRows
    kernel: Tensor
    inner_weights: Tensor

    def __init__(
        self, problem: Linearization, features: Features, ridge: float | None, known: FittedDual | None = None
    ) -> None:
        """Assemble the kernel block by block, or take it from a bread that has it, factor it, read leverages off it."""
        self.problem = problem
        self.features = features
        self.rows = known.rows if known else TrainingRows(problem, features)
        self.rows.bring_together()  # each pair of examples meets
        self.facts = features.notes
        self.kernel, self.inner_weights = (known.kernel, known.inner_weights) if known else self._assemble()
        self.path: RidgePath | None = None
        if ridge is None:
            self.path = path_from_kernel(self.kernel, problem.residuals + self.inner_weights, problem, self.facts)
            ridge = self.path.best
        self.ridge = ridge  # above zero: the structure sees to it
        self.factor = self._factor()
        projected = self.project(self.kernel)  # K (lambda + L K)^-1
        blocks = projected.reshape(problem.n, problem.k, problem.n, problem.k)
        self.leverage_blocks = torch.diagonal(blocks, dim1=0, dim2=2).permute(2, 0, 1).contiguous()
        self.degrees_of_freedom = self._freedom()

    def cross_kernel(self, test_rows: Tensor) -> Tensor:
        """(q, d) test rows times all training rows, (q, n k)."""
        problem = self.problem
        cross = test_rows.new_empty(len(test_rows), problem.n, problem.k)
        for where, rows in self.rows.read("alignments"):
            cross[:, where] = (test_rows @ rows.reshape(-1, rows.shape[-1]).T).reshape(len(test_rows), -1, problem.k)
        return cross.reshape(len(test_rows), -1)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = J^T alpha - w with alpha = (lambda + L K)^-1 (r + L J w)."""
        problem = self.problem
        pseudo = problem.residuals + self.times_hessian(self.inner_weights)
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

    def sandwich(self, meats: Meats) -> DualSandwich:
        """Keep the weights; the kernel does the rest."""
        return DualSandwich(self, meats)

    def group_leverage_blocks(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Blocks of K (lambda + L K)^-1."""
        problem, outputs = self.problem, torch.arange(self.problem.k, device=self.problem.device)
        for members in pieces(groups.members(), problem, 3.0 * problem.n * problem.k):
            at = (members.unsqueeze(2) * problem.k + outputs).flatten(1)  # (g, size k)
            projected = self.project(self.kernel[at.reshape(-1)]).reshape(*at.shape, -1)
            yield members, projected.gather(2, at.unsqueeze(1).expand(-1, at.shape[1], -1))

    def alignments(self, inputs: Inputs) -> Alignments:
        """Products with all training rows, times (lambda + L K)^-1: all training examples at once."""
        problem, start = self.problem, 0
        everything = slice(0, problem.n)
        for rows in self.blocks(inputs):
            cross = self.cross_kernel(rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
            step = max(1, int(0.1 * problem.budget.limit) // (cross[0].numel() * cross.element_size()))
            for part in cross.split(step):
                aligned = self.project(part.flatten(0, 1)).reshape(*part.shape[:2], problem.n, problem.k)
                yield slice(start, start + len(part)), iter([(everything, aligned)])
                start += len(part)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """(J J'^T - a L K_x'^T) / lambda with the products K_x' of the others with all training rows."""
        k = self.problem.k
        found = []
        for rows in self.blocks(inputs):
            flat = rows.flatten(0, 1)
            aligned = self.project(self.cross_kernel(flat))
            parts = []
            for batch in others:
                for other in self.blocks(batch):
                    other_flat = other.flatten(0, 1)
                    cross = self.cross_kernel(other_flat).reshape(len(other_flat), -1, k)
                    curved = self.times_hessian(cross).flatten(1)
                    parts.append((flat @ other_flat.T - aligned @ curved.T) / self.ridge)
            found.append(torch.cat(parts, dim=1).reshape(*rows.shape[:2], -1, self.problem.output_count(others[0])))
        return torch.cat(found)

    def precondition(self, vectors: Tensor) -> Tensor:
        """The inverse itself: F_lam^-1 v = (v - J^T L a) / lambda with a = J F_lam^-1 v."""
        problem = self.problem
        aligned = self.project(self.cross_kernel(vectors)).reshape(len(vectors), problem.n, problem.k)
        curved = self.times_hessian(aligned)
        inside = torch.zeros_like(vectors)
        for where, rows in self.rows.read("solves"):
            inside += curved[:, where].flatten(1) @ rows.flatten(0, 1)
        return (vectors - inside) / self.ridge

    def at(self, ridge: float, weigh: Weigh | None) -> FittedDual:
        """Factor the same kernel anew."""
        need = 5.0 * self.kernel.numel() * self.kernel.element_size()
        self.problem.budget.require(need, "a second factor of the kernel", f"Fit again with ridge={ridge:g}.")
        return FittedDual(self.problem, self.features, ridge, self)

    def blocks(self, inputs: Inputs) -> Iterator[Tensor]:
        """Rows (m, k, d) of a batch, as many at once as fit: each block costs a pass over the training rows."""
        problem, seen = self.problem, self.problem.output_count(inputs)
        row = seen * self.features.size * problem.outputs.element_size()
        most = max(1, int(0.1 * problem.budget.limit) // row)
        pending: list[Tensor] = []
        for _, rows in self.features.rows(inputs, seen):
            if pending and sum(map(len, pending)) + len(rows) > most:
                yield torch.cat(pending)
                pending = []
            pending.append(rows)
        yield torch.cat(pending)

    def _assemble(self) -> tuple[Tensor, Tensor]:
        """K and J w. Rows that do not fit in memory are recomputed for each block of columns."""
        problem = self.problem
        size = problem.n * problem.k
        kernel = torch.empty(size, size, dtype=problem.dtype, device=problem.device)
        inner = torch.empty(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        weights = self.features.weights()
        if self.rows.in_memory:
            flat = torch.cat([rows.reshape(-1, rows.shape[-1]) for _, rows in self.rows.read("kernel")])
            torch.mm(flat, flat.T, out=kernel)
            return kernel, (flat @ weights).reshape(problem.n, problem.k)
        block_rows = max(1, int(0.2 * problem.budget.limit) // (problem.k * self.features.size * kernel.element_size()))
        pending: list[tuple[slice, Tensor]] = []
        for where, rows in self.rows.read("kernel"):
            inner[where] = rows @ weights
            pending.append((where, rows))
            if sum(len(rows) for _, rows in pending) >= block_rows:
                self._fill(kernel, pending)
                pending = []
        if pending:
            self._fill(kernel, pending)
        return kernel, inner

    def _fill(self, kernel: Tensor, pending: list[tuple[slice, Tensor]]) -> None:
        k = self.problem.k
        start, stop = pending[0][0].start * k, pending[-1][0].stop * k
        flat = torch.cat([rows.reshape(-1, rows.shape[-1]) for _, rows in pending])
        kernel[start:stop] = self.cross_kernel(flat)

    def _factor(self) -> Tensor:
        roots = self.problem.hessian_roots
        matrix = self.kernel.clone() if roots is None else self._between_roots()
        matrix.diagonal().add_(self.ridge)
        factor: Tensor
        factor, info = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal().abs()
        tiny = (torch.finfo(factor.dtype).eps * max(len(pivots), LEAST_ROUNDING)) ** 0.5
        null = len(pivots) - int(info) + 1 if int(info) else int((pivots <= tiny * pivots.max()).sum())
        if null:
            raise singular(self.ridge, null, len(pivots), " Exact(road='primal') tells more of them from rounding.")
        return factor

    def _between_roots(self) -> Tensor:
        roots = self.problem.hessian_roots
        assert roots is not None
        n, k, q = roots.shape
        right = torch.einsum("anj,njq->anq", self.kernel.reshape(n * k, n, k), roots).reshape(n, k, n * q)
        return torch.einsum("nkp,nkb->npb", roots, right).reshape(n * q, n * q)

    def times_hessian(self, vectors: Tensor) -> Tensor:
        """L v for vectors (..., n, k)."""
        roots = self.problem.hessian_roots
        if roots is None:
            return vectors
        return torch.einsum("nkq,...nq->...nk", roots, torch.einsum("nkq,...nk->...nq", roots, vectors))

    def project(self, cross: Tensor) -> Tensor:
        """X (lambda + L K)^-1 for rows X (a, n k)."""
        roots = self.problem.hessian_roots
        if roots is None:
            return torch.cholesky_solve(cross.T, self.factor).T
        n, k, q = roots.shape
        right = torch.einsum("anj,njq->anq", cross.reshape(-1, n, k), roots).reshape(-1, n * q)
        solved = torch.cholesky_solve(right.T, self.factor).T.reshape(-1, n, q)
        back = torch.einsum("anq,njq->anj", solved, roots).reshape(-1, n * k)
        return (cross - back @ self.kernel) / self.ridge

    def _solve_left(self, vector: Tensor) -> Tensor:
        """(lambda + L K)^-1 v."""
        roots = self.problem.hessian_roots
        if roots is None:
            return torch.cholesky_solve(vector.unsqueeze(1), self.factor).squeeze(1)
        n, k, q = roots.shape
        inner = torch.einsum("nkq,nk->nq", roots, (self.kernel @ vector).reshape(n, k)).reshape(-1, 1)
        solved = torch.cholesky_solve(inner, self.factor).reshape(n, q)
        return (vector - torch.einsum("nkq,nq->nk", roots, solved).reshape(-1)) / self.ridge

    def _freedom(self) -> float:
        roots = self.problem.hessian_roots
        if roots is None:
            return float(self.leverage_blocks.diagonal(dim1=1, dim2=2).sum())
        return float((roots * (self.leverage_blocks @ roots)).sum())


@dataclass(frozen=True)
class DualSandwich(Sandwich):
    """Variances as sums over training examples."""

    bread: FittedDual
    meats: Meats

    def predict(self, inputs: Inputs) -> Predicted:
        """Alignments with every training example, then weighted sums of them."""
        problem, bread = self.bread.problem, self.bread
        with torch.no_grad():
            outputs = problem.network(inputs).to(problem.dtype)
        found: dict[str, list[Tensor]] = {}
        shifts = []
        for rows in bread.blocks(inputs):  # (m, k, d)
            cross = bread.cross_kernel(rows.flatten(0, 1)).reshape(*rows.shape[:2], -1)
            step = max(1, int(0.1 * problem.budget.limit) // (cross[0].numel() * cross.element_size()))
            for part_rows, part in zip(rows.split(step), cross.split(step), strict=True):
                covariances, shift = self._covariances(part_rows, part)
                for name, value in covariances.items():
                    found.setdefault(name, []).append(value)
                shifts.append(shift)
        return Predicted(outputs, {name: torch.cat(chunks) for name, chunks in found.items()}, torch.cat(shifts))

    def _covariances(self, rows: Tensor, cross: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """From rows (m, k, d) and their products with all training rows (m, k, n k)."""
        bread, problem = self.bread, self.bread.problem
        projected = bread.project(cross.flatten(0, 1)).reshape(cross.shape)
        alignments = projected.reshape(*rows.shape[:2], problem.n, problem.k)
        covariances, shift = covariances_from_alignments(alignments, self.meats)
        # J F_lam^-1 J^T = (J J^T - a L K_x^T) / lambda
        curved = bread.times_hessian(cross.reshape(-1, problem.n, problem.k)).reshape(cross.shape)
        left = (rows @ rows.transpose(1, 2) - projected @ curved.transpose(1, 2)) / bread.ridge
        covariances["laplace"] = (left + left.transpose(1, 2)) / 2  # a small difference: rounding shows
        return covariances, shift
