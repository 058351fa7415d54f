"""What can be said without much work: printed with the fit."""

from __future__ import annotations

from whence.tracing.fitted import Fitted

from . import rules
from .outside import share_inside
from .result import Check, Trust


def at_once(fitted: Fitted) -> Trust:
    """Degrees of freedom, leverages, how far the structure's own Newton step would go, and what lies outside a core.

    Standard errors are the typical one of training predictions: noise times the root of degrees of freedom a number.
    """
    problem, bread = fitted.problem, fitted.bread
    residuals = fitted.meats.roots["hec0"].sum(2)
    lost = fitted.weighing.lost(slice(0, problem.n), fitted.step.change)
    noise = float(residuals.square().sum())
    error = noise * min(bread.degrees_of_freedom / max(problem.numbers, 1), 1.0)
    moves = (float(lost.square().sum()) / error) ** 0.5 if error > 0 else 0.0
    if fitted.weighing.recenter:
        moves = 0.0  # the step was taken
    checks = [
        rules.stationarity(fitted.step.relative, moves, fitted.weighing.recenter),
        rules.freedom(bread.degrees_of_freedom, problem.numbers),
        guards(fitted),
    ]
    inside = share_inside(fitted)
    if inside is not None:
        checks.append(rules.outside(inside))
    return Trust(tuple(checks))


def guards(fitted: Fitted) -> Check:
    """Counts of guarded leverages."""
    largest = float(fitted.left_out.leverage.max())
    return rules.leverage(fitted.left_out.guarded, fitted.meats.deletions, largest, fitted.weighing.policy)
