"""A fit that is asked again and again, as a service would: memory stays flat, answers stay the same."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

import whence

STRUCTURES: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(),
    "ekfac": whence.EKFAC(),
    "two bases": whence.EKFAC(meat="two_bases"),
}
ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


def resident() -> int:
    """Bytes of this process in memory, now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2)).double().eval()


def soak(structure: whence.Structure, predictions: int, batch: int, folder: Path) -> int:
    """Bytes gained between the first tenth of the predictions and the last; all of them are checked."""
    model = network()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    loader = [(x[:25], y[:25]), (x[25:], y[25:])]
    whence.fit(model, loader, structure=structure, ridge=0.5, progress=False).save(folder / "fit.whence")
    tracer = whence.load(folder / "fit.whence", model, loader, progress=False)
    test = torch.randn(200 * batch, 4, dtype=torch.float64)
    wanted = tracer.predict(test)
    before = done = 0
    while done < predictions:
        for number, part in enumerate(test.split(batch)):
            found = tracer.predict(part)
            here = slice(number * batch, number * batch + len(part))
            for name in ESTIMATORS:
                value = wanted.variance(name)[here]
                torch.testing.assert_close(found.variance(name), value, rtol=1e-9, atol=1e-12, msg=name)
            torch.testing.assert_close(found.mean, wanted.mean[here], rtol=1e-9, atol=1e-12)
            done += len(part)
            if not before and done >= predictions // 10:
                before = resident()
    assert done >= predictions
    return resident() - before


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to measure memory")


@needs_proc
@pytest.mark.parametrize("name", ["dual", "core", "ekfac"])
def test_a_thousand_predictions(name: str, tmp_path: Path) -> None:
    assert soak(STRUCTURES[name], 1000, 5, tmp_path) < 8 * 2**20


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_a_hundred_thousand_predictions(structure: whence.Structure, tmp_path: Path) -> None:
    assert soak(structure, 100_000, 8, tmp_path) < 4 * 2**20
