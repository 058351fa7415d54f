"""What-if against retraining: small networks, trained again on the changed training set from where they were.

    python -m benchmarks.what_if --data DIR --out results/what_if.json

For each network, seed and kind of change: rank correlation and slope between predicted and true change of the outputs
over all test points and changes, rank correlation of the mean change a change, and rank correlation between predicted
and true change of Ho and HeC3 (true: a new fit to the retrained network, with the noise covariance of before).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import whence

from .draws import run_draws
from .optimum import converge
from .scores import spearman
from .studied import eight_by_eight

UNSEEN = (200, 201, 202)
"""Seeds that were not looked at while this was made."""

GROUP = 10
TESTS = 60


@dataclass(frozen=True)
class Case:
    """A training set, test points, a network and its ridge."""

    x: Tensor
    y: Tensor
    test: Tensor
    network: nn.Module
    ridge: float

    @property
    def likelihood(self) -> str:
        """By the labels."""
        return "gaussian" if self.y.is_floating_point() else "categorical"

    def other(self, at: int, draw: torch.Generator) -> Tensor:
        """Another label: a training example's drawn at random, or another class."""
        if self.y.is_floating_point():
            return self.y[int(torch.randint(len(self.y), (), generator=draw))]
        classes = int(self.y.max()) + 1
        return (self.y[at] + torch.randint(1, classes, (), generator=draw)) % classes


def concrete(seed: int, folder: Path) -> Case:
    """Strength of concrete, eight inputs: 200 training examples, 16 tanh units."""
    raw = np.load(folder / "uci" / "concrete.npz")
    x, y = torch.from_numpy(raw["X"]).double(), torch.from_numpy(raw["y"]).double().reshape(-1, 1)
    return _case((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std(), seed, 200, _mlp(8, 16, 1, seed), 1.0)


def sine(seed: int, folder: Path) -> Case:
    """A noisy sine of one input: 60 training examples, 20 tanh units."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(200, 1, generator=draw, dtype=torch.float64) * 6 - 3
    y = x.sin() + 0.2 * torch.randn(200, 1, generator=draw, dtype=torch.float64)
    return _case(x, y, seed, 60, _mlp(1, 20, 1, seed), 0.1)


def digits(seed: int, folder: Path) -> Case:
    """The digits 0 to 4 in 8 x 8 pixels: 150 training examples, 8 tanh units, cross-entropy."""
    data = eight_by_eight()
    few = data.labels < 5
    return _case(data.inputs[few].double(), data.labels[few], seed, 150, _mlp(64, 8, 5, seed), 1.0)


CASES: dict[str, Callable[[int, Path], Case]] = {"sine": sine, "concrete": concrete, "digits": digits}


def _mlp(inputs: int, units: int, outputs: int, seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(inputs, units), nn.Tanh(), nn.Linear(units, outputs)).double()


def _case(x: Tensor, y: Tensor, seed: int, n: int, network: nn.Module, ridge: float) -> Case:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    chosen, tested = order[:n], order[n : n + TESTS]
    return Case(x[chosen], y[chosen], x[tested], network, ridge)


def changes(case: Case, draw: torch.Generator, count: int) -> dict[str, list[dict[str, Any]]]:
    """Some changes of each kind. Groups are alike: an example and its nearest ones."""
    n = len(case.x)

    def some() -> list[int]:
        return torch.randperm(n, generator=draw)[:count].tolist()

    def group(at: int) -> list[int]:
        return (case.x - case.x[at]).norm(dim=1).argsort()[:GROUP].tolist()

    def relabelled(chosen: list[int]) -> dict[int, Tensor]:
        return {at: case.other(at, draw) for at in chosen}

    return {
        "remove one": [{"remove": [at]} for at in some()],
        "relabel one": [{"relabel": relabelled([at])} for at in some()],
        "repeat one": [{"repeat": [at]} for at in some()],
        f"remove {GROUP} neighbours": [{"remove": group(at)} for at in some()],
        f"relabel {GROUP} neighbours": [{"relabel": relabelled(group(at))} for at in some()],
        f"repeat {GROUP} neighbours": [{"repeat": group(at)} for at in some()],
        f"remove {GROUP} at random": [{"remove": torch.randperm(n, generator=draw)[:GROUP].tolist()} for _ in some()],
    }


def changed(case: Case, change: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The training set after a change."""
    y = case.y.clone()
    for at, target in change.get("relabel", {}).items():
        y[at] = target
    gone = set(change.get("remove", ()))
    rows = [at for at in range(len(y)) if at not in gone] + list(change.get("repeat", ()))
    return case.x[rows], y[rows]


def measure(case: Case, count: int, seed: int) -> dict[str, Any]:
    """Train, ask, retrain, compare."""
    start = time.perf_counter()
    left = converge(case.network, case.x, case.y, case.ridge)
    options = {"likelihood": case.likelihood, "ridge": case.ridge, "progress": False}
    tracer = whence.fit(case.network, [(case.x, case.y)], **options)
    before = tracer.predict(case.test)
    scale = tracer.noise_scale
    rows = {}
    for kind, listed in changes(case, torch.Generator().manual_seed(seed), count).items():
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {"change": [], "ho": [], "hec3": []}
        for change in listed:
            said = tracer.what_if(case.test, **change)
            again = copy.deepcopy(case.network)
            x, y = changed(case, change)
            converge(again, x, y, case.ridge, steps=60)
            refit = whence.fit(again, [(x, y)], **options)
            after = refit.predict(case.test)
            factor = scale / refit.noise_scale if case.likelihood == "gaussian" else 1.0
            pairs["change"].append((said.change, after.mean - before.mean))
            pairs["ho"].append(((said.new_ho / said.ho).log(), (factor * after.ho / before.ho).log()))
            pairs["hec3"].append(((said.new_hec3 / said.hec3).log(), (after.hec3 / before.hec3).log()))
        rows[kind] = _agreement(pairs)
    return {"gradient_left": left, "kinds": rows, "seconds": round(time.perf_counter() - start, 1)}


def _agreement(pairs: dict[str, list[tuple[Tensor, Tensor]]]) -> dict[str, float]:
    said, true = (torch.stack(part) for part in zip(*pairs["change"], strict=True))
    found = {
        "spearman": spearman(said.flatten(), true.flatten()),
        "slope": float((said * true).sum() / said.square().sum()),
        "explained": 1 - float((said - true).square().sum() / true.square().sum()),
        "spearman_of_sizes": spearman(said.square().mean((1, 2)), true.square().mean((1, 2))),
    }
    for name in ("ho", "hec3"):
        first, second = (torch.stack(part).flatten() for part in zip(*pairs[name], strict=True))
        if bool(first.any()):  # Ho does not change with labels
            found[f"spearman_{name}"] = spearman(first, second)
    return found


def tell(found: dict[str, Any]) -> Iterator[str]:
    """Lines about what was measured."""
    yield f"gradient left {found['gradient_left']:.1e}"
    for kind, row in found["kinds"].items():
        yield f"{kind}: " + ", ".join(f"{key} {value:.3f}" for key, value in row.items())


def main() -> None:
    """All cases and seeds."""
    run_draws(__doc__, CASES, UNSEEN, ("count", 5, "changes of each kind"), measure, tell)


if __name__ == "__main__":
    main()
