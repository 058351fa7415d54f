"""The table of training examples against statsmodels, refits and dense matrices."""

from __future__ import annotations

import math

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from statsmodels.stats.outliers_influence import OLSInfluence

import networks
import oracles
import whence
from doubles import fit
from whence.influence import training
from whence.influence.training import change_without, cooks_distance

RIDGE = 0.5


def regression(generator: torch.Generator, n: int = 15, k: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return x, torch.randn(n, k, generator=generator, dtype=torch.float64)


def test_columns_are_those_of_statsmodels_for_least_squares(generator: torch.Generator) -> None:
    x, y = regression(generator)
    wanted = OLSInfluence(sm.OLS(y.numpy()[:, 0], x.numpy()).fit())
    weights = np.linalg.lstsq(x.numpy(), y.numpy(), rcond=None)[0].T
    table = fit(networks.linear(weights), [(x, y)], ridge=0.0, noise="unbiased").training_frame()
    np.testing.assert_allclose(table.cook, wanted.cooks_distance[0], rtol=1e-8)
    np.testing.assert_allclose(table.leverage, wanted.hat_matrix_diag, rtol=1e-8)
    np.testing.assert_allclose(table.suspicion, np.abs(wanted.resid_studentized_internal), rtol=1e-8)
    np.testing.assert_allclose(table.residual, np.abs(wanted.resid), rtol=1e-8)
    assert table.index.name == "example"
    order = np.argsort(-np.abs(wanted.resid_studentized_internal))
    np.testing.assert_array_equal(table.suspect_rank.to_numpy()[order], np.arange(1, 16))


def test_cooks_distance_is_the_move_of_the_weights_in_the_curvature(generator: torch.Generator) -> None:
    x, y = regression(generator, k=2)
    tangents = oracles.linear_tangents(x.numpy(), 2)
    weights = oracles.ridge_fit(tangents, y.numpy(), RIDGE)
    tracer = fit(networks.linear(weights.reshape(2, 3)), [(x[:8], y[:8]), (x[8:], y[8:])], ridge=RIDGE)
    damped = oracles.damped_curvature(tangents, RIDGE)
    moves = weights - oracles.refits(tangents, y.numpy(), RIDGE)
    wanted = np.einsum("np,pq,nq->n", moves, damped, moves)
    dof = oracles.degrees_of_freedom(oracles.leverage_blocks(tangents, RIDGE))
    noise = float(tracer.sigma.diagonal().mean())
    np.testing.assert_allclose(cooks_distance(tracer), wanted / (dof * noise), rtol=1e-8)


def test_cooks_distance_of_classes(generator: torch.Generator) -> None:
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    model = networks.linear(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE)
    u, leverage_blocks = tracer.loo_residuals, tracer.bread.leverage_blocks
    wanted = torch.einsum("nk,nkj,nj->n", u, leverage_blocks, u) / (tracer.degrees_of_freedom * tracer.noise_scale)
    torch.testing.assert_close(cooks_distance(tracer), wanted, rtol=1e-8, atol=1e-12)


def test_influence_on_a_test_set_is_what_refits_give(generator: torch.Generator) -> None:
    x, y = regression(generator, k=2)
    tangents = oracles.linear_tangents(x.numpy(), 2)
    weights = oracles.ridge_fit(tangents, y.numpy(), RIDGE)
    tracer = fit(networks.linear(weights.reshape(2, 3)), [(x[:8], y[:8]), (x[8:], y[8:])], ridge=RIDGE)
    test = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    moves = oracles.refit_moves(
        oracles.linear_tangents(test.numpy(), 2), weights, oracles.refits(tangents, y.numpy(), RIDGE)
    )
    squares = (moves**2).sum((0, 2))
    table = tracer.training_frame([test[:3], test[3:]])
    np.testing.assert_allclose(table.test_influence, np.sqrt(squares / 5), rtol=1e-8)
    np.testing.assert_allclose(table.test_share, squares / squares.sum(), rtol=1e-8)


@pytest.mark.parametrize("structure", ["core", "sketch", "ekfac", "kfac", "diagonal"])
def test_every_structure_has_a_table(structure: str) -> None:
    case = networks.build("convolution")
    table = fit(case.model, case.batches(4), structure=structure, ridge=RIDGE).training_frame(case.test_inputs)
    assert len(table) == networks.EXAMPLES
    assert bool(np.isfinite(table.to_numpy()).all())
    assert sorted(table.suspect_rank) == list(range(1, networks.EXAMPLES + 1))
    np.testing.assert_allclose(table.test_share.sum(), 1.0)


def test_a_flipped_label_is_the_first_suspect(generator: torch.Generator) -> None:
    x, _ = regression(generator, n=40)
    y = x[:, :1] + 0.01 * torch.randn(40, 1, generator=generator, dtype=torch.float64)
    y[17] = -y[17] + 1
    weights = oracles.ridge_fit(x.unsqueeze(1).numpy(), y.numpy(), 0.1)
    table = fit(networks.linear(weights.reshape(1, 3)), [(x, y)], ridge=0.1).training_frame()
    assert int(table.suspect_rank[17]) == 1


def test_without_residuals_nobody_is_suspect() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
    model = networks.linear([[2.0]])
    table = fit(model, [(x, model(x).detach())]).training_frame(x)
    assert not table[["cook", "suspicion", "test_influence", "test_share"]].to_numpy().any()


def test_groups_have_no_single_examples() -> None:
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(1)
    groups = torch.tensor([0, 0, 1, 1, 2, 2])
    tracer = fit(networks.linear([[1.0]]), [(x, 2 * x)], groups=groups)
    for ask in (tracer.training_frame, lambda: tracer.explain(x), lambda: tracer.attribute(x)):
        with pytest.raises(whence.InputError, match="without groups"):
            ask()


@pytest.fixture
def learned_by_heart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels are judged by the fit without them, however much a network has learned them."""
    monkeypatch.setattr(training, "LEARNED", -math.inf)  # suspects in the order of their suspicion


CLASSES = {"categorical": 3, "bernoulli": 2}


def softmax_or_sigmoid(likelihood: str, outputs: np.ndarray) -> np.ndarray:
    if likelihood == "bernoulli":
        return 1 / (1 + np.exp(-outputs))
    raised = np.exp(outputs - outputs.max())
    return raised / raised.sum()


def hessian(likelihood: str, p: np.ndarray) -> np.ndarray:
    return np.diag(p * (1 - p)) if likelihood == "bernoulli" else np.diag(p) - np.outer(p, p)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("likelihood", CLASSES)
@pytest.mark.usefixtures("learned_by_heart")
def test_suspicion_of_classes_is_the_residual_where_the_others_would_predict(
    likelihood: str, weighted: bool, generator: torch.Generator
) -> None:
    n, k = 12, CLASSES[likelihood]
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(k, (n,), generator=generator)
    given = y if likelihood == "categorical" else torch.nn.functional.one_hot(y, k).double()
    weights = torch.rand(n, generator=generator, dtype=torch.float64) + 0.5 if weighted else torch.ones(n)
    model = networks.linear(torch.randn(k, 3, generator=generator, dtype=torch.float64))
    batch = (x, given, weights) if weighted else (x, given)
    table = fit(model, [batch], likelihood=likelihood, ridge=RIDGE).training_frame()
    tangents = oracles.linear_tangents(x.numpy(), k)
    outputs = model(x).detach().numpy()
    answers = np.eye(k)[y.numpy()]
    p = np.stack([softmax_or_sigmoid(likelihood, row) for row in outputs])
    curved = [float(w) * J.T @ hessian(likelihood, row) @ J for w, J, row in zip(weights, tangents, p, strict=True)]
    for i, block in enumerate(tangents):  # one Newton step of the fit without the example
        others = sum(curved) - curved[i] + RIDGE * np.eye(block.shape[1])
        there = outputs[i] - block @ np.linalg.solve(others, block.T @ (float(weights[i]) * (answers[i] - p[i])))
        wanted = np.abs(answers[i] - softmax_or_sigmoid(likelihood, there)).max()
        np.testing.assert_allclose(table.suspicion[i], wanted, rtol=1e-8)


@pytest.mark.usefixtures("learned_by_heart")
def test_suspicion_where_outputs_share_most_of_their_gradients(generator: torch.Generator) -> None:
    """Outputs v w^T x with nearly the same v for all classes: diagonals of Q L above one, though no leverage is."""
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    weights, ridge = np.array([0.5, 1.5, 2.5]), 0.1
    first, second = networks.linear(0.05 * torch.ones(1, 3)), networks.linear(torch.tensor([[10.0], [11.0], [12.5]]))
    model = torch.nn.Sequential(first, second).double()
    likelihood = whence.Categorical(weight=weights.tolist())
    tracer = fit(model, [(x, y)], likelihood=likelihood, ridge=ridge, parameters=["0.weight"])
    outputs = model(x).detach()
    tangents = [np.outer([10.0, 11.0, 12.5], row) for row in x.numpy()]
    p = outputs.softmax(1).numpy()
    hessians = [weights[label] * (np.diag(row) - np.outer(row, row)) for label, row in zip(y, p, strict=True)]
    damped = sum(J.T @ L @ J for J, L in zip(tangents, hessians, strict=True)) + ridge * np.eye(3)
    largest, wanted = 0.0, []
    for J, L, f, row, label in zip(tangents, hessians, outputs.numpy(), p, y, strict=True):
        largest = max(largest, np.diag(J @ np.linalg.solve(damped, J.T) @ L).max())
        residual = weights[label] * (np.eye(3)[label] - row)
        after = f - J @ np.linalg.solve(damped - J.T @ L @ J, J.T @ residual)
        grown = np.exp(after - after[label])
        wanted.append(weights[label] * (grown.sum() - 1) / grown.sum())
    assert largest > 1
    assert float(tracer.leverage.sum(1).max()) < 1
    np.testing.assert_allclose(tracer.training_frame().suspicion, wanted, rtol=1e-7)


@pytest.mark.parametrize("curved", [False, True])
def test_residuals_of_another_loss_after_a_change_are_to_first_order(curved: bool, generator: torch.Generator) -> None:
    x, y = regression(generator)
    loader = [(x, y.abs().round(), 0.3 + torch.rand(15, generator=generator, dtype=torch.float64))]
    model = networks.linear(torch.full((1, x.shape[1]), 0.1, dtype=torch.float64))
    problem = fit(model, loader, likelihood=Poisson() if curved else Counts(), ridge=RIDGE).problem
    change = torch.randn(problem.outputs.shape, generator=generator, dtype=torch.float64)
    hessian = loader[0][2].unsqueeze(1) * (problem.outputs.exp() if curved else 1.0)
    torch.testing.assert_close(problem.residuals_after(change), problem.residuals - hessian * change)


class Counts(whence.Likelihood):
    """A likelihood that tells no more than it must."""

    name = "counts"

    def check_targets(self, targets: torch.Tensor, outputs: torch.Tensor, where: str) -> torch.Tensor:
        return targets

    def residuals(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return targets - outputs.exp()


class Poisson(Counts):
    """Its Hessian too."""

    def hessian_root(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (0.5 * outputs).exp().diag_embed()


def test_suspicion_of_weighted_least_squares_is_that_of_statsmodels(generator: torch.Generator) -> None:
    x, y = regression(generator)
    weights = 0.3 + torch.rand(15, generator=generator, dtype=torch.float64)
    fitted = sm.WLS(y.numpy()[:, 0], x.numpy(), weights=weights.numpy()).fit()
    loader = [(x, y, weights)]
    table = fit(networks.linear(fitted.params[None]), loader, ridge=0.0, noise="unbiased").training_frame()
    residual, leverage = (
        fitted.wresid,
        OLSInfluence(sm.OLS(fitted.model.wendog, fitted.model.wexog).fit()).hat_matrix_diag,
    )
    wanted = np.abs(residual) / np.sqrt(fitted.scale * (1 - leverage))
    np.testing.assert_allclose(table.suspicion, wanted, rtol=1e-8)


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
@pytest.mark.usefixtures("learned_by_heart")
def test_suspicion_of_a_recentered_fit_is_the_residual_at_the_prediction_without_the_example(
    likelihood: str, generator: torch.Generator
) -> None:
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    labels = torch.nn.functional.one_hot(torch.randint(3, (12,), generator=generator), 3).double()
    model = networks.linear(2 * torch.randn(3, 3, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, labels)], likelihood=likelihood, ridge=RIDGE, recenter=True)
    f, J = model(x).detach().numpy(), oracles.linear_tangents(x.numpy(), 3)

    def chances(outputs: np.ndarray) -> np.ndarray:
        logits = torch.from_numpy(outputs)
        return (logits.softmax(1) if likelihood == "categorical" else logits.sigmoid()).numpy()

    p = chances(f)
    L = np.stack(
        [np.diag(row) - np.outer(row, row) if likelihood == "categorical" else np.diag(row * (1 - row)) for row in p]
    )
    damped = np.einsum("nkp,nkj,njq->pq", J, L, J) + RIDGE * np.eye(9)
    weights = np.concatenate([one.detach().numpy().reshape(-1) for one in model.parameters()])
    step = np.linalg.solve(damped, np.einsum("nkp,nk->p", J, labels.numpy() - p) - RIDGE * weights)
    residuals = labels.numpy() - p - np.einsum("nkj,njp,p->nk", L, J, step)
    without = []
    for i in range(12):
        rest = damped - J[i].T @ L[i] @ J[i]
        without.append(f[i] + J[i] @ step - J[i] @ np.linalg.solve(rest, J[i].T @ residuals[i]))
    wanted = np.abs(labels.numpy() - chances(np.stack(without))).max(1)
    np.testing.assert_allclose(tracer.training_frame().suspicion, wanted, rtol=1e-8)


def test_cooks_distance_where_probabilities_are_certain(generator: torch.Generator) -> None:
    """Hessians of the loss are nearly singular there: 1e-20 and less along some directions, 1e-9 along others."""
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (12,), generator=generator)
    model = networks.linear(20 * torch.randn(3, 3, generator=generator, dtype=torch.float64))
    tracer = fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE)
    u, leverage_blocks = tracer.loo_residuals, tracer.bread.leverage_blocks
    wanted = torch.einsum("nk,nkj,nj->n", u, leverage_blocks, u) / (tracer.degrees_of_freedom * tracer.noise_scale)
    torch.testing.assert_close(cooks_distance(tracer), wanted, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("recenter", [False, True])
def test_a_suggested_number_is_the_prediction_of_a_refit_without_the_example(
    recenter: bool, generator: torch.Generator
) -> None:
    x, y = regression(generator, n=14)
    weights = torch.rand(14, generator=generator, dtype=torch.float64) + 0.5
    there = x.numpy() * np.sqrt(weights.numpy())[:, None]
    optimum = np.linalg.solve(there.T @ there + RIDGE * np.eye(3), x.numpy().T @ (weights.numpy()[:, None] * y.numpy()))
    start = optimum + 0.3 if recenter else optimum
    tracer = fit(networks.linear(start.T), [(x, y, weights)], ridge=RIDGE, recenter=recenter)
    table = tracer.training_frame()
    np.testing.assert_allclose(table.label, y[:, 0], rtol=1e-12)
    refit, variance = [], []
    for i in range(14):
        others = np.delete(np.arange(14), i)
        curved = there[others].T @ there[others] + RIDGE * np.eye(3)
        right = x.numpy()[others].T @ (weights.numpy()[others, None] * y.numpy()[others])
        refit.append((x.numpy()[i] @ np.linalg.solve(curved, right)).item())
        variance.append(1 / float(weights[i]) + x.numpy()[i] @ np.linalg.solve(curved, x.numpy()[i]))
    np.testing.assert_allclose(table.suggested, refit, rtol=1e-8)
    np.testing.assert_allclose(table.suggested_std, np.sqrt(tracer.noise_scale * np.array(variance)), rtol=1e-8)
    np.testing.assert_allclose(table.suspicion, np.abs(table.label - table.suggested) / table.suggested_std, rtol=1e-8)


@pytest.mark.parametrize("likelihood", [whence.Categorical(weight=[1.0, 2.0, 0.5]), whence.Bernoulli(pos_weight=3.0)])
@pytest.mark.usefixtures("learned_by_heart")
def test_suggested_classes_are_the_most_probable_ones_without_the_example(
    likelihood: whence.Likelihood, generator: torch.Generator
) -> None:
    n, k = 30, 3 if likelihood.couples_outputs else 1
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(3 if k == 3 else 2, (n,), generator=generator)
    model = networks.linear(torch.randn(k, 3, generator=generator, dtype=torch.float64))
    batch = (x, y if k == 3 else y.double().unsqueeze(1))
    tracer = fit(model, [batch], likelihood=likelihood, ridge=RIDGE)
    table = tracer.training_frame()
    after = tracer.problem.outputs + change_without(tracer)
    p = after.softmax(1) if k == 3 else torch.cat([after.neg().sigmoid(), after.sigmoid()], 1)
    np.testing.assert_array_equal(table.label, y)
    np.testing.assert_array_equal(table.suggested, p.argmax(1))
    np.testing.assert_allclose(table.suggested_probability, p.amax(1), rtol=1e-12)
    assert table.sort_values("suspect_rank").suspicion.is_monotonic_decreasing
    agree = (table.label == table.suggested).to_numpy()
    assert 0 < agree.sum() < n
    if k == 1:  # suspicion is c (1 - p of the label)
        size = np.where(y == 1, 3.0, 1.0)
        wanted = np.where(agree, 1 - table.suggested_probability, table.suggested_probability) * size
        np.testing.assert_allclose(table.suspicion, wanted, rtol=1e-9)


def test_labels_that_do_not_count_are_not_named(generator: torch.Generator) -> None:
    x = torch.randn(9, 3, generator=generator, dtype=torch.float64)
    y = torch.tensor([0, 1, 2] * 3)
    y[4] = -100
    table = fit(networks.linear(torch.eye(3, dtype=torch.float64)), [(x, y)], likelihood="categorical").training_frame()
    np.testing.assert_array_equal(table.label, np.where(np.arange(9) == 4, np.nan, y))
    assert bool((table.suggested_probability > 1 / 3).all())


def test_several_numbers_have_a_column_each(generator: torch.Generator) -> None:
    x, y = regression(generator, k=2)
    table = fit(networks.linear(torch.zeros(2, 3)), [(x, y)], ridge=RIDGE, recenter=True).training_frame()
    np.testing.assert_allclose(table[["label_0", "label_1"]], y, rtol=1e-12)
    assert {"suggested_0", "suggested_std_1"} <= set(table.columns)


@pytest.mark.parametrize("structure", ["exact", "core"])
@pytest.mark.usefixtures("learned_by_heart")
def test_suspicion_over_copies_is_the_mean_of_the_probabilities_for_them(
    structure: str, generator: torch.Generator
) -> None:
    n, k = 24, 3
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(k, (n,), generator=generator)
    weights = torch.randn(k, 3, generator=generator, dtype=torch.float64)
    batches = [(x[:10], y[:10]), (x[10:], y[10:])]
    tracer = fit(networks.linear(weights), batches, likelihood="categorical", ridge=RIDGE, structure=structure)
    shifts = iter([0.0, 0.0, 0.3, 0.3, -0.2, -0.2])  # each copy is made batch by batch
    found = tracer.suggest(n, augment=lambda inputs: inputs + next(shifts), copies=3)
    residuals = torch.nn.functional.one_hot(y, k) - (x @ weights.T).softmax(1)
    change = -(tracer.bread.leverage_blocks @ tracer.loo_residuals.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(tracer.residuals, residuals)
    p = torch.stack([((x + shift) @ weights.T + change).softmax(1)[torch.arange(n), y] for shift in (0.0, 0.3, -0.2)])
    wanted = 1 - p.mean(0)
    torch.testing.assert_close(found.score, wanted[found.index], rtol=1e-7, atol=1e-9)
    assert bool((found.score.diff() <= 0).all())
    same = tracer.suggest(n, augment=lambda inputs: inputs, copies=2)
    torch.testing.assert_close(same.index, tracer.suggest(n).index)


def test_copies_that_cannot_be_used_are_refused(generator: torch.Generator) -> None:
    x, y = regression(generator)
    numbers = fit(networks.linear(torch.eye(3, dtype=torch.float64)[:1]), [(x, y)], ridge=RIDGE)
    with pytest.raises(whence.InputError, match=r"expected classes and all outputs, got Gaussian.*Leave augment out"):
        numbers.suggest(3, augment=lambda inputs: inputs)
    labels = torch.tensor([0, 1, 2] * 5)
    classes = fit(networks.linear(torch.eye(3, dtype=torch.float64)), [(x, labels)], likelihood="categorical")
    with pytest.raises(whence.InputError, match=r"expected augment to return 15 inputs .* got 14"):
        classes.suggest(3, augment=lambda inputs: inputs[1:])
    with pytest.raises(whence.InputError, match="Leave out pool or augment"):
        classes.suggest(3, pool=x, augment=lambda inputs: inputs)


@pytest.mark.parametrize("epochs", [3, 400])
def test_labels_are_judged_without_themselves_where_they_were_learned_by_heart(
    epochs: int, generator: torch.Generator
) -> None:
    x = torch.randn(60, 8, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (60,), generator=generator)  # nothing to learn but by heart
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3)).double()
    optimizer = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(epochs):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    tracer = fit(net, [(x, y)], likelihood="categorical", ridge=0.05)
    without, own = (
        1 - (tracer.problem.outputs + moved).softmax(1)[torch.arange(60), y] for moved in (change_without(tracer), 0.0)
    )
    table = tracer.training_frame()
    np.testing.assert_allclose(table.suspicion, without.numpy(), rtol=1e-9, atol=1e-12)
    wanted = (without if epochs == 400 else own).argsort(descending=True).numpy()
    np.testing.assert_array_equal(table.sort_values("suspect_rank").index, wanted)
    found = tracer.suggest(60, augment=lambda inputs: inputs, copies=2)
    np.testing.assert_array_equal(found.index.numpy(), wanted)
    np.testing.assert_allclose(found.score.numpy(), without[found.index].numpy(), rtol=1e-9, atol=1e-12)
