"""What-if against refits of linear models, and against retraining of a small network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import networks
import oracles
import whence
from doubles import fit

RIDGE, N, K = 0.5, 14, 2
ROADS = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix_free": whence.Exact(road="matrix_free", tolerance=1e-14),
}
CHANGES: dict[str, dict[str, Any]] = {
    "remove one": {"remove": [3]},
    "remove some": {"remove": [3, 0, 11]},
    "repeat": {"repeat": [5, 5, 2]},
    "relabel": {"relabel": {4: [1.5, -2.0], 9: [0.0, 0.0]}},
    "all of it": {"remove": [1, 13], "repeat": [5, 6], "relabel": {5: [3.0, 1.0], 8: [1.0, 1.0]}},
    "nothing": {},
}


def changed(x: torch.Tensor, y: torch.Tensor, change: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The training set after a change."""
    y = y.clone()
    for at, target in change.get("relabel", {}).items():
        y[at] = torch.tensor(target, dtype=y.dtype)
    rows = [i for i in range(len(x)) if i not in change.get("remove", [])] + list(change.get("repeat", []))
    return x[rows], y[rows]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("name", CHANGES)
def test_linear_models_change_as_refits_do(name: str, road: str, generator: torch.Generator) -> None:
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(N, K, generator=generator, dtype=torch.float64)
    test = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    tangents = oracles.linear_tangents(x.numpy(), K)
    weights = oracles.ridge_fit(tangents, y.numpy(), RIDGE)
    model = networks.linear(weights.reshape(K, 3))
    tracer = fit(model, [(x[:6], y[:6]), (x[6:], y[6:])], ridge=RIDGE, structure=ROADS[road])
    found = tracer.what_if([test[:3], test[3:]], **CHANGES[name])

    new_x, new_y = changed(x, y, CHANGES[name])
    new_tangents, test_tangents = oracles.linear_tangents(new_x.numpy(), K), oracles.linear_tangents(test.numpy(), K)
    refit = oracles.ridge_fit(new_tangents, new_y.numpy(), RIDGE)
    np.testing.assert_allclose(found.change, test_tangents @ refit - test_tangents @ weights, rtol=1e-9, atol=1e-12)
    residuals = new_y.numpy() - new_tangents @ refit
    sigma = tracer.sigma.numpy()
    wanted = oracles.covariances(test_tangents, new_tangents, residuals, RIDGE, sigma=sigma)
    for estimator, values in (("ho", found.new_ho), ("hec3", found.new_hec3)):
        diagonal = np.diagonal(wanted[estimator], axis1=1, axis2=2)
        np.testing.assert_allclose(values, diagonal, rtol=1e-9, atol=1e-13)
    predicted = tracer.predict(test)
    torch.testing.assert_close(found.ho, predicted.ho, rtol=1e-9, atol=0)
    torch.testing.assert_close(found.hec3, predicted.hec3, rtol=1e-9, atol=0)
    assert repr(found).startswith("WhatIf(4 predictions move by ")


@pytest.mark.parametrize("structure", ["primal", "dual", "core"])
@pytest.mark.parametrize("loo", ["example", "output"])
@pytest.mark.parametrize("name", ["remove some", "all of it"])
def test_weighted_examples_change_as_refits_do(name: str, loo: str, structure: str, generator: torch.Generator) -> None:
    """An example of weight w counts as its row times the root of w, in a fit without weights."""
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(N, K, generator=generator, dtype=torch.float64)
    test = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    weights = 0.5 + torch.rand(N, generator=generator, dtype=torch.float64)

    def rows(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        roots = weights.sqrt().numpy()
        return oracles.linear_tangents(x.numpy(), K) * roots[:, None, None], y.numpy() * roots[:, None]

    before = oracles.ridge_fit(*rows(x, y, weights), RIDGE)
    model = networks.linear(before.reshape(K, 3))
    options = {"core": whence.Core(size=10_000, tolerance=0.0), **ROADS}
    tracer = fit(model, [(x, y, weights)], ridge=RIDGE, structure=options[structure], loo=loo)
    found = tracer.what_if(test, **CHANGES[name])

    new_x, new_y = changed(x, y, CHANGES[name])
    new_weights, _ = changed(weights, y, CHANGES[name])
    tangents, targets = rows(new_x, new_y, new_weights)
    points = oracles.linear_tangents(test.numpy(), K)
    after = oracles.ridge_fit(tangents, targets, RIDGE)
    np.testing.assert_allclose(found.change, points @ after - points @ before, rtol=1e-8, atol=1e-12)
    residuals = targets - tangents @ after
    wanted = oracles.covariances(points, tangents, residuals, RIDGE, sigma=tracer.sigma.numpy())
    np.testing.assert_allclose(found.new_ho, np.diagonal(wanted["ho"], axis1=1, axis2=2), rtol=1e-8)
    inflate = oracles.inflated_residuals_apart if loo == "output" else oracles.inflated_residuals
    left_out = inflate(residuals, oracles.leverage_blocks(tangents, RIDGE), 1.0)
    pull = oracles.alignments(points, tangents, RIDGE)  # (m, n, k, k)
    moves = pull * left_out[None, :, None, :] if loo == "output" else pull @ left_out[None, :, :, None]
    np.testing.assert_allclose(found.new_hec3, (moves**2).sum((1, 3)), rtol=1e-8)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_variances_of_classes_after_one_newton_step(likelihood: str, generator: torch.Generator) -> None:
    """Dense matrices, with the loss's Hessians where they were before the step."""
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    model = networks.linear(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    said = torch.nn.functional.one_hot(y, 3).double()
    tracer = fit(model, [(x, y if likelihood == "categorical" else said)], likelihood=likelihood, ridge=RIDGE)
    label = (int(y[4]) + 1) % 3
    fresh = np.eye(3)[label]
    target = torch.tensor(label) if likelihood == "categorical" else torch.from_numpy(fresh)
    found = tracer.what_if(x[:3], remove=[1, 2], repeat=[6], relabel={4: target})
    outputs = model(x).detach()
    p = (outputs.softmax(1) if likelihood == "categorical" else outputs.sigmoid()).numpy()
    hessians = [np.diag(r) - np.outer(r, r) if likelihood == "categorical" else np.diag(r * (1 - r)) for r in p]
    tangents = oracles.linear_tangents(x.numpy(), 3)
    truth = said.numpy().copy()
    truth[4] = fresh
    kept = [i for i in range(10) if i not in (1, 2)] + [6]
    inverse = np.linalg.inv(RIDGE * np.eye(6) + sum(tangents[i].T @ hessians[i] @ tangents[i] for i in kept))
    stale = sum(tangents[i].T @ (said.numpy()[i] - p[i]) for i in range(10))  # what the optimum would have as lambda w
    step = inverse @ (sum(tangents[i].T @ (truth[i] - p[i]) for i in kept) - stale)
    np.testing.assert_allclose(found.change, tangents[:3] @ step, rtol=1e-8, atol=1e-12)
    hec3, ho = np.zeros((3, 3)), np.zeros((3, 3))
    for i in kept:
        residual = truth[i] - p[i] - hessians[i] @ tangents[i] @ step
        hat = hessians[i] @ tangents[i] @ inverse @ tangents[i].T
        left_out = np.linalg.solve(np.eye(3) - hat, residual)
        pull = tangents[:3] @ inverse @ tangents[i].T
        hec3 += (pull @ left_out) ** 2
        ho += np.einsum("mij,jl,mil->mi", pull, hessians[i], pull)
    np.testing.assert_allclose(found.new_hec3, hec3, rtol=1e-8)
    np.testing.assert_allclose(found.new_ho, ho, rtol=1e-8)


def test_one_removal_is_the_pull_of_the_example() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    shares = tracer.attribute(case.test_inputs, top=1).hec3
    for at in range(len(case.test_inputs)):
        one = tracer.what_if(case.test_inputs[at : at + 1], remove=[int(shares.index[at, 0])])
        torch.testing.assert_close(one.change[0], -shares.pull[at, 0], rtol=1e-8, atol=1e-12)


def test_classes_take_one_newton_step(generator: torch.Generator) -> None:
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    model = networks.linear(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE)
    tangents = oracles.linear_tangents(x.numpy(), 3)
    p = model(x).softmax(1).detach().numpy()
    label = (int(y[4]) + 1) % 3
    found = tracer.what_if(x[:2], remove=[1, 2], relabel={4: torch.tensor(label)})
    kept = [i for i in range(10) if i not in (1, 2)]
    curved = sum(tangents[i].T @ (np.diag(p[i]) - np.outer(p[i], p[i])) @ tangents[i] for i in kept)
    eye = np.eye(3)
    score = -sum(tangents[i].T @ (eye[int(y[i])] - p[i]) for i in (1, 2))
    score = score + tangents[4].T @ (eye[label] - eye[int(y[4])])
    step = np.linalg.solve(curved + RIDGE * np.eye(6), score)
    np.testing.assert_allclose(found.change, tangents[:2] @ step, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"remove": [99]}, "positions 0 to 8"),
        ({"remove": [-1]}, "positions 0 to 8"),
        ({"repeat": [1.5]}, "positions 0 to 8"),
        ({"remove": [2, 2]}, "named twice"),
        ({"relabel": {1: [1.0, 2.0, 3.0]}}, "new label of example 1"),
    ],
)
def test_impossible_changes_are_refused(change: dict[str, Any], words: str) -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.WhenceError, match=words):
        fit(case.model, case.batches()).what_if(case.test_inputs, **change)


def test_approximate_leverages_are_refused() -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="true leverages"):
        fit(case.model, case.batches(), structure="ekfac").what_if(case.test_inputs, remove=[0])


@pytest.mark.slow
def test_retrained_networks_move_as_predicted(generator: torch.Generator) -> None:
    """Forty sets of three examples, removed one after the other; the network is trained again from where it was."""
    x = torch.rand(60, 1, generator=generator, dtype=torch.float64) * 6 - 3
    y = x.sin() + 0.2 * torch.randn(60, 1, generator=generator, dtype=torch.float64)
    test = torch.linspace(-2.5, 2.5, 25, dtype=torch.float64).unsqueeze(1)
    ridge = 0.1
    network = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double()
    converge(network, x, y, ridge)
    start = {name: value.clone() for name, value in network.state_dict().items()}
    tracer = fit(network.eval(), [(x, y)], ridge=ridge)
    before = network(test).detach()
    sets = [torch.randperm(60, generator=generator)[:3].tolist() for _ in range(40)]
    predicted = torch.stack([tracer.what_if(test, remove=chosen).change for chosen in sets])
    true = []
    for chosen in sets:
        network.load_state_dict(start)
        kept = [i for i in range(60) if i not in chosen]
        converge(network, x[kept], y[kept], ridge)
        true.append(network(test).detach() - before)
    ranks = [values.flatten().argsort().argsort().double() for values in (predicted, torch.stack(true))]
    assert float(torch.corrcoef(torch.stack(ranks))[0, 1]) > 0.9  # 0.94 when written


def converge(network: nn.Module, x: torch.Tensor, y: torch.Tensor, ridge: float) -> None:
    """The optimum of sum of squared errors + ridge |w|^2."""
    optimiser = torch.optim.LBFGS(
        network.parameters(), max_iter=3000, tolerance_grad=1e-9, tolerance_change=1e-13, line_search_fn="strong_wolfe"
    )

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        value = (network(x) - y).square().sum() + ridge * sum(p.square().sum() for p in network.parameters())
        value.backward()
        return value

    optimiser.step(loss)
