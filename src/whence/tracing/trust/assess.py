"""All checks, on a sample."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from whence.tangents.switches import rounded_products
from whence.tracing.asking import borrowed_model
from whence.tracing.fitted import Fitted

from . import rules
from .at_once import guards
from .bending import bend, bend_at_home
from .result import Check, Trust
from .ridges import Sensitivity, sensitivity
from .sample import Deletion, Points, draw_points, mix, most_influential, signs
from .truth import Effort, Quadratics, Steps, Truth

ITERATIONS = 1000
VERDICTS = 4
"""Verdicts are looked at for so many times the sample: they cost less than solves."""


def assess(fitted: Fitted, x: Any, sample: int, seed: int, tolerance: float, seconds: float) -> Trust:
    """Look at a sample of predictions; see `Tracer.trust`."""
    start = time.monotonic()
    # Not the seed itself: data drawn with the same one would choose itself, the smallest numbers first.
    generator = torch.Generator("cpu").manual_seed((seed * 2_654_435_761 + 104_729) % 2**63)
    with borrowed_model(fitted):
        many = draw_points(fitted, x, VERDICTS * sample, generator)
        points = many.first(sample)
        mixtures = mix(fitted, points, generator)
        given = _given(fitted, points, mixtures)
        deletions = most_influential(fitted, points, min(max(1, sample // 4), 8))
        with rounded_products(False):
            effort = Effort(tolerance, ITERATIONS, start + 0.4 * seconds)
            steps = Truth(fitted, effort).steps(deletions, _trace_signs(fitted, max(2, sample // 8), generator))
            truth = Truth(fitted, Effort(tolerance, ITERATIONS, start + 0.8 * seconds))
            exact = truth.variances(points, mixtures)
            checks = [
                compare(given, exact),
                compare_left_out(fitted, deletions, steps),
                *follow(truth, points, deletions, steps, given, exact),
                count_freedom(fitted, steps),
                guards(fitted),
            ]
        late = time.monotonic() - start > seconds
        checks.append(vary(fitted, many, late))
    return Trust(tuple(checks), len(points), time.monotonic() - start)


@dataclass(frozen=True)
class Given:
    """What the fit says about the points.

    Attributes:
        along: (m,) variances along the mixtures, by name.
        error: (m,) HeC3, all outputs together.
    """

    along: dict[str, Tensor]
    error: Tensor


def _given(fitted: Fitted, points: Points, mixtures: list[Tensor]) -> Given:
    along: dict[str, list[Tensor]] = {"ho": [], "hec3": [], "laplace": []}
    errors = []
    for inputs, mixed in zip(points.pieces, mixtures, strict=True):
        found = fitted.sandwich.predict(inputs).covariances
        for name, parts in along.items():
            parts.append(torch.einsum("mk,mkl,ml->m", mixed, found[name], mixed))
        errors.append(torch.diagonal(found["hec3"], dim1=1, dim2=2).sum(1))
    return Given({name: torch.cat(parts) for name, parts in along.items()}, torch.cat(errors))


def compare(given: Given, exact: Quadratics) -> Check:
    """Variances of the structure against exact ones."""
    numbers: dict[str, float] = {}
    spread: dict[str, float] = {}
    pairs = {name: (given.along[name], exact.values[name]) for name in ("ho", "hec3")}
    ours, theirs = (_over(side["hec3"], side["ho"]) for side in (given.along, exact.values))
    pairs["ratio"] = (ours, theirs)
    for name, (ours, theirs) in pairs.items():
        factors = _over(ours, theirs)
        typical = float(factors.median())
        if name != "ratio":
            numbers[name] = typical
        numbers[f"{name} rank"] = rank_correlation(ours, theirs)
        spread[name] = max(rules.fold(float(one) / typical) if typical > 0 else math.inf for one in factors)
    numbers["worst"] = max(rules.fold(float(one)) for pair in ("ho", "hec3") for one in _over(*pairs[pair]))
    numbers["solved"] = exact.reached
    return rules.distance(numbers, spread, exact.reached)


def compare_left_out(fitted: Fitted, deletions: list[Deletion], steps: Steps) -> Check:
    """Squared leave-one-out residuals of the structure against exact ones."""
    ours, theirs = [], []
    for one, exact in zip(deletions, steps.left_out, strict=True):
        ours.append(float(fitted.left_out.hec3[one.members][:, one.outputs].square().sum()))
        theirs.append(float(exact[:, one.outputs].square().sum()))
    total = sum(theirs)
    factor = sum(ours) / total if total > 0 else 1.0
    pairs = zip(ours, theirs, strict=True)
    largest = max((rules.fold(a / b) if b > 0 else math.inf for a, b in pairs), default=1.0)
    return rules.leave_one_out(factor, largest, len(deletions), steps.reached)


def follow(
    truth: Truth, points: Points, deletions: list[Deletion], steps: Steps, given: Given, exact: Quadratics
) -> tuple[Check, Check]:
    """Stationarity and linearization: what exact steps do to predictions, by tangents and by the network itself."""
    fitted, problem = truth.fitted, truth.problem
    taken = fitted.step.direction if fitted.weighing.recenter else None
    left = steps.newton if taken is None else steps.newton - taken
    errors = _standard_errors(given, exact)
    moves = truth.push(points, left)  # (m,)
    size = float(left.norm() / problem.weights().norm().clamp_min(torch.finfo(left.dtype).tiny))
    still = rules.stationarity(size, _in_errors(moves, errors), taken is not None, steps.reached)
    newton = bend(truth, points, None, (steps.newton if taken is None else taken).unsqueeze(0))
    gap = _in_errors(newton.gap[0], errors)
    if not deletions:
        return still, rules.linearization(0.0, 0.0, gap, taken is not None, newton.hidden, steps.reached)
    without = bend(truth, points, taken, steps.deletions)
    own = bend_at_home(truth, deletions, taken, steps.deletions)
    return still, rules.linearization(without.error, own, gap, taken is not None, without.hidden, steps.reached)


def count_freedom(fitted: Fitted, steps: Steps) -> Check:
    """Degrees of freedom of the structure, and an estimate of the exact ones."""
    if steps.reached > rules.SOLVED:
        return rules.freedom(fitted.bread.degrees_of_freedom, fitted.problem.numbers)
    estimate = float(steps.freedom.mean())
    # The variance of v^T H v over signs v is at most 2 tr H^2, and eigenvalues of H are at most one.
    error = (2.0 * max(estimate, 0.0) / len(steps.freedom)) ** 0.5
    return rules.freedom(fitted.bread.degrees_of_freedom, fitted.problem.numbers, estimate, error)


def vary(fitted: Fitted, points: Points, late: bool) -> Check:
    """Verdicts at other ridges."""
    found = "no seconds were left" if late else sensitivity(fitted, points, 0.95)
    if isinstance(found, Sensitivity):
        return rules.ridges(found.same, found.below, found.above, "")
    return rules.ridges(math.nan, math.nan, math.nan, found)


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


def _trace_signs(fitted: Fitted, count: int, generator: torch.Generator) -> Tensor:
    roots = fitted.problem.hessian_roots
    inner = fitted.problem.k if roots is None else roots.shape[2]
    return signs((count, fitted.problem.n, inner), fitted.problem.outputs, generator)


def _standard_errors(given: Given, exact: Quadratics) -> Tensor:
    """(m,) of all outputs together, with the size that the exact curvature gives."""
    factor = float(_over(given.along["hec3"], exact.values["hec3"]).median())
    return (given.error / factor if factor > 0 else given.error).clamp_min(0.0).sqrt()


def _in_errors(values: Tensor, errors: Tensor) -> float:
    """Root mean square of values over standard errors."""
    return float(_over(values, errors, none=0.0).square().mean().sqrt())


def _over(one: Tensor, other: Tensor, none: float = 1.0) -> Tensor:
    """A ratio; where both are zero, what there is none of."""
    zero = (one == 0) & (other == 0)
    return torch.where(zero, none, one / torch.where(zero, 1.0, other))
