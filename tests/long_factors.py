"""Layers with so many inputs that processes share the rows of a factor: answers, and memory at the peak."""

from __future__ import annotations

import importlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import whence
from forked_fits import batches_of, cut, forked, gap
from whence.jacobian.network import whole_copy

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # of older versions
    from torch.distributed._composable.fsdp import fully_shard


def deep(inputs: int, outputs: int = 2) -> nn.Module:
    """Four layers, of which the first has many inputs."""
    torch.manual_seed(3)
    widths = (inputs, 8, 7, 6, outputs)
    layers: list[nn.Module] = []
    for below, above in pairwise(widths):
        layers += [nn.Linear(below, above), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).eval()


def long_sides(folder: Path) -> dict[str, Any]:
    """The factor of a layer with many inputs, a few rows of it in each process: answers, and where all rank is seen."""
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(24, size, dtype=torch.float64, generator=generator) for size in (50, 2))
    asked = torch.randn(7, 50, dtype=torch.float64, generator=generator)
    model = deep(50).double()

    def told(where: slice, **options: Any) -> dict[str, Tensor]:
        structure = whence.EKFAC(tolerance=0.0, **options.pop("structure", {"largest_side": 20, "leading": 9}))
        loader = batches_of((x, y), where)
        tracer = whence.fit(model, loader, structure=structure, ridge=0.5, progress=False, **options)
        found = tracer.predict(asked, covariance=True)
        shares = tracer.attribute(asked).hec3.share if tracer.problem.passes.process_group.alone else asked
        parts = {name: found.covariance(name) for name in found.estimators}
        return {**parts, "leverage": tracer.leverage, "share": shares}

    everything = slice(0, 24)
    wanted = told(everything)
    found: dict[str, Any] = {
        str(world): [
            one.get("trace") or gap(one, wanted)
            for one in forked(world, folder, lambda rank: told(everything, shard="layers"))
        ]
        for world in (2, 4)
    }
    for meat in ("one_basis", "two_bases"):  # a layer that all share, and that only one of them owns
        options = {"parameters": "0.*", "structure": {"largest_side": 20, "leading": 9, "meat": meat}, "recenter": True}
        alone = told(everything, **options)
        several = forked(3, folder, lambda rank, options=options: told(everything, shard="layers", **options))
        found[f"one layer, {meat}"] = [one.get("trace") or gap(one, alone) for one in several]
    both = forked(4, folder, lambda rank: {**told(cut([15, 9], rank // 2), shard=2), "share": wanted["share"]})
    found["4 by 2"] = [one.get("trace") or gap(one, wanted) for one in both]
    whole = told(everything, structure={})
    found["all of its rank"] = gap(told(everything, structure={"largest_side": 20, "leading": 30}), whole)
    return found


def peaks(folder: Path, inputs: int = 4096) -> dict[str, Any]:
    """Bytes gained at the peak of a fit, in every process that shares the rows of a factor of so many inputs."""
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(48, size, generator=generator) for size in (inputs, 2))
    model = deep(inputs)

    importlib.import_module("torch.distributed.tensor")  # here, so that it does not count as memory of the fit

    def work(rank: int) -> Any:
        options: dict[str, Any] = {"ridge": 0.5, "progress": False, "shard": "layers"}
        small = whence.EKFAC(largest_side=20, leading=9)
        whence.fit(deep(50), [(x[:, :50], y)], structure=small, **options)  # loads what loads late
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        structure = whence.EKFAC(largest_side=1024, leading=64)
        whence.fit(model, batches_of((x, y), slice(0, 48)), structure=structure, **options)
        return {"peak": resident("VmHWM") - before}

    return {str(world): [one.get("trace") or one["peak"] for one in forked(world, folder, work)] for world in (1, 2, 4)}


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
        whole_copy(fully_shard(nn.Linear(3, 3), mesh=mesh))  # loads what loads late
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        found = whole_copy(model)
        return {"peak": resident("VmHWM") - before, "held": sum(one.nbytes for one in found.parameters())}

    return {"layer": size, "whole": 12 * size, "said": forked(2, folder, work)}
