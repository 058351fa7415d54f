"""Fits by several processes beside the same fit by one, over NCCL or gloo, on a GPU or a CPU.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.distributed_check --backend gloo --device cuda --out FILE

NCCL wants a GPU of its own for each process. Where there is only one, a process that is alone talks to itself: all
collectives run, over a group of one, so that what NCCL refuses (kinds of numbers, devices) would show.
"""

from __future__ import annotations

import argparse
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import whence
from whence import api
from whence.runtime.processes import ProcessGroup, open_process_group

from .record import save, say, surroundings

STRUCTURES: dict[str, whence.Structure] = {
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
    "core": whence.Core(size=150),
    "sketch": whence.Sketch(size=150),
    "primal": whence.Exact(road="primal"),
}
OPTIONS: dict[str, Any] = {"ridge": 1.0, "progress": False}


def forced(_: Any) -> ProcessGroup:
    """One process that does not know that it is alone."""
    found = ProcessGroup(1, dist.new_group(backend="gloo"), 60.0)
    found.alone = False
    return found


def network(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(128, 12), nn.Tanh()
    return nn.Sequential(*layers, nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 10)).double().eval().to(device)


def batches(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(16), y.split(16), strict=True))


def answers(tracer: whence.Tracer, inputs: Tensor) -> dict[str, Tensor]:
    found = tracer.predict(inputs, covariance=True)
    parts = {name: found.covariance(name).cpu() for name in found.estimators}
    return {**parts, "leverage": tracer.leverage.cpu()}


def gap(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference, over the largest number of each answer."""
    return max(float((found[name] - one).abs().max() / one.abs().max()) for name, one in wanted.items())


def compare(device: torch.device, backend: str) -> dict[str, Any]:
    """Gaps by structure, or errors in words."""
    x = torch.randn(96, 1, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    y = torch.arange(96, device=device) % 10
    model, asked = network(device), x[:20]
    rank, world = dist.get_rank(), dist.get_world_size()
    here = slice(96 * rank // world, 96 * (rank + 1) // world)
    api.open_process_group = forced if world == 1 else open_process_group
    execution = whence.Execution(precision="float32")
    found: dict[str, Any] = {}
    for name, structure in STRUCTURES.items():
        wanted = answers(alone(model, x, y, structure), asked)
        start = time.perf_counter()
        try:
            loader = batches(x[here], y[here])
            tracer = whence.fit(model, loader, "categorical", structure, **OPTIONS, execution=execution)
            found[name] = {"gap": gap(answers(tracer, asked), wanted), "seconds": time.perf_counter() - start}
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
            if world > 1:
                return found
        if rank == 0:
            say({f"{backend}, {name}": found[name]})
    return found


def alone(model: nn.Module, x: Tensor, y: Tensor, structure: whence.Structure) -> whence.Tracer:
    """The fit of a process that knows that it is alone."""
    before, api.open_process_group = api.open_process_group, open_process_group
    try:
        execution = whence.Execution(precision="float32", distributed=False)
        return whence.fit(model, batches(x, y), "categorical", structure, **OPTIONS, execution=execution)
    finally:
        api.open_process_group = before


def sharded(device: torch.device) -> dict[str, Any]:
    """A model in `fully_shard`, beside itself."""
    from torch.distributed.device_mesh import init_device_mesh  # not in every build of torch
    from torch.distributed.fsdp import fully_shard

    x = torch.randn(96, 1, 14, 14, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    y = torch.arange(96, device=device) % 10
    execution = whence.Execution(distributed=False)
    options: dict[str, Any] = {**OPTIONS, "structure": "ekfac", "execution": execution}
    wanted = answers(whence.fit(network(device), batches(x, y), "categorical", **options), x[:20])
    model = network(device)
    fully_shard(model, mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    return {"gap": gap(answers(whence.fit(model, batches(x, y), "categorical", **options), x[:20]), wanted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    device = torch.device(given.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group(given.backend)
    rows = compare(device, given.backend)
    wrapped: dict[str, Any] = {}
    if given.backend == "nccl" or device.type == "cpu":
        try:
            wrapped = sharded(device)
        except Exception as error:
            wrapped = {"error": f"{type(error).__name__}: {error}"}
    if dist.get_rank() == 0:
        facts = {"backend": given.backend, "device": given.device, "processes": dist.get_world_size()}
        save(given.out, {"surroundings": surroundings(), **facts, "fits": rows, "fully_shard": wrapped})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
