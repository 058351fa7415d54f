"""Do outputs move as their tangents say? The network itself, with other weights, against J times the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.tangents.batches import Inputs, take
from whence.tangents.linearization import Linearization

from .sample import Deletion, Points
from .truth import Truth

ROUNDING = 16
"""Outputs may differ by so many units in the last place before a difference is taken for one."""


@dataclass(frozen=True)
class Bend:
    """How outputs move along some steps: sizes over the outputs of each point.

    Attributes:
        linear: (q, m) as the tangents say.
        gap: (q, m) by how much the network's outputs miss that, less what rounding may be.
        hidden: share of the linear change that rounding may hide.
    """

    linear: Tensor
    gap: Tensor
    hidden: float

    @property
    def error(self) -> float:
        """Size of the gap over the size of the change, all steps together."""
        size = float(self.linear.norm())
        return float(self.gap.norm()) / size if size > 0 else 0.0


def bend(truth: Truth, points: Points, start: Tensor | None, steps: Tensor) -> Bend:
    """Take steps (q, d) from the weights, or from where `start` leads from there, and look at some points."""
    parts = [_bend(truth, inputs, start, steps) for _, inputs in points]
    linear, gap, floor = (torch.cat([part[at].norm(dim=2) for part in parts], dim=1) for at in range(3))
    size = float(linear.norm())
    return Bend(linear, gap, float(floor.norm()) / size if size > 0 else 0.0)


def bend_at_home(truth: Truth, deletions: list[Deletion], start: Tensor | None, steps: Tensor) -> float:
    """The error where it matters to leave-one-out residuals: on what was left out, along the step without it."""
    gaps = sizes = 0.0
    for batch in truth.problem.batches.read(None):
        for one, step in zip(deletions, steps, strict=True):
            here = (one.members >= batch.start) & (one.members < batch.start + batch.size)
            if bool(here.any()):
                some = take(batch.inputs, one.members[here] - batch.start)  # type: ignore[arg-type]  # positions
                linear, gap, _ = _bend(truth, some, start, step.unsqueeze(0))
                gaps, sizes = gaps + float(gap.square().sum()), sizes + float(linear.square().sum())
    return (gaps / sizes) ** 0.5 if sizes > 0 else 0.0


def _bend(truth: Truth, inputs: Inputs, start: Tensor | None, steps: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    problem = truth.problem
    weights = problem.weights().double()
    before = _as_stored(problem, weights if start is None else weights + start)
    base = _outputs(problem, before, inputs)
    after = [_as_stored(problem, before + step) for step in steps]
    taken = torch.stack([there - before for there in after])  # what is left of a small step in single precision
    linear = truth.jacobian.jvp(inputs, taken.to(problem.dtype)).double()
    moved = torch.stack([_outputs(problem, there, inputs) for there in after]) - base
    coarsest = max(torch.finfo(p.dtype).eps for p in problem.selection.parameters.values())
    floor = ROUNDING * coarsest * base.abs().amax(1, keepdim=True).expand_as(base).expand_as(linear)
    return linear, ((moved - linear).abs() - floor).clamp_min(0.0), floor


def _as_stored(problem: Linearization, weights: Tensor) -> Tensor:
    """Weights (d,) rounded to the precision of the parameters."""
    return problem.selection.flatten({name: p.double() for name, p in problem.selection.like(weights).items()})


def _outputs(problem: Linearization, weights: Tensor, inputs: Inputs) -> Tensor:
    with torch.no_grad():
        return problem.network.with_parameters(problem.selection.like(weights), inputs).double()
