"""Fits whose layers are shared, with a process that is killed again and again, resumed in other ways each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import whence
from forked_fits import CASES, Failing, answers, batches_of, cut, data, forked, gap, network
from long_factors import deep

WAYS: tuple[tuple[int, Any], ...] = ((3, "layers"), (2, "layers"), (4, 2), (1, "data"), (2, "data"), (4, "layers"))
"""How many processes, and what they share."""

ALL = slice(0, 24)


def cut_layers(folder: Path) -> dict[str, Any]:
    """How far the answers are from those of one process, and how often one was killed on the way."""
    draw, ways = random.Random(3), cycle(WAYS)
    found: dict[str, Any] = {"ways": []}
    for name in ("ekfac", "ekfac, two bases", "diagonal", "long sides"):
        place = folder / name
        wanted = _fit(name, ALL)
        kills, died = 0, True
        while died:
            way = next(ways)
            victim = draw.randrange(way[0])
            many = len(_batches(name, _part(way, victim))[1])  # a pass, after three looks at the data
            left = 1 + 2 * many + draw.randint(1, 3 * many if kills else many)  # the first time for sure
            said = forked(way[0], folder, partial(_attempt, name, place, way, victim, left))
            died = said[victim] is None
            kills += died
            found["ways"].append(f"{way[0]} {way[1]}")
        found[name] = {"gaps": [one.get("trace") or gap(one, wanted) for one in said], "kills": kills}
    counted = Counted(_batches("ekfac", ALL)[1])
    alone = _fit("ekfac", ALL, lambda _: counted, checkpoint=folder / "ekfac")
    found["again"] = [gap(alone, _fit("ekfac", ALL)), counted.read]
    return found


def _attempt(name: str, place: Path, way: tuple[int, Any], victim: int, left: int, rank: int) -> dict[str, Tensor]:
    """A fit by one of several processes, of which one is killed after so many batches."""

    def dying(batches: list[Any]) -> Failing:
        found = Failing(batches, "dies")
        found.left = left
        return found

    return _fit(name, _part(way, rank), dying if rank == victim else list, checkpoint=place, shard=way[1])


class Counted:
    """Batches, and how often one was read."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.read = batches, 0

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.read += 1
            yield batch


def _part(way: tuple[int, Any], rank: int) -> slice:
    world, shard = way
    if world == 1 or shard == "layers":
        return ALL
    return cut([15, 9], rank // shard) if shard == 2 else cut([17, 7], rank)


def _batches(name: str, where: slice) -> tuple[Any, list[Any]]:
    if name != "long sides":
        return network(), batches_of(data(CASES[name].get("likelihood")), where)
    generator = torch.Generator().manual_seed(5)
    tensors = [torch.randn(24, size, dtype=torch.float64, generator=generator) for size in (50, 2)]
    return deep(50).double(), batches_of(tensors, where)


def _fit(name: str, where: slice, loader: Callable[[list[Any]], Any] = list, **more: Any) -> dict[str, Tensor]:
    long = {"structure": whence.EKFAC(tolerance=0.0, largest_side=20, leading=9)}
    options = {"ridge": 0.5, "progress": False, **(long if name == "long sides" else CASES[name]), **more}
    options.pop("weighted", None)
    model, batches = _batches(name, where)
    tracer = whence.fit(model, loader(batches), **options)
    if name != "long sides":
        return answers(tracer)
    found = tracer.predict(torch.linspace(-1, 1, 150, dtype=torch.float64).reshape(3, 50))
    return {"hec3": found.hec3, "ho": found.ho, "leverage": tracer.leverage}
