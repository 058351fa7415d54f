"""The batched networks and optimisers against autograd, torch modules and a plain minimiser."""

from __future__ import annotations

import pytest
import torch
from scipy.optimize import minimize

from whence_paper.toys.network import Architecture
from whence_paper.toys.training import train_converged, train_paper

NET = Architecture(2, 3, 2)


def make(seed: int, networks: int = 2, examples: int = 12) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(networks, examples, 2, generator=generator, dtype=torch.float64)
    y = torch.randn(networks, examples, 2, generator=generator, dtype=torch.float64)
    return NET.initial(networks, generator), x, y


def test_size_counts_the_weights_of_the_module():
    assert sum(p.numel() for p in NET.module(torch.zeros(NET.size)).parameters()) == NET.size


def test_predictions_are_those_of_the_module():
    weights, x, _ = make(0)
    for row in weights:
        torch.testing.assert_close(NET.predict(row[None], x[0])[0], NET.module(row)(x[0]))


def test_objective_and_gradient_are_those_of_autograd():
    weights, x, y = make(1)
    value, gradient = NET.objective(weights, x, y, 0.3)
    for j in range(len(weights)):
        w = weights[j].clone().requires_grad_()
        expected = (NET.predict(w[None], x[j])[0] - y[j]).square().sum() + 0.3 * w.square().sum()
        torch.testing.assert_close(value[j], expected.detach())
        torch.testing.assert_close(gradient[j], torch.autograd.grad(expected, w)[0])


def test_tangents_are_the_jacobian():
    weights, x, _ = make(2)
    for j in range(len(weights)):
        expected = torch.func.jacrev(lambda w, at=x[j]: NET.predict(w[None], at)[0])(weights[j])
        torch.testing.assert_close(NET.tangents(weights, x)[j], expected)


def test_initial_weights_fill_the_range_of_torch():
    weights = Architecture(4, 50, 1).initial(20, torch.Generator().manual_seed(0))
    first, _, second, _ = Architecture(4, 50, 1).split(weights)
    assert 0.49 < float(first.abs().max()) <= 0.5
    assert 0.95 * 50**-0.5 < float(second.abs().max()) <= 50**-0.5


def test_converged_networks_are_stationary_and_as_good_as_another_minimiser():
    weights, x, y = make(3, networks=12)  # more than are trained together
    trained = train_converged(NET, weights, x, y, 0.5, tolerance=1e-7)
    value, gradient = NET.objective(trained.weights, x, y, 0.5)
    assert float(gradient.norm(dim=1).max()) <= 1e-7
    torch.testing.assert_close(trained.objective, value)
    for j in (0, 11):

        def both(w, j=j):
            v, g = NET.objective(torch.from_numpy(w)[None], x[j : j + 1], y[j : j + 1], 0.5)
            return float(v), g[0].numpy()

        nearby = minimize(both, trained.weights[j].numpy() + 1e-3, jac=True, method="BFGS", options={"gtol": 1e-6})
        assert nearby.fun == pytest.approx(float(trained.objective[j]), rel=1e-9)


def test_training_without_a_ridge_is_refused():
    weights, x, y = make(4)
    with pytest.raises(ValueError, match="positive ridge"):
        train_converged(NET, weights, x, y, 0.0)


def test_the_papers_optimiser_is_that_of_torch():
    weights, x, y = make(5, networks=1)
    trained = train_paper(NET, weights, x, y, 0.1, [5, 15])
    model = NET.module(weights[0].float())
    optimiser = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=15)

    def closure():
        optimiser.zero_grad()
        squares = sum(p.square().sum() for p in model.parameters())
        loss = (model(x[0].float()) - y[0].float()).square().sum() + 0.1 * squares
        loss.backward()
        return loss

    optimiser.step(closure)
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.testing.assert_close(trained[15].weights[0], expected, rtol=1e-3, atol=1e-4)
    assert trained[5].iterations.tolist() == [5]
    assert trained[15].iterations.tolist() == [15]
    assert float(trained[15].objective) < float(trained[5].objective)
