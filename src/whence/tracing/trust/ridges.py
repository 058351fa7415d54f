"""Do verdicts hang on lambda? The same fit at ridges a decade below and above."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from whence.errors import InputError, SingularCurvatureError, TooLargeError
from whence.tracing import verdicts
from whence.tracing.calibration import Calibration
from whence.tracing.fitted import Fitted
from whence.tracing.parts import assemble

from .sample import Points

DECADES = (-1.0, 1.0)
"""Powers of ten by which lambda is moved: two decades between the ends."""


EXAMPLES = 200
"""Training examples that say at each lambda what is usual."""


@dataclass(frozen=True)
class Sensitivity:
    """What becomes of verdicts.

    Attributes:
        same: share of predictions whose verdict is the same at all ridges.
        below: share that keeps it a decade below.
        above: share that keeps it a decade above.
    """

    same: float
    below: float
    above: float


def sensitivity(fitted: Fitted, points: Points, level: float) -> Sensitivity | str:
    """Verdicts at other ridges; in words, why there are none."""
    if fitted.weighing.groups is not None:
        return "verdicts are about single examples, and this fit leaves whole groups out"
    if fitted.bread.ridge <= 0:
        return "the fit has no ridge"
    given = _verdicts(fitted, points, level)
    try:
        others = [_verdicts(at_ridge(fitted, fitted.bread.ridge * 10.0**decade), points, level) for decade in DECADES]
    except (InputError, TooLargeError, SingularCurvatureError) as error:
        return str(error).split(". ")[0].removeprefix("expected ")
    kept = [[a == b for a, b in zip(given, other, strict=True)] for other in others]
    below, above = (sum(one) / len(given) for one in kept)
    return Sensitivity(sum(a and b for a, b in zip(*kept, strict=True)) / len(given), below, above)


def at_ridge(fitted: Fitted, ridge: float) -> Fitted:
    """The same fit with another lambda, from the curvature at hand."""
    weighing, problem = fitted.weighing, fitted.problem
    bread = fitted.bread.at(ridge, weighing.columns)
    bread.tf32 = fitted.bread.tf32
    parts = assemble(problem, bread, weighing, unbiased=False)  # the scale of the noise does not change a verdict
    given = cast(Any, fitted)  # a frozen dataclass, whichever
    return cast(
        Fitted,
        replace(
            given,
            bread=bread,
            sandwich=parts.sandwich,
            meats=parts.meats,
            left_out=parts.left_out,
            step=parts.step,
            sigma=parts.noise.covariance,
            noise_scale=parts.noise.scale,
        ),
    )


def _verdicts(fitted: Fitted, points: Points, level: float) -> list[str]:
    usual = Calibration.of(fitted, EXAMPLES)
    return [word for _, inputs in points for word in verdicts.explain(fitted, inputs, usual, level, 1).verdicts]
