"""Models, loaders and data for tests that ask what happens when something is not as it should be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import whence

N, WIDTH, OUTPUTS = 8, 3, 2
CPU = torch.device("cpu")


def inputs_and_targets(device: torch.device = CPU, n: int = N, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    """Normal numbers, always the same."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    return x.to(device), y.to(device)


def batches(device: torch.device = CPU, size: int = 3) -> list[tuple[Tensor, Tensor]]:
    """The data in batches of three, three and two."""
    x, y = inputs_and_targets(device)
    return list(zip(x.split(size), y.split(size), strict=True))


def mlp(device: torch.device = CPU, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Three inputs, four tanh units, two outputs; 26 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        net = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, OUTPUTS))
    return net.to(device, dtype).eval()


def fit(model: nn.Module, loader: Any, **options: Any) -> whence.Tracer:
    """`whence.fit` without a progress line."""
    return whence.fit(model, loader, **{"ridge": 0.5, "progress": False, **options})


class Wrapped(nn.Module):
    """A tanh network whose forward, or outputs, a test changes."""

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__()
        self.net = mlp(device)

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


class Counting(Wrapped):
    """Counts its calls in a buffer, in an attribute and in a list, and keeps its last outputs."""

    calls: Tensor

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long, device=device))
        self.register_buffer("hidden", torch.zeros(2, device=device), persistent=False)
        self.times = 0
        self.history: list[Tensor] = []
        self.cache: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.hidden = self.hidden + 1  # a buffer that is replaced, not written to
        self.times += 1
        outputs: Tensor = self.net(x)
        self.history.append(outputs)
        self.cache["last"] = outputs
        self.last = outputs
        return outputs


class Breaking(Wrapped):
    """Raises on its n-th call, after leaving traces."""

    def __init__(self, at: int, error: BaseException, device: torch.device = CPU) -> None:
        super().__init__(device)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long, device=device))
        self.left, self.error = at, error

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        torch.rand(3, device=x.device)
        self.left -= 1
        if self.left == 0:
            raise self.error
        outputs: Tensor = self.net(x)
        return outputs


class Once:
    """Can be asked for an iterator again and again, but it is always the same one."""

    def __init__(self, items: list[Any]) -> None:
        self.items = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self.items


class Changing:
    """Gives its batches after a change that may differ from pass to pass."""

    def __init__(self, items: list[Any], change: Any) -> None:
        self.items, self.change, self.passes = items, change, 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        yield from self.change(self.passes, self.items)
