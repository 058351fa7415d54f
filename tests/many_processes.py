"""Fits by several processes beside the same fits by one. A program: it forks, and prints what it found as JSON."""

from __future__ import annotations

import json
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import whence
from forked_fits import (
    CASES,
    LIMIT,
    SHARDS,
    Failing,
    answers,
    batches_of,
    cut,
    data,
    decompositions,
    fit,
    forked,
    gap,
    network,
    partings,
    refused,
    test_inputs,
)
from killed_fits import killed_fits
from sharded_models import copied, fully_shard  # noqa: F401 (asked for by name)


def fits(names: Sequence[str], where: slice) -> dict[str, Any]:
    """Answers of several fits, or errors in words."""

    def one(name: str) -> Any:
        try:
            return answers(fit(name, where))
        except Exception:
            return traceback.format_exc()

    return {name: one(name) for name in names}


def compare(folder: Path, names: Sequence[str], worlds: Sequence[int], shards: Sequence[str]) -> dict[str, Any]:
    """Gaps between fits of several processes and of one, the worst of all ranks."""
    wanted = {name: answers(fit(name, slice(0, 24))) for name in names}
    found: dict[str, Any] = {}
    for world, kind in product(worlds, shards):
        sizes = SHARDS[kind].get(world)
        if sizes is None:
            continue
        for said in forked(world, folder, lambda rank, sizes=sizes: fits(names, cut(sizes, rank))):
            for name in names:
                key = f"{name} | {world} | {kind}"
                here = said["trace"] if "trace" in said else said[name]
                here = here if isinstance(here, str) else gap(here, wanted[name])
                found[key] = here if isinstance(here, str) else max(here, found.get(key, 0.0))
    return found


def suite(folder: Path) -> dict[str, Any]:
    """What the tests ask for, in one process."""
    meetings = (partings, decompositions, failures, unlike)
    works = (*meetings, predictions, saved, resumed, wrapped, killed_fits)
    found = {work.__name__: work(folder) for work in works}
    found["compare"] = compare(folder, list(CASES), [2], ["uneven"])
    found["compare"] |= compare(folder, ["ekfac", "core", "primal"], [4], ["uneven"])
    found["compare"] |= compare(folder, ["ekfac", "core"], [2], ["first empty"])
    return found


def predictions(folder: Path) -> dict[str, Any]:
    """Predictions of three processes, one of them without inputs, beside those of one."""
    wanted = fit("ekfac", slice(0, 24)).predict(test_inputs())
    parts = [slice(0, 2), slice(0, 0), slice(2, 7)]

    def work(rank: int) -> Any:
        tracer = fit("ekfac", cut([10, 10, 4], rank))
        some = test_inputs()[parts[rank]]
        found = whence.gather(tracer.predict(some) if len(some) else None)
        return {"hec3": found.hec3, "mean": found.mean, "error": refused(lambda: tracer.attribute(some))}

    said = forked(3, folder, work)
    gaps = [gap({"hec3": one["hec3"], "mean": one["mean"]}, {"hec3": wanted.hec3, "mean": wanted.mean}) for one in said]
    return {"gaps": gaps, "errors": [one["error"] for one in said]}


def unlike(folder: Path) -> dict[str, Any]:
    """Processes that do not want the same."""

    def work(rank: int) -> Any:
        model = network()
        some = cut([12, 12], rank)
        ridge = refused(lambda: fit("ekfac", some, ridge=0.5 + rank))
        once = refused(
            lambda: fit("ekfac", some, execution=whence.Execution(checkpoint=folder / "once" if rank else None))
        )
        with torch.no_grad():
            model[3].bias += rank
        batches = batches_of(data(None), some)
        weights = refused(lambda: whence.fit(model, batches, structure="diagonal", progress=False))
        free = refused(lambda: whence.fit(model, batches, structure=whence.Exact("matrix_free"), progress=False))
        return [ridge, once, weights, free]

    return {"said": forked(2, folder, work)}


def absent(folder: Path) -> dict[str, Any]:
    """Only one process fits: on purpose, or not."""

    def work(rank: int) -> Any:
        if rank:
            time.sleep(8)
            return None
        return [
            refused(lambda given=given: fit("diagonal", slice(0, 24), execution=whence.Execution(distributed=given)))
            for given in (3, False)
        ]

    return {"said": forked(2, folder, work)[0]}


def saved(folder: Path) -> dict[str, Any]:
    """A fit of two processes, saved by one of them and loaded with the batches of both."""
    wanted = fit("core", slice(0, 24))

    def work(rank: int) -> Any:
        tracer = fit("core", cut([15, 9], rank))
        if rank == 0:
            tracer.save(folder / "fit.whence")
        return None

    forked(2, folder, work)
    tensors = data(None)
    loader = [*batches_of(tensors, slice(0, 15)), *batches_of(tensors, slice(15, 24))]
    again = whence.load(folder / "fit.whence", network(), loader, progress=False)
    x = test_inputs()
    return {
        "hec3": gap({"hec3": again.predict(x).hec3}, {"hec3": wanted.predict(x).hec3}),
        "share": gap({"share": again.attribute(x).hec3.share}, {"share": wanted.attribute(x).hec3.share}),
    }


def failures(folder: Path, seconds: float = 5.0) -> dict[str, Any]:
    """One process fails, dies or hangs in the middle of a fit: what the others say, and after how long."""
    found = {}
    for kind in ("fails", "dies", "hangs"):

        def work(rank: int, kind: str = kind) -> Any:
            start = time.monotonic()
            tensors = data(None)
            loader = Failing(batches_of(tensors, cut([8, 8, 8], rank), 2), kind) if rank == 1 else None
            plain = batches_of(tensors, cut([8, 8, 8], rank), 2)
            try:
                whence.fit(
                    network(),
                    loader or plain,
                    structure="ekfac",
                    progress=False,
                    execution=whence.Execution(distributed=seconds if kind == "hangs" else LIMIT),
                )
            except BaseException as error:
                return [type(error).__name__, str(error), time.monotonic() - start]
            return ["no error", "", 0.0]

        found[kind] = forked(3, folder, work)
    return found


def resumed(folder: Path, names: Sequence[str] = ("ekfac",)) -> dict[str, Any]:
    """A fit of three processes, of which one fails in its last pass, resumed by other numbers of processes."""
    wanted = {name: answers(fit(name, slice(0, 24))) for name in names}
    last = {"ekfac": 4 + 4 + 1 + 4 + 4 + 2, "core": 4 + 4 + 1 + 4 + 2}
    found: dict[str, Any] = {}
    for name in names:

        def work(rank: int, name: str = name, before: int = last[name]) -> Any:
            loader: Any = batches_of(data(None), cut([8, 8, 8], rank), 2)
            if rank == 2:
                loader = Failing(loader, "fails")
                loader.left = before
            return refused_fit(name, loader, folder / name)

        said = forked(3, folder, work)
        files = sorted(file.name for file in (folder / name).iterdir())
        for world in (1, 2, 4):
            copy = folder / f"{name}-{world}"
            shutil.copytree(folder / name, copy)
            if world == 1:
                gaps = [
                    gap(answers(fit(name, slice(0, 24), execution=whence.Execution(checkpoint=copy))), wanted[name])
                ]
            else:
                sizes = SHARDS["uneven"][world]
                told = forked(
                    world,
                    folder,
                    lambda rank, name=name, sizes=sizes, copy=copy: answers(
                        fit(name, cut(sizes, rank), execution=whence.Execution(checkpoint=copy))
                    ),
                )
                gaps = [one.get("trace") or gap(one, wanted[name]) for one in told]
            found[f"{name} {world}"] = [gaps, said, files]
    return found


def refused_fit(name: str, loader: Any, checkpoint: Path) -> str:
    options = {"ridge": 0.5, "progress": False, **CASES[name]}
    try:
        whence.fit(network(), loader, execution=whence.Execution(checkpoint=checkpoint), **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrapped(folder: Path) -> dict[str, Any]:
    """Models as `DistributedDataParallel` and `fully_shard` leave them."""
    wanted = answers(fit("ekfac", slice(0, 24)))

    def work(rank: int) -> Any:
        found = {}
        for kind in ("ddp", "fsdp2"):
            model = network()
            if kind == "ddp":
                model = nn.parallel.DistributedDataParallel(model)
            else:
                mesh = init_device_mesh("cpu", (2,))
                for layer in (model[0], model[3]):
                    fully_shard(layer, mesh=mesh)
                fully_shard(model, mesh=mesh)
            tracer = whence.fit(
                model, batches_of(data(None), cut([17, 7], rank)), structure="ekfac", ridge=0.5, progress=False
            )
            found[kind] = answers(tracer)
        return found

    said = forked(2, folder, work)
    return {kind: [one.get("trace") or gap(one[kind], wanted) for one in said] for kind in ("ddp", "fsdp2")}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given = json.loads(sys.argv[1])
    print(json.dumps(globals()[given.pop("work")](Path(given.pop("folder")), **given)))
