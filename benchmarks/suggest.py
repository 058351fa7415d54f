"""Suggestions put to the test: label what is suggested, or check it, train again, and look at the test set.

    python -m benchmarks.suggest --data DIR --out results/suggest.json

*Labels to buy.* A network is trained on a few labelled examples; in each round a strategy chooses inputs of a pool,
which are labelled, and the network is trained again from the same start. Strategies: `Tracer.suggest`, random, the
largest Ho, the largest HeC3, and for classes the smallest margin between the two largest probabilities.

*Labels to check.* A tenth of the training labels is wrong. A budget of them is checked and corrected where wrong:
those that `Tracer.suggest` lists, those of the largest loss, or random ones. Then the network is trained again.

Errors on the test set: root mean squared error over the standard deviation of the labels, or share of wrong classes.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence

from .data import read_housing
from .draws import run_draws
from .optimum import approach
from .studied import UNSEEN, eight_by_eight

STRATEGIES = ("suggest", "random", "largest Ho", "largest HeC3", "smallest margin")
CHECKS = ("suggest", "loss", "random")
WRONG = 0.1


@dataclass(frozen=True)
class Case:
    """Data in a random order, and a network that has seen none of them.

    Attributes:
        first: how many labels there are to begin with.
        each: how many are bought in a round.
        candidates: how many of the unlabelled are looked at in a round.
        checked: how many training examples there are where labels are to be checked.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    network: nn.Module
    ridge: float
    first: int
    each: int
    candidates: int
    checked: int

    @property
    def likelihood(self) -> str:
        """By the labels."""
        return "gaussian" if self.y.is_floating_point() else "categorical"

    def trained(self, x: Tensor, y: Tensor) -> nn.Module:
        """A trained network, always from the same start."""
        network = copy.deepcopy(self.network)
        if self.likelihood == "gaussian":
            approach(network, x, y, self.ridge, steps=60)
        else:
            descend(network, x, y, self.ridge)
        return network

    def tracer(self, network: nn.Module, x: Tensor, y: Tensor) -> whence.Tracer:
        """The fit."""
        return whence.fit(network, [(x, y)], self.likelihood, ridge=self.ridge, progress=False)

    @torch.no_grad()
    def error(self, network: nn.Module) -> float:
        """On the test set."""
        out = network(self.test_x)
        if self.likelihood == "gaussian":
            return float((out - self.test_y).square().mean().sqrt())
        return float((out.argmax(1) != self.test_y).double().mean())


def descend(network: nn.Module, x: Tensor, y: Tensor, ridge: float) -> None:
    """Cross-entropy + ridge / 2 |w|^2 by L-BFGS."""
    optimiser = torch.optim.LBFGS(
        network.parameters(), max_iter=150, tolerance_grad=1e-4, line_search_fn="strong_wolfe", history_size=20
    )

    def loss() -> Tensor:
        optimiser.zero_grad()
        penalty = torch.stack([parameter.square().sum() for parameter in network.parameters()]).sum()
        value = F.cross_entropy(network(x), y, reduction="sum") + 0.5 * ridge * penalty
        value.backward()
        return value

    optimiser.step(loss)
    network.zero_grad(set_to_none=True)
    network.eval()


def concrete(seed: int, folder: Path) -> Case:
    """Strength of concrete, 8 inputs, 16 tanh units, squared error."""
    raw = np.load(folder / "uci" / "concrete.npz")
    x, y = torch.from_numpy(raw["X"]).double(), torch.from_numpy(raw["y"]).double().reshape(-1, 1)
    return _shuffled((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std(), seed, 400, (16, 1))


def housing(seed: int, folder: Path) -> Case:
    """House prices in California, 8 inputs, 16 tanh units, squared error."""
    x, y = (part.double() for part in read_housing(folder))
    return _shuffled(x, y, seed, 2000, (16, 1))


def digits(seed: int, folder: Path) -> Case:
    """Digits of 8 x 8 pixels, 24 tanh units, cross-entropy."""
    data = eight_by_eight()
    x, y = torch.cat([data.inputs, data.test_inputs]).double(), torch.cat([data.labels, data.test_labels])
    return replace(_shuffled(x, y, seed, 800, (24, 10)), candidates=200, checked=250)


CASES: dict[str, Callable[[int, Path], Case]] = {"concrete": concrete, "housing": housing, "digits": digits}


def _shuffled(x: Tensor, y: Tensor, seed: int, test: int, sizes: tuple[int, int]) -> Case:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    tested, rest = order[:test], order[test:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(x.shape[1], sizes[0]), nn.Tanh(), nn.Linear(*sizes)).double()
    return Case(x[rest], y[rest], x[tested], y[tested], network, 1.0, 50, 20, 500, 300)


def choose(strategy: str, tracer: whence.Tracer, pool: Tensor, count: int, draw: torch.Generator) -> Tensor:
    """Positions in the pool."""
    if strategy == "suggest":
        return tracer.suggest(count, pool).index
    if strategy == "random":
        return torch.randperm(len(pool), generator=draw)[:count]
    if strategy == "smallest margin":
        with torch.no_grad():
            first, second = tracer.problem.network(pool).softmax(1).topk(2, dim=1).values.unbind(1)
        return (second - first).topk(count).indices
    name = {"largest Ho": "ho", "largest HeC3": "hec3"}[strategy]
    return tracer.predict(pool).variance(name).sum(1).topk(count).indices


def buy(case: Case, strategy: str, rounds: int, seed: int) -> list[float]:
    """Errors before the first and after each round."""
    draw = torch.Generator().manual_seed(seed)
    known = torch.zeros(len(case.x), dtype=torch.bool)
    known[: case.first] = True
    errors = []
    for turn in range(rounds + 1):
        x, y = case.x[known], case.y[known]
        network = case.trained(x, y)
        errors.append(case.error(network))
        if turn < rounds:
            unknown = (~known).nonzero().squeeze(1)
            looked = unknown[torch.randperm(len(unknown), generator=draw)[: case.candidates]]
            chosen = choose(strategy, case.tracer(network, x, y), case.x[looked], case.each, draw)
            known[looked[chosen]] = True
    return errors


def check(case: Case, budget: int, seed: int) -> dict[str, Any]:
    """Errors after checking, and how many of the wrong labels were found."""
    draw = torch.Generator().manual_seed(seed)
    x, right = case.x[: case.checked], case.y[: case.checked]
    wrong = torch.zeros(len(x), dtype=torch.bool)
    wrong[torch.randperm(len(x), generator=draw)[: round(WRONG * len(x))]] = True
    if right.is_floating_point():
        given = torch.where(wrong.unsqueeze(1), right[torch.randperm(len(x), generator=draw)], right)
    else:
        given = torch.where(wrong, (right + torch.randint(1, 10, right.shape, generator=draw)) % 10, right)
    network = case.trained(x, given)
    tracer = case.tracer(network, x, given)
    with torch.no_grad():
        out = network(x)
        if right.is_floating_point():
            loss = (out - given).square().sum(1)
        else:
            loss = F.cross_entropy(out, given, reduction="none")
    orders = {
        "suggest": tracer.suggest(budget).index,
        "loss": loss.topk(budget).indices,
        "random": torch.randperm(len(x), generator=draw)[:budget],
    }
    found: dict[str, Any] = {"wrong": int(wrong.sum()), "budget": budget, "nothing": case.error(network)}
    for name, chosen in orders.items():
        mended = given.clone()
        mended[chosen] = right[chosen]
        error = case.error(case.trained(x, mended))
        found[name] = {"error": error, "found": int(wrong[chosen].sum())}
    found["everything"] = case.error(case.trained(x, right))
    return found


def measure(case: Case, rounds: int, seed: int) -> dict[str, Any]:
    """Both experiments."""
    start = time.perf_counter()
    allowed = [name for name in STRATEGIES if case.likelihood == "categorical" or name != "smallest margin"]
    errors = {name: buy(case, name, rounds, seed) for name in allowed}
    checked = [check(case, max(1, case.checked // 20 * times), seed) for times in (1, 2)]
    return {"labels_to_buy": errors, "labels_to_check": checked, "seconds": round(time.perf_counter() - start, 1)}


def tell(found: dict[str, Any]) -> Iterator[str]:
    """Lines about what was measured."""
    for strategy, errors in found["labels_to_buy"].items():
        yield f"{strategy}: " + " ".join(f"{error:.3f}" for error in errors)
    for row in found["labels_to_check"]:
        each = (f"{one} {row[one]['error']:.3f} ({row[one]['found']} of {row['wrong']})" for one in CHECKS)
        ends = f"nothing {row['nothing']:.3f}, everything {row['everything']:.3f}"
        yield f"check {row['budget']}: {ends}, {', '.join(each)}"


def main() -> None:
    """All cases and seeds."""
    run_draws(__doc__, CASES, UNSEEN, ("rounds", 4, "in which labels are bought"), measure, tell)


if __name__ == "__main__":
    main()
