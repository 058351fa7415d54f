"""Which ridge to take where none is given: the truth of Monte-Carlo retraining against rules for the ridge.

For every problem and weight decay, the same network is trained on many fresh training sets, all of them at once as one
batched tensor program: from the same first weights (what a linearization can describe) and from fresh ones. The
variance of the predictions over retrainings is the truth. The first few of the networks are fitted with the ridge of
each rule, and Ho and HeC3 compared with it at test points: median of log(variance / truth) and of its absolute value,
rank correlation, and how often prediction +- 1.96 standard errors covers the mean over retrainings.

A fresh training set is drawn from the problem's own distribution (the paper's toy), or with replacement from the rows
of a table that are not tested on: these rows are the population then.

    python -m benchmarks.ridge_default --data FOLDER
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional as F

import whence
from whence_paper.toys.problems import Sinc

from .record import attempt, measured, save, say, surroundings
from .scores import spearman

Loss = Literal["mse", "cross_entropy"]

DECAYS = {"sinc": (1e-3, 1e-4, 0.0), "other": (1e-2, 1e-3, 0.0)}
STRUCTURES = ("exact", "core", "ekfac")
TESTED = 150
STEPS, STOPPED = 1500, 300
"""Steps of training with a weight decay, and without."""
CURVATURE = 0.1
"""Part of trace(F) / p, the mean curvature, and of trace(F) / n, the mean squared gradient of an example."""
ASSUMED = (3e-3, 1e-2, 3e-2)
"""Weight decays to assume, of a network whose targets have variance one."""


@dataclass(frozen=True)
class Problem:
    """Data to draw training sets from.

    Attributes:
        draw: n training examples, by a generator.
        tests: (m, i) inputs.
        n: training examples.
        sizes: of the layers.
        loss: "mse", or "cross_entropy".
        activation: between the layers.
    """

    draw: Callable[[int, Generator], tuple[Tensor, Tensor]]
    tests: Tensor
    n: int
    sizes: tuple[int, ...]
    loss: Loss
    activation: Callable[[Tensor], Tensor]

    @property
    def likelihood(self) -> str:
        """What whence calls the loss."""
        return "gaussian" if self.loss == "mse" else "categorical"


def toy(scenario: int) -> Problem:
    """The paper's sin(x)/x, 50 tanh units."""
    source = Sinc(scenario)

    def draw(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        x = source.inputs(n, generator)
        return x.float(), source.targets(x, "true", generator).float()

    return Problem(draw, torch.linspace(-7, 7, TESTED)[:, None], 200, (1, 50, 1), "mse", torch.tanh)


def table(inputs: Tensor, targets: Tensor, n: int, sizes: tuple[int, ...], loss: Loss) -> Problem:
    """Rows of a table; some are kept for tests, the others are the population."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    tested, pool = order[:TESTED], order[TESTED:]

    def draw(n: int, generator: Generator) -> tuple[Tensor, Tensor]:
        chosen = pool[torch.randint(len(pool), (n,), generator=generator)]
        return inputs[chosen], targets[chosen]

    return Problem(draw, inputs[tested], n, sizes, loss, torch.relu)


def uci(folder: Path, name: str, n: int) -> Problem:
    """A table in standard units, 50 ReLU units."""
    with np.load(folder / "uci" / f"{name}.npz") as found:
        inputs, targets = (torch.from_numpy(found[key]).float().reshape(len(found["y"]), -1) for key in "Xy")
    inputs = (inputs - inputs.mean(0)) / inputs.std(0).clamp_min(1e-6)
    targets = (targets - targets.mean()) / targets.std()
    return table(inputs, targets, n, (inputs.shape[1], 50, 1), "mse")


def digits(loss: Loss) -> Problem:
    """8 x 8 digits, 64-32-10."""
    found = load_digits()
    inputs, labels = torch.from_numpy(found.data / 16.0).float(), torch.from_numpy(found.target).long()
    return table(inputs, F.one_hot(labels).float() if loss == "mse" else labels, 150, (64, 32, 10), loss)


PROBLEMS: dict[str, Callable[[Path], Problem]] = {
    "sinc-1": lambda _: toy(1),
    "sinc-2": lambda _: toy(2),
    "sinc-3": lambda _: toy(3),
    "concrete": lambda folder: uci(folder, "concrete", 200),
    "wine-quality-red": lambda folder: uci(folder, "wine-quality-red", 200),
    "power-plant": lambda folder: uci(folder, "power-plant", 200),
    "digits, squared error": lambda _: digits("mse"),
    "digits, cross-entropy": lambda _: digits("cross_entropy"),
}


class Network(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, sizes: tuple[int, ...], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """(n, i) -> (n, k)."""
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        found: Tensor = self.layers[-1](x)
        return found


def initial(problem: Problem, count: int, seed: int) -> list[Tensor]:
    """Weights (count, o, i) and biases (count, 1, o) of all layers, as torch draws them."""
    generator = torch.Generator().manual_seed(seed)
    return [
        (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(i)
        for i, o in pairwise(problem.sizes)
        for shape in ((count, o, i), (count, 1, o))
    ]


def forward(problem: Problem, weights: list[Tensor], x: Tensor) -> Tensor:
    """(b, n, i) -> (b, n, k)."""
    last = len(weights) - 2
    for at in range(0, len(weights), 2):
        x = torch.baddbmm(weights[at + 1], x, weights[at].mT)
        x = x if at == last else problem.activation(x)
    return x


def train(problem: Problem, weights: list[Tensor], x: Tensor, y: Tensor, decay: float, steps: int) -> list[Tensor]:
    """All networks at once, each on its own data: full-batch Adam with a penalty, rate 0.01 that falls to zero."""
    weights = [one.clone().requires_grad_() for one in weights]
    optimiser = torch.optim.Adam(weights, lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for _ in range(steps):
        optimiser.zero_grad()
        outputs = forward(problem, weights, x)
        if problem.loss == "mse":
            loss = (outputs - y).square().mean((1, 2)).sum()
        else:
            loss = F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="sum") / x.shape[1]
        (loss + decay / 2 * sum(one.square().sum() for one in weights)).backward()
        optimiser.step()
        schedule.step()
    return [one.detach() for one in weights]


def module(problem: Problem, weights: list[Tensor], at: int) -> nn.Module:
    """One of the networks."""
    network = Network(problem.sizes, problem.activation)
    with torch.no_grad():
        for own, one in zip(network.parameters(), weights, strict=True):
            own.copy_(one[at].reshape(own.shape))
    return network.double().eval()


def trace(problem: Problem, network: nn.Module, x: Tensor) -> float:
    """Of the curvature: sum of squared gradients, each weighted with the loss's Hessian."""
    parameters = {name: one.detach() for name, one in network.named_parameters()}

    def outputs(given: dict[str, Tensor], one: Tensor) -> Tensor:
        found: Tensor = functional_call(network, given, (one[None],))[0]
        return found

    rows = torch.cat([part.flatten(2) for part in vmap(jacrev(outputs), (None, 0))(parameters, x.double()).values()], 2)
    if problem.loss == "mse":
        return float(rows.square().sum())
    p = network(x.double()).softmax(1).detach()
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    return float(torch.einsum("nkp,nkj,njp->", rows, hessian, rows))


def optimality(problem: Problem, network: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """The ridge for which the weights are an optimum along themselves, w^T (score - lambda w) = 0; and |w|^2."""
    outputs = network(x)
    squares = problem.loss == "mse"
    loss = (outputs - y).square().sum() / 2 if squares else F.cross_entropy(outputs, y, reduction="sum")
    parameters = list(network.parameters())
    gradients = torch.autograd.grad(loss, parameters)
    size = float(sum(one.detach().square().sum() for one in parameters))
    downhill = -float(sum((g * one.detach()).sum() for g, one in zip(gradients, parameters, strict=True)))
    return downhill / size, size


def rules(
    problem: Problem, network: nn.Module, x: Tensor, y: Tensor, decay: float
) -> Iterator[tuple[str, float | str]]:
    """Ridges to try, by the name of the rule."""
    yield "1", 1.0
    yield "n / 100", problem.n / 100
    if problem.loss == "mse":  # of cross-entropy: 45 times the time of a fit, and more
        yield "leave-one-out", "loo"
    if decay > 0:
        outputs = problem.sizes[-1] if problem.loss == "mse" else 1
        yield "weight decay", whence.ridge_from_weight_decay(decay, problem.n, outputs=outputs, loss=problem.loss)
    whole = trace(problem, network, x)
    p = sum(one.numel() for one in network.parameters())
    stationary, size = optimality(problem, network, x, y)
    yield "stationarity", max(stationary, 1e-8 * whole)
    noise = float((network(x) - y).detach().square().mean()) if problem.loss == "mse" else 1.0
    yield "noise p / w.w", noise * p / size
    yield f"trace / p x {CURVATURE:g}", CURVATURE * whole / p
    yield f"trace / n x {CURVATURE:g}", CURVATURE * whole / problem.n
    for assumed in ASSUMED:
        half_squares = float((y - y.mean(0)).square().sum()) / 2 if problem.loss == "mse" else problem.n
        yield f"assumed decay {assumed:g}", assumed * half_squares


def retrain(problem: Problem, decay: float, steps: int, retrainings: int) -> tuple[dict[str, Any], Any]:
    """Mean and variance of the predictions over retrainings, by the kind of first weights; networks and data of one."""
    truths, trained = {}, None
    for kind, seed in (("same", 1), ("fresh", 2)):
        draws = [problem.draw(problem.n, torch.Generator().manual_seed(1000 * seed + at)) for at in range(retrainings)]
        x, y = (torch.stack(part) for part in zip(*draws, strict=True))
        first = initial(problem, 1 if kind == "same" else retrainings, seed)
        weights = train(problem, [one.expand(retrainings, -1, -1) for one in first], x, y, decay, steps)
        with torch.no_grad():
            predictions = forward(problem, weights, problem.tests.expand(retrainings, -1, -1)).double()
        truths[kind] = (predictions.mean(0), predictions.var(0))
        if trained is None:
            trained = (weights, x, y)
    return truths, trained


def measure(
    problem: Problem, decay: float, retrainings: int, fits: int, structures: tuple[str, ...], kept: Path
) -> dict[str, Any]:
    """Retrain, fit, compare.

    Args:
        problem: the data.
        decay: weight decay.
        retrainings: of each kind.
        fits: networks to fit.
        structures: to fit with.
        kept: where retrained networks are, or will be.
    """
    start = time.perf_counter()
    steps = STEPS if decay > 0 else STOPPED
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        torch.save(retrain(problem, decay, steps, retrainings), kept)
    truths, (weights, x, y) = torch.load(kept, weights_only=True)
    rows = []
    for at in range(fits if problem.sizes[-1] == 1 else 1):  # ten outputs take ten times as long
        network = module(problem, weights, at)
        inputs, targets = x[at].double(), y[at] if y.dtype == torch.long else y[at].double()
        tried = dict(rules(problem, network, inputs, targets, decay))
        for structure in structures:
            if structure == "core" and (at > 0 or len(problem.tests[0]) > 20):  # small networks are all core
                continue
            for rule, ridge in tried.items():
                row = {"draw": at, "structure": structure, "rule": rule}
                fit = partial(fitted, problem, network, (inputs, targets), structure, ridge, truths)
                attempt(row, fit, lambda _: "")
                if ridge == "loo" and "ridge" in row:
                    tried[rule] = row["ridge"]  # the exact structure's serves the others too
                rows.append(row)
    return {
        "decay": decay,
        "steps": steps,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }


def fitted(
    problem: Problem,
    network: nn.Module,
    data: tuple[Tensor, Tensor],
    structure: str,
    ridge: Any,
    truths: dict[str, Any],
) -> dict[str, Any]:
    """One fit, and how it compares with the truths."""
    begun = time.perf_counter()
    tracer = whence.fit(network, [data], problem.likelihood, structure, ridge=ridge, progress=False)
    found = tracer.predict(problem.tests.double())
    row: dict[str, Any] = {"ridge": tracer.ridge, "seconds": round(time.perf_counter() - begun, 2)}
    for name, variances in (("Ho", found.ho), ("HeC3", found.hec3)):
        row |= {f"{name}, {kind}": agreement(found.mean, variances, *truth) for kind, truth in truths.items()}
    return row


def agreement(mean: Tensor, variance: Tensor, expected: Tensor, truth: Tensor) -> dict[str, float]:
    """Of variances (m, k) with the truth, summed over outputs; coverage an output."""
    ratio = (variance.sum(1) / truth.sum(1)).log()
    return {
        "log": round(float(ratio.median()), 3),
        "abs_log": round(float(ratio.abs().median()), 3),
        "rank": round(spearman(variance.sum(1), truth.sum(1)), 3),
        "coverage": round(float(((mean - expected).abs() <= 1.96 * variance.sqrt()).double().mean()), 3),
    }


def summary(cases: list[dict[str, Any]], truth: str) -> list[str]:
    """A line for each rule and structure: means over problems, decays and draws; and the worst."""
    rows = [row | {"decay": case["decay"]} for case in cases for row in case["rows"]]
    lines = [f"truth: {truth} first weights", f"{'':38s}{'Ho':^34s}{'HeC3':^34s}"]
    heading = f"{'log':>7s}{'|log|':>7s}{'rank':>7s}{'cover':>7s}  "
    lines.append(f"{'structure, rule':38s}{heading}{heading}  worst |log|, failed")
    for structure in dict.fromkeys(row["structure"] for row in rows):
        for rule in dict.fromkeys(row["rule"] for row in rows):
            same = [row for row in rows if row["structure"] == structure and row["rule"] == rule]
            done = [row for row in same if "ridge" in row]
            if not done:
                continue
            line = f"{structure + ', ' + rule:38s}"
            for name in ("Ho", "HeC3"):
                numbers = [row[f"{name}, {truth}"] for row in done]
                line += "".join(
                    f"{np.mean([one[key] for one in numbers]):7.2f}" for key in ("log", "abs_log", "rank", "coverage")
                )
                line += "  "
            worst = max(row[f"{name}, {truth}"]["abs_log"] for row in done for name in ("Ho", "HeC3"))
            lines.append(f"{line} {worst:7.2f} {len(same) - len(done):4d}")
    return lines


def main() -> None:
    """All problems and decays; what an earlier run measured is kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with uci/")
    parser.add_argument("--problems", nargs="+", choices=list(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--retrainings", type=int, default=60)
    parser.add_argument("--fits", type=int, default=3, help="networks that are fitted, of those retrained")
    parser.add_argument("--structures", nargs="+", choices=STRUCTURES, default=list(STRUCTURES))
    parser.add_argument("--networks", type=Path, default=Path("out/ridge_default"), help="where they are kept")
    parser.add_argument("--out", type=Path, default=Path("results/ridge_default.json"))
    given = parser.parse_args()
    setting = {"retrainings": given.retrainings, "fits": given.fits}
    cases = measured(given.out, "cases", **setting)
    known = {(case["problem"], case["decay"]) for case in cases}
    for name in given.problems:
        problem = PROBLEMS[name](given.data)
        for decay in DECAYS["sinc" if name.startswith("sinc") else "other"]:
            if (name, decay) in known:
                continue
            kept = given.networks / f"{name.replace(', ', '-').replace(' ', '-')}-{decay:g}-{given.retrainings}.pt"
            found = measure(problem, decay, given.retrainings, given.fits, tuple(given.structures), kept)
            case = {"problem": name, **found}
            cases.append(case)
            save(given.out, {**surroundings(), **setting, "cases": cases})
            say(f"\n{name}, decay {decay:g}: {case['seconds']} s")
            say("\n".join(line for line in summary([case], "same") if not line.startswith("core")))
    save(given.out, {**surroundings(), **setting, "cases": cases})
    for truth in ("same", "fresh"):
        say("\n".join(["", *summary(cases, truth)]))


if __name__ == "__main__":
    main()
