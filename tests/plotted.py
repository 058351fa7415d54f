"""Results to draw, whose numbers are known by hand, and how to read a drawing back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import whence
from whence import Uncertainty


def results(ho: list[float], hec3: list[float], mean: list[float] | None = None) -> Uncertainty:
    """Predictions of one output with these variances."""
    m = len(ho)
    values = {"ho": ho, "hec3": hec3}
    means = torch.zeros(m, 1) if mean is None else torch.tensor(mean).reshape(m, 1)
    return Uncertainty(means, {name: torch.tensor(value).reshape(m, 1, 1) for name, value in values.items()})


def line_fit(**options: Any) -> tuple[whence.Tracer, Tensor, Tensor]:
    """A straight line through twelve points, at its optimum, one of them far off."""
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).unsqueeze(1)
    y = 2 * x + 0.1 * (37 * x).sin()
    y[9] += 1.0
    options = {"ridge": 1e-6, "recenter": True, "progress": False, **options}
    return whence.fit(nn.Linear(1, 1, dtype=torch.float64), [(x, y)], **options), x, y


def class_fit(outputs: int) -> tuple[whence.Tracer, Tensor, Tensor]:
    """A linear classifier whose decision is known: the sign of the first input, or the largest of the outputs."""
    x = torch.tensor([[-1.0, 0.5], [-0.6, -0.5], [0.7, 0.4], [1.0, -0.3], [0.2, 1.0], [-0.1, -1.0]]).double()
    y = torch.tensor([0, 0, 1, 1, 1, 0])
    net = nn.Linear(2, outputs, dtype=torch.float64)
    with torch.no_grad():
        net.bias.zero_()
        net.weight.copy_(torch.tensor([[-2.0, 0.0], [2.0, 0.0], [0.0, -1.0]])[:outputs])
        if outputs == 1:
            net.weight.copy_(torch.tensor([[2.0, 0.0]]))
    targets = y.unsqueeze(1).double() if outputs == 1 else y
    kind = "bernoulli" if outputs == 1 else "categorical"
    return whence.fit(net, [(x, targets)], kind, ridge=0.5, progress=False), x, y
