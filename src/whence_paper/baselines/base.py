"""The interface of all baselines: how networks are made and trained, and what is said about a prediction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Data:
    """A training set.

    Attributes:
        inputs: (n, ...).
        targets: (n, k) numbers, or (n,) classes.
    """

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        """Number of examples."""
        return len(self.inputs)

    def take(self, index: Tensor) -> Data:
        """Some of the examples, perhaps more than once."""
        return Data(self.inputs[index], self.targets[index])

    def batches(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """All examples in order, some at a time."""
        return list(zip(self.inputs.split(size), self.targets.split(size), strict=True))


Train = Callable[[nn.Module, Data, torch.Generator], object]
"""Trains a network in place; all that is random about it comes from the generator."""


@dataclass(frozen=True)
class Recipe:
    """How a network comes about. Networks are trained when they are first asked for, and kept.

    All baselines on one recipe share its networks: the first member of the ensemble is the network that Laplace
    is fitted to.

    Attributes:
        make: an untrained network. What is random about it may come from torch's global generator, which is seeded
            for the call and left as it was.
        train: trains it in place.
        data: the training set.
        likelihood: "gaussian" (outputs are means) or "categorical" (outputs are logits).
        seed: of the first member; later ones count on from it.
    """

    make: Callable[[], nn.Module]
    train: Train
    data: Data
    likelihood: Literal["gaussian", "categorical"] = "gaussian"
    seed: int = 0
    kept: dict[int, nn.Module] = field(default_factory=dict, repr=False)

    def network(self, member: int = 0) -> nn.Module:
        """A trained member, in evaluation mode."""
        if member not in self.kept:
            self.kept[member] = self.trained(self.data, member)
        return self.kept[member]

    def trained(
        self, data: Data, member: int, change: Callable[[nn.Module], nn.Module] = lambda network: network
    ) -> nn.Module:
        """A network trained on given data, after a change of its layers; it is not kept."""
        # Modules draw their first weights from the global generator; a prediction may be what asks for the network.
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(self.seed + member)
            network = change(self.make())
            network.train()  # dropout draws from the global generator too
            self.train(network, data, self.generator(member))
        return network.eval()

    def generator(self, stream: int) -> torch.Generator:
        """One for each purpose."""
        return torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + stream)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Mean over examples: of half the summed squared errors, or of the cross-entropy."""
        if self.likelihood == "categorical":
            return F.cross_entropy(outputs, targets)
        return (outputs - targets).square().sum(1).mean() / 2


@dataclass(frozen=True)
class Answer:
    """What a baseline says about m inputs.

    Attributes:
        mean: (m, k) outputs.
        variance: (m, k) epistemic variance of the outputs, without the noise of an observation.
        probabilities: (m, k) of the classes, averaged over what is uncertain; for classes only.
        noise: variance of an observation around the mean, where the method estimates one itself.
    """

    mean: Tensor
    variance: Tensor
    probabilities: Tensor | None = None
    noise: float | None = None


class Fitted(Protocol):
    """Something that predicts."""

    def predict(self, x: Tensor) -> Answer:
        """Means and variances of the outputs at inputs (m, ...)."""
        ...


class Baseline(ABC):
    """A way to an uncertainty, with its options."""

    @property
    @abstractmethod
    def name(self) -> str:
        """For tables."""

    @abstractmethod
    def fit(self, recipe: Recipe) -> Fitted:
        """Train what it needs, or take what the recipe already has."""


@dataclass(frozen=True)
class Sampled:
    """Scatter over several functions: members of an ensemble, or draws of weights.

    Attributes:
        sample: outputs (s, m, k) of s functions, each for all inputs.
        classes: whether outputs are logits.
    """

    sample: Callable[[Tensor], Tensor]
    classes: bool

    @torch.no_grad()
    def predict(self, x: Tensor) -> Answer:
        """Mean and unbiased variance over the functions; probabilities are averaged, not logits."""
        drawn = self.sample(x)
        if len(drawn) < 2:
            raise ValueError(f"expected at least two functions for a variance, got {len(drawn)}.")
        probabilities = drawn.softmax(-1).mean(0) if self.classes else None
        return Answer(drawn.mean(0), drawn.var(0), probabilities)


def outputs_of(networks: Sequence[nn.Module], x: Tensor, batch: int = 1000) -> Tensor:
    """(s, m, k) outputs of several networks."""
    return torch.stack([torch.cat([network(some) for some in x.split(batch)]) for network in networks])
