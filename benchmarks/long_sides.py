"""Layers whose factor is too large for one process: memory of each that shares its rows, and what is lost.

    python -m benchmarks.long_sides --out results/long_sides.json

Memory: peaks of real processes for a layer with many inputs, over gloo on a CPU. What is lost: EKFAC with leading
directions of long sides on the digits of scikit-learn, beside EKFAC with sides as they are, EKFAC and the exact
structure; correlations are Spearman's, over test images.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from torch import Tensor, nn

import whence
from whence.curvature.long_sides import side_bytes

from .memory import METHOD, extra_bytes
from .record import save, say, surroundings

EXAMPLES, LEADING = 96, 128


def wide(inputs: int) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(16, 2)).eval()


def batches(inputs: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(EXAMPLES, size, generator=generator) for size in (inputs, 2))
    return list(zip(x.split(32), y.split(32), strict=True))


def one(inputs: int, rank: int, processes: int, store: str) -> dict[str, Any]:
    """What one process takes."""
    torch.set_num_threads(1)
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    options: dict[str, Any] = {"ridge": 1.0, "progress": False, "shard": "layers"}
    small = whence.EKFAC(largest_side=16, leading=8)
    whence.fit(wide(40), batches(40), structure=small, **options)  # loads what loads late
    model, loader, spent = wide(inputs), batches(inputs), []
    structure = whence.EKFAC(largest_side=1024, leading=LEADING)

    def fit() -> None:
        start = time.process_time()
        tracer = whence.fit(model, loader, structure=structure, **options)
        spent.extend(
            [time.process_time() - start, side_bytes(tracer.bread.stream.known.blocks, 1024, LEADING, processes)]
        )

    return {"bytes": extra_bytes(fit), "seconds": spent[0], "told": spent[1]}


def memory(inputs: int, processes: int) -> dict[str, Any]:
    """The most that any process takes."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.long_sides", "--one", str(inputs)]
        words += ["--processes", str(processes), "--store", f"{folder}/store"]
        where = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=where)
            for rank in range(processes)
        ]
        found = [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]
    worst = {name: max(each[name] for each in found) for name in found[0]}
    return {"inputs": inputs, "factor": 8 * (inputs + 1) ** 2, "processes": processes, **worst}


def trained(x: Tensor, y: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(60):
        for at in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[at]), y[at]).backward()
            optimizer.step()
    return model.eval()


def lost() -> list[dict[str, Any]]:
    """How well each way follows the exact structure."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16.0, torch.tensor(labels)
    model = trained(x[:700], y[:700])
    loader, asked = list(zip(x[:700].split(100), y[:700].split(100), strict=True)), x[700:1100]

    def answers(structure: Any) -> dict[str, Tensor]:
        found = whence.fit(model, loader, "categorical", structure, ridge=1.0, progress=False).predict(asked)
        return {"ho": found.ho.sum(1), "hec3": found.hec3.sum(1), "ratio": found.ratio}

    wanted = answers("exact")
    ways: dict[str, Any] = {"ekfac": whence.EKFAC(), "sides as they are": whence.EKFAC(largest_side=20)}
    for count in (8, 16, 32):
        ways[f"{count} leading"] = whence.EKFAC(largest_side=20, leading=count)
    rows = []
    for name, structure in ways.items():
        found = answers(structure)
        row: dict[str, Any] = {"way": name}
        for what, values in found.items():
            row[what] = float(spearmanr(values, wanted[what]).statistic)
            row[f"{what}, median of quotients"] = float((values / wanted[what]).median())
        rows.append(row)
        say(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/long_sides.json"))
    parser.add_argument("--inputs", type=int, nargs="+", default=[4096, 8192])
    for name, kind in (("one", int), ("rank", int), ("processes", int), ("store", str)):
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one, given.rank, given.processes, given.store)))
        return
    found = lost()
    rows = []
    for inputs in given.inputs:
        for processes in (1, 2, 4):
            rows.append(memory(inputs, processes))
            say(rows[-1])
            save(given.out, {"surroundings": surroundings(), "memory": METHOD, "rows": rows, "lost": found})


if __name__ == "__main__":
    main()
