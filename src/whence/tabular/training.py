"""Train a network for a table, and leave it close to an optimum, since that is what its variances suppose.

Weight decays are tried on a part of the training rows, each from the same random weights, and the loss on the others,
the validation rows, chooses. With the best one the network is trained on all training rows, by L-BFGS over whole
passes, until the loss stands still. There is no stopping early within a weight decay: it alone keeps the network from
learning noise, so that it is judged by where it leads in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence.errors import InputError
from whence.runtime.progress import Progress
from whence.tabular.targets import Target

DECAYS = (1e-1, 3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 3e-5)
"""From strong to weak."""

MIDDLE = 4
"""Where the search begins."""

STEPS = 50
"""Of L-BFGS in a round, after which the loss is looked at."""

ROUNDS = 4
"""For each weight decay, at most; as many again for the one that is chosen."""

LAST_ROUNDS = 30
"""On all training rows, at most."""

NEARLY_STILL, STILL = 1e-3, 5e-5
"""Relative changes of the loss in a round at which a trial, and the last training, end."""

AS_GOOD = 1.01
"""Of validation losses closer than this the stronger decay is taken: its optimum is nearer."""


@dataclass(frozen=True)
class Trained:
    """How the training went.

    Attributes:
        weight_decay: the one that was chosen.
        tried: each weight decay with its validation loss.
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
        validation: (n,) the round of validation in which each of them is left out, from 1; 0 for never.
        progress: shows how far along it is.
    """
    inputs, values = data
    folds = [validation == fold for fold in range(1, int(validation.max()) + 1)]
    start(network)
    first = [deepcopy(network.state_dict())] * len(folds)
    tried: dict[float, float] = {}
    reached: dict[float, list[dict[str, Tensor]]] = {}

    def trial(decay: float, weights: list[dict[str, Tensor]]) -> float:
        losses, reached[decay] = [], []
        for out, before in zip(folds, weights, strict=True):
            network.load_state_dict(before)
            _settle(network, target, (inputs[~out], values[~out]), decay, ROUNDS, NEARLY_STILL)
            with torch.no_grad():
                losses.append(float(loss_of(target, network(inputs[out]), values[out])))
            reached[decay].append(deepcopy(network.state_dict()))
        found = sum(losses) / len(losses)
        tried[decay] = found if found == found else float("inf")  # NaN is worse than anything
        return tried[decay]

    for _ in progress.track(_search(lambda decay: trial(decay, first)), "weight decays tried, at most:", len(DECAYS)):
        pass
    chosen = _choose(tried)
    while trial(chosen, reached[chosen]) > AS_GOOD * _stronger(chosen, tried):
        chosen = max(decay for decay in tried if decay > chosen and tried[decay] == _stronger(chosen, tried))
    if not tried[chosen] < float("inf"):
        raise InputError("expected a training that converges, got losses that are not finite. Look for extreme values.")
    network.load_state_dict(reached[chosen][0])
    ended = _settle(network, target, data, chosen, LAST_ROUNDS, STILL, progress)
    return Trained(chosen, tried, ended.rounds, ended.still)


def _search(trial: Callable[[float], float]) -> Iterator[float]:
    """Try decays: the middle, all stronger ones, whose optimum is soon reached, and weaker ones until one is no better.

    Examples:
        >>> list(_search(lambda decay: abs(decay - 0.003)))
        [0.001, 0.003, 0.01, 0.03, 0.1, 0.0003]
    """
    best = float("inf")
    for decay in DECAYS[MIDDLE::-1]:
        best = min(best, trial(decay))
        yield decay
    for decay in DECAYS[MIDDLE + 1 :]:
        found = trial(decay)
        yield decay
        if not found < best:
            return
        best = found


def _choose(tried: dict[float, float]) -> float:
    """The strongest decay that is as good as the best.

    Examples:
        >>> _choose({0.01: 0.5, 0.003: 0.402, 0.001: 0.4})
        0.003
    """
    least = min(tried.values())
    return max(decay for decay, loss in tried.items() if loss <= AS_GOOD * least)


def _stronger(decay: float, tried: dict[float, float]) -> float:
    """The best loss of stronger decays."""
    return min((loss for other, loss in tried.items() if other > decay), default=float("inf"))


class Ended(NamedTuple):
    """How a training with one weight decay ended: its penalized loss, rounds, and whether the loss stood still."""

    loss: float
    rounds: int
    still: bool


def _settle(
    network: nn.Module,
    target: Target,
    data: tuple[Tensor, Tensor],
    decay: float,
    rounds: int,
    change: float,
    progress: Progress | None = None,
) -> Ended:
    """Train until the loss changes by no more than a share in a round."""
    optimizer = _optimizer(network)
    before = now = float("inf")
    shown = progress or Progress(enabled=False)
    for number in shown.track(range(1, rounds + 1), "training, at most: round", rounds):
        now = _round(network, optimizer, target, data, decay)
        if before - now <= change * abs(now):
            return Ended(now, number, True)
        before = now
    return Ended(now, rounds, False)


def _optimizer(network: nn.Module) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(
        network.parameters(),
        max_iter=STEPS,
        history_size=20,
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
