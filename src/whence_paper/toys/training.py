"""Two ways to train the toy networks: as in the paper, and until nothing moves any more.

`train_paper` is `torch.optim.LBFGS` with learning rate 0.1 and a fixed number of steps, one network after the other,
in float32. `train_converged` is L-BFGS with a line search in float64, on ten networks at once (each with its own
memory, step length and end), down to a small gradient. Plain L-BFGS needs thousands of iterations for that; started
from the Gauss-Newton matrix of a recent iterate instead of a multiple of the identity, it needs hundreds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .network import Architecture

MEMORY = 30  # pairs of steps and gradient changes each network remembers
REFRESH = 50  # iterations between two Gauss-Newton matrices
DAMPING = 10.0  # added to them, times the ridge: what the Hessian has beside them is at times negative
GROUP = 10  # networks trained together; more no longer fit into the processor's cache and run slower


@dataclass(frozen=True)
class Trained:
    """Trained networks.

    Attributes:
        weights: (b, p).
        objective: (b,) sum of squared errors + ridge ||w||^2 at the end.
        gradient: (b,) norm of its gradient at the end.
        iterations: (b,) iterations of L-BFGS each took.
    """

    weights: Tensor
    objective: Tensor
    gradient: Tensor
    iterations: Tensor


def train_paper(
    net: Architecture, start: Tensor, x: Tensor, y: Tensor, ridge: float, marks: Sequence[int]
) -> dict[int, Trained]:
    """Train each network with torch's `LBFGS(lr=0.1)`, in float32, and look at it after so many iterations.

    Args:
        net: the architecture.
        start: (b, p) initial weights.
        x: (b, n, i) inputs, one set for each network.
        y: (b, n, k) targets.
        ridge: lambda in the objective, on the sum scale.
        marks: numbers of iterations, rising.

    Returns:
        The networks at each mark.
    """
    rows: dict[int, list[tuple[Tensor, ...]]] = {mark: [] for mark in marks}
    for w, xb, yb in zip(start.float(), x.float()[:, None], y.float()[:, None], strict=True):
        weights = torch.nn.Parameter(w.clone())
        optimiser = torch.optim.LBFGS([weights], lr=0.1)

        def closure(weights: torch.nn.Parameter = weights, xb: Tensor = xb, yb: Tensor = yb) -> float:
            value, gradient = net.objective(weights.detach()[None], xb, yb, ridge)
            weights.grad = gradient[0]
            return float(value)

        before = 0
        for mark in marks:
            optimiser.param_groups[0].update(max_iter=mark - before, max_eval=2 * (mark - before))
            optimiser.step(closure)
            value, gradient = net.objective(weights.detach()[None], xb, yb, ridge)
            iterations = torch.tensor(optimiser.state[weights]["n_iter"])
            rows[mark].append((weights.detach().clone(), value[0], gradient.norm(), iterations))
            before = mark
    return {mark: Trained(*(torch.stack(part) for part in zip(*kept, strict=True))) for mark, kept in rows.items()}


def train_converged(
    net: Architecture,
    start: Tensor,
    x: Tensor,
    y: Tensor,
    ridge: float,
    tolerance: float = 1e-2,
    most: int = 2000,
) -> Trained:
    """Train each network until the norm of its gradient is below `tolerance`, or for `most` iterations.

    Args:
        net: the architecture.
        start: (b, p) initial weights.
        x: (b, n, i) inputs, one set for each network.
        y: (b, n, k) targets.
        ridge: lambda in the objective, on the sum scale; positive.
        tolerance: of the gradient of the objective.
        most: iterations at the most.
    """
    if ridge <= 0:
        raise ValueError(f"expected a positive ridge, got {ridge}. Without one the optimum is not unique.")
    parts = [
        _train_group(net, w.double(), xb.double(), yb.double(), ridge, tolerance, most)
        for w, xb, yb in zip(start.split(GROUP), x.split(GROUP), y.split(GROUP), strict=True)
    ]
    columns = zip(*((p.weights, p.objective, p.gradient, p.iterations) for p in parts), strict=True)
    return Trained(*(torch.cat(column) for column in columns))


@dataclass
class _State:
    """L-BFGS on several networks; every tensor has the networks along its first axis."""

    index: Tensor  # (b,) place of each network in the result
    weights: Tensor  # (b, p)
    value: Tensor  # (b,)
    gradient: Tensor  # (b, p)
    start: Tensor  # (b, p, p) the inverse Hessian before any memory
    steps: Tensor  # (b, m, p) the last steps, written round and round
    changes: Tensor  # (b, m, p) and the gradient's changes over them
    inverse: Tensor  # (b, m) 1 / <step, change>, zero for a pair to be left out

    def keep(self, mask: Tensor) -> _State:
        return _State(*(getattr(self, name)[mask] for name in self.__dataclass_fields__))


def _train_group(
    net: Architecture, start: Tensor, x: Tensor, y: Tensor, ridge: float, tolerance: float, most: int
) -> Trained:
    b, p = start.shape
    value, gradient = net.objective(start, x, y, ridge)
    none = start.new_zeros(b, MEMORY, p)
    state = _State(torch.arange(b), start, value, gradient, start, none, none.clone(), none[..., 0].clone())
    result = Trained(start.clone(), value.clone(), gradient.norm(dim=1), torch.full((b,), most))
    for iteration in range(1, most + 1):
        if iteration % REFRESH == 1:
            state.start = _inverse_curvature(net, state.weights, x, ridge)
        _step(state, net, x, y, ridge, iteration)
        done = state.gradient.norm(dim=1) <= tolerance
        if iteration == most:
            done = torch.ones_like(done)
        if bool(done.any()):
            at = state.index[done]
            result.weights[at], result.objective[at] = state.weights[done], state.value[done]
            result.gradient[at], result.iterations[at] = state.gradient[done].norm(dim=1), iteration
            state, x, y = state.keep(~done), x[~done], y[~done]
        if not len(state.index):
            break
    return result


def _inverse_curvature(net: Architecture, weights: Tensor, x: Tensor, ridge: float) -> Tensor:
    tangents = net.tangents(weights, x).flatten(1, 2)
    curvature = tangents.mT @ tangents
    curvature.diagonal(dim1=1, dim2=2).add_((1 + DAMPING) * ridge)
    return torch.cholesky_inverse(torch.linalg.cholesky(curvature)) / 2  # the objective has no 1/2


def _times(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[:, :, None])[:, :, 0]


def _step(state: _State, net: Architecture, x: Tensor, y: Tensor, ridge: float, iteration: int) -> None:
    newest_first = [(iteration - 2 - age) % MEMORY for age in range(min(iteration - 1, MEMORY))]
    direction = _direction(state, newest_first)
    slope = (direction * state.gradient).sum(1)
    uphill = slope >= 0  # the memory is of no use there
    if bool(uphill.any()):
        direction[uphill] = -_times(state.start[uphill], state.gradient[uphill])
        slope = (direction * state.gradient).sum(1)
    weights, value, gradient = _search(state, direction, slope, net, x, y, ridge)
    step, change = weights - state.weights, gradient - state.gradient
    product = (step * change).sum(1)
    useful = product > 1e-10 * step.norm(dim=1) * change.norm(dim=1)
    place = (iteration - 1) % MEMORY
    state.steps[:, place], state.changes[:, place] = step, change
    state.inverse[:, place] = torch.where(useful, 1 / product.clamp_min(1e-300), 0.0)
    state.weights, state.value, state.gradient = weights, value, gradient


def _direction(state: _State, newest_first: list[int]) -> Tensor:
    """-(inverse Hessian) gradient, by the two-loop recursion."""
    direction = -state.gradient
    weights = {}
    for place in newest_first:
        weights[place] = state.inverse[:, place] * (state.steps[:, place] * direction).sum(1)
        direction = direction - weights[place][:, None] * state.changes[:, place]
    direction = _times(state.start, direction)
    for place in reversed(newest_first):
        back = state.inverse[:, place] * (state.changes[:, place] * direction).sum(1)
        direction = direction + (weights[place] - back)[:, None] * state.steps[:, place]
    return direction


def _search(
    state: _State, direction: Tensor, slope: Tensor, net: Architecture, x: Tensor, y: Tensor, ridge: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Shorten each network's step until its objective falls enough (Armijo's rule, quadratic interpolation)."""
    length = torch.ones_like(slope)
    weights = state.weights + direction
    value, gradient = net.objective(weights, x, y, ridge)
    for _ in range(30):
        rise = value - state.value
        # 1e-14: at the optimum, differences are rounding.
        failed = (~(rise <= 1e-4 * length * slope + 1e-14 * state.value)).nonzero()[:, 0]
        if not len(failed):
            break
        t, s = length[failed], slope[failed]
        best = -s * t**2 / (2 * (rise[failed] - s * t))
        length[failed] = torch.where(best.isfinite(), best, t / 2).clamp(0.1 * t, 0.5 * t)
        weights[failed] = state.weights[failed] + length[failed, None] * direction[failed]
        value[failed], gradient[failed] = net.objective(weights[failed], x[failed], y[failed], ridge)
    return weights, value, gradient
