"""The exact structure, by three algorithms with the same result; and `Auto`, the default, exact where that is quick."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

from whence.curvature.accumulate import reserve_memory
from whence.curvature.aligned import FittedDual, FittedIterative
from whence.curvature.base import FittedCurvature, MeatRoots, Structure, singular
from whence.curvature.core import Core
from whence.curvature.cost import Cost, ProblemSizes
from whence.curvature.primal import FittedPrimal, algebra_bytes, algebra_operations, cached_rows_bytes
from whence.errors import InputError, SingularCurvatureError
from whence.jacobian.linearization import Linearization
from whence.runtime.memory import readable

Road = Literal["auto", "primal", "dual", "matrix_free"]

OPERATIONS = {"cpu": 1.5e11, "cuda": 2e14}  # a third of an exact fit of ten seconds on one core


@dataclass(frozen=True)
class Exact(Structure):
    """No approximation beyond the linearization.

    Args:
        road: which algorithm. "primal" factors the d x d curvature, "dual" the n k x n k kernel; "matrix_free" factors
            nothing and solves by conjugate gradients; "auto" takes the smaller of the first two matrices.
        tolerance: relative residual at which a matrix-free solve stops.
        iterations: maximum number of steps of a matrix-free solve.

    Examples:
        >>> Exact(road="dual").road
        'dual'
    """

    name: ClassVar[str] = "exact"
    road: Road = "auto"
    tolerance: float = 1e-12
    iterations: int = 10_000

    def __post_init__(self) -> None:
        """Raise for options that no fit could use."""
        if self.road not in get_args(Road):
            raise InputError(f"expected road to be one of {', '.join(map(repr, get_args(Road)))}, got {self.road!r}.")
        if not (math.isfinite(self.tolerance) and self.tolerance > 0 and self.iterations >= 1):
            raise InputError(
                f"expected tolerance > 0 and at least one of iterations, got {self.tolerance} and {self.iterations}."
            )

    @property
    def takes_groups(self) -> bool:  # type: ignore[override]  # it depends on the road
        """True except on the matrix-free road, which would solve for every pair of members."""
        return self.road != "matrix_free"

    @property
    def additive(self) -> bool:  # type: ignore[override]  # it depends on the road
        """Whether its passes are sums over examples: the dual road is made of all pairs of them."""
        return self.road in ("auto", "primal")

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedCurvature:
        """Choose the road, check that it fits in memory, and take it."""
        sizes = ProblemSizes.of(problem)
        road = self._road(sizes, ridge)
        if ridge == 0 and sizes.numbers < sizes.d:
            raise singular(0.0, sizes.d - sizes.numbers, sizes.d)
        if ridge == 0 and road != "primal":
            raise SingularCurvatureError(
                f'expected ridge > 0 for the {road} road, got 0. Use Exact(road="primal"), which checks that the '
                "curvature has an inverse, or raise `ridge`."
            )
        if road == "matrix_free":
            assert ridge is not None  # leave-one-out needs a matrix
            return FittedIterative.fit(problem, ridge, self.tolerance, self.iterations)
        need = matrix_bytes(sizes, road)
        left = reserve_memory(problem, need, f"the exact structure ({road} road)", _instead(sizes))  # for rows
        algebra: type[FittedPrimal | FittedDual] = FittedPrimal if road == "primal" else FittedDual
        fitted = algebra.fit(left, problem.jacobian(), ridge)
        fitted.notes.append(f"exact algebra, {road} road, {readable(need)} planned")
        return fitted

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        road = self._road(sizes, None)
        costs = {"primal": _primal_cost, "dual": _dual_cost, "matrix_free": _matrix_free_cost}
        return costs[road](sizes, f"exact ({road.replace('_', '-')} road)")

    def _road(self, sizes: ProblemSizes, ridge: float | None) -> Road:
        """The road with the smaller matrix. The dual needs a ridge, and all examples in one process."""
        if self.road != "auto":
            return self.road
        return "dual" if sizes.numbers < sizes.d and sizes.dual and ridge != 0 else "primal"


def matrix_bytes(sizes: ProblemSizes, road: Road) -> float:
    """Memory of the road in bytes: square matrices, and a chunk of rows."""
    square = 9.0 * sizes.d**2 if road == "primal" else (10.5 if sizes.q else 5.0) * sizes.numbers**2
    return (square + 3.0 * sizes.row_chunk * sizes.k * sizes.d) * sizes.item


def _instead(sizes: ProblemSizes) -> str:
    primal, dual = readable(matrix_bytes(sizes, "primal")), readable(matrix_bytes(sizes, "dual"))
    return (
        f"For {sizes.n} examples, {sizes.k} outputs and {sizes.d} parameters the primal road takes {primal} and the "
        f"dual {dual}: take the smaller one, whence.Exact(road=...), if it fits. Else use structure='core' or 'ekfac' "
        "(a few times the weights), fewer layers (parameters='last_layer'), fewer training examples, fewer columns "
        "(hessian_columns=...) where outputs are many, a smaller chunk_size where its rows are what is too large, "
        "whence.Exact(road='matrix_free') for a handful of test points, or a larger max_memory."
    )


def _primal_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Cost with the d x d curvature."""
    rows = cached_rows_bytes(sizes, sizes.d, sizes.item, 9.0 * sizes.item * sizes.d**2)
    memory = algebra_bytes(sizes, sizes.d, rows, sizes.row_bytes)
    return Cost(name, memory, 1.0 if rows else 4.0, algebra_operations(sizes, sizes.d), rows=True)


def _dual_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Cost with the n k x n k kernel; rows that are not kept are read again for each of its blocks."""
    inner = float(sizes.n * max(sizes.k, sizes.q))
    kernel, part = inner**2 * sizes.item, 0.2 * sizes.limit
    rows = cached_rows_bytes(sizes, sizes.d, sizes.item, 5.0 * kernel)
    assembling = kernel + (max(2.0 * rows, rows + sizes.row_bytes) if rows else 2.0 * part)
    factoring = rows + (10.5 if sizes.q else 5.0) * kernel + sizes.example_bytes
    passes = 1.0 if rows else 2.0 + sizes.numbers * sizes.d * sizes.item / part
    operations = 2.0 * sizes.numbers**2 * sizes.d + (8.0 if sizes.q else 3.0) * inner**3
    return Cost(name, max(assembling, factoring), passes, operations, rows=True)


def _matrix_free_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Cost of conjugate gradients, tens of passes over the data for every solve."""
    memory = 8.0 * sizes.row_chunk * sizes.k * sizes.d * sizes.item + sizes.row_bytes + sizes.example_bytes
    return Cost(name, memory, 100.0 * sizes.numbers / sizes.row_chunk, rows=True)


@dataclass(frozen=True)
class Auto(Structure):
    """Choose the structure by size: exact where it fits in memory and takes about ten seconds at most, else the core.

    `tracer.diagnostics` says which one was chosen, and why.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], structure="auto", ridge=0.1)
        >>> tracer.diagnostics["structure"]
        'exact'
    """

    name: ClassVar[str] = "auto"
    most_operations: ClassVar[Mapping[str, float]] = OPERATIONS  # of an exact fit
    fallback: ClassVar[Structure] = Core()
    primal_first: ClassVar[bool] = False  # whether the primal road is preferred to one with fewer operations
    takes_groups: ClassVar[bool] = True  # the exact structure and the core both do
    additive: ClassVar[bool] = True  # the primal road and the core are sums over examples

    def resolve(self, problem: Linearization, ridge: float | None) -> tuple[Structure, str]:
        """Exact if it fits in memory, else the core."""
        sizes = ProblemSizes.of(problem)
        return self.choose(sizes if ridge != 0 else replace(sizes, dual=False))

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedCurvature:
        """Fit the structure that was chosen."""
        return self.resolve(problem, ridge)[0].fit(problem, ridge, meat_roots)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of the structure that would be chosen."""
        return self.choose(sizes)[0].cost(sizes)

    def choose(self, sizes: ProblemSizes) -> tuple[Structure, str]:
        """Exact by the road of fewest operations that fits and is quick, else the core; and why."""
        roads: tuple[Road, ...] = ("primal", "dual") if sizes.dual else ("primal",)
        sides = {"primal": sizes.d, "dual": sizes.numbers}
        operations = {road: sides[road] ** 2.0 * (sizes.numbers + sizes.d) for road in roads}
        memory = {road: readable(matrix_bytes(sizes, road)) for road in roads}
        ordered = sorted(roads, key=operations.__getitem__)
        for road in roads if self.primal_first else ordered:
            quick = operations[road] <= self.most_operations["cuda" if sizes.device.type == "cuda" else "cpu"]
            if quick and matrix_bytes(sizes, road) <= sizes.limit:
                return Exact(road), f"{road} road: {memory[road]}, {operations[road]:.0e} operations"
        road = ordered[0]
        return self.fallback, f"exact would take {memory[road]} and {operations[road]:.0e} operations ({road} road)"
