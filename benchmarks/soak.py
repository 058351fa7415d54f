"""A fit asked again and again in small batches, as a service would: does memory stay flat, do answers stay the same?

`python -m benchmarks.soak --out results/soak.json` asks every structure a hundred thousand times.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import whence
from benchmarks.record import measured, save, say, surroundings

STRUCTURES: dict[str, whence.Structure] = {
    "exact, primal": whence.Exact(road="primal"),
    "exact, dual": whence.Exact(road="dual"),
    "exact, matrix-free": whence.Exact(road="matrix_free"),
    "core": whence.Core(),
    "sketch": whence.Sketch(),
    "ekfac": whence.EKFAC(),
    "ekfac, two bases": whence.EKFAC(meat="two_bases"),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")
SOLVED = "exact, matrix-free"
"""Each of its answers is solved for: fewer weights, fewer steps."""

DISTINCT = 40
"""Batches that differ; then they come again."""


def resident() -> int:
    """Bytes of this process in memory, now."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loaded(structure: whence.Structure, width: int, folder: Path) -> whence.Tracer:
    """A fit that has been in a file, as that of a service."""
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2)).double().eval()
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    loader = [(x[:25], y[:25]), (x[25:], y[25:])]
    whence.fit(model, loader, structure=structure, ridge=0.5, progress=False).save(folder / "fit.whence")
    return whence.load(folder / "fit.whence", model, loader, progress=False)


def gap(found: Tensor, wanted: Tensor) -> float:
    """The largest difference, over the size of the numbers."""
    return float((found - wanted).abs().max() / wanted.abs().max())


def soak(structure: whence.Structure, predictions: int, batch: int, width: int, folder: Path) -> dict[str, Any]:
    """Ask, compare every answer with that for all inputs in one batch, and look at memory after each tenth."""
    tracer = loaded(structure, width, folder)
    test = torch.randn(DISTINCT * batch, 4, dtype=torch.float64)
    whole = tracer.predict(test)
    wanted = [part.split(batch) for part in (whole.mean, *map(whole.variance, ESTIMATORS))]
    worst, done, sizes = 0.0, 0, []
    start = time.perf_counter()
    while done < predictions:
        for number, part in enumerate(test.split(batch)):
            found = tracer.predict(part)
            given = (found.mean, *map(found.variance, ESTIMATORS))
            worst = max(worst, *(gap(one, parts[number]) for one, parts in zip(given, wanted, strict=True)))
            done += len(part)
            if done * 10 >= predictions * (len(sizes) + 1):
                sizes.append(resident())
    return {
        "predictions": done,
        "batch": batch,
        "width": width,
        "seconds": round(time.perf_counter() - start, 1),
        "resident": sizes,
        "gained": sizes[-1] - sizes[0],
        "worst": worst,
    }


def main() -> None:
    """Ask every structure and write down what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/soak.json"))
    parser.add_argument("--predictions", type=int, default=100_000)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--structures", nargs="+", default=list(STRUCTURES), choices=list(STRUCTURES), metavar="NAME")
    parser.add_argument("--append", action="store_true", help="keep what is in the file about other structures")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    earlier = measured(given.out, "rows") if given.append else []
    rows = [row for row in earlier if row["structure"] not in given.structures]
    record: dict[str, Any] = {**surroundings(), "rows": rows}
    for name in given.structures:
        width, batch = (2, 25) if name == SOLVED else (16, given.batch)
        with tempfile.TemporaryDirectory() as folder:
            found = soak(STRUCTURES[name], given.predictions, batch, width, Path(folder))
        rows.append({"structure": name, "when": record["when"], **found})
        save(given.out, record)
        gained = f"{found['gained'] / 2**10:.0f} KiB gained"
        say(f"{name}: {found['seconds']} s, {gained}, answers within {found['worst']:.1g}")


if __name__ == "__main__":
    main()
