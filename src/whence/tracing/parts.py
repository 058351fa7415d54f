"""From a fitted curvature to everything that depends on it: residuals, leave-one-out, meats, sandwich."""

from __future__ import annotations

from dataclasses import dataclass

from whence.curvature import Bread, Meats, NewtonStep, Sandwich
from whence.estimators import LeftOut, Weighing
from whence.likelihoods import Noise
from whence.tangents.linearization import Linearization

from .numeric_range import check_range


@dataclass(frozen=True)
class Parts:
    """What follows from a curvature and the choices of a fit."""

    step: NewtonStep
    left_out: LeftOut
    noise: Noise
    meats: Meats
    sandwich: Sandwich


def assemble(problem: Linearization, bread: Bread, weighing: Weighing, unbiased: bool) -> Parts:
    """Leave examples out, estimate the noise, and put the meats between the breads.

    Args:
        problem: the linearized training problem.
        bread: its curvature.
        weighing: how training examples are weighed.
        unbiased: whether the noise is scaled for degrees of freedom.
    """
    step = bread.newton_step(with_direction=weighing.recenter)
    everything = slice(0, problem.n)
    residuals = weighing.residuals(everything, step.change)
    left_out = weighing.left_out(everything, bread.hats, step.change)
    if weighing.groups is not None:
        left_out = weighing.groups_left_out(residuals, left_out, bread.joint_hats(weighing.groups))
    noise = problem.noise(residuals, bread.degrees_of_freedom if unbiased else None)
    check_range(problem, bread, left_out, noise)
    roots = {"ho": noise.roots, **weighing.roots_of(residuals, left_out)}
    meats = Meats(roots, left_out.hec3, weighing.deletions(problem), weighing.groups)
    return Parts(step, left_out, noise, meats, bread.sandwich(meats))
