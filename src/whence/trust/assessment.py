"""How far to trust a fit: compare a sample of predictions with exact solves.

The exact curvature F_lam = sum_i J_i^T L_i J_i + lambda is never formed. Conjugate gradients on products with the
Jacobian solve it. They give the variances of a sample of predictions, the Newton step, the steps without the most
influential examples, and degrees of freedom. The network's outputs after such a step give the linearization error.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from whence.curvature import Sandwich
from whence.curvature.aligned import FittedIterative, Solved, conjugate_gradients, curvature_times
from whence.curvature.base import times_hessian
from whence.data.batches import Inputs, batch_size, take
from whence.influence.fitted import Fitted, inputs_of, join_batches, training_examples, using_model
from whence.jacobian.functionals import OutputMixtures
from whence.jacobian.leaves import LeafSum
from whence.linalg import largest
from whence.runtime.model_state import rounded_products
from whence.trust import checks
from whence.trust.checks import FINE, Check, Trust, fold_change, if_solved, level_of, own_checks, worst

ITERATIONS = 1000  # most iterations of an exact solve
PARTS = ("the sample", "exact steps", "exact variances")  # shown in the progress line


def assess(fitted: Fitted, x: Any, sample: int, seed: int, tolerance: float, seconds: float) -> Trust:
    """Check a sample of predictions; see `Tracer.trust`."""
    start = time.monotonic()
    # Not the seed itself: data drawn with the same seed would select itself, smallest numbers first.
    generator = torch.Generator("cpu").manual_seed((seed * 2_654_435_761 + 104_729) % 2**63)
    problem = fitted.problem
    part = iter(problem.progress.track(PARTS, "trust, part", len(PARTS)))  # each `next` starts a part
    with using_model(fitted):
        next(part)
        drawn = draw_sample(fitted, x, sample, generator)
        shapes = [(batch_size(inputs, "the sample"), problem.output_count(inputs)) for inputs in drawn]
        directions = [random_signs(shape, problem.outputs, generator) for shape in shapes]
        ours = variances_along(fitted.sandwich, drawn, directions)
        deletions = most_influential(fitted, drawn, min(max(1, sample // 4), 8))
        next(part)
        with rounded_products(False):
            columns = problem.hessian_roots.shape[2]
            signs = random_signs((max(2, sample // 8), problem.n, columns), problem.outputs, generator)
            first = ExactSolver.of(fitted, tolerance, ITERATIONS, start + 0.5 * seconds)
            steps = first.steps(deletions, signs)
            next(part)
            second = ExactSolver.of(fitted, tolerance, ITERATIONS, start + seconds)
            # with the weights that the fit gave to its examples, so that only the curvature is compared
            exact = variances_along(second.sandwich(fitted.meats), drawn, directions)
            factor = float(_ratio(ours["hec3"], exact["hec3"]).median())  # scales standard errors to the exact ones
            hec3 = [fitted.sandwich.predict(inputs).covariances["hec3"] for inputs in drawn]
            traces = torch.cat([one.diagonal(dim1=1, dim2=2).sum(1) for one in hec3])
            errors = (traces / factor if factor > 0 else traces).clamp_min(0.0).sqrt()
            solved = first.residual <= checks.UNCONVERGED
            found = (
                _check_variances(ours, exact, second.residual),
                _check_loo_residuals(fitted, deletions, steps, first.residual),
                *_check_steps(first, drawn, deletions, steps, errors),
                *own_checks(fitted, steps.degrees_of_freedom if solved else None),
            )
    return Trust(found, len(errors), time.monotonic() - start)


def variances_along(sandwich: Sandwich, sample: list[Inputs], directions: list[Tensor]) -> dict[str, Tensor]:
    """(m,) variances of each estimator along directions v of the outputs, (m, k) per batch: v^T J F^-1 M F^-1 J^T v."""
    views = [OutputMixtures(inputs, some.unsqueeze(2)) for inputs, some in zip(sample, directions, strict=True)]
    return join_batches([{n: v.flatten() for n, v in sandwich.predict(view).covariances.items()} for view in views])


def _check_variances(ours: dict[str, Tensor], exact: dict[str, Tensor], residual: float) -> Check:
    """How far variances are from those of the exact curvature, in size and in order.

    Ranks count only if single predictions deviate from the typical factor.
    """
    pairs = {name: (ours[name], exact[name]) for name in ("ho", "hec3")}
    pairs["ratio"] = _ratio(ours["hec3"], ours["ho"]), _ratio(exact["hec3"], exact["ho"])
    factors = {name: _ratio(*pair) for name, pair in pairs.items()}
    typical = {name: float(one.median()) for name, one in factors.items()}
    ranks = {name: rank_correlation(*pair) for name, pair in pairs.items()}
    largest = {name: max(fold_change(float(one)) for one in factors[name]) for name in ("ho", "hec3")}
    scattered = [
        ranks[name]
        for name, middle in typical.items()
        if middle <= 0 or max(fold_change(float(one) / middle) for one in factors[name]) > checks.FOLD[0]
    ]
    size = worst(level_of(fold_change(typical[name]), checks.FOLD) for name in largest)
    order = worst([FINE, *(level_of(rank, checks.RANK) for rank in scattered if not math.isnan(rank))])
    words = "Variances have the size and order that the exact curvature gives."
    if order != FINE:
        words = "Not even the order of predictions is that of the exact curvature."
    elif size != FINE:
        words = "Variances are off by a factor, but predictions keep their order: rank by them, do not scale by them."
    if (level := worst([size, order])) != FINE:
        words += ' Use structure="core" (or "exact" where it fits in memory) to read variances as variances.'
    numbers = {name: typical[name] for name in largest} | {f"{name} rank": rank for name, rank in ranks.items()}
    numbers |= {"worst": max(largest.values()), "solved": residual}
    return if_solved(Check("distance", level, numbers, words), residual)


def _check_loo_residuals(fitted: Fitted, deletions: Tensor, steps: ExactSteps, residual: float) -> Check:
    """Squared leave-one-out residuals of the structure against exact ones."""
    if not len(deletions):
        words = "There are no residuals, so that leaving an example out changes nothing."
        return Check("leave-one-out", checks.SKIPPED, {}, words)
    ours, exact = (
        [float(fitted.problem.isometric(one).square().sum()) for one in some]
        for some in (deletions * fitted.adjusted.hec3, steps.loo_residuals)
    )
    factor = sum(ours) / sum(exact) if sum(exact) > 0 else 1.0
    largest = max(fold_change(a / b) if b > 0 else math.inf for a, b in zip(ours, exact, strict=True))
    level = worst([level_of(fold_change(factor), checks.FOLD), FINE if largest <= checks.FOLD[0] else checks.CAREFUL])
    words = "Leave-one-out residuals of the most influential examples, squared, are those of the exact curvature."
    if level != FINE:
        words = (
            "Leave-one-out residuals of the most influential examples, squared, are off by a factor, and HeC3 with "
            'them: this structure\'s leverages are not true. Use structure="core" or "exact".'
        )
    numbers = {"factor": factor, "worst": largest, "examples": float(len(deletions))}
    return if_solved(Check("leave-one-out", level, numbers, words), residual)


def _check_steps(
    solver: ExactSolver, sample: list[Inputs], deletions: Tensor, steps: ExactSteps, errors: Tensor
) -> tuple[Check, Check]:
    """Stationarity and linearization: effect of exact steps on predictions, linearized and by the network itself."""
    fitted, problem, recentered = solver.fitted, solver.problem, solver.fitted.loo.recenter
    direction = fitted.step.direction if recentered else None
    remaining = steps.newton if direction is None else steps.newton - direction
    size = float(remaining.norm() / problem.weights().norm().clamp_min(torch.finfo(remaining.dtype).tiny))
    moved = torch.cat([solver.jacobian.jvp(inputs, remaining.unsqueeze(0))[0] for inputs in sample])
    newton_step = steps.newton if direction is None else direction
    along_newton, _, hidden = linearization_error(solver, sample, None, newton_step.unsqueeze(0))
    newton = _root_mean_square(along_newton[0], errors)
    factor = checks.factor_after_step(fitted, steps.change)
    far, trees = newton > checks.NEWTON_CHANGE[1], isinstance(problem.network.model, LeafSum)
    change = _root_mean_square(moved.norm(dim=1), errors)
    stationarity = checks.stationarity(size, change, factor, recentered, far, trees)
    if recentered or not trees:  # for trees nothing is concluded from the solves
        stationarity = if_solved(stationarity, solver.residual)
    loo, own = 0.0, 0.0
    if len(deletions):
        _, loo, hidden = linearization_error(solver, sample, direction, steps.deletions)
        own = own_linearization_error(solver, deletions, direction, steps.deletions)
    return stationarity, if_solved(checks.linearization(loo, own, newton, recentered, hidden), solver.residual)


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation, ties in the order given; NaN for fewer than three values.

    Examples:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.1, 0.3, 0.2]))
        0.5
    """
    if len(one) < 3:
        return math.nan
    ranks = torch.stack([values.double().argsort(stable=True).argsort().double() for values in (one, other)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _root_mean_square(values: Tensor, errors: Tensor) -> float:
    """Root mean square of values over standard errors."""
    return float(_ratio(values, errors, otherwise=0.0).square().mean().sqrt())


def _ratio(one: Tensor, other: Tensor, otherwise: float = 1.0) -> Tensor:
    """The ratio; `otherwise` where both are zero."""
    zero = (one == 0) & (other == 0)
    return torch.where(zero, otherwise, one / torch.where(zero, 1.0, other))


VECTORS_PER_SOLVE = 10  # vectors of the size of the weights that a solve keeps per right-hand side
ROUNDING = 16  # units in the last place by which outputs may differ from their linearization


def draw_sample(fitted: Fitted, x: Any, most: int, generator: torch.Generator) -> list[Inputs]:
    """Draw up to `most` inputs at random, from x or else from the training examples that count."""
    if x is None:
        counted = fitted.counted.nonzero().squeeze(1)
        order = torch.randperm(len(counted), generator=generator, device="cpu")[:most]
        index = counted[order.to(counted.device)].sort().values
        return [inputs for _, inputs, _ in training_examples(fitted, index, "trust, sample")]
    drawn: list[tuple[Tensor, Inputs]] = []  # each input has a random number; those up to the bound are kept
    bound = math.inf
    for inputs, where in inputs_of(fitted, x):
        numbers = torch.rand(batch_size(inputs, where), generator=generator, dtype=torch.float64, device="cpu")
        some = numbers.argsort()[: int((numbers < bound).sum())]
        drawn.append((numbers[some], take(inputs, some)))
        known = torch.cat([numbers for numbers, _ in drawn])
        bound = float(known.kthvalue(most).values) if len(known) >= most else bound
    kept = [((numbers <= bound).nonzero().squeeze(1), inputs) for numbers, inputs in drawn]
    return [take(inputs, some) for some, inputs in kept if len(some)]


def random_signs(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs, drawn on the CPU so that they are the same on every device."""
    return (torch.randint(0, 2, shape, generator=generator, device="cpu") * 2 - 1).to(like)


def most_influential(fitted: Fitted, sample: list[Inputs], most: int) -> Tensor:
    """(t, n, k) the units that move the sample most: which outputs of which examples are left out together."""
    problem, roots, groups = fitted.problem, fitted.meats.roots["hec3"], fitted.loo.groups
    influence = torch.zeros(problem.n, roots.shape[2], dtype=problem.dtype, device=problem.device)  # |a_i W_i|^2
    for rows, aligned in (chunk for x in sample for _, chunks in fitted.bread.alignments(x) for chunk in chunks):
        influence[rows] += torch.einsum("mkni,niq->mknq", aligned.to(roots), roots[rows]).square().sum((0, 1))
    if groups is not None:
        influence = influence.new_zeros(groups.total, influence.shape[1]).index_add_(0, groups.index, influence)
    top = largest(influence.flatten(), min(most, int((influence > 0).sum())))[1]
    unit, column = top.unsqueeze(1) // influence.shape[1], top.unsqueeze(1) % influence.shape[1]
    examples = torch.arange(problem.n, device=top.device) if groups is None else groups.index
    outputs = torch.arange(problem.k, device=top.device) // (fitted.loo.width or problem.k)
    return (examples == unit).unsqueeze(2) & (outputs == column).unsqueeze(1)


@dataclass(frozen=True)
class ExactSteps:
    """Exact steps of the weights."""

    newton: Tensor  # (d,) to the optimum of the linearized model
    change: Tensor  # (n, k) of the training outputs by it
    deletions: Tensor  # (t, d) change of the weights without each unit
    loo_residuals: Tensor  # (t, n, k) residuals of each unit without it, zero elsewhere
    degrees_of_freedom: Tensor  # (h,) independent estimates


@dataclass(frozen=True, eq=False, kw_only=True)
class ExactSolver(FittedIterative):
    """The exact curvature of a fit. Solves are preconditioned by the fitted curvature.

    A solve stops at a relative residual (not below the precision of the weights), after a number of iterations, or at
    the deadline, a time of `time.monotonic`.
    """

    fitted: Fitted
    deadline: float
    solves: list[Solved] = field(default_factory=list)  # so far, without their solutions

    @classmethod
    def of(cls, fitted: Fitted, tolerance: float, iterations: int, deadline: float) -> ExactSolver:
        """Nothing is solved yet."""
        problem, bread = fitted.problem, fitted.bread
        jacobian = problem.jacobian()
        return cls(
            problem=problem,
            ridge=bread.ridge,
            leverage_blocks=bread.leverage_blocks,
            notes=[],
            jacobian=jacobian,
            tolerance=max(tolerance, 4 * jacobian.precision),
            iterations=iterations,
            fitted=fitted,
            deadline=deadline,
        )

    @property
    def residual(self) -> float:
        """The largest relative residual of the solves so far."""
        return max((float(one.reached.max()) for one in self.solves), default=0.0)

    def blocks(self, inputs: Inputs) -> Iterator[Tensor]:
        """Yield rows (m, 1, d) of a view of one mixture of the outputs."""
        size, most = batch_size(inputs, "the sample"), self.chunk_size
        for low in range(0, size, most):
            some = take(inputs, slice(low, low + most))
            units = torch.eye(min(most, size - low), dtype=self.problem.dtype, device=self.problem.device)
            yield self.jacobian.vjp(some, units.unsqueeze(2)).unsqueeze(1)

    def steps(self, deletions: Tensor, signs: Tensor) -> ExactSteps:
        """The Newton step, the steps without units (t, n, k), and the trace of the hat matrix along signs (h, n, q)."""
        problem, residuals, roots = self.problem, self.fitted.weighted_residuals, self.problem.hessian_roots
        traced = torch.einsum("nkq,hnq->hnk", roots, signs)
        cotangents = torch.cat([problem.residuals.unsqueeze(0), deletions * residuals, traced])
        right = torch.zeros(len(cotangents), problem.selection.size, dtype=problem.dtype, device=problem.device)
        for batch in problem.read("trust, steps"):
            right += self.jacobian.vjp(batch.inputs, cotangents[:, batch.rows])
        right[0] -= self.ridge * problem.weights()
        first_trace = 1 + len(deletions)
        gone = torch.zeros(cotangents.shape, dtype=torch.bool, device=deletions.device)
        gone[1:first_trace] = deletions
        chunks = zip(right.split(self.chunk_size), gone.split(self.chunk_size), strict=True)
        solved = torch.cat([self.solve(*chunk) for chunk in chunks])
        changes = self._along(solved[:first_trace])
        loo_residuals = deletions * (residuals + times_hessian(changes[1:], roots))
        traces = (right * solved)[first_trace:].sum(1)
        return ExactSteps(solved[0], changes[0], -solved[1:first_trace], loo_residuals, traces)

    def solve(self, vectors: Tensor, gone: Tensor | None = None) -> Tensor:
        """F_lam^-1 v for right-hand sides (q, d), without the terms of F_lam marked in `gone` (q, n, k)."""

        def multiply(some: Tensor, at: Tensor) -> Tensor:
            left_out = None if gone is None else gone[at]
            return curvature_times(some, self.problem, self.jacobian, self.ridge, left_out)

        found = conjugate_gradients(
            multiply,
            vectors,
            tolerance=self.tolerance,
            iterations=self.iterations,
            precondition=self.fitted.bread.precondition,
            going=lambda: time.monotonic() < self.deadline,
        )
        self.solves.append(replace(found, solution=vectors[:0]))
        return found.solution

    @property
    def chunk_size(self) -> int:
        """How many right-hand sides fit in memory at once."""
        row = VECTORS_PER_SOLVE * self.problem.selection.size * self.problem.outputs.element_size()
        return max(1, int(0.3 * self.problem.budget.limit) // row)


def linearization_error(
    solver: ExactSolver, sample: list[Inputs], start: Tensor | None, steps: Tensor
) -> tuple[Tensor, float, float]:
    """Take steps (q, d) from the weights, or from the end of the step `start`, and compare outputs on a sample.

    Returns norms (q, m) of the difference between the network's outputs and the linear change, minus possible rounding;
    the same relative to the linear change; and the share of the change that rounding may hide.
    """
    found = [_compare_outputs(solver, inputs, start, steps) for inputs in sample]
    linear, error, floor = (torch.cat([one.norm(dim=2) for one in some], dim=1) for some in zip(*found, strict=True))
    return error, _relative_norm(error, linear), _relative_norm(floor, linear)


def own_linearization_error(solver: ExactSolver, deletions: Tensor, start: Tensor | None, steps: Tensor) -> float:
    """The relative error on the unit left out, along the step without it: that of leave-one-out residuals."""
    found = [
        _compare_outputs(solver, take(inputs, unit[which].any(1).nonzero().squeeze(1)), start, step.unsqueeze(0))
        for which, inputs, _ in training_examples(solver.fitted, deletions.any(2).any(0).nonzero().squeeze(1))
        for unit, step in zip(deletions, steps, strict=True)
        if bool(unit[which].any())
    ]
    linear, error, _ = (torch.cat([one.flatten() for one in some]) for some in zip(*found, strict=True))
    return _relative_norm(error, linear)


def _relative_norm(some: Tensor, whole: Tensor) -> float:
    size = float(whole.norm())
    return float(some.norm()) / size if size > 0 else 0.0


def _compare_outputs(
    solver: ExactSolver, inputs: Inputs, start: Tensor | None, steps: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, m, k) each: the linear change of outputs, its error, and the rounding that was subtracted from the error."""
    problem, selection = solver.problem, solver.problem.selection

    def as_stored(weights: Tensor) -> Tensor:  # rounded to the precision of the parameters
        return selection.flatten({name: p.double() for name, p in selection.unflatten(weights, cast=True).items()})

    def outputs(weights: Tensor) -> Tensor:
        with torch.no_grad():
            return problem.network.with_parameters(selection.unflatten(weights, cast=True), inputs).double()

    weights = problem.weights().double()
    before = as_stored(weights if start is None else weights + start)
    base, after = outputs(before), [as_stored(before + step) for step in steps]
    taken = torch.stack([one - before for one in after])  # the step that remains after rounding to single precision
    linear = solver.jacobian.jvp(inputs, taken.to(problem.dtype)).double()
    change = torch.stack([outputs(one) for one in after]) - base
    floor = ROUNDING * solver.jacobian.precision * base.abs().amax(1, keepdim=True).expand_as(base).expand_as(linear)
    return linear, ((change - linear).abs() - floor).clamp_min(0.0), floor
