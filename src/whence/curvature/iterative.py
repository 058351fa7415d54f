"""The exact algebra without a matrix: conjugate gradients for several right-hand sides at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.curvature.accumulate import check_gradients, finite_examples
from whence.curvature.base import AlignedCurvature, Alignments, NewtonStep, times_hessian, trace_of_hat
from whence.data.batches import Inputs
from whence.errors import SingularCurvatureError
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.linearization import Linearization

Multiply = Callable[[Tensor, Tensor], Tensor]
"""From vectors (a, d) and their positions (a,) among all right-hand sides to their images (a, d)."""


@dataclass(frozen=True)
class Solved:
    """Solutions, and how good they are."""

    solution: Tensor  # (q, d)
    # (q,) size of what is left of each right-hand side, in the preconditioner's norm, over its size before
    reached: Tensor
    steps: int  # how many were taken
    lowest: float  # the lowest curvature along any direction taken; a matrix that is not positive ends that solve


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
        tolerance: relative size of what may be left of v.
        iterations: most steps.
        precondition: something like A^-1 for vectors (a, d), symmetric and positive; sizes are measured in its norm.
        going: asked before each step whether to go on.

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
        stopped[at[~(curvature > 0)]] = True  # also where it is no number
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

    Terms of F_lam that are `gone` (q, n, k) are left out.
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
    """No matrix at all: every answer solves by conjugate gradients."""

    jacobian: Jacobian  # of the network
    tolerance: float  # relative residual at which a solve stops
    iterations: int  # most steps of a solve
    worst: float = 0.0  # the largest relative residual of the solves for the leverages

    @classmethod
    def fit(cls, problem: Linearization, ridge: float, tolerance: float, iterations: int) -> FittedIterative:
        """Solve for the leverage blocks of all training examples."""
        jacobian = problem.jacobian()
        blocks = torch.empty(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        for batch in problem.read("gradients"):  # every solve reads all of them: first of all, that they are numbers
            for part, rows in jacobian.rows(batch.inputs, problem.k):
                check_gradients([(batch.start + part.start, finite_examples(rows))])
        fitted = cls(
            problem=problem,
            ridge=ridge,
            leverage_blocks=blocks,
            degrees_of_freedom=0.0,
            notes=jacobian.notes,
            jacobian=jacobian,
            # J and J^T are exact transposes only up to rounding; below that conjugate gradients wander
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
        return replace(fitted, degrees_of_freedom=trace_of_hat(blocks, problem.hessian_roots), worst=worst)

    def solve(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v for vectors (q, d), all at once."""
        return self._solve(vectors)[0]

    def _solve(self, vectors: Tensor) -> tuple[Tensor, float]:
        """The same, and the largest relative residual."""
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
        """Rows (m, k, d) of a batch, some at a time."""
        yield from (rows for _, rows in self.jacobian.rows(inputs, self.problem.output_count(inputs)))

    def aligned(self, inputs: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """K solves a test point, then one pass over the training data."""
        for rows in self.blocks(inputs):
            solved = self.solve(rows.flatten(0, 1))
            alignments = self._along(solved).reshape(*rows.shape[:2], self.problem.n, self.problem.k)
            yield alignments, rows @ solved.reshape(rows.shape).mT

    def alignments(self, inputs: Inputs) -> Alignments:
        """K solves a test point, then products with the Jacobian of the training examples, batch by batch."""
        for where, rows in self.jacobian.rows(inputs, self.problem.output_count(inputs)):
            yield where, self._align(self.solve(rows.flatten(0, 1)), len(rows))

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
        size = float(step.norm() / weights.norm().clamp_min(torch.finfo(weights.dtype).tiny))
        return NewtonStep(self._along(step)[0], size, step[0] if with_direction else None)

    def _along(self, vectors: Tensor) -> Tensor:
        """J_i v for every training example: (q, d) -> (q, n, k)."""
        read = self.problem.read("alignments")
        return torch.cat([self.jacobian.jvp(batch.inputs, vectors) for batch in read], dim=1)
