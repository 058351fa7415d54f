"""How far to trust a fit: a sample of predictions against exact solves, and verdicts at other ridges."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from whence.data.batches import Inputs, batch_size
from whence.errors import InputError, SingularCurvatureError, TooLargeError
from whence.estimators import assemble
from whence.influence.fitted import Fitted, using_model
from whence.jacobian.leaves import LeafSum
from whence.runtime.model_state import rounded_products
from whence.trust import checks
from whence.trust.checks import Check, Trust, fold
from whence.trust.exact import (
    Deletion,
    ExactSolver,
    ExactSteps,
    draw_sample,
    fewer,
    linearization_error,
    most_influential,
    own_linearization_error,
    random_signs,
)

ITERATIONS = 1000
"""Most iterations of an exact solve."""

VERDICT_FACTOR = 4
"""Verdicts are compared for so many times the sample: they cost less than solves."""

RIDGE_FACTORS = (0.1, 10.0)
"""Factors on lambda at which verdicts are compared."""

PARTS = ("the sample", "exact steps", "exact variances", "other ridges")
"""That are counted while they last."""

LEAST_RANKED = 3
"""Predictions whose order is compared at other ridges."""


def assess(fitted: Fitted, x: Any, sample: int, seed: int, tolerance: float, seconds: float) -> Trust:
    """Check a sample of predictions; see `Tracer.trust`."""
    start = time.monotonic()
    # Not the seed itself: data drawn with the same one would choose itself, the smallest numbers first.
    generator = torch.Generator("cpu").manual_seed((seed * 2_654_435_761 + 104_729) % 2**63)
    problem = fitted.problem
    part = iter(problem.progress.track(PARTS, "trust, part", len(PARTS)))  # what comes after `next` is the part
    with using_model(fitted):
        next(part)
        many = draw_sample(fitted, x, VERDICT_FACTOR * sample, generator)
        few = fewer(many, sample)
        shapes = [(batch_size(inputs, "the sample"), problem.output_count(inputs)) for inputs in few]
        directions = [random_signs(shape, problem.outputs, generator) for shape in shapes]
        ours = StructureVariances.of(fitted, few, directions)
        deletions = most_influential(fitted, few, min(max(1, sample // 4), 8))
        next(part)
        with rounded_products(False):
            columns = problem.k if problem.hessian_roots is None else problem.hessian_roots.shape[2]
            signs = random_signs((max(2, sample // 8), problem.n, columns), problem.outputs, generator)
            first = ExactSolver(fitted, tolerance, ITERATIONS, start + 0.4 * seconds)
            steps = first.steps(deletions, signs)
            next(part)
            second = ExactSolver(fitted, tolerance, ITERATIONS, start + 0.8 * seconds)
            exact = second.variances(few, directions)
            found = [
                _check_variances(ours, exact, second.residual),
                _check_loo_residuals(fitted, deletions, steps, first.residual),
                *_check_steps(first, few, deletions, steps, ours.standard_errors(exact)),
                _check_degrees_of_freedom(fitted, steps, first.residual),
                checks.leverage(fitted),
            ]
        next(part)
        found.append(_check_ridges(fitted, many, late=time.monotonic() - start > seconds))
        found.extend(checks.trust_of_columns(fitted))
        found.extend(checks.trust_of_gradients(fitted))
    return Trust(tuple(found), len(ours.hec3), time.monotonic() - start)


@dataclass(frozen=True)
class StructureVariances:
    """What the fit says about a sample.

    Attributes:
        along: (m,) variances along one direction of the outputs of each prediction, by name.
        hec3: (m,) traces of HeC3.
    """

    along: dict[str, Tensor]
    hec3: Tensor

    @classmethod
    def of(cls, fitted: Fitted, sample: list[Inputs], directions: list[Tensor]) -> StructureVariances:
        """From the structure's own covariances."""
        along: dict[str, list[Tensor]] = {"ho": [], "hec3": [], "laplace": []}
        traces = []
        for inputs, some in zip(sample, directions, strict=True):
            found = fitted.sandwich.predict(inputs).covariances
            for name, values in along.items():
                values.append(torch.einsum("mk,mkl,ml->m", some, found[name], some))
            traces.append(torch.diagonal(found["hec3"], dim1=1, dim2=2).sum(1))
        return cls({name: torch.cat(values) for name, values in along.items()}, torch.cat(traces))

    def standard_errors(self, exact: dict[str, Tensor]) -> Tensor:
        """(m,) of all outputs together, scaled to the size that the exact curvature gives."""
        factor = float(_over(self.along["hec3"], exact["hec3"]).median())
        return (self.hec3 / factor if factor > 0 else self.hec3).clamp_min(0.0).sqrt()


def _check_variances(ours: StructureVariances, exact: dict[str, Tensor], residual: float) -> Check:
    """Variances of the structure against exact ones."""
    numbers: dict[str, float] = {}
    spread: dict[str, float] = {}
    pairs = {name: (ours.along[name], exact[name]) for name in ("ho", "hec3")}
    pairs["ratio"] = _over(ours.along["hec3"], ours.along["ho"]), _over(exact["hec3"], exact["ho"])
    ranks: dict[str, float] = {}
    for name, (mine, true) in pairs.items():
        factors = _over(mine, true)
        typical = float(factors.median())
        if name != "ratio":
            numbers[name] = typical
        ranks[f"{name} rank"] = rank_correlation(mine, true)
        spread[name] = max(fold(float(one) / typical) if typical > 0 else math.inf for one in factors)
    numbers |= ranks
    numbers["worst"] = max(fold(float(one)) for name in ("ho", "hec3") for one in _over(*pairs[name]))
    numbers["solved"] = residual
    return checks.distance(numbers, spread, residual)


def _check_loo_residuals(fitted: Fitted, deletions: list[Deletion], steps: ExactSteps, residual: float) -> Check:
    """Squared leave-one-out residuals of the structure against exact ones."""
    ours: list[float] = []
    exact: list[float] = []
    for one, residuals in zip(deletions, steps.loo_residuals, strict=True):
        pair = fitted.adjusted.hec3[one.members], residuals
        for sums, some in zip((ours, exact), pair, strict=True):
            sums.append(float(fitted.problem.isometric(some, one.members)[:, one.outputs].square().sum()))
    factor = sum(ours) / sum(exact) if sum(exact) > 0 else 1.0
    worst = max((fold(a / b) if b > 0 else math.inf for a, b in zip(ours, exact, strict=True)), default=1.0)
    return checks.leave_one_out(factor, worst, len(deletions), residual)


def _check_steps(
    solver: ExactSolver, sample: list[Inputs], deletions: list[Deletion], steps: ExactSteps, errors: Tensor
) -> tuple[Check, Check]:
    """Stationarity and linearization: what exact steps do to predictions, linearized and by the network itself."""
    fitted, problem = solver.fitted, solver.problem
    direction = fitted.step.direction if fitted.loo.recenter else None
    taken = direction is not None
    remaining = steps.newton if direction is None else steps.newton - direction
    size = float(remaining.norm() / problem.weights().norm().clamp_min(torch.finfo(remaining.dtype).tiny))
    change = _root_mean_square(solver.output_change(sample, remaining), errors)
    newton_step = steps.newton if direction is None else direction
    along_newton = linearization_error(solver, sample, None, newton_step.unsqueeze(0))
    newton = _root_mean_square(along_newton.error[0], errors)
    factor = checks.factor_after_step(fitted, solver.training_change(steps.newton))
    far = newton > checks.NEWTON_CHANGE[1]
    trees = isinstance(problem.network.model, LeafSum)
    stationarity = checks.stationarity(size, change, factor, taken, far, solver.residual, trees)
    loo = own = 0.0
    hidden = along_newton.hidden
    if deletions:
        without = linearization_error(solver, sample, direction, steps.deletions)
        loo, hidden = without.relative, without.hidden
        own = own_linearization_error(solver, deletions, direction, steps.deletions)
    return stationarity, checks.linearization(loo, own, newton, taken, hidden, solver.residual)


def _check_degrees_of_freedom(fitted: Fitted, steps: ExactSteps, residual: float) -> Check:
    """Degrees of freedom of the structure, and Hutchinson's estimate of the exact ones."""
    found, numbers = fitted.degrees_of_freedom, fitted.problem.numbers
    if residual > checks.UNCONVERGED:
        return checks.degrees_of_freedom(found, numbers)
    estimate = float(steps.degrees_of_freedom.mean())
    # The variance of v^T H v over signs v is at most 2 tr H^2, and eigenvalues of H are at most one.
    error = (2.0 * max(estimate, 0.0) / len(steps.degrees_of_freedom)) ** 0.5
    return checks.degrees_of_freedom(found, numbers, estimate, error)


def _check_ridges(fitted: Fitted, sample: list[Inputs], late: bool) -> Check:
    """The order of predictions by HeC3 at other ridges."""
    ridge = fitted.bread.ridge
    reason = "no seconds were left" if late else "the fit has no ridge" if ridge <= 0 else ""
    if not reason:
        try:
            given, *others = (
                _hec3(fitted if factor == 1.0 else at_ridge(fitted, factor * ridge), sample)
                for factor in (1.0, *RIDGE_FACTORS)
            )
            if len(given) >= LEAST_RANKED:
                return checks.ridge_sensitivity(*(rank_correlation(given, other) for other in others))
            reason = f"fewer than {LEAST_RANKED} predictions"
        except (InputError, TooLargeError, SingularCurvatureError) as error:
            reason = str(error).split(". ")[0].removeprefix("expected ")
    return checks.not_checked("lambda", f"Variances at other ridges were not looked at: {reason}.")


def _hec3(fitted: Fitted, sample: list[Inputs]) -> Tensor:
    covariances = [fitted.sandwich.predict(inputs).covariances["hec3"] for inputs in sample]
    return torch.cat([torch.diagonal(one, dim1=1, dim2=2).sum(1) for one in covariances])


def at_ridge(fitted: Fitted, ridge: float) -> Fitted:
    """The same fit with another lambda, for HeC3 alone, from the curvature at hand."""
    bread = fitted.bread.at(ridge, fitted.loo.meat_roots)
    found = assemble(fitted.problem, bread, fitted.loo, unbiased=False, only="hec3")
    return replace(
        fitted,
        bread=bread,
        sandwich=found.sandwich,
        meats=found.meats,
        adjusted=found.adjusted,
        step=found.step,
        sigma=found.noise.covariance,
        noise_scale=found.noise.scale,
    )


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's, with ties in the order in which they come; not a number for fewer than three.

    Examples:
        >>> rank_correlation(torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.1, 0.3, 0.2]))
        0.5
    """
    if len(one) < 3:
        return math.nan
    ranks = torch.stack([values.double().argsort(stable=True).argsort().double() for values in (one, other)])
    return round(float(torch.corrcoef(ranks)[0, 1]), 12)


def _root_mean_square(values: Tensor, errors: Tensor) -> float:
    """Of values over standard errors."""
    return float(_over(values, errors, otherwise=0.0).square().mean().sqrt())


def _over(one: Tensor, other: Tensor, otherwise: float = 1.0) -> Tensor:
    """A ratio; `otherwise` where both are zero."""
    zero = (one == 0) & (other == 0)
    return torch.where(zero, otherwise, one / torch.where(zero, 1.0, other))
