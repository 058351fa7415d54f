"""Exact algebra by the alignments of an input with all training examples, for any number of parameters.

Either with the n k x n k kernel of the training set, or without any matrix, by conjugate gradients.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
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
    Sandwich,
    singular,
    times_hessian,
)
from whence.curvature.features import Features, TrainingRows, check_gradients, finite_examples, groups_within_memory
from whence.curvature.ridge import path_from_kernel, path_from_losses
from whence.data.batches import Inputs
from whence.errors import SingularCurvatureError
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.linearization import Linearization

LEAST_ROUNDING = 32  # least number of additions assumed in the rounding error of a pivot, else the number of pivots


class AlignedCurvature(FittedCurvature):
    """A curvature that predicts by sums over the alignments with all training examples."""

    @abstractmethod
    def aligned(self, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield alignments a (m, k, n, k) with all training examples and J F_lam^-1 J^T (m, k, k), in order."""

    @abstractmethod
    def blocks(self, inputs: Inputs) -> Iterator[Tensor]:
        """Yield rows (m, k, d) of a batch, for as many inputs at once as memory allows."""

    @abstractmethod
    def solve(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v for vectors (q, d)."""

    def alignments(self, inputs: Inputs) -> Alignments:
        """One chunk with all training examples."""
        start = 0
        for aligned, _ in self.aligned(inputs):
            yield slice(start, start + len(aligned)), iter([(slice(0, self.problem.n), aligned)])
            start += len(aligned)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """Solve for the rows of the inputs, then multiply by the rows of the others."""
        found, j = [], self.problem.output_count(others[0])
        for rows in self.blocks(inputs):
            solved = self.solve(rows.flatten(0, 1))
            parts = [solved @ other.flatten(0, 1).T for batch in others for other in self.blocks(batch)]
            found.append(torch.cat(parts, dim=1).reshape(*rows.shape[:2], -1, j))
        return torch.cat(found)

    def to_dense(self) -> Tensor:
        """One solve for each weight."""
        problem = self.problem
        return self.solve(torch.eye(problem.selection.size, dtype=problem.dtype, device=problem.device))

    def sandwich(self, meats: Meats) -> AlignmentSandwich:
        """Keep the weights; alignments are computed for each prediction."""
        return AlignmentSandwich(self, meats)


@dataclass(frozen=True)
class AlignmentSandwich(Sandwich):
    """Variances sum_i a_i W_i W_i^T a_i^T as sums over training examples."""

    curvature: AlignedCurvature
    meats: Meats

    def predict(self, inputs: Inputs) -> Predicted:
        """Alignments with every training example, or sums of them over groups, weighted and squared."""
        problem, meats = self.curvature.problem, self.meats
        with torch.no_grad():
            outputs = problem.network(inputs).to(problem.dtype)
        parts: dict[str, list[Tensor]] = {name: [] for name in (*meats.roots, "laplace", "shift")}
        for alignments, laplace in self.curvature.aligned(inputs):
            m, k, n, _ = alignments.shape
            for name, root in meats.roots.items():
                weighted = torch.einsum("mkni,niq->mknq", alignments, root.expand(n, -1, -1))
                groups = meats.pooled(name)
                if groups is not None:
                    sums = weighted.new_zeros(m, k, groups.total, weighted.shape[3])
                    weighted = sums.index_add_(2, groups.index, weighted)
                flat = weighted.flatten(2)
                parts[name].append(flat @ flat.transpose(1, 2))
            parts["laplace"].append(laplace)
            parts["shift"].append(torch.einsum("mkni,ni->mk", alignments, meats.total))
        found = {name: torch.cat(chunks) for name, chunks in parts.items()}
        return Predicted(outputs, found, found.pop("shift"))


# --- The kernel -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedDual(AlignedCurvature):
    """K = J J^T over all training examples; J F_lam^-1 J^T = K (lambda + L K)^-1 with L the output Hessians.

    For squared error L is the identity and the factored matrix is K + lambda. Otherwise it is lambda + R^T K R with
    L = R R^T.
    """

    features: Features  # rows of the Jacobian
    rows: TrainingRows  # rows of the training examples
    kernel: Tensor  # (n k, n k) K
    inner_weights: Tensor  # (n, k) J w
    factor: Tensor  # the Cholesky factor

    @classmethod
    def fit(cls, problem: Linearization, features: Features, ridge: float | None) -> FittedDual:
        """Assemble the kernel, factor lambda + R^T K R, and compute the leverages."""
        rows, n, k = TrainingRows(problem, features), problem.n, problem.k
        (kernel, inner_weights), path = rows.kernel(), None
        if ridge is None:
            targets = problem.residuals + inner_weights
            squared = problem.identity_hessians
            path = path_from_kernel(kernel, targets, problem, features.notes) if squared else path_from_losses(rows)
            ridge = path.best
        matrix = kernel.clone() if problem.identity_hessians else times_roots(times_roots(kernel, problem).T, problem)
        matrix.diagonal().add_(ridge)
        factor, info = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal().abs()
        tiny = (torch.finfo(factor.dtype).eps * max(len(pivots), LEAST_ROUNDING)) ** 0.5
        null = len(pivots) - int(info) + 1 if int(info) else int((pivots <= tiny * pivots.max()).sum())
        if null:
            raise singular(ridge, null, len(pivots), " Exact(road='primal') separates more of them from rounding.")
        del matrix  # the leverages need the memory
        blocks = problem.outputs.new_empty(n, k, k)
        fitted = cls(
            problem=problem,
            ridge=ridge,
            leverage_blocks=blocks,
            notes=features.notes,
            path=path,
            features=features,
            rows=rows,
            kernel=kernel,
            inner_weights=inner_weights,
            factor=factor,
        )
        projected = fitted.project(kernel).reshape(n, k, n, k)  # K (lambda + L K)^-1
        blocks.copy_(torch.diagonal(projected, dim1=0, dim2=2).permute(2, 0, 1))
        return fitted

    def project(self, cross: Tensor) -> Tensor:
        """X (lambda + L K)^-1 for rows X (a, n k)."""
        inner = self._inner(cross)
        return inner if self.problem.identity_hessians else (cross - inner @ self.kernel) / self.ridge

    def _inner(self, rows: Tensor) -> Tensor:
        """X R (lambda + R^T K R)^-1 R^T for rows X (a, n k)."""
        if self.problem.identity_hessians:
            return torch.cholesky_solve(rows.T, self.factor).T
        roots = self.problem.hessian_roots
        solved = torch.cholesky_solve(times_roots(rows, self.problem).T, self.factor).T
        return torch.einsum("anq,nkq->ank", solved.unflatten(1, roots.shape[::2]), roots).flatten(1)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = J^T alpha - w with alpha = (lambda + L K)^-1 (r + L J w)."""
        problem = self.problem
        pseudo = (problem.residuals + times_hessian(self.inner_weights, problem.hessian_roots)).reshape(1, -1)
        if problem.identity_hessians:
            alpha = self._inner(pseudo).squeeze(0)
        else:
            alpha = ((pseudo - self._inner(pseudo @ self.kernel)) / self.ridge).squeeze(0)
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
        for rows in self.blocks(inputs):
            cross = self.rows.times(rows.flatten(0, 1)).reshape(*rows.shape[:2], problem.n, problem.k)  # K_x
            step = max(1, int(0.1 * problem.budget.limit) // cross[0].nbytes)
            for some, part in zip(rows.split(step), cross.split(step), strict=True):
                aligned = self.project(part.flatten(2).flatten(0, 1)).view_as(part)
                curved = times_hessian(part, problem.hessian_roots).flatten(2)
                products = (some @ some.mT - aligned.flatten(2) @ curved.mT) / self.ridge
                yield aligned, (products + products.mT) / 2  # a small difference: rounding may break symmetry

    def precondition(self, vectors: Tensor) -> Tensor:
        """The exact inverse."""
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

    def blocks(self, inputs: Inputs) -> Iterator[Tensor]:
        """Yield rows (m, k, d) of a batch, as many as fit: each block may cost a pass over the training rows."""
        problem, k = self.problem, self.problem.output_count(inputs)
        most = max(1, int(0.1 * problem.budget.limit) // (k * self.features.size * problem.outputs.element_size()))
        pending: list[Tensor] = []
        for _, rows in self.features.rows(inputs, k):
            if pending and sum(map(len, pending)) + len(rows) > most:
                yield torch.cat(pending)
                pending = []
            pending.append(rows)
        yield torch.cat(pending)


def times_roots(rows: Tensor, problem: Linearization) -> Tensor:
    """X R (a, n q) for rows X (a, n k) and the roots R_i of the Hessians."""
    roots = problem.hessian_roots
    return torch.einsum("ank,nkq->anq", rows.unflatten(1, roots.shape[:2]), roots).flatten(1)


# --- Conjugate gradients ----------------------------------------------------------------------------------------------


Multiply = Callable[[Tensor, Tensor], Tensor]
"""Maps vectors (a, d) and their positions (a,) among all right-hand sides to their products (a, d)."""


@dataclass(frozen=True)
class Solved:
    """Solutions and their accuracy."""

    solution: Tensor  # (q, d)
    # (q,) final norm of each residual relative to its first, in the preconditioner's norm
    reached: Tensor
    steps: int  # number of steps taken
    lowest: float  # lowest curvature along any direction; a solve stops if it is not positive


def conjugate_gradients(
    multiply: Multiply,
    vectors: Tensor,
    *,
    tolerance: float,
    iterations: int,
    precondition: Callable[[Tensor], Tensor] | None = None,
    going: Callable[[], bool] | None = None,
) -> Solved:
    """Solve A z = v for a symmetric positive A.

    Args:
        multiply: A times some of the vectors.
        vectors: v (q, d).
        tolerance: relative residual at which a solve stops.
        iterations: maximum number of steps.
        precondition: an approximation of A^-1 for vectors (a, d), symmetric and positive; it defines the norm.
        going: called before each step; returns whether to continue.

    Examples:
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> right = torch.tensor([[3.0, 4.0]])
        >>> found = conjugate_gradients(lambda v, _: v @ matrix, right, tolerance=1e-6, iterations=9)
        >>> found.solution.round(decimals=4)
        tensor([[1., 1.]])
    """
    apply = precondition or (lambda rest: rest)
    solution, residual = torch.zeros_like(vectors), vectors.clone()
    direction = apply(residual).clone()
    size = (residual * direction).sum(1)
    first = size.clone()
    stopped = ~(size > 0)
    lowest, steps = float("inf"), 0
    for _ in range(iterations):
        at = ((size > tolerance**2 * first) & ~stopped).nonzero().squeeze(1)
        if not len(at) or not (going is None or going()):
            break
        image = multiply(direction[at], at)
        curvature = (direction[at] * image).sum(1)
        lowest = min(lowest, float(curvature.min()))
        stopped[at[~(curvature > 0)]] = True  # also if it is NaN
        at, image, curvature = (part[curvature > 0] for part in (at, image, curvature))
        if not len(at):
            break
        step = (size[at] / curvature).unsqueeze(1)
        solution[at] += step * direction[at]
        residual[at] -= step * image
        preconditioned = apply(residual[at])
        fresh = (residual[at] * preconditioned).sum(1)
        direction[at] = preconditioned + (fresh / size[at]).unsqueeze(1) * direction[at]
        size[at] = fresh
        steps += 1
    tiny = torch.finfo(size.dtype).tiny
    return Solved(solution, (size.clamp_min(0.0) / first.clamp_min(tiny)).sqrt(), steps, lowest)


def curvature_times(
    vectors: Tensor, problem: Linearization, jacobian: Jacobian, ridge: float, gone: Tensor | None = None
) -> Tensor:
    """F_lam v = sum_i J_i^T L_i (J_i v) + lambda v for vectors (q, d), in one pass over the data.

    Terms that are true in `gone` (q, n, k) are left out.
    """
    image = ridge * vectors
    for batch in problem.batches.read(None):
        curved = times_hessian(jacobian.jvp(batch.inputs, vectors), problem.hessian_roots, batch.rows)
        if gone is not None:
            curved = curved.masked_fill(gone[:, batch.rows], 0.0)
        image += jacobian.vjp(batch.inputs, curved)
    return image


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedIterative(AlignedCurvature):
    """No matrix at all: every result comes from conjugate gradients."""

    jacobian: Jacobian  # Jacobian of the network
    tolerance: float  # relative residual at which a solve stops
    iterations: int  # maximum number of steps of a solve

    @classmethod
    def fit(cls, problem: Linearization, ridge: float, tolerance: float, iterations: int) -> FittedIterative:
        """Solve for the leverage blocks of all training examples."""
        jacobian = problem.jacobian()
        blocks = torch.empty(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        for batch in problem.read("gradients"):  # every solve reads all gradients: first check that they are finite
            for part, rows in jacobian.rows(batch.inputs, problem.k):
                check_gradients([(batch.start + part.start, finite_examples(rows))])
        fitted = cls(
            problem=problem,
            ridge=ridge,
            leverage_blocks=blocks,
            notes=jacobian.notes,
            jacobian=jacobian,
            # J and J^T are transposes only up to rounding; below it conjugate gradients do not converge
            tolerance=max(tolerance, 4 * jacobian.precision),
            iterations=iterations,
        )
        worst = 0.0
        for batch in problem.read("leverage"):
            for part, rows in jacobian.rows(batch.inputs, problem.k):
                solved, reached = fitted._solve(rows.flatten(0, 1))
                blocks[batch.start + part.start : batch.start + part.stop] = rows @ solved.reshape(rows.shape).mT
                worst = max(worst, reached)
        jacobian.notes.append(f"exact algebra, matrix-free road, solves to a relative residual of {worst:.2g}")
        return fitted

    def solve(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v for vectors (q, d), all at once."""
        return self._solve(vectors)[0]

    def _solve(self, vectors: Tensor) -> tuple[Tensor, float]:
        """As `solve`, with the largest relative residual."""
        found = conjugate_gradients(
            lambda some, _: curvature_times(some, self.problem, self.jacobian, self.ridge),
            vectors,
            tolerance=self.tolerance,
            iterations=self.iterations,
        )
        if found.lowest <= 0:
            raise SingularCurvatureError(
                f"expected a positive curvature in every direction, got {found.lowest:.2g} at "
                f"ridge={self.ridge:g}. Raise `ridge`, use weights of higher precision, or take another road."
            )
        reached = float(found.reached.max())
        if reached > max(10 * self.tolerance, 1e-6):
            raise SingularCurvatureError(
                f"expected conjugate gradients to converge within {self.iterations} steps, got a relative residual of "
                f"{reached:.2g}. Raise `ridge` or `iterations`, or take another road."
            )
        return found.solution, reached

    def blocks(self, inputs: Inputs) -> Iterator[Tensor]:
        """Yield rows (m, k, d) of a batch, some at a time."""
        yield from (rows for _, rows in self.jacobian.rows(inputs, self.problem.output_count(inputs)))

    def aligned(self, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """One solve for each output of a test point, then one pass over the training data."""
        for rows in self.blocks(inputs):
            solved = self.solve(rows.flatten(0, 1))
            alignments = self._along(solved).reshape(*rows.shape[:2], self.problem.n, self.problem.k)
            yield alignments, rows @ solved.reshape(rows.shape).mT

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w)."""
        problem = self.problem
        weights = problem.weights()
        score = -self.ridge * weights
        for batch in problem.read("Newton step"):
            score = score + self.jacobian.vjp(batch.inputs, problem.residuals[batch.rows].unsqueeze(0))[0]
        step = self.solve(score.unsqueeze(0))
        size = float(step.norm() / weights.norm().clamp_min(torch.finfo(weights.dtype).tiny))
        return NewtonStep(self._along(step)[0], size, step[0] if with_direction else None)

    def _along(self, vectors: Tensor) -> Tensor:
        """J_i v for every training example: (q, d) -> (q, n, k)."""
        read = self.problem.read("alignments")
        return torch.cat([self.jacobian.jvp(batch.inputs, vectors) for batch in read], dim=1)
