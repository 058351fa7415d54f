"""Time and memory of a fit as the number of examples grows, on an M4-like network: linear and flat.

    python -m benchmarks.scaling --out results/scaling.json --plot docs/figures/bench-scaling.png

Every number of examples and structure has a process of its own. Examples are made batch by batch when they are read, so
that the data themselves take no memory that grows.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import whence

from .data import random_table
from .memory import METHOD, RETURNED, extra_bytes
from .networks import tabular
from .record import save, say, surroundings
from .reference import cpu_seconds, forward_backward

TOLD = 7
"""Numbers that a fit keeps of every example: output, residual, two left out, leverage, variance, change by a step."""

SIZES = (1_000, 10_000, 100_000, 1_000_000)


class Drawn:
    """A loader that draws each batch from its number: the same examples on every pass, none of them kept."""

    def __init__(self, n: int, batch: int) -> None:
        self.n, self.batch = n, batch

    def __len__(self) -> int:
        return math.ceil(self.n / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            yield random_table(min(self.batch, self.n - number * self.batch), seed=number)


def one(structure: str, n: int, batch: int) -> dict[str, Any]:
    """CPU seconds and extra bytes of one fit, and of the reference on the same data."""
    torch.manual_seed(0)
    network = tabular().eval()
    loader = Drawn(n, batch)
    whence.fit(network, Drawn(32, 32), structure=structure, ridge=0.32, progress=False)
    seconds: list[float] = []

    fit = partial(whence.fit, network, loader, structure=structure, ridge=0.01 * n, progress=False)
    extra = extra_bytes(lambda: seconds.append(cpu_seconds(fit)))
    drawing = cpu_seconds(lambda: [None for _ in loader])
    reference = cpu_seconds(lambda: forward_backward(network, (inputs for inputs, _ in loader))) - drawing
    return {"fit_s": seconds[0], "extra_mb": extra / 1e6, "reference_s": reference, "drawing_s": drawing}


def child(structure: str, n: int, batch: int, surrounding: dict[str, str]) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.scaling", "--batch", str(batch), "--one", structure, str(n)]
    done = subprocess.run(command, capture_output=True, text=True, env=surrounding)
    if done.returncode:
        return {"failed": (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1][:300]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def draw(record: dict[str, Any], path: Path) -> None:
    """Two panels: time and memory over n, both logarithmic."""
    import matplotlib  # an extra: only pictures need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    names = list(dict.fromkeys(row["structure"] for row in record["rows"]))
    for name in names:
        rows = [row for row in record["rows"] if row["structure"] == name and "fit_s" in row]
        sizes = [row["n"] for row in rows]
        panels[0].loglog(sizes, [row["fit_s"] for row in rows], "o-", label=name)
        panels[1].loglog(sizes, [row["extra_mb"] for row in rows], "o-", label=name)
    rows = [row for row in record["rows"] if row["structure"] == names[0] and "reference_s" in row]
    panels[0].loglog(
        [row["n"] for row in rows], [row["reference_s"] for row in rows], "k--", label="forward + k backward"
    )
    panels[0].set(xlabel="training examples", ylabel="CPU seconds of fit", title="Time is linear")
    panels[1].set(xlabel="training examples", ylabel="extra peak memory, MB", title="Memory")
    panels[1].loglog(
        [row["n"] for row in rows], [8e-6 * TOLD * row["n"] for row in rows], "k:", label="what is told of the examples"
    )
    panels[1].set_ylim(1, 1e4)
    panels[0].legend(fontsize=8)
    panels[1].legend(fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure, save, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--structures", nargs="+", default=["ekfac", "core"])
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES)
    parser.add_argument("--batch", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/scaling.json"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs=2, metavar=("STRUCTURE", "N"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        say(json.dumps(one(given.one[0], int(given.one[1]), given.batch)))
        return
    record: dict[str, Any] = {**surroundings(), "threads": given.threads, "memory_method": METHOD, "rows": []}
    surrounding = {**os.environ, "OMP_NUM_THREADS": str(given.threads), "OMP_WAIT_POLICY": "PASSIVE"}
    for structure in given.structures:
        for n in given.sizes:
            row: dict[str, Any] = {"structure": structure, "n": n, "batch": given.batch}
            row.update(child(structure, n, given.batch, surrounding))
            if "failed" not in row:  # to hand memory back takes time: that is measured without
                held = child(structure, n, given.batch, {**surrounding, **RETURNED})
                row.update({key: held[key] for key in ("extra_mb", "failed") if key in held})
            record["rows"].append(row)
            save(given.out, record)
            say(row)
    if given.plot:
        draw(record, given.plot)


if __name__ == "__main__":
    main()
