"""Ensembles, bootstrap, dropout and SWAG against variances that are known in closed form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from whence_paper.baselines import SWAG, Baseline, Bootstrap, Data, DeepEnsemble, MCDropout, Recipe, Sampled
from whence_paper.baselines.swag import Path, place

torch_double = torch.float64


def draw(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def leave(network: nn.Module, data: Data, generator: torch.Generator) -> None:
    """Training that does nothing."""


def least_squares(network: nn.Module, data: Data, generator: torch.Generator) -> None:
    """Training to the optimum, for a linear layer without bias."""
    assert isinstance(network, nn.Linear)
    with torch.no_grad():
        network.weight.copy_(torch.linalg.lstsq(data.inputs, data.targets).solution.T)


def table(n: int = 200, d: int = 3) -> Data:
    """A linear function with noise that grows along the first input."""
    generator = draw(1)
    x = torch.randn(n, d, generator=generator, dtype=torch_double)
    noise = torch.randn(n, 1, generator=generator, dtype=torch_double) * (0.2 + x[:, :1].abs())
    return Data(x, x.sum(1, keepdim=True) + noise)


def linear(bias: bool = False) -> nn.Linear:
    return nn.Linear(3, 1, bias=bias, dtype=torch_double)


def test_bootstrap_of_least_squares_is_whites_sandwich() -> None:
    data = table()
    fitted = Bootstrap(members=400).fit(Recipe(linear, least_squares, data))
    x = torch.randn(20, 3, generator=draw(2), dtype=torch_double)
    answer = fitted.predict(x)
    inverse = torch.linalg.inv(data.inputs.T @ data.inputs)
    residuals = data.targets - data.inputs @ (inverse @ data.inputs.T @ data.targets)
    sandwich = inverse @ (data.inputs.T @ (residuals.square() * data.inputs)) @ inverse
    wanted = torch.einsum("md,de,me->m", x, sandwich, x)
    ratio = answer.variance.squeeze(1) / wanted
    assert float(ratio.min()) > 0.8
    assert float(ratio.max()) < 1.3


def test_members_trained_to_one_optimum_do_not_scatter() -> None:
    fitted = DeepEnsemble(members=3).fit(Recipe(linear, least_squares, table()))
    assert float(fitted.predict(table().inputs).variance.max()) < 1e-25


def test_untrained_members_scatter_as_first_weights_do() -> None:
    x = torch.randn(10, 3, generator=draw(3), dtype=torch_double)
    fitted = DeepEnsemble(members=1500).fit(Recipe(lambda: linear(bias=True), leave, table()))
    wanted = (x.square().sum(1) + 1) / 9  # torch draws weights uniformly within 1 / sqrt(d): variance 1 / (3 d)
    torch.testing.assert_close(fitted.predict(x).variance.squeeze(1), wanted, rtol=0.12, atol=0)


def test_dropout_before_a_linear_layer() -> None:
    rate = 0.3
    fitted = MCDropout(passes=4000).fit(
        Recipe(lambda: nn.Sequential(nn.Dropout(rate), linear()), leave, table(), seed=5)
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        weights = nn.Sequential(nn.Dropout(rate), linear())[1].weight.detach()
    x = torch.randn(10, 3, generator=draw(4), dtype=torch_double)
    answer = fitted.predict(x)
    torch.testing.assert_close(
        answer.variance, rate / (1 - rate) * (x * weights).square().sum(1, True), rtol=0.12, atol=0
    )
    torch.testing.assert_close(answer.mean, x @ weights.T, rtol=0, atol=0.05)


def test_dropout_is_put_before_all_but_the_first_linear_layer() -> None:
    network = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 1))
    changed = MCDropout(rate=0.2)._with_dropout(network)
    kinds = [type(module).__name__ for module in changed.modules() if not isinstance(module, nn.Sequential)]
    assert kinds == ["Linear", "ReLU", "Dropout", "Linear", "ReLU", "Dropout", "Linear"]
    with pytest.raises(ValueError, match="at least two linear layers"):
        MCDropout()._with_dropout(nn.Linear(2, 1))


def test_swag_draws_have_half_of_each_covariance() -> None:
    generator = draw(6)
    mixing = torch.randn(4, 4, generator=generator, dtype=torch_double)
    places = torch.randn(12, 4, generator=generator, dtype=torch_double) @ mixing
    path = Path(rank=5)
    for weights in places:
        path.add(weights)
    means = places.cumsum(0) / torch.arange(1, 13).unsqueeze(1)
    last = (places - means)[-5:]
    wanted = places.var(0, correction=0).diag() / 2 + last.T @ last / 8
    torch.testing.assert_close(path.mean, places.mean(0))
    drawn = torch.stack([path.draw(generator) for _ in range(8_000)])
    torch.testing.assert_close(drawn.T.cov(), wanted, rtol=0.08, atol=0.08)


def test_swag_walks_around_the_optimum_of_least_squares() -> None:
    data = table()
    recipe = Recipe(linear, least_squares, data)
    best = recipe.network().weight.detach().flatten()
    slow, fast = (SWAG(rate=rate, epochs=40, batch=20).walk(recipe) for rate in (0.003, 0.03))
    assert float((slow.mean - best).norm()) < 0.05
    assert float((fast.variance / slow.variance).min()) > 3.0
    assert torch.equal(recipe.network().weight.detach().flatten(), best)


def test_swag_renews_batch_norm() -> None:
    network = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    x = torch.randn(64, 3, generator=draw(7))
    data = Data(x, torch.zeros(64, 2))
    weights = nn.utils.parameters_to_vector(network.parameters()).detach()
    placed = place(network, 2 * weights, data, 32)
    mean = torch.stack([part.mean(0) for part in (x @ placed[0].weight.T + placed[0].bias).split(32)]).mean(0)
    torch.testing.assert_close(placed[1].running_mean, mean.detach())
    assert not placed[1].training
    assert float(network[1].running_mean.abs().max()) == 0.0


def test_swag_says_when_it_diverged() -> None:
    with pytest.raises(FloatingPointError, match="smaller"):
        SWAG(rate=1e6, epochs=40).walk(Recipe(linear, least_squares, table()))


@pytest.mark.parametrize(
    "baseline", [DeepEnsemble(3), Bootstrap(3), MCDropout(0.2, 4), SWAG(epochs=3, samples=4)], ids=lambda one: one.name
)
def test_classes(baseline: Baseline) -> None:
    x = torch.randn(40, 2, generator=draw(8))
    recipe = Recipe(
        lambda: nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3)),
        leave,
        Data(x, torch.arange(40) % 3),
        likelihood="categorical",
    )
    before = torch.get_rng_state()
    first, second = (baseline.fit(recipe).predict(x[:5]) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.mean.shape == first.variance.shape == (5, 3)
    assert first.probabilities is not None
    torch.testing.assert_close(first.probabilities.sum(1), torch.ones(5))
    torch.testing.assert_close(first.variance, second.variance)  # the same seed, the same answer
    assert float(first.variance.min()) > 0


def test_the_first_member_is_the_recipes_network() -> None:
    recipe = Recipe(linear, leave, table())
    network = recipe.network()
    DeepEnsemble(2).fit(recipe)
    assert recipe.network() is network
    assert set(recipe.kept) == {0, 1}
    assert not torch.equal(recipe.network(1).weight, network.weight)


def test_one_function_has_no_variance() -> None:
    def one(x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    with pytest.raises(ValueError, match="at least two"):
        Sampled(one, classes=False).predict(torch.zeros(2, 1))
