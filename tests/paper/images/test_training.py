"""Training: the same seed gives the same network, and the decay is where it should be."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from whence_paper.images.cases import POOLINGS, conv_net
from whence_paper.images.training import Recipe, initialised, outputs, retrain, train


def problem() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=draw)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]])


def test_a_line_is_learned():
    x, y = problem()
    network = initialised(lambda: nn.Linear(3, 1), 0, torch.device("cpu"))
    train(network, x, y, Recipe(epochs=60, rate=0.05, weight_decay=0.0, batch=20), seed=0)
    assert float((outputs(network, x) - y).square().mean()) < 1e-4
    assert not network.training


def test_first_weights_and_order_follow_from_the_seed():
    x, y = problem()
    state = torch.get_rng_state()
    made = []
    for seed in (0, 0, 1):
        network = initialised(lambda: nn.Linear(3, 1), seed, torch.device("cpu"))
        made.append(train(network, x, y, Recipe(epochs=1), seed).weight.detach().clone())
    assert torch.equal(made[0], made[1])
    assert not torch.equal(made[0], made[2])
    assert torch.equal(torch.get_rng_state(), state)


def test_adam_penalises_the_loss_and_adamw_the_weights():
    x, y = problem()
    shrunk = {}
    for optimiser in ("adam", "adamw"):
        network = initialised(lambda: nn.Linear(3, 1), 0, torch.device("cpu"))
        recipe = Recipe(epochs=400, rate=0.02, weight_decay=1.0, batch=200, optimiser=optimiser)
        shrunk[optimiser] = float(train(network, x, y, recipe, 0).weight.detach().norm())
    # the penalty wd / 2 |w|^2 beside the mean squared error gives ridge regression with n wd / 2
    ridge = torch.linalg.solve(x.T @ x + 100 * torch.eye(3), x.T @ y)
    assert shrunk["adam"] == pytest.approx(float(ridge.norm()), rel=0.05)
    assert abs(shrunk["adamw"] / shrunk["adam"] - 1) > 0.1


def test_further_training_leaves_the_first_network_alone():
    x, y = problem()
    network = initialised(lambda: nn.Linear(3, 1), 0, torch.device("cpu"))
    before = network.weight.detach().clone()
    after = retrain(network, x, y, Recipe(epochs=1), 0)
    assert torch.equal(network.weight, before)
    assert not torch.equal(after.weight, before)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_networks_take_images_of_any_side(pooling):
    network = conv_net(2, (4, 8), pooling)
    assert network(torch.zeros(3, 1, 8, 8)).shape == (3, 2)
    assert network(torch.zeros(3, 1, 28, 28)).shape == (3, 2)


@pytest.mark.gpu
def test_steps_that_are_replayed_are_the_steps(monkeypatch):
    x, y = (part.cuda() for part in problem())
    found = []
    for captured in (True, False):
        monkeypatch.setattr("whence_paper.replayed.can_capture", lambda inputs, captured=captured: captured)
        network = initialised(lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), 0, x.device)
        train(network, x, y, Recipe(epochs=5, rate=0.01, batch=16), seed=0)  # the last batch has 8
        found.append(outputs(network, x.float()))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
