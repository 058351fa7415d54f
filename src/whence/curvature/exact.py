"""The exact structure: three roads to the same numbers, chosen by size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from whence.errors import InputError
from whence.memory import readable
from whence.tangents.linearization import Linearization

from .base import Bread, Structure
from .dual import DualBread
from .matrix_free import MatrixFreeBread
from .primal import PrimalBread

Road = Literal["auto", "primal", "dual", "matrix_free"]


@dataclass(frozen=True)
class Exact(Structure):
    """No approximation beyond the linearization.

    Args:
        road: "primal" factors the d x d curvature, "dual" the n k x n k kernel, "matrix_free" factors nothing and
            solves by conjugate gradients; "auto" takes the smaller of the first two.
        tolerance: relative residual at which a matrix-free solve stops.
        iterations: most steps of a matrix-free solve.
    """

    name: ClassVar[str] = "exact"
    road: Road = "auto"
    tolerance: float = 1e-12
    iterations: int = 10_000

    def fit(self, problem: Linearization, ridge: float | None) -> Bread:
        """Choose the road, check that it fits in memory, and take it."""
        numbers, size = problem.n * problem.k, problem.selection.size
        road = self.road
        if road == "auto":
            road = "primal" if size <= numbers or ridge == 0 else "dual"
        jacobian = problem.jacobian()
        if road == "matrix_free":
            return MatrixFreeBread(problem, jacobian, ridge, self.tolerance, self.iterations)
        if road not in ("primal", "dual"):
            raise InputError(f'expected road "auto", "primal", "dual" or "matrix_free", got {road!r}.')
        need = memory_needed(problem, road)
        problem.budget.require(need, f"the exact structure ({road} road)", _instead(problem))
        bread: Bread = (
            PrimalBread(problem, jacobian, ridge) if road == "primal" else DualBread(problem, jacobian, ridge)
        )
        bread.facts.append(f"exact algebra, {road} road, {readable(need)} planned")
        return bread


def memory_needed(problem: Linearization, road: str) -> float:
    """Bytes the road will hold at its peak: square matrices, and a chunk of rows."""
    numbers, size = problem.n * problem.k, problem.selection.size
    item = problem.outputs.element_size()
    chunk = problem.jacobian().chunk(problem.k) * problem.k * size * item * 2
    if road == "primal":
        return 9.0 * size * size * item + chunk
    return 3.0 * numbers * numbers * item + chunk


def _instead(problem: Linearization) -> str:
    primal, dual = (readable(memory_needed(problem, road)) for road in ("primal", "dual"))
    return (
        f"Exact roads: primal {primal}, dual {dual}. What fits: structure='ekfac' or 'core' (a few times the weights), "
        "parameters='last_layer', fewer training examples, Exact(road='matrix_free') for a handful of test points, or "
        "a larger max_memory."
    )
