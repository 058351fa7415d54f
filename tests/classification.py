"""Small classification problems, and what the oracle says about them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import loss_oracles
import oracles
import whence
from doubles import fit
from networks import batches_of, linear

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")
N, M, WIDTH = 14, 4, 3


def network(outputs: int, seed: int = 0) -> nn.Module:
    """Three inputs, four tanh units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, outputs)).double().eval()


def inputs(n: int = N, seed: int = 1) -> Tensor:
    return torch.randn(n, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def labels(classes: int, n: int = N, seed: int = 2) -> Tensor:
    return torch.randint(0, classes, (n,), generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Problem:
    """A network with data, and the loss in the words of the oracle."""

    model: nn.Module
    x: Tensor
    y: Tensor
    likelihood: Any
    terms: loss_oracles.Terms
    numbers: int  # that HeC1 counts

    def fit(self, ridge: float = 0.4, batch: int = 5, **options: Any) -> whence.Tracer:
        loader = batches_of(self.x, self.y, batch)
        return whence.fit(self.model, loader, self.likelihood, ridge=ridge, progress=False, **options)

    def expected(self, x: Tensor, ridge: float = 0.4, **options: Any) -> dict[str, np.ndarray]:
        """Covariances at x by their definitions."""
        outputs, tangents, _ = oracles.tangents_of(self.model, self.x)
        _, test_tangents, _ = oracles.tangents_of(self.model, x)
        residuals, hessians = self.terms(outputs)
        return loss_oracles.covariances(
            test_tangents, tangents, residuals, hessians, ridge, noise=hessians, numbers=self.numbers, **options
        )


def categorical(classes: int = 3, soft: bool = False) -> Problem:
    """Softmax over some classes."""
    y = labels(classes)
    onehot = nn.functional.one_hot(y, classes).double()
    given = (0.7 * onehot + 0.3 * inputs(N, 5)[:, :1].sigmoid() / classes) if soft else onehot
    given = given / given.sum(1, keepdim=True)
    terms = loss_oracles.softmax_terms(given.numpy())
    return Problem(network(classes), inputs(), given if soft else y, "categorical", terms, N * (classes - 1))


def bernoulli(outputs: int = 2) -> Problem:
    """Yes or no for some outputs."""
    y = torch.stack([labels(2, seed=7 + c) for c in range(outputs)], dim=1).double()
    return Problem(network(outputs), inputs(), y, "bernoulli", loss_oracles.logistic_terms(y.numpy()), N * outputs)


PROBLEMS = {
    "two classes": categorical(2),
    "three classes": categorical(3),
    "soft targets": categorical(3, soft=True),
    "one logit": bernoulli(1),
    "three logits": bernoulli(3),
}


def assert_covariances(found: whence.Uncertainty, wanted: dict[str, np.ndarray], rtol: float = 1e-8) -> None:
    for name in ESTIMATORS:
        value = wanted[name]
        np.testing.assert_allclose(found.covariance(name), value, rtol=rtol, atol=rtol * abs(value).max(), err_msg=name)


def linear_softmax(generator: torch.Generator, ridge: float) -> tuple[whence.Tracer, Any, list[Any]]:
    """A fit of a linear softmax model to twelve examples, its tangents, and the Hessians of its loss by hand."""
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    model = linear(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, y)], likelihood="categorical", ridge=ridge)
    p = model(x).softmax(1).detach().numpy()
    hessians = [np.diag(row) - np.outer(row, row) for row in p]
    return tracer, oracles.linear_tangents(x.numpy(), 3), hessians
