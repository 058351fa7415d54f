"""Fits that are cut off while they read their data, and go on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence
from fits_to_save import STRUCTURES

BEFORE = 13
"""Batches that are read before the first pass: five for their marks, five for the outputs, three looks at the first."""


class Halt(BaseException):
    """A power cut."""


class Faulty:
    """Batches, of which reading fails after so many."""

    def __init__(self, batches: list[Any], after: int) -> None:
        self.batches, self.left = batches, after

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.left == 0:
                raise Halt
            self.left -= 1
            yield batch


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, 2)).double().eval()


def batches(n: int = 24, size: int = 5, classes: bool = False) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(n, 2, dtype=torch.float64, generator=generator)
    y = (noise[:, 0] > 0).long() if classes else x[:, :2].sin() + 0.3 * noise
    return list(zip(x.split(size), y.split(size), strict=True))


def answers(tracer: whence.Tracer) -> dict[str, Tensor]:
    found = tracer.predict(torch.linspace(-2, 2, 12, dtype=torch.float64).reshape(4, 3), covariance=True)
    parts = {name: found.covariance(name) for name in found.estimators}
    freedom = torch.tensor([tracer.degrees_of_freedom, tracer.ridge])
    return {**parts, "leverage": tracer.leverage, "loo": tracer.loo_residuals, "sigma": tracer.sigma, "dof": freedom}


def same(one: whence.Tracer, other: whence.Tracer) -> list[str]:
    a, b = answers(one), answers(other)
    return [name for name in a if not torch.equal(a[name], b[name])]


def fit(
    loader: Any, structure: str, folder: Path | None, execution: dict[str, Any] | None = None, **options: Any
) -> whence.Tracer:
    """Checkpoints are written after every batch, unless `execution` says otherwise."""
    settings: dict[str, Any] = {"ridge": 0.5, "progress": False, "recenter": True, **options}
    how = whence.Execution(**{"checkpoint": folder, "checkpoint_seconds": 0.0, **(execution or {})})
    return whence.fit(network(), loader, structure=STRUCTURES[structure], execution=how, **settings)


def until_it_ends(
    structure: str, folder: Path, data: list[Any], step: int, **options: Any
) -> tuple[whence.Tracer, int]:
    """Start again and again, with a little more time each time for the reading that comes before."""
    for attempt in range(1, 200):
        with suppress(Halt):
            return fit(Faulty(data, BEFORE - 1 + step * attempt), structure, folder, **options), attempt
    raise AssertionError("no progress")
