"""Data of the toy experiments: sources from which a new training set can be drawn at will.

The paper gives no sizes, noises or densities; those here were chosen so that the figures show what the paper says.
Each problem has one scalar response per example (a number, or the sign of a class), and knows its mean and its noise
exactly, which is what makes a Monte-Carlo ground truth possible.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Generator, Tensor

Noise = Literal["true", "homoscedastic"]


class Problem(ABC):
    """A joint distribution of inputs and responses.

    Attributes:
        name: short, for files and tables.
        title: for figures.
        encoding: the targets of the network are response * encoding: (1,) for regression, (1, -1) for two classes.
    """

    name: str
    title: str
    encoding: tuple[float, ...]

    @property
    @abstractmethod
    def equal_noise(self) -> bool:
        """Whether the noise is the same everywhere, as Ho assumes."""

    @abstractmethod
    def inputs(self, n: int, generator: Generator) -> Tensor:
        """Draw inputs (n, i)."""

    @abstractmethod
    def mean(self, x: Tensor) -> Tensor:
        """(n,) the expected response at each input: what a perfect network would say."""

    @abstractmethod
    def variance(self, x: Tensor) -> Tensor:
        """(n,) the variance of the response at each input."""

    @abstractmethod
    def responses(self, x: Tensor, generator: Generator) -> Tensor:
        """(n,) draw responses at given inputs, with the problem's own noise."""

    def average_variance(self) -> float:
        """Variance of the response, averaged over 20,000 inputs that are always the same."""
        return _average_variance(self)

    def targets(self, x: Tensor, noise: Noise, generator: Generator) -> Tensor:
        """(n, k) targets with the problem's own noise, or with Gaussian noise of its average variance everywhere."""
        if noise == "true":
            response = self.responses(x, generator)
        else:
            scatter = torch.randn(len(x), generator=generator, dtype=x.dtype)
            response = self.mean(x) + math.sqrt(self.average_variance()) * scatter
        return response[:, None] * torch.tensor(self.encoding, dtype=x.dtype)


@cache
def _average_variance(problem: Problem) -> float:
    x = problem.inputs(20_000, torch.Generator().manual_seed(0))
    return float(problem.variance(x).mean())


@dataclass(frozen=True)
class Sinc(Problem):
    """sin(x)/x with Gaussian noise, in the paper's three scenarios.

    1: normal inputs, equal noise. 2: normal inputs, noise concentrated around 0. 3: few inputs around 0, equal noise.

    Attributes:
        scenario: 1, 2 or 3.
        quiet: in scenario 2, standard deviation of the noise far from 0; near it, it is larger by 0.3.
        spread: in scenario 3, standard deviation of the inputs around -4 and 4.

    Examples:
        >>> problem = Sinc(2)
        >>> x = torch.tensor([[0.0], [5.0]], dtype=torch.float64)
        >>> problem.mean(x).round(decimals=3).tolist(), problem.variance(x).sqrt().round(decimals=3).tolist()
        ([1.0, -0.192], [0.35, 0.05])
    """

    scenario: int
    quiet: float = 0.05
    spread: float = 1.5
    encoding: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        """Refuse a scenario that does not exist."""
        if self.scenario not in (1, 2, 3):
            raise ValueError(f"expected scenario 1, 2 or 3, got {self.scenario}.")

    @property
    def name(self) -> str:  # type: ignore[override]  # a constant of the scenario
        """`sinc-1` and so on."""
        return f"sinc-{self.scenario}"

    @property
    def title(self) -> str:  # type: ignore[override]
        """What is special about the scenario."""
        return ("1. equal noise", "2. noise around 0", "3. few examples around 0")[self.scenario - 1]

    @property
    def equal_noise(self) -> bool:
        """Not in scenario 2."""
        return self.scenario != 2

    def inputs(self, n: int, generator: Generator) -> Tensor:
        """N(0, 3^2); in scenario 3 an even mixture of N(-4, spread^2) and N(4, spread^2)."""
        normal = torch.randn(n, 1, generator=generator, dtype=torch.float64)
        if self.scenario != 3:
            return 3.0 * normal
        side = torch.randint(2, (n, 1), generator=generator, dtype=torch.float64)
        return 8.0 * side - 4.0 + self.spread * normal

    def mean(self, x: Tensor) -> Tensor:
        """sin(x)/x."""
        return torch.sinc(x[:, 0] / math.pi)

    def variance(self, x: Tensor) -> Tensor:
        """0.1^2; in scenario 2 (quiet + 0.3 exp(-x^2/2))^2."""
        if self.scenario != 2:
            return torch.full_like(x[:, 0], 0.01)
        return (self.quiet + 0.3 * torch.exp(-(x[:, 0] ** 2) / 2)) ** 2

    def responses(self, x: Tensor, generator: Generator) -> Tensor:
        """Mean plus Gaussian noise."""
        return self.mean(x) + self.variance(x).sqrt() * torch.randn(len(x), generator=generator, dtype=x.dtype)


@dataclass(frozen=True)
class Spirals(Problem):
    """Two classes on two spirals that meet at the centre and thin out towards their tails.

    An example of class +1 (-1) lies at spiral(t) (at -spiral(t)) plus Gaussian noise, where spiral(t) has radius t and
    angle 2 pi turns t, and t has density 2 (1 - t) on [0, 1].

    Examples:
        >>> problem = Spirals()
        >>> problem.mean(torch.zeros(1, 2, dtype=torch.float64)).abs() < 1e-12  # a toss-up in the centre
        tensor([True])
    """

    turns: float = 0.5
    scatter: float = 0.1
    encoding: tuple[float, ...] = (1.0, -1.0)
    name: str = "spirals"
    title: str = "two spirals"

    @property
    def equal_noise(self) -> bool:
        """Labels are certain in the tails and a toss-up in the centre."""
        return False

    def inputs(self, n: int, generator: Generator) -> Tensor:
        """Points of both classes, equally likely."""
        t = 1.0 - torch.rand(n, generator=generator, dtype=torch.float64).sqrt()
        side = 2.0 * torch.randint(2, (n, 1), generator=generator, dtype=torch.float64) - 1.0
        noise = torch.randn(n, 2, generator=generator, dtype=torch.float64)
        return side * self.centre_line(t) + self.scatter * noise

    def centre_line(self, t: Tensor) -> Tensor:
        """(n, 2) the spiral of class +1 at positions t between 0 and 1."""
        angle = 2 * math.pi * self.turns * t
        return torch.stack([t * torch.cos(angle), t * torch.sin(angle)], dim=1)

    def densities(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) densities of the inputs of class +1 and of class -1, by the midpoint rule over the spiral."""
        nodes = 400
        t = (torch.arange(nodes, dtype=x.dtype) + 0.5) / nodes
        weights = 2 * (1 - t) / nodes / (2 * math.pi * self.scatter**2)
        line = self.centre_line(t)
        plus, minus = (
            torch.exp(-(torch.cdist(x, side * line) ** 2) / (2 * self.scatter**2)) @ weights for side in (1.0, -1.0)
        )
        return plus, minus

    def density(self, x: Tensor) -> Tensor:
        """(n,) density of the inputs."""
        plus, minus = self.densities(x)
        return (plus + minus) / 2

    def mean(self, x: Tensor) -> Tensor:
        """P(class +1) - P(class -1) given the input."""
        plus, minus = self.densities(x)
        return (plus - minus) / (plus + minus).clamp_min(torch.finfo(x.dtype).tiny)

    def variance(self, x: Tensor) -> Tensor:
        """That of a sign with the given mean."""
        return 1 - self.mean(x) ** 2

    def responses(self, x: Tensor, generator: Generator) -> Tensor:
        """The class of each input, drawn given the input."""
        uniform = torch.rand(len(x), generator=generator, dtype=x.dtype)
        return torch.where(uniform < (1 + self.mean(x)) / 2, 1.0, -1.0).to(x.dtype)
