"""A network that is trained to its optimum, one that is not, and a look at both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import whence

CHECKS = (
    "distance",
    "leave-one-out",
    "stationarity",
    "linearization",
    "degrees of freedom",
    "leverage",
)
RIDGE = 1.0
TEST: Tensor = torch.linspace(-2.5, 2.5, 40, dtype=torch.float64).unsqueeze(1)


def look(tracer: whence.Tracer, x: Any = TEST, **options: Any) -> whence.Trust:
    """However long it takes."""
    return tracer.trust(x, **{"seconds": 1e9, **options})


def told_at_once(tracer: whence.Tracer) -> str:
    """What the fit itself said about trust."""
    return next(finding.words for finding in tracer.diagnostics if finding.name == "trust")


def sine(n: int = 60) -> tuple[Tensor, Tensor]:
    """Points of a sine with noise."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(n, 1, generator=generator, dtype=torch.float64) * 6 - 3
    return x, x.sin() + 0.2 * torch.randn(n, 1, generator=generator, dtype=torch.float64)


def trained(ridge: float, steps: int, units: int = 6) -> nn.Sequential:
    """So many steps of L-BFGS towards the optimum of sum of squared errors + ridge |w|^2."""
    x, y = sine()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        network = nn.Sequential(nn.Linear(1, units), nn.Tanh(), nn.Linear(units, 1)).double()
    optimiser = torch.optim.LBFGS(
        network.parameters(), max_iter=steps, tolerance_grad=1e-8, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = (network(x) - y).square().sum() + ridge * sum(p.square().sum() for p in network.parameters())
        value.backward()
        return value

    optimiser.step(loss)
    return network.eval()
