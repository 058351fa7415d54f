"""Many networks with one hidden tanh layer at once, each a row of flat weights.

The weights of a row are those of `nn.Sequential(Linear, Tanh, Linear)`, flattened in the order of its parameters.
Axis letters: b networks, n examples, i inputs, h hidden units, k outputs, p weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn


@dataclass(frozen=True)
class Architecture:
    """Sizes of a network with one hidden layer.

    Examples:
        >>> Architecture(1, 100, 1).size
        301
    """

    inputs: int
    hidden: int
    outputs: int

    @property
    def size(self) -> int:
        """Number of weights."""
        return self.hidden * (self.inputs + 1) + self.outputs * (self.hidden + 1)

    def split(self, weights: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(b, p) -> first weights (b, h, i) and biases (b, h), second weights (b, k, h) and biases (b, k)."""
        i, h, k = self.inputs, self.hidden, self.outputs
        first, bias, second, offset = weights.split([h * i, h, k * h, k], dim=-1)
        return first.unflatten(-1, (h, i)), bias, second.unflatten(-1, (k, h)), offset

    def initial(self, count: int, generator: Generator) -> Tensor:
        """(count, p) random weights, uniform in +-1/sqrt(fan in) as torch's `nn.Linear` does."""
        i, h, k = self.inputs, self.hidden, self.outputs
        bounds = torch.cat(
            [torch.full((h * (i + 1),), 1 / math.sqrt(i)), torch.full((k * (h + 1),), 1 / math.sqrt(h))]
        ).double()
        return bounds * (2 * torch.rand(count, self.size, generator=generator, dtype=torch.float64) - 1)

    def predict(self, weights: Tensor, x: Tensor) -> Tensor:
        """(b, p) networks at the same inputs (m, i) -> (b, m, k)."""
        first, bias, second, offset = self.split(weights)
        hidden = torch.tanh(x @ first.mT + bias[:, None, :])
        return hidden @ second.mT + offset[:, None, :]

    def objective(self, weights: Tensor, x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """Sum of squared errors + ridge ||w||^2 of each network on its own data, with gradients.

        Args:
            weights: (b, p).
            x: (b, n, i).
            y: (b, n, k).
            ridge: on the sum scale.

        Returns:
            (b,) values and (b, p) gradients. Written out, because autograd takes several times as long here.
        """
        first, bias, second, offset = self.split(weights)
        hidden = torch.baddbmm(bias[:, None, :], x, first.mT).tanh_()
        errors = torch.baddbmm(offset[:, None, :], hidden, second.mT).sub_(y)
        value = errors.square().sum((1, 2)) + ridge * weights.square().sum(1)
        backward = (errors @ second).mul_(1 - hidden * hidden)  # (b, n, h)
        parts = [(backward.mT @ x).flatten(1), backward.sum(1), (errors.mT @ hidden).flatten(1), errors.sum(1)]
        return value, 2 * torch.cat(parts, dim=1) + 2 * ridge * weights

    def tangents(self, weights: Tensor, x: Tensor) -> Tensor:
        """(b, n, k, p) derivatives of the outputs of each network on its own data (b, n, i)."""
        first, bias, second, _ = self.split(weights)
        b, n, k = len(x), x.shape[1], self.outputs
        hidden = torch.tanh(x @ first.mT + bias[:, None, :])
        inner = (1 - hidden**2)[:, :, None, :] * second[:, None, :, :]  # (b, n, k, h), also that of the biases
        outer = (inner[..., None] * x[:, :, None, None, :]).flatten(3)
        eye = torch.eye(k, dtype=x.dtype)
        top = (eye[:, :, None] * hidden[:, :, None, None, :]).flatten(3)
        return torch.cat([outer, inner, top, eye.expand(b, n, k, k)], dim=3)

    def module(self, weights: Tensor) -> nn.Sequential:
        """One network (p,) as a torch module, in evaluation mode and in the weights' dtype."""
        dtype = weights.dtype
        model = nn.Sequential(
            nn.utils.skip_init(nn.Linear, self.inputs, self.hidden, dtype=dtype),
            nn.Tanh(),
            nn.utils.skip_init(nn.Linear, self.hidden, self.outputs, dtype=dtype),
        )
        nn.utils.vector_to_parameters(weights.clone(), model.parameters())
        return model.eval()
