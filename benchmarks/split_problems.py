"""Problems whose noise and design parts are known: linear models, classes, a small network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import whence

POINTS = 30


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Standard normal numbers in double precision."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def spread(x: Tensor) -> Tensor:
    """Standard deviation of noise that grows away from zero in the first input."""
    return 0.3 + 0.7 * x[..., 0].abs()


class Problem(ABC):
    """Draws training sets, knows the truth about them, fits one."""

    name: str
    points: Tensor

    @abstractmethod
    def truth(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Noise and design part of the variance at the test points, (m,) each."""

    @abstractmethod
    def tracer(self, generator: torch.Generator) -> whence.Tracer:
        """A fit to one draw."""

    def options(self) -> dict[str, Any]:
        """What it was made with."""
        return {key: value for key, value in self.__dict__.items() if isinstance(value, (str, int, float))}


@dataclass
class Linear(Problem):
    """Least squares in some normal inputs; the truth may have a square, or a wave, in the first input.

    Attributes:
        name: "noise" (the model is right, noise is uneven), "design" (a square, no noise), "both", or "rough" (a wave
            that turns three times between one and minus one, and noise).
    """

    name: str
    n: int
    inputs: int
    ridge: float = 1e-3
    points: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Test points like the training inputs, not further out than two standard deviations."""
        self.points = normal(torch.Generator().manual_seed(self.inputs), POINTS, self.inputs).clamp(-2, 2)

    def truth(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Exact in the labels, 4,000 draws of the inputs."""
        noise, means = [], []
        for _ in range(20):
            x = normal(generator, 200, self.n, self.inputs)
            rows = _with_bias(x)
            gram = rows.mT @ rows + self.ridge * torch.eye(rows.shape[2], dtype=rows.dtype)
            pull = _with_bias(self.points) @ torch.linalg.solve(gram, rows.mT)  # (draws, m, n)
            noise.append(torch.einsum("bmn,bn->bm", pull.square(), self.noise(x).square()))
            means.append(torch.einsum("bmn,bn->bm", pull, self.mean(x)))
        return torch.cat(noise).mean(0), torch.cat(means).var(0)

    def tracer(self, generator: torch.Generator) -> whence.Tracer:
        """From zero weights, recentered: the optimum of a linear model."""
        x = normal(generator, self.n, self.inputs)
        y = self.mean(x) + self.noise(x) * normal(generator, self.n)
        model = nn.Linear(self.inputs, 1, dtype=torch.float64)
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()
        return whence.fit(model.eval(), [(x, y.unsqueeze(1))], ridge=self.ridge, recenter=True, progress=False)

    def mean(self, x: Tensor) -> Tensor:
        """The true function."""
        first = x[..., 0]
        bent = {"noise": 0.0 * first, "rough": (3 * first).sin()}.get(self.name, (first.square() - 1) / 2)
        return x.sum(-1) + bent

    def noise(self, x: Tensor) -> Tensor:
        """Standard deviation of the labels."""
        return 0.0 * spread(x) if self.name == "design" else spread(x)


@dataclass
class Classes(Problem):
    """Logistic regression on two inputs; the truth may have a square, and labels without chance."""

    name: str
    n: int
    ridge: float = 1.0
    points: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Test points like the training inputs."""
        self.points = normal(torch.Generator().manual_seed(2), POINTS, 2).clamp(-2, 2)

    def truth(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """400 draws of the inputs, 10 of the labels each."""
        x = normal(generator, 400, 1, self.n, 2).expand(-1, 10, -1, -1).reshape(4000, self.n, 2)
        weights = _logistic(_with_bias(x), self.labels(x, generator), self.ridge)
        outputs = (weights @ _with_bias(self.points).T).reshape(400, 10, -1)
        return _parts(outputs)

    def tracer(self, generator: torch.Generator) -> whence.Tracer:
        """At the optimum."""
        x = normal(generator, self.n, 2)
        y = self.labels(x, generator)
        weights = _logistic(_with_bias(x).unsqueeze(0), y.unsqueeze(0), self.ridge)[0]
        model = nn.Linear(2, 1, dtype=torch.float64)
        with torch.no_grad():
            model.weight.copy_(weights[:2].unsqueeze(0))
            model.bias.copy_(weights[2:])
        batches = [(x, y.unsqueeze(1))]
        return whence.fit(model.eval(), batches, likelihood="bernoulli", ridge=self.ridge, progress=False)

    def labels(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Zeros and ones."""
        first, second = x[..., 0], x[..., 1]
        logits = first + second if self.name == "noise" else first + first.square() - 1
        if self.name == "design":
            return (logits > 0).to(x.dtype)
        return (torch.rand(logits.shape, generator=generator, dtype=x.dtype) < logits.sigmoid()).to(x.dtype)


@dataclass
class SmallNetwork(Problem):
    """Three tanh units on one input, trained to the optimum; the truth is such a network, or a wave beyond it."""

    name: str
    n: int
    ridge: float = 0.1
    points: Tensor = field(init=False, repr=False)
    start: Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Weights fitted to the wave on a fine grid, from which every training starts."""
        self.points = torch.linspace(-2.5, 2.5, POINTS, dtype=torch.float64).unsqueeze(1)
        grid = torch.linspace(-3, 3, 600, dtype=torch.float64)
        first = torch.tensor([[1.0, 2.0, 1.0, 1.5, 0.0, -1.5, 1.0, -1.0, 1.0, 0.0]], dtype=torch.float64)
        self.start = _train(first, grid.unsqueeze(0), _wave(grid).unsqueeze(0), self.ridge * 600 / self.n)[0]

    def truth(self, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """200 draws of the inputs, 5 of the labels each, trained again."""
        x = self._inputs(generator, 200, 1).expand(-1, 5, -1).reshape(1000, self.n)
        y = self._labels(x, generator)
        weights = _train(self.start.expand(len(x), -1), x, y, self.ridge)
        outputs = _network(weights, self.points.T.expand(len(x), -1))[0].reshape(200, 5, -1)
        return _parts(outputs)

    def tracer(self, generator: torch.Generator) -> whence.Tracer:
        """At the optimum."""
        x = self._inputs(generator, 1, 1).reshape(1, self.n)
        y = self._labels(x, generator)
        weights = _train(self.start.unsqueeze(0), x, y, self.ridge)[0]
        model = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double()
        parts = (model[0].weight, model[0].bias, model[2].weight, model[2].bias)
        with torch.no_grad():
            for parameter, values in zip(parts, weights.split([3, 3, 3, 1]), strict=True):
                parameter.copy_(values.reshape(parameter.shape))
        return whence.fit(model.eval(), [(x.T, y.T)], ridge=self.ridge, progress=False)

    def _inputs(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.rand(*shape, self.n, generator=generator, dtype=torch.float64) * 6 - 3

    def _labels(self, x: Tensor, generator: torch.Generator) -> Tensor:
        mean = _network(self.start.expand(len(x), -1), x)[0] if self.name == "noise" else _wave(x)
        return mean if self.name == "design" else mean + (0.04 + 0.05 * x.abs()) * normal(generator, *x.shape)


def _parts(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """From outputs (draws of inputs, draws of labels, m): the mean of a few labels still varies with them."""
    noise = outputs.var(1).mean(0)
    return noise, outputs.mean(1).var(0) - noise / outputs.shape[1]


def _with_bias(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _logistic(rows: Tensor, labels: Tensor, ridge: float) -> Tensor:
    """Optima of sum of cross-entropies + ridge / 2 |w|^2, by Newton steps, (draws, d)."""
    weights = rows.new_zeros(len(rows), rows.shape[2])
    eye = ridge * torch.eye(rows.shape[2], dtype=rows.dtype)
    for _ in range(25):
        p = torch.einsum("bnd,bd->bn", rows, weights).sigmoid()
        score = torch.einsum("bnd,bn->bd", rows, labels - p) - ridge * weights
        curved = torch.einsum("bnd,bn,bne->bde", rows, p * (1 - p), rows) + eye
        weights = weights + torch.linalg.solve(curved, score)
    return weights


def _wave(x: Tensor) -> Tensor:
    return (2 * x).sin() + 0.3 * x


def _network(weights: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs (draws, n) of three tanh units, and their derivatives in the weights (draws, n, 10)."""
    inner, shift, outer, bias = (part.unsqueeze(1) for part in weights.split([3, 3, 3, 1], 1))
    units = (x.unsqueeze(2) * inner + shift).tanh()
    slope = outer * (1 - units.square())
    outputs = (units * outer).sum(2) + bias.squeeze(2)
    return outputs, torch.cat([slope * x.unsqueeze(2), slope, units, torch.ones_like(units[..., :1])], 2)


def _train(start: Tensor, x: Tensor, y: Tensor, ridge: float, steps: int = 80) -> Tensor:
    """Optima of sum of squared errors + ridge |w|^2 by Levenberg's and Marquardt's steps, all draws at once."""
    weights = start.clone()
    damping = torch.ones(len(x), dtype=x.dtype)

    def loss(at: Tensor) -> Tensor:
        return (y - _network(at, x)[0]).square().sum(1) + ridge * at.square().sum(1)

    now = loss(weights)
    eye = torch.eye(weights.shape[1], dtype=x.dtype)
    for _ in range(steps):
        outputs, slopes = _network(weights, x)
        score = torch.einsum("bnd,bn->bd", slopes, y - outputs) - ridge * weights
        curved = slopes.mT @ slopes + (ridge + damping).reshape(-1, 1, 1) * eye
        tried = weights + torch.linalg.solve(curved, score)
        then = loss(tried)
        better = then < now
        weights = torch.where(better.unsqueeze(1), tried, weights)
        now = torch.where(better, then, now)
        damping = torch.where(better, damping / 3, damping * 3).clamp(1e-9, 1e9)
    return weights
