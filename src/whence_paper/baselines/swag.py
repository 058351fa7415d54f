"""SWAG: a normal distribution of weights from the path of a stochastic gradient descent (Maddox et al. 2019)."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from .base import Baseline, Data, Recipe, Sampled, outputs_of


@dataclass
class Path:
    """Moments of weights that pass by: their mean, variances, and the last deviations from the running mean.

    Attributes:
        rank: deviations to keep.
    """

    rank: int
    count: int = 0

    def __post_init__(self) -> None:
        self.mean = torch.zeros(())
        self.squares = torch.zeros(())
        self.deviations: list[Tensor] = []

    def add(self, weights: Tensor) -> None:
        """Note one place on the path."""
        self.count += 1
        self.mean = self.mean + (weights - self.mean) / self.count
        self.squares = self.squares + (weights.square() - self.squares) / self.count
        self.deviations = [*self.deviations, weights - self.mean][-self.rank :]

    @property
    def variance(self) -> Tensor:
        """(p,) of each weight along the path."""
        return (self.squares - self.mean.square()).clamp_min(0.0)

    def draw(self, generator: torch.Generator) -> Tensor:
        """(p,) weights with half of the diagonal and half of the low-rank covariance, as in the paper's equation 1."""
        if len(self.deviations) < 2:
            raise ValueError(f"expected a path of at least two places, got {len(self.deviations)}.")
        columns = torch.stack(self.deviations, 1)  # (p, r)
        own = torch.randn(len(self.mean), generator=generator, dtype=self.mean.dtype)
        shared = torch.randn(columns.shape[1], generator=generator, dtype=self.mean.dtype)
        low_rank: Tensor = columns @ shared / (2 * (columns.shape[1] - 1)) ** 0.5
        return low_rank + self.mean + self.variance.sqrt() * own / 2**0.5


@dataclass(frozen=True)
class SWAG(Baseline):
    """From the trained network on, gradient descent with a constant rate; its path makes the distribution.

    Attributes:
        rate: learning rate; large enough to leave the optimum.
        epochs: passes over the data, each a place on the path.
        rank: deviations kept, 20 in the paper.
        samples: weights drawn, 30 in the paper.
        momentum: of the descent.
        weight_decay: of the descent.
        batch: examples a step.
    """

    rate: float = 0.01
    epochs: int = 30
    rank: int = 20
    samples: int = 30
    momentum: float = 0.9
    weight_decay: float = 0.0
    batch: int = 128

    @property
    def name(self) -> str:
        """For tables."""
        return f"SWAG, rate {self.rate:g}"

    def fit(self, recipe: Recipe) -> Sampled:
        """Walk on from the recipe's first network."""
        path = self.walk(recipe)
        generator = recipe.generator(700_000)
        network = recipe.network()
        networks = [place(network, path.draw(generator), recipe.data, self.batch) for _ in range(self.samples)]
        return Sampled(lambda x: outputs_of(networks, x), recipe.likelihood == "categorical")

    def walk(self, recipe: Recipe) -> Path:
        """The path; the recipe's network stays where it is."""
        network = deepcopy(recipe.network()).train()
        path = Path(self.rank)
        generator = recipe.generator(700_001)
        optimiser = torch.optim.SGD(
            network.parameters(), lr=self.rate, momentum=self.momentum, weight_decay=self.weight_decay
        )
        with torch.random.fork_rng(devices=[]):  # for dropout, if the network has any
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
            for _ in range(self.epochs):
                for chosen in torch.randperm(len(recipe.data), generator=generator).split(self.batch):
                    optimiser.zero_grad(set_to_none=True)
                    some = recipe.data.take(chosen)
                    recipe.loss(network(some.inputs), some.targets).backward()
                    optimiser.step()
                path.add(parameters_to_vector(network.parameters()).detach().clone())
        if not bool(path.mean.isfinite().all()):
            raise FloatingPointError(f"the descent went off to infinity at rate {self.rate:g}; choose a smaller one.")
        return path


@torch.no_grad()
def place(network: nn.Module, weights: Tensor, data: Data, batch: int) -> nn.Module:
    """A copy of a network with other weights, and the statistics of its batch norms counted anew."""
    copy = deepcopy(network)
    vector_to_parameters(weights, copy.parameters())
    norms = [module for module in copy.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # a plain mean over the batches
            norm.train()
        for inputs, _ in data.batches(batch):
            copy(inputs)
    return copy.eval()
