"""Fits in processes that are forked from one that has imported everything: dozens take seconds. They meet in a file."""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import whence
from whence.runtime.processes import RELEASE_SECONDS, open_process_group

SHARDS = {"even": {2: [12, 12], 4: [6, 6, 6, 6]}, "uneven": {2: [17, 7], 4: [9, 0, 13, 2]}, "first empty": {2: [0, 24]}}
LIMIT = 60.0
"""Seconds that processes wait for one another."""

CASES: dict[str, dict[str, Any]] = {
    "ekfac": {"structure": "ekfac"},
    "ekfac, corner": {"structure": whence.EKFAC(tolerance=0.2), "ridge": 4.0, "recenter": True},
    "ekfac, gradients": {"structure": whence.EKFAC(basis="gradients")},
    "ekfac, two bases": {"structure": whence.EKFAC(meat="two_bases", corner=2), "likelihood": "categorical"},
    "kfac": {"structure": "kfac", "likelihood": "categorical", "noise": "unbiased"},
    "diagonal": {"structure": "diagonal", "weighted": True},
    "core": {"structure": whence.Core(size=15), "recenter": True},
    "core, loo": {"structure": "core", "ridge": "loo"},
    "primal, groups, loo": {
        "structure": whence.Exact("primal"),
        "ridge": "loo",
        "groups": [at // 3 % 7 for at in range(24)],
    },
    "core, groups": {"structure": "core", "groups": [at // 3 % 7 for at in range(24)], "likelihood": "bernoulli"},
    "sketch": {"structure": whence.Sketch(size=30), "likelihood": "categorical", "hessian_columns": 1},
    "primal": {"structure": whence.Exact("primal"), "loo": "output"},
    "primal, little memory": {
        "structure": whence.Exact("primal"),
        "execution": whence.Execution(max_memory=140_000),
        "likelihood": "categorical",
    },
    "positions": {"structure": "ekfac", "loo": "position", "dense": True},
    "positions, classes": {"structure": "core", "dense": True, "likelihood": whence.Categorical(ignore_index=-1)},
    "single precision": {"structure": "core", "likelihood": "categorical", "single": True},
    "single precision, ekfac": {"structure": whence.EKFAC(tolerance=0.0), "single": True},
    "heads": {"structure": "diagonal", "heads": True},
    "heads, core": {"structure": whence.Core(size=400, tolerance=0.0), "heads": True},
}


class Heads(nn.Module):
    """Two tasks, told by the first input: the second comes last, in the data of the last process alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.trunk = network(3)
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden, second = self.trunk(x).tanh(), x[:, :1] > 0.8
        first = self.heads[0](hidden)
        return torch.where(second, self.heads[1](hidden), first) if bool(second.any()) else first


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


def fit(name: str, where: slice, **more: Any) -> whence.Tracer:
    options = {"ridge": 0.5, "progress": False, **CASES[name], **more}
    tensors = list(data(options.get("likelihood")))
    if options.pop("weighted", False):
        tensors.append(torch.arange(24, dtype=torch.float64) % 4)
    model = network()
    if options.pop("heads", False):
        model, order = Heads(), tensors[0][:, 0].argsort()
        tensors = [one[order] for one in tensors]
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
    return whence.fit(model, batches_of(tensors, where), **options)


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
                time.sleep(RELEASE_SECONDS)
                dist.destroy_process_group()
            except BaseException as error:
                said = {"error": type(error).__name__, "words": str(error), "trace": traceback.format_exc()}
            torch.save(said, folder / f"said-{rank}")
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    files = [folder / f"said-{rank}" for rank in range(world)]
    found = [torch.load(file, weights_only=True) if file.exists() else None for file in files]
    for file in files:
        file.unlink(missing_ok=True)
    return found


class Decompositions(TorchFunctionMode):
    """Sizes of the matrices that `torch.linalg.eigh` is given."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.linalg.eigh:
            self.sizes.append(args[0].shape[-1])
        return func(*args, **(kwargs or {}))


def decompositions(folder: Path) -> dict[str, Any]:
    """Sizes of the matrices that each of three processes decomposes in a fit, and those of one that is alone."""

    def sizes(where: slice) -> list[int]:
        with Decompositions() as seen:
            fit("ekfac", where)
        return seen.sizes

    said = forked(3, folder, lambda rank: sizes(cut([10, 10, 4], rank)))
    return {"alone": sizes(slice(0, 24)), "said": said}


def partings(folder: Path, rounds: int = 20) -> dict[str, Any]:
    """Processes that meet, exchange something that none of them keeps, and part, again and again."""

    def work(rank: int) -> Any:
        for _ in range(rounds):
            with (process_group := open_process_group(LIMIT)).reporting_errors():
                process_group.all_gather(torch.full((5, 2), 1.0), "the rows", torch.device("cpu"))
            del process_group
        return rounds

    return {"rounds": rounds, "said": forked(3, folder, work)}


def refused(work: Callable[[], Any]) -> str:
    try:
        work()
    except whence.WhenceError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


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
