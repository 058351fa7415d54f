"""The network for tables, with two smooth hidden layers, and its training to an optimum, which the variances assume.

Several weight decays are tried on a part of the training rows, each from the same random weights. The loss on the other
rows, the validation rows, chooses one. With it the network is trained on all training rows by L-BFGS until the loss no
longer changes. There is no early stopping: only the weight decay prevents overfitting, and it is judged at its optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from whence.errors import InputError
from whence.runtime.execution import Progress

if TYPE_CHECKING:
    from whence.tabular.target import Target  # needs pandas, which `whence.sklearn` does without

WIDTHS = tuple(range(32, 7, -4))
MAX_WEIGHTS, MIN_WEIGHTS = 1500, 600  # up to twenty thousand rows, and for many more: the algebra takes seconds
ROWS_TIMES_WEIGHTS = 3e7  # kept constant in between


class Units(nn.Module):
    """Convert standard deviations to the units of the target, or units of inputs to standard deviations."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: float | Tensor, scale: float | Tensor) -> None:
        """In float64: targets may vary by less than a millionth of their mean."""
        super().__init__()
        self.register_buffer("shift", torch.as_tensor(shift, dtype=torch.float64, device="cpu"))
        self.register_buffer("scale", torch.as_tensor(scale, dtype=torch.float64, device="cpu"))

    def forward(self, outputs: Tensor) -> Tensor:
        """Shift and scale."""
        return outputs.double() * self.scale + self.shift


def count_weights(inputs: int, width: int, outputs: int) -> int:
    """Number of weights.

    Examples:
        >>> count_weights(8, 32, 1)
        1377
    """
    return (inputs + 1) * width + (width + 1) * width + (width + 1) * outputs


def choose_width(inputs: int, outputs: int, rows: int) -> int:
    """The widest hidden layers that keep the exact algebra fast.

    Examples:
        >>> choose_width(8, 1, 16_000), choose_width(51, 1, 36_000), choose_width(5000, 1, 100)
        (32, 12, 8)
    """
    most = min(max(ROWS_TIMES_WEIGHTS / rows, MIN_WEIGHTS), MAX_WEIGHTS)
    return next((width for width in WIDTHS if count_weights(inputs, width, outputs) <= most), WIDTHS[-1])


def build_network(inputs: int, width: int, target: Target) -> nn.Sequential:
    """The network, with arbitrary weights."""
    first, second, last = (nn.Linear(*size, device="cpu") for size in pairwise((inputs, width, width, target.outputs)))
    units = [Units(target.shift, target.scale)] if target.task == "regression" else []
    return nn.Sequential(first, nn.SiLU(), second, nn.SiLU(), last, *units)


def initialize(network: nn.Module, generator: torch.Generator) -> None:
    """Draw random weights, uniform with variance 1 / (3 inputs)."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            bound = 1.0 / math.sqrt(layer.in_features)
            for parameter in (layer.weight, layer.bias):
                nn.init.uniform_(parameter, -bound, bound, generator)


# In the order in which they are tried: a middle one, all stronger ones, whose optimum is soon reached, and weaker ones
# until one is no better.
WEIGHT_DECAYS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-4, 1e-4, 3e-5)
STEPS = 50  # steps of L-BFGS in a round, after which convergence is checked
CHOOSING = 3  # most folds of validation rows that choose the weight decay
ROUNDS = 4  # most rounds for each weight decay; twice as many for the chosen one
LAST_ROUNDS = 30  # most rounds on all training rows
TRIAL_TOLERANCE, TOLERANCE = 1e-3, 5e-5  # relative changes of the loss in a round at which training ends
AS_GOOD = 1.01  # among validation losses within this factor, the stronger decay wins: its optimum is reached sooner


def mean_loss(target: Target, outputs: Tensor, values: Tensor) -> Tensor:
    """Mean loss of outputs (m, k) at targets (m,); squared errors in standard deviations of the target."""
    if target.task == "regression":
        return ((outputs[:, 0] - values) / target.scale).square().mean()
    if target.outputs == 1:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], values.to(outputs.dtype))
    return F.cross_entropy(outputs, values.long())


class Trained(NamedTuple):
    """A trained model, and its results on validation rows."""

    predictor: Any  # a network, or `Trees`
    held_out: Tensor  # (n, k) outputs of models that were trained without the row; NaN for rows in no fold
    settings: dict[str, Any]  # chosen on validation rows


def train(
    network: nn.Module, target: Target, inputs: Tensor, values: Tensor, folds: list[Tensor], progress: Progress
) -> Trained:
    """Choose the weight decay, and train on all rows with it, in place.

    Folds are masks (n,) of validation rows. The first `CHOOSING` choose the weight decay. The rows of the others are
    also predicted by networks trained without them, with the chosen weight decay.
    """
    State = dict[str, Tensor]

    def train_without(fold: Tensor, start: State, decay: float, rounds: int) -> tuple[State, Tensor]:
        """Train without a fold: the weights, and the outputs for its rows."""
        network.load_state_dict(start)
        _minimize_mean(network, target, inputs[~fold], values[~fold], decay, rounds, TRIAL_TOLERANCE)
        with torch.no_grad():
            return deepcopy(network.state_dict()), network(inputs[fold]).double()

    first, choosing = deepcopy(network.state_dict()), folds[:CHOOSING]
    losses: dict[float, float] = {}
    weights: dict[float, list[State]] = {}
    for decay in progress.track(WEIGHT_DECAYS, "weight decays tried, at most:", len(WEIGHT_DECAYS)):
        trials = [train_without(fold, first, decay, ROUNDS) for fold in choosing]
        weights[decay] = [trained for trained, _ in trials]
        known = zip(choosing, trials, strict=True)
        loss = sum(float(mean_loss(target, outputs, values[fold])) for fold, (_, outputs) in known)
        losses[decay] = loss if math.isfinite(loss) else math.inf
        if decay < WEIGHT_DECAYS[0] and losses[decay] > min(losses.values()):
            break
    chosen = max(decay for decay, loss in losses.items() if loss <= AS_GOOD * min(losses.values()))
    if losses[chosen] == math.inf:
        raise InputError("expected a training that converges, got losses that are not finite. Look for extreme values.")
    starts = [*weights[chosen], *[first] * (len(folds) - len(choosing))]
    held_out = torch.full((len(inputs), target.outputs), math.nan, dtype=torch.float64, device="cpu")
    for fold, start in progress.track(zip(folds, starts, strict=True), "training without some rows, part", len(folds)):
        held_out[fold] = train_without(fold, start, chosen, 2 * ROUNDS)[1]
    network.load_state_dict(starts[0])
    _minimize_mean(network, target, inputs, values, chosen, LAST_ROUNDS, TOLERANCE, progress)
    return Trained(network.eval(), held_out, {"weight_decay": chosen})


def _minimize_mean(network: nn.Module, target: Target, inputs: Tensor, values: Tensor, *how: Any) -> None:
    options: dict[str, Any] = {"max_iter": STEPS, "tolerance_grad": 1e-9, "tolerance_change": 0.0}
    minimize(network, lambda: mean_loss(target, network(inputs), values), *how, **options)


def minimize(
    network: nn.Module,
    loss: Callable[[], Tensor],
    decay: float,
    rounds: int = 1,
    tolerance: float = 0.0,
    progress: Progress | None = None,
    **options: Any,
) -> torch.optim.LBFGS:
    """Minimize loss + decay / 2 ||w||^2 by L-BFGS, until its relative change in a round is below the tolerance."""
    optimizer = torch.optim.LBFGS(network.parameters(), history_size=20, line_search_fn="strong_wolfe", **options)
    values = [math.inf]  # of this round

    def closure() -> Tensor:
        optimizer.zero_grad()
        penalty = torch.stack([weight.square().sum() for weight in network.parameters()]).sum()
        value = loss() + decay / 2 * penalty
        value.backward()
        values.append(float(value.detach()))
        return value

    before = math.inf
    for _ in (progress or Progress(enabled=False)).track(range(rounds), "training, at most: round", rounds):
        values[:] = [math.inf]
        with torch.enable_grad():
            optimizer.step(closure)
        best = min(values)
        if before - best <= tolerance * abs(best):
            break
        before = best
    optimizer.zero_grad()
    return optimizer
