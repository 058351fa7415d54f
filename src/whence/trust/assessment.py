"""How far to trust a fit: a sample of predictions against exact solves, and verdicts at other ridges."""

from __future__ import annotations

import math
import time
from dataclasses import replace
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
from whence.trust.checks import FINE, Check, Trust, fold, if_solved, level_of, worst
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

ITERATIONS = 1000  # most iterations of an exact solve
VERDICT_FACTOR = 4  # verdicts are compared for so many times the sample: they cost less than solves
RIDGE_FACTORS = (0.1, 10.0)  # factors on lambda at which verdicts are compared
PARTS = ("the sample", "exact steps", "exact variances", "other ridges")  # that are counted while they last
LEAST_RANKED = 3  # predictions whose order is compared at other ridges


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
        ours = _structure_variances(fitted, few, directions)
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
            factor = float(_over(ours["hec3"], exact["hec3"]).median())  # standard errors of the size of the exact ones
            errors = (ours["trace"] / factor if factor > 0 else ours["trace"]).clamp_min(0.0).sqrt()
            solved = first.residual <= checks.UNCONVERGED
            found = [
                _check_variances(ours, exact, second.residual),
                _check_loo_residuals(fitted, deletions, steps, first.residual),
                *_check_steps(first, few, deletions, steps, errors),
                checks.degrees_of_freedom(fitted, steps.degrees_of_freedom if solved else None),
                checks.leverage(fitted),
            ]
        next(part)
        found.append(_check_ridges(fitted, many, late=time.monotonic() - start > seconds))
        found.extend(checks.trust_of_columns(fitted))
        found.extend(checks.trust_of_gradients(fitted))
    return Trust(tuple(found), len(errors), time.monotonic() - start)


def _structure_variances(fitted: Fitted, sample: list[Inputs], directions: list[Tensor]) -> dict[str, Tensor]:
    """(m,) Ho and HeC3 by the fit, along one direction of the outputs of each prediction, and the trace of HeC3."""
    found: dict[str, list[Tensor]] = {"ho": [], "hec3": [], "trace": []}
    for inputs, some in zip(sample, directions, strict=True):
        covariances = fitted.sandwich.predict(inputs).covariances
        for name in ("ho", "hec3"):
            found[name].append(torch.einsum("mk,mkl,ml->m", some, covariances[name], some))
        found["trace"].append(_trace(covariances["hec3"]))
    return {name: torch.cat(values) for name, values in found.items()}


def _check_variances(ours: dict[str, Tensor], exact: dict[str, Tensor], residual: float) -> Check:
    """How far variances are from those of the exact curvature, in size and in their order.

    Ranks count only where single predictions are off against the typical factor.
    """
    pairs = {name: (ours[name], exact[name]) for name in ("ho", "hec3")}
    pairs["ratio"] = _over(ours["hec3"], ours["ho"]), _over(exact["hec3"], exact["ho"])
    factors = {name: _over(*pair) for name, pair in pairs.items()}
    typical = {name: float(one.median()) for name, one in factors.items()}
    ranks = {name: rank_correlation(*pair) for name, pair in pairs.items()}
    largest = {name: max(fold(float(one)) for one in factors[name]) for name in ("ho", "hec3")}
    scattered = [
        ranks[name]
        for name, middle in typical.items()
        if middle <= 0 or max(fold(float(one) / middle) for one in factors[name]) > checks.FOLD[0]
    ]
    size = worst(level_of(fold(typical[name]), checks.FOLD) for name in largest)
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


def _check_loo_residuals(fitted: Fitted, deletions: list[Deletion], steps: ExactSteps, residual: float) -> Check:
    """Squared leave-one-out residuals of the structure against exact ones."""
    if not deletions:
        words = "There are no residuals, so that leaving an example out changes nothing."
        return checks.not_checked("leave-one-out", words)

    def size(one: Deletion, residuals: Tensor) -> float:
        return float(fitted.problem.isometric(residuals, one.members)[:, one.outputs].square().sum())

    ours = [size(one, fitted.adjusted.hec3[one.members]) for one in deletions]
    exact = [size(one, residuals) for one, residuals in zip(deletions, steps.loo_residuals, strict=True)]
    factor = sum(ours) / sum(exact) if sum(exact) > 0 else 1.0
    largest = max(fold(a / b) if b > 0 else math.inf for a, b in zip(ours, exact, strict=True))
    check = checks.judged(
        "leave-one-out",
        worst([level_of(fold(factor), checks.FOLD), FINE if largest <= checks.FOLD[0] else checks.CAREFUL]),
        {"factor": factor, "worst": largest, "examples": float(len(deletions))},
        "Leave-one-out residuals of the most influential examples, squared, are those of the exact curvature.",
        "Leave-one-out residuals of the most influential examples, squared, are off by a factor, and HeC3 with "
        'them: this structure\'s leverages are not true. Use structure="core" or "exact".',
    )
    return if_solved(check, residual)


def _check_steps(
    solver: ExactSolver, sample: list[Inputs], deletions: list[Deletion], steps: ExactSteps, errors: Tensor
) -> tuple[Check, Check]:
    """Stationarity and linearization: what exact steps do to predictions, linearized and by the network itself."""
    fitted, problem, taken = solver.fitted, solver.problem, solver.fitted.loo.recenter
    direction = fitted.step.direction if taken else None
    remaining = steps.newton if direction is None else steps.newton - direction
    size = float(remaining.norm() / problem.weights().norm().clamp_min(torch.finfo(remaining.dtype).tiny))
    change = _root_mean_square(solver.output_change(sample, remaining), errors)
    newton_step = steps.newton if direction is None else direction
    along_newton, _, hidden = linearization_error(solver, sample, None, newton_step.unsqueeze(0))
    newton = _root_mean_square(along_newton[0], errors)
    factor = checks.factor_after_step(fitted, solver.training_change(steps.newton))
    far, trees = newton > checks.NEWTON_CHANGE[1], isinstance(problem.network.model, LeafSum)
    stationarity = checks.stationarity(size, change, factor, taken, far, trees)
    if not (trees and not taken):  # of trees nothing is concluded from the solves
        stationarity = if_solved(stationarity, solver.residual)
    loo, own = 0.0, 0.0
    if deletions:
        _, loo, hidden = linearization_error(solver, sample, direction, steps.deletions)
        own = own_linearization_error(solver, deletions, direction, steps.deletions)
    return stationarity, if_solved(checks.linearization(loo, own, newton, taken, hidden), solver.residual)


def _check_ridges(fitted: Fitted, sample: list[Inputs], late: bool) -> Check:
    """The order of predictions by HeC3 at other ridges."""
    ridge, found = fitted.bread.ridge, []
    reason = "no seconds were left" if late else "the fit has no ridge" if ridge <= 0 else ""
    if not reason:
        try:
            others = (at_ridge(fitted, factor * ridge) for factor in RIDGE_FACTORS)
            found = [_hec3(one, sample) for one in (fitted, *others)]
        except (InputError, TooLargeError, SingularCurvatureError) as error:
            reason = str(error).split(". ")[0].removeprefix("expected ")
    if found and len(found[0]) < LEAST_RANKED:
        reason = f"fewer than {LEAST_RANKED} predictions"
    if reason:
        return checks.not_checked("lambda", f"Variances at other ridges were not looked at: {reason}.")
    below, above = (rank_correlation(found[0], other) for other in found[1:])
    return checks.judged(
        "lambda",
        level_of(min(below, above), checks.SAME_ORDER),
        {"a tenth": below, "ten times": above},
        "Predictions have the same order by HeC3 with a tenth and with ten times lambda.",
        "The order of predictions by HeC3 changes with lambda between a tenth and ten times its value. Make sure "
        'of lambda (the weight decay of the training, or ridge="loo").',
    )


def _hec3(fitted: Fitted, sample: list[Inputs]) -> Tensor:
    """(m,) traces of HeC3."""
    return torch.cat([_trace(fitted.sandwich.predict(inputs).covariances["hec3"]) for inputs in sample])


def _trace(covariance: Tensor) -> Tensor:
    return torch.diagonal(covariance, dim1=1, dim2=2).sum(1)


def at_ridge(fitted: Fitted, ridge: float) -> Fitted:
    """The same fit with another lambda, for HeC3 alone, from the curvature at hand."""
    bread = fitted.bread.at(ridge, fitted.loo.meat_roots)
    found = assemble(fitted.problem, bread, fitted.loo, unbiased=False, only="hec3")
    parts = {name: getattr(found, name) for name in ("sandwich", "meats", "adjusted", "step")}
    return replace(fitted, bread=bread, sigma=found.noise.covariance, noise_scale=found.noise.scale, **parts)


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
