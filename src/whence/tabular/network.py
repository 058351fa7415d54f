"""The network for tables: two hidden layers, smooth, with outputs in the units of the target."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from whence.tabular.targets import Target

WIDTHS = tuple(range(32, 7, -4))
MOST_WEIGHTS, FEWEST_WEIGHTS = 1500, 600
"""Weights that the exact algebra takes in seconds, for some ten thousand rows, and for many more."""

ROWS_TIMES_WEIGHTS = 3e7
"""What is kept constant in between."""


class Units(nn.Module):
    """From standard deviations to the units of the target."""

    shift: Tensor
    scale: Tensor

    def __init__(self, shift: float, scale: float) -> None:
        """Kept beside the weights; not trained."""
        super().__init__()
        self.register_buffer("shift", torch.tensor(shift, device="cpu"))
        self.register_buffer("scale", torch.tensor(scale, device="cpu"))

    def forward(self, outputs: Tensor) -> Tensor:
        """Shift and scale."""
        return outputs * self.scale + self.shift


def weights_of(inputs: int, width: int, outputs: int) -> int:
    """Number of weights.

    Examples:
        >>> weights_of(8, 32, 1)
        1377
    """
    return (inputs + 1) * width + (width + 1) * width + (width + 1) * outputs


def choose_width(inputs: int, outputs: int, rows: int) -> int:
    """The widest hidden layers that keep the exact algebra fast.

    Examples:
        >>> choose_width(8, 1, 16_000), choose_width(51, 1, 36_000), choose_width(5000, 1, 100)
        (32, 12, 8)
    """
    most = min(max(ROWS_TIMES_WEIGHTS / rows, FEWEST_WEIGHTS), MOST_WEIGHTS)
    fitting = [width for width in WIDTHS if weights_of(inputs, width, outputs) <= most]
    return fitting[0] if fitting else WIDTHS[-1]


def build(inputs: int, width: int, target: Target) -> nn.Sequential:
    """The network, without sensible weights."""
    layers: list[nn.Module] = [
        nn.Linear(inputs, width, device="cpu"),
        nn.SiLU(),
        nn.Linear(width, width, device="cpu"),
        nn.SiLU(),
        nn.Linear(width, target.outputs, device="cpu"),
    ]
    if target.task == "regression":
        layers.append(Units(target.shift, target.scale))
    return nn.Sequential(*layers)


def start(network: nn.Module, generator: torch.Generator) -> None:
    """Random weights, uniform with variance 1 / (3 inputs)."""
    for layer in network.modules():
        if isinstance(layer, nn.Linear):
            bound = 1.0 / math.sqrt(layer.in_features)
            with torch.no_grad():
                layer.weight.uniform_(-bound, bound, generator=generator)
                layer.bias.uniform_(-bound, bound, generator=generator)
