"""Fits with a process that is killed again and again, resumed by other numbers of processes each time."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from torch import Tensor

import whence
from forked_fits import CASES, Failing, answers, batches_of, cut, data, forked, gap, network

WORLDS = (3, 2, 4, 1)
"""How many processes there are, one attempt after the other."""

SHARDS = {1: [24], 2: [17, 7], 3: [10, 8, 6], 4: [9, 6, 5, 4]}
"""Examples of each process."""

ALL = slice(0, 24)


def killed_fits(folder: Path) -> dict[str, Any]:
    """How far the answers are from those of one process, and how often one was killed on the way."""
    draw, worlds = random.Random(3), cycle(WORLDS)
    found: dict[str, Any] = {"worlds": []}
    for name in ("ekfac", "ekfac, two bases", "diagonal"):
        place = folder / name
        wanted = _fit(name, ALL)
        kills, died = 0, True
        while died:
            world = next(worlds)
            victim = draw.randrange(world)
            many = len(_batches(name, _part(world, victim)))  # a pass, after three looks at the data
            left = 1 + 2 * many + draw.randint(1, 3 * many if kills else many)  # the first time for sure
            said = forked(world, folder, partial(_attempt, name, place, world, victim, left))
            died = said[victim] is None
            kills += died
            found["worlds"].append(world)
        found[name] = {"gaps": [one.get("trace") or gap(one, wanted) for one in said], "kills": kills}
    whole = whence.Execution(checkpoint=folder / "ekfac")
    _fit("ekfac", ALL, execution=whole)  # other shards may round otherwise: then its passes are done again, once
    counted = Counted(_batches("ekfac", ALL))
    alone = _fit("ekfac", ALL, lambda _: counted, execution=whole)
    found["again"] = [gap(alone, _fit("ekfac", ALL)), counted.read]
    return found


def _attempt(name: str, place: Path, world: int, victim: int, left: int, rank: int) -> dict[str, Tensor]:
    """A fit by one of several processes, of which one is killed after so many batches."""

    def dying(batches: list[Any]) -> Failing:
        found = Failing(batches, "dies")
        found.left = left
        return found

    return _fit(
        name, _part(world, rank), dying if rank == victim else list, execution=whence.Execution(checkpoint=place)
    )


class Counted:
    """Batches, and how often one was read."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches, self.read = batches, 0

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.read += 1
            yield batch


def _part(world: int, rank: int) -> slice:
    return cut(SHARDS[world], rank)


def _batches(name: str, where: slice) -> list[Any]:
    return batches_of(data(CASES[name].get("likelihood")), where)


def _fit(name: str, where: slice, loader: Callable[[list[Any]], Any] = list, **more: Any) -> dict[str, Tensor]:
    options = {"ridge": 0.5, "progress": False, **CASES[name], **more}
    options.pop("weighted", None)
    return answers(whence.fit(network(), loader(_batches(name, where)), **options))
