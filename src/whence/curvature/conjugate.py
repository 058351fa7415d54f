"""Conjugate gradients for several right-hand sides at once, each stopping by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Multiply = Callable[[Tensor, Tensor], Tensor]
"""From vectors (a, d) and their positions (a,) among all right-hand sides to their images (a, d)."""


@dataclass(frozen=True)
class Solved:
    """Solutions, and how good they are.

    Attributes:
        solution: (q, d).
        reached: (q,) size of what is left of each right-hand side, in the preconditioner's norm, over its size before.
        steps: how many were taken.
        lowest: the lowest curvature along any direction taken; a matrix that is not positive ends that solve.
    """

    solution: Tensor
    reached: Tensor
    steps: int
    lowest: float


def conjugate_gradients(
    multiply: Multiply,
    vectors: Tensor,
    *,
    tolerance: float,
    iterations: int,
    precondition: Callable[[Tensor], Tensor] | None = None,
    going: Callable[[], bool] | None = None,
) -> Solved:
    """Solve A z = v for a symmetric positive A.

    Args:
        multiply: A times some of the vectors.
        vectors: v (q, d).
        tolerance: relative size of what may be left of v.
        iterations: most steps.
        precondition: something like A^-1 for vectors (a, d), symmetric and positive; sizes are measured in its norm.
        going: asked before each step whether to go on.

    Examples:
        >>> matrix = torch.tensor([[2.0, 1.0], [1.0, 3.0]])
        >>> right = torch.tensor([[3.0, 4.0]])
        >>> found = conjugate_gradients(lambda v, _: v @ matrix, right, tolerance=1e-6, iterations=9)
        >>> found.solution.round(decimals=4)
        tensor([[1., 1.]])
    """
    turn = precondition or (lambda rest: rest)
    solution, residual = torch.zeros_like(vectors), vectors.clone()
    direction = turn(residual).clone()
    size = (residual * direction).sum(1)
    first = size.clone()
    stopped = ~(size > 0)
    lowest, steps = float("inf"), 0
    for _ in range(iterations):
        at = ((size > tolerance**2 * first) & ~stopped).nonzero().squeeze(1)
        if not len(at) or not (going is None or going()):
            break
        image = multiply(direction[at], at)
        curvature = (direction[at] * image).sum(1)
        lowest = min(lowest, float(curvature.min()))
        stopped[at[~(curvature > 0)]] = True  # also where it is no number
        at, image, curvature = (part[curvature > 0] for part in (at, image, curvature))
        if not len(at):
            break
        step = (size[at] / curvature).unsqueeze(1)
        solution[at] += step * direction[at]
        residual[at] -= step * image
        turned = turn(residual[at])
        fresh = (residual[at] * turned).sum(1)
        direction[at] = turned + (fresh / size[at]).unsqueeze(1) * direction[at]
        size[at] = fresh
        steps += 1
    tiny = torch.finfo(size.dtype).tiny
    return Solved(solution, (size.clamp_min(0.0) / first.clamp_min(tiny)).sqrt(), steps, lowest)
