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
