"""A small network that is trained to its optimum, which is where `whence` is exact."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Generator, Tensor, nn

TOLERANCE = 1e-7
"""Largest gradient, over the number of examples, at which training ends."""


class Scaled(nn.Module):
    """A network between inputs and outputs in their own units: f(x) = shift + scale * net((x - middle) / spread).

    Args:
        net: takes and gives numbers of the size of one.
        x: (n, i) training inputs, whose means and standard deviations are kept.
        y: (n, k) training targets; `None` for outputs that are logits. All outputs share one scale, so that squared
            errors in their own units are those of the network but for a factor.
    """

    middle: Tensor
    spread: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor | None) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("middle", x.mean(0))
        self.register_buffer("spread", _at_least(x.std(0, correction=0)))
        self.register_buffer("shift", x.new_zeros(()) if y is None else y.mean(0))
        spread = x.new_ones(()) if y is None else (y - y.mean(0)).square().mean().sqrt()
        self.register_buffer("scale", _at_least(spread))

    def forward(self, x: Tensor) -> Tensor:
        """(n, k) outputs for (n, i) inputs."""
        outputs: Tensor = self.shift + self.scale * self.net((x - self.middle) / self.spread)
        return outputs


def layers(sizes: Sequence[int], generator: Generator) -> nn.Sequential:
    """Linear layers with tanh in between, in float64, with weights drawn from a generator.

    Examples:
        >>> net = layers((3, 5, 2), torch.Generator().manual_seed(0))
        >>> net(torch.zeros(4, 3, dtype=torch.float64)).shape
        torch.Size([4, 2])
    """
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        linear = nn.Linear(inputs, outputs, dtype=torch.float64, device="cpu")
        reach = 1.0 / math.sqrt(max(inputs, 1))
        with torch.no_grad():
            for parameter in linear.parameters():
                drawn = torch.rand(parameter.shape, generator=generator, dtype=torch.float64, device="cpu")
                parameter.copy_(reach * (2.0 * drawn - 1.0))
        parts += [linear, nn.Tanh()]
    return nn.Sequential(*parts[:-1])


def train(
    model: Scaled, x: Tensor, y: Tensor, loss: Literal["squares", "cross_entropy"], ridge: float, steps: int
) -> int:
    """Minimise sum of squared errors + ridge ||w||^2, or sum of cross-entropies + ridge / 2 ||w||^2, by L-BFGS.

    Squared errors are in units of the model's scale. Returns the number of iterations.
    """
    parameters = list(model.parameters())
    optimizer = torch.optim.LBFGS(
        parameters,
        max_iter=steps,
        max_eval=2 * steps + 20,
        tolerance_grad=TOLERANCE,
        tolerance_change=1e-14,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        outputs = model(x)
        if loss == "squares":
            total = ((outputs - y) / model.scale).square().sum() / 2
        else:
            total = nn.functional.cross_entropy(outputs, y, reduction="sum")
        size = torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        value: Tensor = (total + ridge / 2 * size) / len(x)
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(objective)
    optimizer.zero_grad()
    model.eval()
    return int(optimizer.state[parameters[0]]["n_iter"])


def _at_least(spread: Tensor) -> Tensor:
    """Standard deviations, with one in the place of zero: what does not vary needs no scale."""
    return torch.where(spread > 1e-12, spread, torch.ones_like(spread))
