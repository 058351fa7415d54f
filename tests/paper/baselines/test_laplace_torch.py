"""laplace-torch behind the interface, against the posterior of Bayesian linear regression."""

from __future__ import annotations

import builtins
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from whence_paper.baselines import Data, LaplaceTorch, Recipe

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    installed = pytest.importorskip("laplace")

PRIOR, NOISE = 0.7, 0.4


def leave(network: nn.Module, data: Data, generator: torch.Generator) -> None:
    """Training that does nothing."""


def data(n: int = 60, d: int = 3) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, d, generator=generator)
    return Data(x, x.sum(1, keepdim=True) + NOISE * torch.randn(n, 1, generator=generator))


def posterior(features: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """(m, 1) variance of a linear function of features under a normal posterior."""
    precision = features.T @ features / NOISE**2 + PRIOR * torch.eye(features.shape[1])
    return torch.einsum("md,de,me->m", at, precision.inverse(), at).unsqueeze(1)


@pytest.mark.parametrize("structure", ["full", "kron"])
def test_linear_regression(structure: str) -> None:
    given = data()
    recipe = Recipe(lambda: nn.Sequential(nn.Linear(3, 1, bias=False)), leave, given)
    fitted = LaplaceTorch("all", structure, prior=PRIOR, noise=NOISE, batch=60).fit(recipe)
    answer = fitted.predict(given.inputs)
    torch.testing.assert_close(answer.variance, posterior(given.inputs, given.inputs), rtol=1e-3, atol=1e-6)
    assert answer.noise == pytest.approx(NOISE**2)
    torch.testing.assert_close(answer.mean, recipe.network()(given.inputs).detach())


def test_last_layer() -> None:
    given = data()
    recipe = Recipe(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1, bias=False)), leave, given)
    fitted = LaplaceTorch("last_layer", "full", prior=PRIOR, noise=NOISE).fit(recipe)
    features = recipe.network()[:2](given.inputs).detach()
    answer = fitted.predict(given.inputs)
    torch.testing.assert_close(answer.variance, posterior(features, features), rtol=1e-3, atol=1e-6)


def test_noise_is_found_by_the_marginal_likelihood() -> None:
    given = data(400)

    def solve(network: nn.Module, some: Data, generator: torch.Generator) -> None:
        with torch.no_grad():
            network[0].weight.copy_(torch.linalg.lstsq(some.inputs, some.targets).solution.T)

    fitted = LaplaceTorch("all", "full").fit(Recipe(lambda: nn.Sequential(nn.Linear(3, 1, bias=False)), solve, given))
    assert fitted.predict(given.inputs[:2]).noise == pytest.approx(NOISE**2, rel=0.25)


def test_norms_are_frozen_for_the_kronecker_structure() -> None:
    recipe = Recipe(lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1)), leave, data())
    assert LaplaceTorch("all", "kron").fit(recipe).frozen == 8
    assert LaplaceTorch("all", "diag").fit(recipe).frozen == 0
    assert all(parameter.requires_grad for parameter in recipe.network().parameters())


def test_probabilities_are_the_packages() -> None:
    x = torch.randn(30, 2, generator=torch.Generator().manual_seed(1))
    recipe = Recipe(
        lambda: nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)),
        leave,
        Data(x, torch.arange(30) % 3),
        likelihood="categorical",
    )
    fitted = LaplaceTorch("all", "kron", batch=15).fit(recipe)
    answer = fitted.predict(x[:6])
    assert answer.probabilities is not None
    torch.testing.assert_close(answer.probabilities, fitted.laplace(x[:6], link_approx="probit").detach())


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "laplace":
            raise ModuleNotFoundError("No module named 'laplace'", name="laplace")
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ModuleNotFoundError, match=r"benchmarks/peers\.txt"):
        LaplaceTorch().fit(Recipe(lambda: nn.Linear(3, 1), leave, data()))
