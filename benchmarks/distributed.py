"""Fits by several processes, measured at small sizes beside the cost model; and what a large model would take.

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
from whence.curvature.accumulate import LARGEST_SIDE

from .distributed_cost import Crew, Layer, Task, eigen_sizes, memory, operations, passing, traffic, transformer
from .memory import METHOD, extra_bytes
from .record import measured, save, say, surroundings

EFFICIENCY = 0.5
"""Share of the speed of plain products of matrices that fits reach, as measured at a width of 192 in one process."""

POSITIONS, LOOKS, EXAMPLES, BATCH = 48, 8, 32, 4
LARGE = Task(transformer(4096, 11008, 32, 32000), 2048, 10_000, 17, squared=False, weight_bytes=2)
"""Seven billion weights, ten thousand sequences, sixteen mixtures of the outputs and the residual."""


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


def task(width: int) -> Task:
    blocks = [Layer(2 * width, width), Layer(width, 2 * width)] * 2
    return Task((*blocks, Layer(LOOKS, width)), POSITIONS, EXAMPLES, LOOKS, squared=True)


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


def one(width: int, rank: int, process_group: Crew, store: str, device: torch.device) -> dict[str, Any]:
    """What one process takes for its part of a fit."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    network = Tokens(width).eval().to(device)
    few = Tokens(16).eval().to(device)
    whence.fit(
        few, batches(16, 0, 1, device), structure="ekfac", progress=False, execution=whence.Execution(distributed=False)
    )  # warm up
    counted = Counted()
    processes = process_group.data * process_group.layers
    if processes > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mine = batches(width, rank // process_group.layers, process_group.data, device)
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
            shard=process_group.layers,
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


def run(width: int, process_group: Crew, device: str) -> list[dict[str, Any]]:
    """All processes of one fit."""
    processes = process_group.data * process_group.layers
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "-W", "ignore", "-m", "benchmarks.distributed", "--one", str(width)]
        words += ["--data", str(process_group.data), "--layers", str(process_group.layers)]
        words += ["--store", f"{folder}/store", "--device", device]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started = [
            subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in range(processes)
        ]
        return [json.loads(process.communicate()[0].splitlines()[-1]) for process in started]


def rates(width: int, device: torch.device) -> dict[str, float]:
    """Operations a second of this machine in products of matrices, and the constant of its eigendecompositions."""
    torch.set_num_threads(1)
    with_tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    a = torch.randn(8 * width, 2 * width, device=device)
    product = _seconds(lambda: a.T @ a, device)
    side = min(2 * width, LARGEST_SIDE)
    square = torch.randn(side, side, dtype=torch.float64, device=device)
    eigen = _seconds(lambda: torch.linalg.eigh(square @ square.T), device)
    torch.backends.cuda.matmul.allow_tf32 = with_tf32
    return {"products": 2.0 * 8 * width * (2 * width) ** 2 / product, "eigen": eigen / side**3}


def _seconds(work: Any, device: torch.device, times: int = 5) -> float:
    found = []
    for _ in range(times):
        clock = time.process_time if device.type == "cpu" else time.perf_counter
        start = clock()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(clock() - start)
    return min(found)


def predicted(what: Task, process_group: Crew, speed: dict[str, float], batch: int, device: str) -> dict[str, float]:
    """Seconds, bytes and traffic by the model."""
    eigen = speed["eigen"] * sum(float(side) ** 3 for side in eigen_sizes(what, process_group))
    seconds = sum(operations(what, process_group).values()) / speed["products"] / EFFICIENCY + eigen
    held = memory(what, process_group) + passing(what, process_group, batch, device)
    return {"seconds": seconds, "bytes": held, "traffic": sum(traffic(what, process_group).values())}


def measure(widths: list[int], device: str) -> list[dict[str, Any]]:
    """Rows of measurements beside predictions."""
    rows = []
    several = [Crew(1, 1), Crew(2, 1), Crew(4, 1), Crew(1, 2), Crew(1, 4), Crew(2, 2)]
    for width in widths:
        speed = rates(width, torch.device(device))
        for process_group in several if device == "cpu" else several[:1]:
            found = run(width, process_group, device)
            worst = {name: max(one[name] for one in found) for name in found[0]}
            told = predicted(task(width), process_group, speed, BATCH, device)
            row = {
                "width": width,
                "weights": task(width).weights,
                "data": process_group.data,
                "layers": process_group.layers,
            }
            rows.append({**row, **_pairs(worst, told)})
            say(rows[-1])
    return rows


def _pairs(found: dict[str, float], told: dict[str, float]) -> dict[str, Any]:
    return {name: {"measured": found[name], "predicted": told[name]} for name in found}


def large(products: float, eigen: float, bandwidth: float) -> list[dict[str, Any]]:
    """What seven billion weights would take on machines of such a speed."""
    rows = []
    for process_group in (Crew(8, 1), Crew(1, 8), Crew(1, 32), Crew(8, 32)):
        told = predicted(LARGE, process_group, {"products": products, "eigen": eigen}, 8, "cuda")
        seconds = {"computing": told["seconds"], "sending": 2.0 * told["traffic"] / bandwidth}
        rows.append(
            {
                "data": process_group.data,
                "layers": process_group.layers,
                "network_bytes": float(LARGE.weights * LARGE.weight_bytes),
                "held_bytes": memory(LARGE, process_group),
                "passing_bytes": passing(LARGE, process_group, 8, "cuda"),
                "seconds": seconds,
                "operations": operations(LARGE, process_group),
                "traffic": traffic(LARGE, process_group),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/distributed.json"))
    parser.add_argument("--widths", type=int, nargs="+", default=[96, 160, 256])
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--products", type=float, default=1e14, help="operations a second of the large machine's devices"
    )
    parser.add_argument(
        "--eigen", type=float, default=3e-11, help="seconds of an eigendecomposition over its side's cube"
    )
    parser.add_argument("--bandwidth", type=float, default=5e10, help="bytes a second between devices")
    for name, kind in (("one", int), ("rank", int), ("data", int), ("layers", int), ("store", str)):
        parser.add_argument(f"--{name}", type=kind)
    given = parser.parse_args()
    if given.one:
        device = torch.device(given.device)
        print(json.dumps(one(given.one, given.rank, Crew(given.data, given.layers), given.store, device)))
        return
    rows = measured(given.out, "rows", device=given.device)  # of an earlier run, where it was done in parts
    known = {row["width"] for row in rows}
    rows += measure([width for width in given.widths if width not in known], given.device)
    assumed = {"products": given.products, "eigen": given.eigen, "bandwidth": given.bandwidth}
    content = {
        "surroundings": surroundings(),
        "memory": METHOD,
        "device": given.device,
        "rows": rows,
        "assumed": assumed,
        "large": large(**assumed),
    }
    save(given.out, content)


if __name__ == "__main__":
    main()
