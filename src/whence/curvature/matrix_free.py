"""The exact algebra without any matrix: conjugate gradients on products with the Jacobian.

For a handful of test points on any network, and the yardstick for every approximation. The leverage blocks need n k
solves, so a fit is dear; a prediction needs k solves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import InputError, SingularCurvatureError
from whence.tangents.batches import Inputs
from whence.tangents.jacobian import Jacobian
from whence.tangents.linearization import Linearization

from .alignment import covariances_from_alignments
from .base import Alignments, Bread, Meats, NewtonStep, Predicted, RidgePath, Sandwich
from .conjugate import conjugate_gradients
from .features import check_gradients


class MatrixFreeBread(Bread):
    """F_lam^-1 v by conjugate gradients, with F v = sum_i J_i^T L_i (J_i v) streamed over the data.

    Args:
        problem: the linearized training problem.
        jacobian: its tangents.
        ridge: lambda, on the sum scale.
        tolerance: relative residual at which a solve stops; not below the precision of the weights.
        iterations: most steps of a solve.
    """

    def __init__(
        self, problem: Linearization, jacobian: Jacobian, ridge: float | None, tolerance: float, iterations: int
    ) -> None:
        """Solve for the leverage blocks of all training examples."""
        if ridge is None:
            raise InputError(
                'expected a number as ridge for the matrix-free road, got "loo", which needs a matrix. '
                'Use Exact(road="dual") or Exact(road="primal"), or whence.ridge_from_weight_decay.'
            )
        self.problem = problem
        self.jacobian = jacobian
        self.ridge = ridge
        # J and J^T are exact transposes only up to rounding; below that conjugate gradients wander
        self.tolerance = max(tolerance, 4 * jacobian.precision)
        self.iterations = iterations
        self.path: RidgePath | None = None
        self.facts = jacobian.notes
        self.worst = 0.0
        self.hats, self.degrees_of_freedom = self._leverage()
        self.facts.append(f"exact algebra, matrix-free road, solves to a relative residual of {self.worst:.2g}")

    def multiply(self, vectors: Tensor) -> Tensor:
        """F v for vectors (q, d)."""
        problem = self.problem
        result = torch.zeros_like(vectors)
        for batch in problem.batches:
            along = self.jacobian.jvp(batch.inputs, vectors)  # (q, n, k)
            if problem.hessian_roots is not None:
                roots = problem.hessian_roots[batch.rows]
                along = torch.einsum("nkp,qnp->qnk", roots, torch.einsum("nkp,qnk->qnp", roots, along))
            result += self.jacobian.vjp(batch.inputs, along)
        return result

    def solve(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v for vectors (q, d), all at once."""
        found = conjugate_gradients(
            lambda some, _: self.multiply(some) + self.ridge * some,
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
        self.worst = max(self.worst, reached)
        if reached > max(10 * self.tolerance, 1e-6):
            raise SingularCurvatureError(
                f"expected conjugate gradients to converge within {self.iterations} steps, got a relative residual of "
                f"{reached:.2g}. Raise `ridge` or `iterations`, or take another road."
            )
        return found.solution

    def align(self, solved: Tensor) -> Tensor:
        """J_i v for every training example: (q, d) -> (q, n, k)."""
        parts = [self.jacobian.jvp(batch.inputs, solved) for batch in self.problem.batches]
        return torch.cat(parts, dim=1)

    def alignments(self, inputs: Inputs) -> Alignments:
        """K solves a test point, then products with the Jacobian of the training examples."""
        for where, rows in self.jacobian.rows(inputs, self.problem.seen(inputs)):
            yield where, self._align(self.solve(rows.flatten(0, 1)), len(rows))

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """K solves an input, then products with the Jacobian of the others."""
        k = self.problem.seen(inputs)
        found = []
        for _, rows in self.jacobian.rows(inputs, k):
            solved = self.solve(rows.flatten(0, 1))
            along = torch.cat([self.jacobian.jvp(batch, solved) for batch in others], dim=1)  # (m k, p, k)
            found.append(along.reshape(len(rows), k, *along.shape[1:]))
        return torch.cat(found)

    def _align(self, solved: Tensor, m: int) -> Iterator[tuple[slice, Tensor]]:
        for batch in self.problem.read("alignments"):
            along = self.jacobian.jvp(batch.inputs, solved)  # (m k, n, k)
            yield batch.rows, along.reshape(m, -1, batch.size, self.problem.k)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w)."""
        problem = self.problem
        weights = problem.weights()
        score = -self.ridge * weights
        for batch in problem.read("Newton step"):
            score = score + self.jacobian.vjp(batch.inputs, problem.residuals[batch.rows].unsqueeze(0))[0]
        step = self.solve(score.unsqueeze(0))
        change = self.align(step)[0]
        size = float(step.norm() / weights.norm().clamp_min(torch.finfo(weights.dtype).tiny))
        return NewtonStep(change, size, step[0] if with_direction else None)

    def sandwich(self, meats: Meats) -> MatrixFreeSandwich:
        """Keep the weights; alignments are computed for each prediction."""
        return MatrixFreeSandwich(self, meats)

    def _leverage(self) -> tuple[Tensor, float]:
        problem = self.problem
        hats = torch.empty(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        for batch in problem.read("gradients"):  # every solve sees all of them: first of all, that they are numbers
            for part, rows in self.jacobian.rows(batch.inputs, problem.k):
                check_gradients(rows, batch.start + part.start)
        for batch in problem.read("leverage"):
            for part, rows in self.jacobian.rows(batch.inputs, problem.k):
                solved = self.solve(rows.flatten(0, 1)).reshape(rows.shape)
                hats[batch.start + part.start : batch.start + part.stop] = rows @ solved.transpose(1, 2)
        roots = problem.hessian_roots
        freedom = hats.diagonal(dim1=1, dim2=2).sum() if roots is None else (roots * (hats @ roots)).sum()
        return hats, float(freedom)


@dataclass(frozen=True)
class MatrixFreeSandwich(Sandwich):
    """Variances as sums over training examples."""

    bread: MatrixFreeBread
    meats: Meats

    def predict(self, inputs: Inputs) -> Predicted:
        """K solves a test point, then one pass over the training data for the alignments."""
        problem, bread = self.bread.problem, self.bread
        with torch.no_grad():
            outputs = problem.network(inputs).to(problem.dtype)
        parts: dict[str, list[Tensor]] = {}
        shifts = []
        for _, rows in bread.jacobian.rows(inputs, problem.seen(inputs)):
            solved = bread.solve(rows.flatten(0, 1))
            alignments = bread.align(solved).reshape(*rows.shape[:2], problem.n, problem.k)
            covariances, shift = covariances_from_alignments(alignments, self.meats)
            covariances["laplace"] = rows @ solved.reshape(rows.shape).transpose(1, 2)
            for name, value in covariances.items():
                parts.setdefault(name, []).append(value)
            shifts.append(shift)
        return Predicted(outputs, {name: torch.cat(chunks) for name, chunks in parts.items()}, torch.cat(shifts))
