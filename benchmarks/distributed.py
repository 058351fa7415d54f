"""Fits by several processes, each with a part of the data: seconds, memory, and what they send to each other.

    python -m benchmarks.distributed --out results/distributed.json

Every process is one of its own, with one thread on a CPU. CPU seconds are told, and not those on the clock, so that
processes which share cores are counted fairly. Memory is the peak resident set above what was resident before the fit.
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
from torch import Tensor, nn

import whence

from .memory import METHOD, extra_bytes
from .record import measured, save, say, surroundings

POSITIONS, LOOKS, EXAMPLES, BATCH = 48, 8, 32, 4


class Tokens(nn.Module):
    """Blocks of two layers at every position, with a path around them, then a mean and a last layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(2 * width, width, bias=False) for _ in range(2))
        self.last = nn.Linear(width, LOOKS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.tanh(up(x)))
        return self.last(x.mean(1))


def batches(width: int, rank: int, processes: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(EXAMPLES, POSITIONS, width, generator=generator).to(device)
    y = torch.randn(EXAMPLES, LOOKS, generator=generator).to(device)
    share = slice(rank * EXAMPLES // processes, (rank + 1) * EXAMPLES // processes)
    return list(zip(x[share].split(BATCH), y[share].split(BATCH), strict=True))


class Counted:
    """Bytes handed to the collectives of torch.distributed."""

    def __init__(self) -> None:
        self.bytes = 0
        for name in ("all_reduce", "broadcast"):
            setattr(dist, name, self._counting(getattr(dist, name)))

    def _counting(self, call: Any) -> Any:
        def counted(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.bytes += tensor.numel() * tensor.element_size()
            return call(tensor, *args, **options)

        return counted


def one(width: int, rank: int, processes: int, store: str, device: torch.device) -> dict[str, Any]:
    """What one process takes for its part of a fit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = Tokens(width).eval().to(device)
    few = Tokens(16).eval().to(device)
    whence.fit(
        few, batches(16, 0, 1, device), structure="ekfac", progress=False, execution=whence.Execution(distributed=False)
    )  # warm up
    counted = Counted()
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mine = batches(width, rank, processes, device)
    structure, room = whence.EKFAC(tolerance=0.0), 2**34 if device.type == "cpu" else None
    spent: list[float] = []

    def fit() -> None:
        start, clock = time.process_time(), time.perf_counter()
        whence.fit(
            network,
            mine,
            structure=structure,
            ridge=1.0,
            progress=False,
            execution=whence.Execution(max_memory=room),
        )
        if device.type == "cuda":
            torch.cuda.synchronize()
        spent.extend([time.process_time() - start, time.perf_counter() - clock])

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fit()
        return {"seconds": spent[1], "bytes": torch.cuda.max_memory_allocated() - before, "traffic": counted.bytes}
    extra = extra_bytes(fit)
    return {"seconds": spent[0], "bytes": extra, "traffic": counted.bytes}


def run(width: int, processes: int, device: str) -> list[dict[str, Any]]:
    """All processes of one fit."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.distributed", "--one", str(width)]
        words += ["--processes", str(processes), "--store", f"{folder}/store", "--device", device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(processes)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def measure(widths: list[int], device: str) -> list[dict[str, Any]]:
    """Rows of measurements: what the busiest process took."""
    rows = []
    for width in widths:
        weights = sum(parameter.numel() for parameter in Tokens(width).parameters())
        for processes in (1, 2, 4) if device == "cpu" else (1,):
            found = run(width, processes, device)
            worst = {name: max(one[name] for one in found) for name in found[0]}
            rows.append({"width": width, "weights": weights, "processes": processes, **worst})
            say(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/distributed.json"))
    parser.add_argument("--widths", type=int, nargs="+", default=[96, 160, 256])
    parser.add_argument("--device", default="cpu")
    for name, kind in (("one", int), ("rank", int), ("processes", int), ("store", str)):
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_args()
    if given.one:
        device = torch.device(given.device)
        print(json.dumps(one(given.one, given.rank, given.processes, given.store, device)))
        return
    rows = measured(given.out, "rows", device=given.device)  # of an earlier run, where it was done in parts
    known = {row["width"] for row in rows}
    rows += measure([width for width in given.widths if width not in known], given.device)
    content = {"surroundings": surroundings(), "memory": METHOD, "device": given.device, "rows": rows}
    save(given.out, content)


if __name__ == "__main__":
    main()
