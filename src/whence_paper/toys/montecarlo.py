"""Ground truth: train the same network again and again on new data, and see how its predictions scatter.

Three sources of new data:

* `full`: new inputs and new responses, for the variance that HeC3 estimates;
* `label`: the inputs of the first `full` draw with new responses, for the variance that Ho estimates;
* `homoscedastic`: the same, but with Gaussian noise of equal variance everywhere, as in the captions of the paper.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor

from .network import Architecture
from .problems import Noise, Problem
from .training import Trained, train_converged, train_paper

Source = Literal["full", "label", "homoscedastic"]
SOURCES: tuple[Source, ...] = ("full", "label", "homoscedastic")
Init = Literal["same", "fresh", "warm"]


@dataclass(frozen=True)
class Plan:
    """How networks are trained.

    Attributes:
        hidden: hidden units.
        examples: training examples in a draw.
        trials: retrainings for each source of new data.
        ridge: lambda, on the sum scale, in training and in the estimators.
        optimiser: "converged", or "paper" for L-BFGS with learning rate 0.1.
        steps: iterations of the paper's optimiser.
        init: "same" initial weights for all trials (the scatter is then due to the data alone), "fresh" ones for each,
            or "warm": the weights trained on the first draw.
        seed: of everything.
    """

    hidden: int
    examples: int
    trials: int
    ridge: float
    optimiser: Literal["converged", "paper"] = "converged"
    steps: int = 100
    init: Init = "same"
    seed: int = 0

    def as_dict(self) -> dict[str, Any]:
        """For the record; without what the optimiser does not use."""
        unused = {"steps"} if self.optimiser == "converged" else set()
        return {key: value for key, value in asdict(self).items() if key not in unused}


@dataclass(frozen=True)
class Trials:
    """Retrained networks and their data: (b, n, i), (b, n, k), seeds of the draws."""

    net: Architecture
    x: Tensor
    y: Tensor
    seeds: list[int]
    trained: Trained

    def predictions(self, grid: Tensor) -> Tensor:
        """(b, m, k) at the points of a grid, in float64."""
        return self.net.predict(self.trained.weights.double(), grid)


def seed_of(plan: Plan, *path: int) -> int:
    """A seed for one place in the experiment: the same for the same place, unrelated to those of all others.

    Examples:
        >>> plan = Plan(hidden=3, examples=5, trials=2, ridge=1.0)
        >>> seed_of(plan, 0, 1) == seed_of(plan, 0, 1), seed_of(plan, 0, 1) == seed_of(plan, 1, 0)
        (True, False)
    """
    return int(numpy.random.SeedSequence([plan.seed, *path]).generate_state(1)[0])


def draw(problem: Problem, plan: Plan, source: Source) -> tuple[Tensor, Tensor, list[int]]:
    """Training sets (b, n, i) and (b, n, k), with the seed of each."""
    noise: Noise = "homoscedastic" if source == "homoscedastic" else "true"
    fixed = problem.inputs(plan.examples, torch.Generator().manual_seed(seed_of(plan, 0, 0)))
    seeds = [seed_of(plan, SOURCES.index(source), trial) for trial in range(plan.trials)]
    xs, ys = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = problem.inputs(plan.examples, generator) if source == "full" else fixed
        xs.append(x)
        ys.append(problem.targets(x, noise, generator))
    return torch.stack(xs), torch.stack(ys), seeds


def train(net: Architecture, plan: Plan, start: Tensor, x: Tensor, y: Tensor) -> Trained:
    """Train one network on each data set, by the plan's optimiser."""
    if plan.optimiser == "converged":
        return train_converged(net, start, x, y, plan.ridge)
    return train_paper(net, start, x, y, plan.ridge, [plan.steps])[plan.steps]


def initial_weights(problem: Problem, net: Architecture, plan: Plan) -> Tensor:
    """(b, p) where each trial starts."""
    count = plan.trials if plan.init == "fresh" else 1
    start = net.initial(count, torch.Generator().manual_seed(seed_of(plan, len(SOURCES))))
    if plan.init == "warm":
        x, y, _ = draw(problem, Plan(plan.hidden, plan.examples, 1, plan.ridge, seed=plan.seed), "full")
        start = train(net, plan, start, x, y).weights.double()
    return start.expand(plan.trials, -1)


def retrain(problem: Problem, plan: Plan, source: Source) -> Trials:
    """Draw new data and train a network on each draw."""
    x, y, seeds = draw(problem, plan, source)
    net = Architecture(x.shape[2], plan.hidden, y.shape[2])
    return Trials(net, x, y, seeds, train(net, plan, initial_weights(problem, net, plan), x, y))


def scatter(predictions: Tensor) -> Tensor:
    """(b, m, k) predictions -> (m,) variance over the b networks, summed over the k outputs."""
    return predictions.var(dim=0).sum(dim=1)
