"""Fits by several processes beside the same fits by one. Run as a program: it forks, and prints what it found as JSON.

Processes are forked from one that has imported everything, so that dozens of fits take seconds. They meet in a file.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import whence

SHARDS = {"even": {2: [12, 12], 4: [6, 6, 6, 6]}, "uneven": {2: [17, 7], 4: [9, 0, 13, 2]}, "first empty": {2: [0, 24]}}
LIMIT = 60.0
"""Seconds that processes wait for one another."""

CASES: dict[str, dict[str, Any]] = {
    "ekfac": {"structure": "ekfac"},
    "ekfac, corner": {"structure": whence.EKFAC(tolerance=0.2), "ridge": 4.0, "recenter": True},
    "ekfac, joint": {"structure": whence.EKFAC(meat="joint", basis="gradients")},
    "ekfac, two bases": {"structure": whence.EKFAC(meat="two_bases", corner=2), "likelihood": "categorical"},
    "kfac": {"structure": "kfac", "likelihood": "categorical", "noise": "unbiased"},
    "diagonal": {"structure": "diagonal", "weighted": True},
    "core": {"structure": whence.Core(size=15), "recenter": True},
    "core, loo": {"structure": "core", "ridge": "loo"},
    "core, groups": {"structure": "core", "groups": [at // 3 % 7 for at in range(24)], "likelihood": "bernoulli"},
    "sketch": {"structure": whence.Sketch(size=30), "likelihood": "categorical", "outputs": 1},
    "primal": {"structure": whence.Exact("primal"), "loo": "output"},
    "primal, little memory": {"structure": whence.Exact("primal"), "max_memory": 140_000, "likelihood": "categorical"},
    "positions": {"structure": "ekfac", "loo": "position", "dense": True},
    "positions, classes": {"structure": "core", "dense": True, "likelihood": whence.Categorical(ignore_index=-1)},
    "single precision": {"structure": "core", "likelihood": "categorical", "single": True},
    "single precision, ekfac": {"structure": whence.EKFAC(tolerance=0.0), "single": True},
    "dual": {"structure": whence.Exact("dual"), "likelihood": "categorical", "recenter": True},
}


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, outputs)).double().eval()


def data(likelihood: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(24, 3, dtype=torch.float64, generator=generator)
    noise = torch.randn(24, 2, dtype=torch.float64, generator=generator)
    if likelihood == "categorical":
        return x, (noise[:, 0] > 0).long()
    return x, (noise > 0).double() if likelihood == "bernoulli" else x[:, :2].sin() + 0.3 * noise


def test_inputs() -> Tensor:
    return torch.linspace(-2, 2, 21, dtype=torch.float64).reshape(7, 3)


def batches_of(tensors: Sequence[Tensor], where: slice, size: int = 5) -> list[Any]:
    parts = [one[where].split(size) for one in tensors]
    return [] if not len(tensors[0][where]) else list(zip(*parts, strict=True))


def cut(sizes: Sequence[int], rank: int) -> slice:
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def fit(name: str, where: slice, sizes: Sequence[int] = (), **more: Any) -> whence.Tracer:
    options = {"ridge": 0.5, "progress": False, **CASES[name], **more}
    tensors = list(data(options.get("likelihood")))
    if options.pop("weighted", False):
        tensors.append(torch.arange(24, dtype=torch.float64) % 4)
    model = network()
    if options.pop("dense", False):  # three positions an example, some of which may not count
        model, x = nn.Sequential(model), tensors[0]
        tensors = [
            x.unsqueeze(1) * torch.tensor([0.5, 1.0, 2.0]).double().reshape(3, 1),
            x[:, :1, None] * torch.ones(3, 2),
        ]
        if "likelihood" in options:
            tensors[1] = torch.arange(72).reshape(24, 3) % 3 - 1
    if options.pop("single", False):
        model = model.float()
        tensors = [one.float() if one.is_floating_point() else one for one in tensors]
    if "groups" in options:
        options["groups"] = options["groups"][where]
    if sizes:  # the batches of all processes
        loader = [batch for rank in range(len(sizes)) for batch in batches_of(tensors, cut(sizes, rank))]
    else:
        loader = batches_of(tensors, where)
    return whence.fit(model, loader, **options)


def answers(tracer: whence.Tracer) -> dict[str, Tensor]:
    precision = next(tracer.problem.network.model.parameters()).dtype
    inputs = test_inputs().to(precision)
    found = tracer.predict(inputs.unsqueeze(1).expand(-1, 3, -1) if tracer.problem.dense else inputs, covariance=True)
    parts = (
        {name: found.covariance(name) for name in found.estimators} if found.chosen is None else {"hec3": found.hec3}
    )
    freedom = torch.tensor([tracer.degrees_of_freedom, tracer.ridge, tracer.step.relative])
    return {**parts, "mean": found.mean, "leverage": tracer.leverage, "residuals": tracer.residuals, "dof": freedom}


def gap(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference, over the largest number of each answer."""
    return max(float((one[name] - other[name]).abs().max() / other[name].abs().max()) for name in other)


def forked(world: int, folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What each process says, or its error in words; `None` for one that said nothing."""
    store = folder / "store"
    store.unlink(missing_ok=True)
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            said: Any = None
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT)
                )
                said = work(rank)
                dist.destroy_process_group()
            except BaseException as error:
                said = {"error": type(error).__name__, "words": str(error), "trace": traceback.format_exc()}
            torch.save(said, folder / f"said-{rank}")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    files = [folder / f"said-{rank}" for rank in range(world)]
    found = [torch.load(file) if file.exists() else None for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    return found


def fits(names: Sequence[str], where: slice) -> dict[str, Any]:
    """Answers of several fits, or errors in words."""

    def one(name: str) -> Any:
        try:
            return answers(fit(name, where))
        except Exception:
            return traceback.format_exc()

    return {name: one(name) for name in names}


def compare(folder: Path, names: Sequence[str], worlds: Sequence[int], shards: Sequence[str]) -> dict[str, Any]:
    """Gaps between fits of several processes and of one, the worst of all ranks.

    In single precision a network rounds differently in other batches: there the one process reads the same ones.
    """
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
                same = answers(fit(name, slice(0, 24), sizes=sizes)) if "single" in name else wanted[name]
                here = here if isinstance(here, str) else gap(here, same)
                found[key] = here if isinstance(here, str) else max(here, found.get(key, 0.0))
    return found


def suite(folder: Path) -> dict[str, Any]:
    """What the tests ask for, in one process."""
    works = (predictions, saved, failures, resumed, wrapped, layers, unlike)
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
        once = refused(lambda: fit("ekfac", some, checkpoint=folder / "once" if rank else None))
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
        return [refused(lambda given=given: fit("diagonal", slice(0, 24), distributed=given)) for given in (3, False)]

    return {"said": forked(2, folder, work)[0]}


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except whence.WhenceError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


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
                    distributed=seconds if kind == "hangs" else LIMIT,
                )
            except BaseException as error:
                return [type(error).__name__, str(error), time.monotonic() - start]
            return ["no error", "", 0.0]

        found[kind] = forked(3, folder, work)
    return found


class Failing:
    """Batches that fail in the middle of the third time they are read, kill their process, or never come."""

    def __init__(self, batches: list[Any], kind: str) -> None:
        self.batches, self.kind, self.left = batches, kind, 14

    def __iter__(self) -> Any:
        for batch in self.batches:
            self.left -= 1
            if self.left < 0:
                if self.kind == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                if self.kind == "hangs":
                    time.sleep(12)
                raise OSError("the disk is gone")
            yield batch


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
                gaps = [gap(answers(fit(name, slice(0, 24), checkpoint=copy)), wanted[name])]
            else:
                sizes = SHARDS["uneven"][world]
                told = forked(
                    world,
                    folder,
                    lambda rank, name=name, sizes=sizes, copy=copy: answers(
                        fit(name, cut(sizes, rank), checkpoint=copy)
                    ),
                )
                gaps = [one.get("trace") or gap(one, wanted[name]) for one in told]
            found[f"{name} {world}"] = [gaps, said, files]
    return found


def refused_fit(name: str, loader: Any, checkpoint: Path) -> str:
    options = {"ridge": 0.5, "progress": False, **CASES[name]}
    try:
        whence.fit(network(), loader, checkpoint=checkpoint, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def layers(folder: Path) -> dict[str, Any]:
    """Every process reads all data, and has some of the layers; they predict together."""
    names = ["ekfac", "ekfac, corner", "ekfac, two bases", "kfac", "diagonal"]
    wanted = {name: fit(name, slice(0, 24)) for name in names}
    shares = wanted["ekfac"].attribute(test_inputs()).hec3.share

    def work(rank: int) -> Any:
        found: dict[str, Any] = {}
        for name in names:
            tracer = fit(name, slice(0, 24), shard="layers")
            gaps = gap(answers(tracer), answers(wanted[name]))
            found[name] = [gaps, [block.name for block in tracer.bread.stream.blocks]]
            if name == "ekfac":
                found["share"] = gap({"share": tracer.attribute(test_inputs()).hec3.share}, {"share": shares})
                found["save"] = refused(lambda tracer=tracer: tracer.save(folder / "fit.whence"))
        found["other data"] = refused(lambda: fit("ekfac", slice(rank, 24), shard="layers"))
        found["core"] = refused(lambda: fit("core", slice(0, 24), shard="layers"))
        return found

    def both(rank: int) -> Any:
        found: dict[str, Any] = {}
        for name in names:
            tracer = fit(name, cut([15, 9], rank // 2), shard=2)
            owned = [block.name for block in tracer.bread.stream.blocks]
            found[name] = [gap(answers(tracer), answers(wanted[name])), owned]
        found["other data"] = refused(lambda: fit("ekfac", cut([6, 6, 6, 6], rank), shard=2))
        found["three"] = refused(lambda: fit("ekfac", cut([15, 9], rank // 2), shard=3))
        return found

    found = {str(world): forked(world, folder, work) for world in (2, 3)}
    return {**found, "4 by 2": forked(4, folder, both)}


def wrapped(folder: Path) -> dict[str, Any]:
    """Models as `DistributedDataParallel` and `fully_shard` leave them."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # of older versions
        from torch.distributed._composable.fsdp import fully_shard
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
