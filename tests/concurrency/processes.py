"""A fit asked in other processes: `python processes.py FOLDER`. Forked ones have it, spawned ones load it."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import whence

FITS: dict[str, whence.Tracer] = {}
"""What a forked process finds."""


def network() -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(14, width, generator=generator, dtype=torch.float64) for width in (4, 2)))


def numbers(tracer: whence.Tracer) -> list[Any]:
    x = data().tensors[0][:5]
    found = tracer.predict(x)
    return [found.mean.tolist(), found.hec3.tolist(), tracer.attribute(x).hec3.share.tolist()]


def forked(structure: str) -> list[Any]:
    torch.set_num_threads(1)
    return numbers(FITS[structure])


def spawned(path: Path) -> list[Any]:
    torch.set_num_threads(1)
    return numbers(whence.load(path, network(), [data().tensors], progress=False))


def busy(model: nn.Module, loader: Any, entered: threading.Event, leave: threading.Event) -> None:
    """Hold the model in the midst of a fit, for as long as is wanted."""

    class Slow(list[tuple[Tensor, Tensor]]):
        def __iter__(self) -> Any:
            entered.set()
            leave.wait(60)
            return super().__iter__()

    whence.fit(model, Slow(loader), progress=False)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    model = network()
    loader = DataLoader(data(), batch_size=14)
    for structure in ("exact", "ekfac"):
        FITS[structure] = whence.fit(model, loader, structure=structure, ridge=0.5, progress=False)
        FITS[structure].save(folder / structure)
    wanted = {name: numbers(tracer) for name, tracer in FITS.items()}
    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=busy, args=(model, [data().tensors], entered, leave))
    thread.start()
    entered.wait(60)
    with multiprocessing.get_context("fork").Pool(2) as pool:  # the other thread has the model, and does not come along
        assert dict(zip(FITS, pool.map_async(forked, FITS).get(60), strict=True)) == wanted, "fork"
    leave.set()
    thread.join()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.map_async(spawned, [folder / name for name in FITS]).get(120)
        assert dict(zip(FITS, found, strict=True)) == wanted, "spawn"
    print("the same")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
