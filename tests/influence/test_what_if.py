"""What-if against refits of linear models, and against retraining of a small network."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import brentq, root
from torch import nn

import networks
import oracles
import whence
from doubles import fit
from fuzz.dense import Dense, Loss, tangents_of
from whence.curvature.features import TrainingRows

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


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_classes_settle_where_their_loss_and_the_parabola_of_the_others_balance(
    likelihood: str, weighted: bool, generator: torch.Generator
) -> None:
    """Dense matrices, and scipy for the balance; Hessians of the changed examples are those after the change."""
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    weights = 0.5 + torch.rand(10, generator=generator, dtype=torch.float64) if weighted else torch.ones(10).double()
    model = networks.linear(2 * torch.randn(3, 2, generator=generator, dtype=torch.float64))
    said = torch.nn.functional.one_hot(y, 3).double()
    given = y if likelihood == "categorical" else said
    batch = (x, given, weights) if weighted else (x, given)
    tracer = fit(model, [batch], likelihood=likelihood, ridge=RIDGE)
    label = (int(y[4]) + 1) % 3
    fresh = np.eye(3)[label]
    target = torch.tensor(label) if likelihood == "categorical" else torch.from_numpy(fresh)
    found = tracer.what_if(x[:3], remove=[1, 2], repeat=[6], relabel={4: target})

    w = weights.numpy()
    outputs, tangents = model(x).detach().numpy(), oracles.linear_tangents(x.numpy(), 3)
    truth, counts = said.numpy().copy(), np.ones(10)
    truth[4], counts[[1, 2]], counts[6] = fresh, 0.0, 2.0
    changed_ones = [1, 2, 4, 6]

    def chances(f: np.ndarray) -> np.ndarray:
        return np.exp(f) / np.exp(f).sum() if likelihood == "categorical" else 1 / (1 + np.exp(-f))

    def hessian(f: np.ndarray) -> np.ndarray:
        p = chances(f)
        return np.diag(p) - np.outer(p, p) if likelihood == "categorical" else np.diag(p * (1 - p))

    old = [w[i] * (said.numpy()[i] - chances(outputs[i])) for i in range(10)]
    hessians = [w[i] * hessian(outputs[i]) for i in range(10)]
    damped = RIDGE * np.eye(6) + sum(tangents[i].T @ hessians[i] @ tangents[i] for i in range(10))

    def balance(step: np.ndarray) -> np.ndarray:
        total = damped @ step
        for i in changed_ones:
            moved = tangents[i] @ step
            after = w[i] * (truth[i] - chances(outputs[i] + moved))
            total = total - tangents[i].T @ (counts[i] * after - old[i] + hessians[i] @ moved)
        return total

    step = root(balance, np.zeros(6), tol=1e-13).x
    np.testing.assert_allclose(found.change, tangents[:3] @ step, rtol=1e-7, atol=1e-10)
    residuals = [old[i] - hessians[i] @ tangents[i] @ step for i in range(10)]
    before = list(hessians)
    for i in changed_ones:
        residuals[i] = w[i] * (truth[i] - chances(outputs[i] + tangents[i] @ step))
        hessians[i] = w[i] * hessian(outputs[i] + tangents[i] @ step)
    inverse = np.linalg.inv(
        RIDGE * np.eye(6) + sum(counts[i] * tangents[i].T @ hessians[i] @ tangents[i] for i in range(10))
    )
    hec3, ho = np.zeros((3, 3)), np.zeros((3, 3))
    for i in range(10):
        hat = hessians[i] @ tangents[i] @ inverse @ tangents[i].T
        left_out = np.linalg.solve(np.eye(3) - hat, residuals[i])
        pull = tangents[:3] @ inverse @ tangents[i].T
        hec3 += counts[i] * (pull @ left_out) ** 2
        ho += counts[i] * np.einsum("mij,jl,mil->mi", pull, before[i], pull)
    np.testing.assert_allclose(found.new_hec3, hec3, rtol=1e-6)
    np.testing.assert_allclose(found.new_ho, ho, rtol=1e-6)


def test_removals_of_classes_take_one_newton_step(generator: torch.Generator) -> None:
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    model = networks.linear(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    found = fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE).what_if(x[:2], remove=[1, 2])
    tangents, p = oracles.linear_tangents(x.numpy(), 3), model(x).softmax(1).detach().numpy()
    kept = [i for i in range(10) if i not in (1, 2)]
    curved = sum(tangents[i].T @ (np.diag(p[i]) - np.outer(p[i], p[i])) @ tangents[i] for i in kept)
    score = -sum(tangents[i].T @ (np.eye(3)[int(y[i])] - p[i]) for i in (1, 2))
    step = np.linalg.solve(curved + RIDGE * np.eye(6), score)
    np.testing.assert_allclose(found.change, tangents[:2] @ step, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_labels_given_again_change_nothing(likelihood: str, seed: int) -> None:
    """Residuals of another batch differ by rounding, of which Newton's method must not look for a solution."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(10, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    targets = y if likelihood == "categorical" else torch.nn.functional.one_hot(y, 3).double()
    model = networks.linear(20 * torch.randn(3, 4, generator=generator, dtype=torch.float64))
    tracer = fit(model, networks.batches_of(x, targets, 10), likelihood=likelihood, ridge=RIDGE)
    found = tracer.what_if(x[:2], relabel={at: targets[at] for at in range(10)})
    np.testing.assert_allclose(found.change, 0.0, atol=1e-12)
    np.testing.assert_allclose(found.new_ho, found.ho, rtol=1e-9)
    np.testing.assert_allclose(found.new_hec3, found.hec3, rtol=1e-9)


@pytest.mark.parametrize("scale", [1.0, 30.0, 150.0])
def test_removals_of_certain_labels_are_not_nothing(scale: float, generator: torch.Generator) -> None:
    """Residuals far below one, and alignments as far above: their product is what a removal changes.

    Hessians as sums of p_a p_b (e_a - e_b)(e_a - e_b)^T, in which no numbers near one are subtracted.
    """
    x = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    weights = torch.randn(3, 2, generator=generator, dtype=torch.float64)
    y = (x @ weights.T).argmax(1)
    scores = (x @ weights.T).topk(2).values
    at = int((scores[:, 0] - scores[:, 1]).argsort()[4])
    model, ridge = networks.linear(scale * weights), 1e-9
    found = fit(model, [(x, y)], likelihood="categorical", ridge=ridge).what_if(x[:3], remove=[at]).change
    p = model(x).softmax(1).detach().numpy()
    tangents = oracles.linear_tangents(x.numpy(), 3)
    curved = ridge * np.eye(6)
    for i in range(8):
        if i != at:
            for one, two in ((0, 1), (0, 2), (1, 2)):
                edge = tangents[i][one] - tangents[i][two]
                curved += p[i][one] * p[i][two] * np.outer(edge, edge)
    residual = -p[at]
    residual[int(y[at])] = np.delete(p[at], int(y[at])).sum()
    wanted = -tangents[:3] @ np.linalg.solve(curved, tangents[at].T @ residual)
    assert abs(wanted).max() > 0
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5 * abs(wanted).max())


def test_a_certain_label_turned_round_does_not_run_away(generator: torch.Generator) -> None:
    """Against a refit of a logistic regression. One Newton step, with a Hessian near zero, went many times too far."""
    x = torch.randn(40, 2, generator=generator, dtype=torch.float64)
    y = (x.sum(1, keepdim=True) > 0).double()
    at = int((x.sum(1)).argmax())
    model = networks.linear([[0.0, 0.0]])
    other = y.clone()
    other[at] = 0.0
    predictions = []
    for labels in (y, other):
        weights = np.zeros(2)
        for _ in range(50):
            p = 1 / (1 + np.exp(-x.numpy() @ weights))
            curved = (x.numpy().T * (p * (1 - p))) @ x.numpy() + 0.1 * np.eye(2)
            weights = weights + np.linalg.solve(curved, x.numpy().T @ (labels[:, 0].numpy() - p) - 0.1 * weights)
        predictions.append(x.numpy() @ weights)
        if labels is y:
            with torch.no_grad():
                model.weight.copy_(torch.from_numpy(weights).unsqueeze(0))
    true = predictions[1] - predictions[0]
    found = fit(model, [(x, y)], likelihood="bernoulli", ridge=0.1).what_if(x, relabel={at: [0.0]}).change[:, 0]
    assert 0.5 < float(found.norm()) / np.linalg.norm(true) < 2.0
    assert float(np.corrcoef(found, true)[0, 1]) > 0.99


def test_one_removal_is_the_pull_of_the_example() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    shares = tracer.attribute(case.test_inputs, top=1).hec3
    for at in range(len(case.test_inputs)):
        one = tracer.what_if(case.test_inputs[at : at + 1], remove=[int(shares.index[at, 0])])
        torch.testing.assert_close(one.change[0], -shares.pull[at, 0], rtol=1e-8, atol=1e-12)


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


@pytest.mark.parametrize("change", [{"remove": [2, 5]}, {"repeat": [3]}, {"remove": [0], "repeat": [7, 7]}], ids=str)
@pytest.mark.parametrize(
    "loss", [Loss("categorical", (0.5, 2.0, 3.5), 0.1), Loss("bernoulli", (0.4, 3.0, 1.5))], ids=str
)
def test_changed_examples_keep_the_weights_of_their_own_classes(
    loss: Loss, change: dict[str, list[int]], generator: torch.Generator
) -> None:
    x = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    model = networks.linear(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    categorical = loss.kind == "categorical"
    given = y if categorical else torch.nn.functional.one_hot(y, 3).double()
    likelihood = (
        whence.Categorical(weight=loss.weight, label_smoothing=loss.smoothing)
        if categorical
        else whence.Bernoulli(pos_weight=loss.weight)
    )
    found = fit(model, [(x[:5], given[:5]), (x[5:], given[5:])], likelihood=likelihood, ridge=RIDGE).what_if(
        x[:3], **change
    )
    f, J = tangents_of(model, x, ["weight"])
    start = model.weight.detach().numpy().reshape(-1)
    truth = Dense(f, J, start, loss, loss.encoded(given, torch.from_numpy(f)).numpy(), np.ones((12, 1)), RIDGE)
    counts = np.ones(12)
    np.add.at(counts, change.get("remove", []), -1)
    np.add.at(counts, change.get("repeat", []), 1)
    for name, wanted in truth.what_if(J[:3], counts, {})[0].items():
        np.testing.assert_allclose(getattr(found, name), wanted, rtol=1e-7, atol=1e-10, err_msg=name)


def test_a_label_of_large_logits_settles_between_two_flat_sides() -> None:
    """A margin of 1000 and a leverage of 10^6: the loss is a line on either side of the solution, which is a root."""
    weight = torch.tensor([[500.0, 0.0], [-500.0, 0.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.5], [1.0, -0.5], [1.0, 0.2]], dtype=torch.float64)
    ridge, test = 1.25e-6, torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    tracer = fit(networks.linear(weight), [(x, torch.zeros(3).long())], likelihood="categorical", ridge=ridge)
    leverage = float(x[0] @ x[0]) / ridge  # the others are certain, and tell nothing
    g = brentq(
        lambda g: 1 / (1 + np.exp(np.clip(2 * leverage * g - 1000, -700, 700))) - g, 0, 1, xtol=1e-16, rtol=1e-14
    )
    by = float(test[0] @ x[0]) / ridge * g
    np.testing.assert_allclose(tracer.what_if(test, relabel={0: 1}).change, [[-by, by]], rtol=1e-8)


def certain_of_all(margin: float) -> tuple[whence.Tracer, torch.Tensor]:
    """Three examples whose loss is zero to the last digit, fitted with a ridge of 1.25 / margin."""
    weight = torch.tensor([[margin / 2, 0.0], [-margin / 2, 0.0]], dtype=torch.float64)
    x = torch.tensor([[1.0, 0.5], [1.0, -0.5], [1.0, 0.2]], dtype=torch.float64)
    given = [(x, torch.zeros(3).long())]
    return fit(networks.linear(weight), given, likelihood="categorical", ridge=1.25 / margin), x


@pytest.mark.parametrize("margin", [1e2, 1e4])
def test_a_new_leverage_near_one(margin: float) -> None:
    """The relabelled example alone has a residual: HeC3 is the prediction's change without it, which is x x' g / ridge.

    At a margin of 10^4 its new leverage is 2e-4 below one.
    """
    tracer, x = certain_of_all(margin)
    leverage, test = margin, torch.tensor([[0.3, 2.0]], dtype=torch.float64)
    g = brentq(
        lambda g: 1 / (1 + np.exp(np.clip(2 * leverage * g - margin, -700, 700))) - g, 0, 1, xtol=1e-16, rtol=1e-14
    )
    by = float(test[0] @ x[0]) * margin / 1.25 * g
    found = tracer.what_if(test, relabel={0: 1})
    np.testing.assert_allclose(found.change, [[-by, by]], rtol=1e-7)
    np.testing.assert_allclose(found.new_hec3, [[by**2, by**2]], rtol=1e-6)


@pytest.mark.parametrize("margin", [1e6, 1e9, 1e11, 1e14])
def test_leverages_that_rounding_decides_are_refused(margin: float) -> None:
    """A leverage as large as the margin before, and 2 / margin below one after: its rounding is nearly as large."""
    tracer, x = certain_of_all(margin)
    with pytest.raises(whence.SingularCurvatureError, match="1 that determine their own predictions after the change"):
        tracer.what_if(x[:1], relabel={0: 1})


def classes_of_four(generator: torch.Generator) -> tuple[whence.Tracer, torch.Tensor]:
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(4, (40,), generator=generator)
    weights = torch.randn(4, 5, generator=generator, dtype=torch.float64)
    given = networks.batches_of(x, y, 7)
    tracer = fit(networks.linear(weights), given, likelihood="categorical", structure="sketch", ridge=RIDGE)
    return tracer, x[:3]


MANY: list[dict[str, Any]] = [{"remove": list(range(0, 40, 2))}, {"remove": [0, 9], "relabel": {3: 1}, "repeat": [5]}]


@pytest.mark.parametrize("change", MANY)
def test_features_in_memory_give_the_same_numbers(
    change: dict[str, Any], generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the changed examples are in memory; else they are computed anew."""
    tracer, x = classes_of_four(generator)
    found = tracer.what_if(x, **change)
    monkeypatch.setattr(TrainingRows, "complete", False)
    again = tracer.what_if(x, **change)
    for name in ("change", "new_ho", "new_hec3"):
        torch.testing.assert_close(getattr(found, name), getattr(again, name), rtol=1e-10, atol=1e-14)


def test_removals_without_an_inverse_are_refused() -> None:
    """Both examples that know the second weight leave, and the ridge is nothing beside the others."""
    x = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0], [0.0, 2.0]], dtype=torch.float64)
    tracer = fit(networks.linear([[1.0, 1.0]]), [(x, x.sum(1, keepdim=True) + 0.1)], ridge=1e-14)
    with pytest.raises(whence.SingularCurvatureError, match="leverage one up to rounding"):
        tracer.what_if(x[:1], remove=[2, 3])
