"""Train a network for a table, and leave it close to an optimum, since that is what its variances suppose.

Several weight decays are tried on a part of the training rows, and the others, the validation rows, choose one. With it
the network is trained on all of them, by L-BFGS over whole passes, until the loss stands still. There is no stopping
early in that last training: the weight decay alone keeps the network from learning noise.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence.errors import InputError
from whence.progress import Progress

from .targets import Target

DECAYS = (1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
"""Tried from strong to weak, until two in a row are no better."""

STEPS = 50
"""Of L-BFGS between two looks at the validation rows."""

ROUNDS = 5
"""Looks at the validation rows for each weight decay."""

LAST_ROUNDS = 40
"""Rounds of steps on all training rows, at most."""

STILL = 2e-5
"""Relative change of the loss in a round at which the last training ends."""


@dataclass(frozen=True)
class Trained:
    """How the training went.

    Attributes:
        weight_decay: the one that was chosen.
        tried: each weight decay with the best validation loss it reached.
        rounds: of the last training.
        still: whether it ended because the loss stood still.
    """

    weight_decay: float
    tried: dict[float, float]
    rounds: int
    still: bool


def loss_of(target: Target, outputs: Tensor, values: Tensor) -> Tensor:
    """Mean loss over the rows; squared errors in standard deviations of the target.

    Args:
        target: what is predicted.
        outputs: (m, k) of the network, in units of the target.
        values: (m,) targets.
    """
    if target.task == "regression":
        return ((outputs[:, 0] - values) / target.scale).square().mean()
    if target.outputs == 1:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], values)
    return F.cross_entropy(outputs, values.long())


def train(
    network: nn.Module,
    start: Callable[[nn.Module], None],
    target: Target,
    data: tuple[Tensor, Tensor],
    validation: Tensor,
    progress: Progress,
) -> Trained:
    """Choose the weight decay, then train on all rows; the network is changed in place.

    Args:
        network: with any weights.
        start: gives it fresh random weights.
        target: what is predicted.
        data: inputs (n, inputs) and targets (n,) of all training rows.
        validation: (n,) which of them are validation rows.
        progress: shows how far along it is.
    """
    inputs, values = data
    inside = (inputs[~validation], values[~validation])
    outside = (inputs[validation], values[validation])
    tried: dict[float, float] = {}
    best_weights: dict[str, Tensor] = {}
    for decay in progress.track(DECAYS, "weight decays tried:", len(DECAYS)):
        start(network)
        tried[decay] = _fit_watching(network, target, inside, outside, decay)
        best = min(tried, key=lambda one: tried[one])
        if best == decay:
            best_weights = deepcopy(network.state_dict())
        if len(tried) - list(tried).index(best) > 2:
            break
    chosen = min(tried, key=lambda one: tried[one])
    if not tried[chosen] < float("inf"):
        raise InputError("expected a training that converges, got losses that are not finite. Look for extreme values.")
    network.load_state_dict(best_weights)
    rounds, still = _settle(network, target, data, chosen, progress)
    return Trained(chosen, tried, rounds, still)


def _fit_watching(
    network: nn.Module,
    target: Target,
    inside: tuple[Tensor, Tensor],
    outside: tuple[Tensor, Tensor],
    decay: float,
) -> float:
    """Train with one weight decay until the validation loss rises; the best validation loss, and its weights stay."""
    optimizer = _optimizer(network)
    best, kept, worse = float("inf"), deepcopy(network.state_dict()), 0
    for _ in range(ROUNDS):
        _round(network, optimizer, target, inside, decay)
        with torch.no_grad():
            found = float(loss_of(target, network(outside[0]), outside[1]))
        if found < best:
            best, kept, worse = found, deepcopy(network.state_dict()), 0
        else:
            worse += 1
        if worse == 2:
            break
    network.load_state_dict(kept)
    return best


def _settle(
    network: nn.Module, target: Target, data: tuple[Tensor, Tensor], decay: float, progress: Progress
) -> tuple[int, bool]:
    """Train on all rows until the loss stands still."""
    optimizer = _optimizer(network)
    before = float("inf")
    for number in progress.track(range(1, LAST_ROUNDS + 1), "training, at most: round", LAST_ROUNDS):
        now = _round(network, optimizer, target, data, decay)
        if before - now <= STILL * abs(now):
            return number, True
        before = now
    return LAST_ROUNDS, False


def _optimizer(network: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(
        network.parameters(),
        max_iter=STEPS,
        history_size=50,
        line_search_fn="strong_wolfe",
        tolerance_grad=1e-9,
        tolerance_change=0.0,
    )


def _round(
    network: nn.Module, optimizer: torch.optim.LBFGS, target: Target, data: tuple[Tensor, Tensor], decay: float
) -> float:
    """Some steps; the penalized loss before the last of them."""
    last = float("inf")

    def closure() -> Tensor:
        nonlocal last
        optimizer.zero_grad()
        penalty = torch.stack([weight.square().sum() for weight in network.parameters()]).sum()
        loss = loss_of(target, network(data[0]), data[1]) + decay / 2 * penalty
        loss.backward()
        last = min(last, float(loss.detach()))
        return loss

    optimizer.step(closure)
    return last
