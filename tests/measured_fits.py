"""Fits in processes of their own, whose peak of memory is measured: `python measured_fits.py NAME;NAME [MAX_MEMORY]`.

Each named case, or each of "all", runs in a child of this process, which has the libraries loaded, and prints a line
of JSON with the bytes gained at the peak, beside what was there before the fit.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import whence


class Case(NamedTuple):
    """A network by its widths, and a fit."""

    widths: tuple[int, ...]
    n: int
    structure: whence.Structure
    likelihood: str = "gaussian"
    positions: int = 1


class Positions(nn.Module):
    """Inputs as several positions in a row, a layer that sees each of them, their mean, a linear layer."""

    def __init__(self, positions: int, width: int, outputs: int) -> None:
        super().__init__()
        self.positions, self.first, self.last = positions, nn.Linear(width, width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(x.unflatten(1, (self.positions, -1))).tanh().mean(1))
        return outputs


class Convolutions(nn.Module):
    """Pixels as one row; two convolutions and a linear layer. Only its last width is given."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Linear(16 * 16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(self.first(x.unflatten(1, (3, 16, 16))).relu(), 2)
        outputs: Tensor = self.last(nn.functional.max_pool2d(self.second(x).relu(), 2).flatten(1))
        return outputs


CASES = {
    "primal": Case((40, 50, 30, 2), 600, whence.Exact(road="primal")),
    "primal, tall": Case((10, 20, 10, 4), 6000, whence.Exact(road="primal")),
    "dual": Case((100, 200, 100, 2), 400, whence.Exact(road="dual")),
    "dual, classes": Case((50, 60, 3), 500, whence.Exact(road="dual"), "categorical"),
    "ekfac": Case((500, 800, 600, 5), 1000, whence.EKFAC()),
    "ekfac, whole": Case((500, 800, 600, 5), 1000, whence.EKFAC(tolerance=0.0)),
    "ekfac, classes": Case((30, 50, 40), 3000, whence.EKFAC(), "categorical"),
    "ekfac, convolutions": Case((768, 4), 500, whence.EKFAC()),
    "ekfac, positions": Case((16 * 96, 10), 400, whence.EKFAC(), positions=16),
    "core, positions": Case((8 * 96, 10), 400, whence.Core(size=200), positions=8),
    "diagonal": Case((500, 800, 600, 5), 1000, whence.Diagonal()),
    "core": Case((200, 300, 200, 3), 800, whence.Core(size=1200)),
    "sketch": Case((200, 300, 200, 3), 800, whence.Sketch(size=1200)),
}


def build(case: Case) -> nn.Module:
    if case.positions > 1:
        return Positions(case.positions, case.widths[0] // case.positions, case.widths[-1]).eval()
    if len(case.widths) == 2:
        return Convolutions(case.widths[-1]).eval()
    layers: list[nn.Module] = []
    for below, above in zip(case.widths, case.widths[1:], strict=False):
        layers += [nn.Linear(below, above), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).eval()


def data(width: int, n: int, outputs: int, likelihood: str) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, width, generator=generator)
    classes = likelihood == "categorical"
    y = (
        torch.randint(0, outputs, (n,), generator=generator)
        if classes
        else torch.randn(n, outputs, generator=generator)
    )
    return list(zip(x.split(200), y.split(200), strict=True))


def ask(name: str, **options: Any) -> whence.Estimate:
    """What `whence.estimate` says about a case."""
    case = CASES[name]
    loader = data(case.widths[0], case.n, case.widths[-1], case.likelihood)
    return whence.estimate(build(case), loader, case.likelihood, case.structure, **options)


def status(key: str) -> int:
    """Bytes, as the system counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def measure(name: str, max_memory: int | None) -> None:
    case = CASES[name]
    outputs = case.widths[-1]
    small = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).eval()
    settings: dict[str, Any] = {"structure": case.structure, "progress": False}
    whence.fit(small, data(3, 30, outputs, case.likelihood), case.likelihood, **settings)  # loads what loads late
    model, loader = build(case), data(case.widths[0], case.n, outputs, case.likelihood)
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = status("VmRSS")
    try:
        whence.fit(
            model, loader, case.likelihood, ridge=10.0, execution=whence.Execution(max_memory=max_memory), **settings
        )
        refused = False
    except whence.TooLargeError:
        refused = True
    print(json.dumps({"name": name, "peak": status("VmHWM") - before, "refused": refused}), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    limit = int(sys.argv[2]) if len(sys.argv) > 2 else None
    for wanted in CASES if sys.argv[1] == "all" else sys.argv[1].split(";"):
        child = os.fork()
        if child == 0:
            measure(wanted, limit)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0, wanted
