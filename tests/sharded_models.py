"""Models in `fully_shard`: memory at the peak where they are brought together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from forked_fits import forked
from whence.jacobian.network import unwrap

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # of older versions
    from torch.distributed._composable.fsdp import fully_shard


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def copied(folder: Path, width: int = 1024) -> dict[str, Any]:
    """Bytes gained at the peak, and in the end, when a model in `fully_shard` is brought together; its own bytes."""
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(12)))
    size = 4 * width**2

    def work(rank: int) -> Any:
        mesh = init_device_mesh("cpu", (2,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        unwrap(fully_shard(nn.Linear(3, 3), mesh=mesh))  # loads what loads late
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        found = unwrap(model)
        return {"peak": resident("VmHWM") - before, "held": sum(one.nbytes for one in found.parameters())}

    return {"layer": size, "whole": 12 * size, "said": forked(2, folder, work)}
