"""The exact structure, by three algorithms with the same result; and `Auto`, the default, exact where that is quick."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from whence.curvature.accumulate import setting_aside
from whence.curvature.aligned import FittedDual, FittedIterative
from whence.curvature.base import FittedCurvature, MeatRoots, Structure, singular
from whence.curvature.core import Core
from whence.curvature.cost import Cost, ProblemSizes, Work
from whence.curvature.primal import FittedPrimal, algebra_operations, algebra_stages, rows_in_cache
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

    additive = takes_groups  # the matrix-free road reads all data for every example

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots | None = None) -> FittedCurvature:
        """Choose the road, check that it fits in memory, and take it."""
        numbers, size = problem.n * problem.k, problem.selection.size
        road = self._road(numbers, size, ridge)
        if road == "dual" and problem.passes.checkpointed:
            raise InputError(
                "expected a structure of sums over examples with a checkpoint, got the dual road, which is made of "
                f"all pairs of {problem.n} examples. Use Exact(road='primal'), 'core', 'ekfac' or 'sketch'."
            )
        if ridge == 0 and numbers < size:
            raise singular(0.0, size - numbers, size)
        if ridge == 0 and road != "primal":
            raise SingularCurvatureError(
                f'expected ridge > 0 for the {road} road, got 0. Use Exact(road="primal"), which checks that the '
                "curvature has an inverse, or raise `ridge`."
            )
        if road == "matrix_free":
            if ridge is None:
                raise InputError(
                    'expected a number as ridge for the matrix-free road, got "loo", which needs a matrix. '
                    'Use Exact(road="dual") or Exact(road="primal"), or whence.ridge_from_weight_decay.'
                )
            return FittedIterative.fit(problem, ridge, self.tolerance, self.iterations)
        need = memory_needed(problem, road)
        left = setting_aside(problem, need, f"the exact structure ({road} road)", _instead(problem))  # for the rows
        algebra: type[FittedPrimal | FittedDual] = FittedPrimal if road == "primal" else FittedDual
        fitted = algebra.fit(left, problem.jacobian(), ridge)
        fitted.notes.append(f"exact algebra, {road} road, {readable(need)} planned")
        return fitted

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        road = self._road(sizes.numbers, sizes.d, None)
        costs = {"primal": primal_cost, "dual": dual_cost, "matrix_free": matrix_free_cost}
        return costs[road](sizes, f"exact ({road.replace('_', '-')} road)")

    def _road(self, numbers: int, size: int, ridge: float | None) -> Road:
        """The road with the smaller matrix: d `size` or n k `numbers`. The dual needs a ridge."""
        if self.road != "auto":
            return self.road
        return "primal" if size <= numbers or ridge == 0 else "dual"


def memory_needed(problem: Linearization, road: str) -> float:
    """Peak memory of the road in bytes: square matrices, and a chunk of rows."""
    numbers, size = problem.n * problem.k, problem.selection.size
    item = problem.outputs.element_size()
    chunk = 3.0 * min(problem.jacobian().chunk(problem.k), problem.n) * problem.k * size * item
    if road == "primal":
        return 9.0 * size * size * item + chunk
    return (5.0 if problem.hessian_roots is None else 10.5) * numbers * numbers * item + chunk


def _instead(problem: Linearization) -> str:
    sizes = {road: memory_needed(problem, road) for road in ("primal", "dual")}
    fitting = [f"structure=whence.Exact(road='{road}')" for road, need in sizes.items() if problem.budget.fits(need)]
    ways = [
        *fitting,
        "structure='core' or 'ekfac' (a few times the weights)",
        *([] if problem.selection.one_layer else ["parameters='last_layer'"]),
        "fewer training examples",
        *(["fewer columns (hessian_columns=...)"] if problem.k > 1 else []),
        "a smaller chunk_size where its rows are what is too large",
        "structure=whence.Exact(road='matrix_free') for a handful of test points",
    ]
    return (
        f"For {problem.n} examples, {problem.k} outputs and {problem.selection.size} parameters the primal road takes "
        f"{readable(sizes['primal'])} and the dual {readable(sizes['dual'])}. What fits: {'; '.join(ways)}; or a "
        "larger max_memory."
    )


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
    most: ClassVar[Mapping[str, float]] = OPERATIONS  # operations of an exact fit
    otherwise: ClassVar[Structure] = Core()
    primal_first: ClassVar[bool] = False  # whether the primal road is preferred to one with fewer operations
    takes_groups: ClassVar[bool] = True  # the exact structure and the core both do
    additive: ClassVar[bool] = True  # the primal road and the core are sums over examples

    def resolve(self, problem: Linearization, ridge: float | None) -> tuple[Structure, str]:
        """Exact if it fits in memory, else the core."""
        memory: dict[Road, float] = {"primal": memory_needed(problem, "primal")}
        if not (problem.passes.checkpointed or ridge == 0):  # the kernel is no sum over examples
            memory["dual"] = memory_needed(problem, "dual")
        return self.choose(
            problem.n * problem.k, problem.selection.size, memory, problem.budget.limit, problem.device.type
        )

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots | None = None) -> FittedCurvature:
        """Fit the structure that was chosen."""
        return self.resolve(problem, ridge)[0].fit(problem, ridge, meat_roots)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of the structure that would be chosen."""
        roads: tuple[Road, ...] = ("primal", "dual") if sizes.dual else ("primal",)
        memory = {road: Exact(road).cost(sizes).memory for road in roads}
        return self.choose(sizes.numbers, sizes.d, memory, sizes.limit, sizes.device.type)[0].cost(sizes)

    def choose(
        self, numbers: int, size: int, memory: Mapping[Road, float], limit: float, device: str
    ) -> tuple[Structure, str]:
        """Exact by the quickest of the roads in `memory` (bytes each) that fits and is quick, else the core; and why.

        `numbers` is n k and `size` is d.
        """
        most = self.most["cuda" if device == "cuda" else "cpu"]
        operations = {road: (size if road == "primal" else numbers) ** 2.0 * (numbers + size) for road in memory}
        roads = sorted(memory, key=operations.__getitem__)
        for road in memory if self.primal_first else roads:
            if operations[road] <= most and memory[road] <= limit:
                return Exact(road), f"{road} road: {readable(memory[road])}, {operations[road]:.0e} operations"
        need = f"{readable(memory[roads[0]])} and {operations[roads[0]]:.0e} operations ({roads[0]} road)"
        return self.otherwise, f"exact would take {need}"


# --- Cost ------------------------------------------------------------------------------------------------------------


def primal_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Cost with the d x d curvature."""
    square = float(sizes.d) ** 2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    kept = rows_in_cache(rows, sizes.limit - 9.0 * square)
    read = sizes.n * (1.0 if kept else 4.0)
    return Cost(
        name,
        stages=algebra_stages(sizes, sizes.d, rows if kept else 0.0, sizes.row_bytes),
        steps={"rows": Work(read=read, rows=read), "algebra": Work(algebra=algebra_operations(sizes, sizes.d))},
        prediction=Work(rows=1.0, forward=1.0, algebra=12.0 * sizes.k * float(sizes.d) ** 2),
    )


def dual_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Cost with the n k x n k kernel."""
    inner = float(sizes.n * max(sizes.k, sizes.q))
    kernel = inner**2 * sizes.item
    rows = float(sizes.numbers) * sizes.d * sizes.item
    kept = rows_in_cache(rows, sizes.limit - 5.0 * kernel)
    held = rows if kept else 0.0
    assembling = 2.0 * rows if kept else 2.0 * 0.2 * sizes.limit
    blocks = 0.0 if kept else max(1.0, rows / (0.2 * sizes.limit))  # rows are read again for every block of the kernel
    again = 0.0 if kept else sizes.n / 100.0  # a pass for a hundred predictions or so
    read = sizes.n * (1.0 + blocks)
    stages = {
        "rows and kernel": max(assembling, held + sizes.row_bytes) + kernel,
        "factor and leverages": held + (10.5 if sizes.q else 5.0) * kernel + sizes.example_bytes,
    }
    steps = {
        "rows": Work(read=read, rows=read),
        "kernel": Work(algebra=2.0 * sizes.numbers**2 * sizes.d),
        "algebra": Work(algebra=(8.0 if sizes.q else 3.0) * inner**3),
    }
    products = 2.0 * sizes.k * sizes.numbers * (sizes.d + 2.0 * inner)
    return Cost(name, stages, steps, Work(read=again, rows=1.0 + again, forward=1.0, algebra=products))


def matrix_free_cost(sizes: ProblemSizes, name: str) -> Cost:
    """Cost of conjugate gradient solves, each of which takes tens of passes over the data."""

    def solves(count: float) -> Work:
        return Work(read=50.0 * sizes.n * count, rows=100.0 * sizes.n * count)

    memory = 8.0 * sizes.row_chunk * sizes.k * sizes.d * sizes.item + sizes.row_bytes + sizes.example_bytes
    steps = {"solves": solves(sizes.numbers / sizes.row_chunk)}
    return Cost(name, stages={"solves": memory}, steps=steps, prediction=solves(sizes.k))
