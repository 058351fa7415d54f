"""Training ends near an optimum of the penalized loss, with a weight decay that suits the data; scores and choices."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, r2_score, roc_auc_score
from torch import Tensor, nn

import whence
from whence.runtime.progress import Progress
from whence.tabular.network import build, choose_width, start, weights_of
from whence.tabular.reading import Table
from whence.tabular.results import affordable, noise_of
from whence.tabular.scores import Predicted, score
from whence.tabular.study import Options, choose_structure, prepare, ridge, study, training_data
from whence.tabular.targets import Target
from whence.tabular.training import Trained, loss_of, train

QUIET = Progress(enabled=False)


def trained(target: Target, x: Tensor, y: Tensor, width: int = 5) -> tuple[nn.Module, Trained]:
    network = build(x.shape[1], width, target)
    generator = torch.Generator().manual_seed(0)
    validation = torch.tensor([0, 1, 0, 2, 3])[torch.arange(len(x)) % 5]  # three rounds
    done = train(network, lambda one: start(one, generator), target, (x, y), validation, QUIET)
    return network.eval(), done


def data(n: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, 50 + 10 * (torch.sin(2 * x[:, 0]) + x[:, 1] + noise * torch.randn(n, generator=generator))


def target_of(y: Tensor) -> Target:
    return Target("y", "regression", (), shift=float(y.mean()), scale=float(y.std()))


def test_gradient_of_the_penalized_loss_is_nearly_zero() -> None:
    x, y = data(100, 0.3)
    target = target_of(y)
    network, done = trained(target, x, y)
    penalty = sum(weight.square().sum() for weight in network.parameters())
    loss = loss_of(target, network(x), y) + done.weight_decay / 2 * penalty
    loss.backward()
    size = torch.cat([weight.grad.flatten() for weight in network.parameters() if weight.grad is not None]).norm()
    assert float(size) < 0.01
    with torch.no_grad():
        assert float(loss_of(target, network(x), y)) < 0.2


def test_noise_gets_a_stronger_decay() -> None:
    decays = []
    for noise in (0.05, 3.0):
        x, y = data(100, noise)
        decays.append(trained(target_of(y), x, y)[1].weight_decay)
    assert decays[1] > decays[0]


def test_pure_noise_is_not_learnt() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(100, 3, generator=generator), torch.randn(100, generator=generator)
    target = target_of(y)
    network, _ = trained(target, x, y)
    fresh, other = torch.randn(500, 3, generator=generator), torch.randn(500, generator=generator)
    with torch.no_grad():
        assert float(loss_of(target, network(fresh), other)) < 1.4  # always saying the mean gives about 1


def test_ridge_of_the_fit_is_the_penalty_of_the_training() -> None:
    """The Newton step left at the optimum is small only with the right ridge."""
    x, y = data(100, 0.3)
    target = target_of(y)
    network, done = trained(target, x, y)
    loader = [(x, y.unsqueeze(1))]
    lam = ridge(target, done.weight_decay, len(x))
    right, wrong = (
        float(whence.fit(network, loader, ridge=factor * lam, progress=False).diagnostics["Newton change"])
        for factor in (1.0, 100.0)
    )
    assert right < 0.05
    assert wrong > 2 * right


@pytest.mark.parametrize("classes", [("a", "b"), ("a", "b", "c")])
def test_ridge_of_the_fit_is_the_penalty_for_classes_too(classes: tuple[str, ...]) -> None:
    x, y = data(100, 0.5)
    target = Target("y", "classification", classes)
    edges = torch.quantile(y, torch.linspace(0, 1, len(classes) + 1)[1:-1])
    values = torch.bucketize(y, edges).to(x.dtype)
    network, done = trained(target, x, values)
    loader = [(x, values.long())] if len(classes) > 2 else [(x, values.unsqueeze(1))]
    lam = ridge(target, done.weight_decay, len(x))
    tracer = whence.fit(network, loader, likelihood=target.likelihood, ridge=lam, progress=False)
    assert float(tracer.diagnostics["Newton change"]) < 0.05


def test_scores_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    raw = generator.random((50, 3))
    probabilities = raw / raw.sum(1, keepdims=True)
    places = generator.integers(0, 3, 50)
    nothing = np.zeros(50)
    predicted = Predicted(probabilities.argmax(1), nothing, nothing, probabilities, nothing, nothing, nothing, nothing)
    found = {one.name: one.value for one in score(Target("y", "classification", ("a", "b", "c")), predicted, places)}
    assert found["log loss"] == pytest.approx(log_loss(places, probabilities))
    assert found["accuracy"] == pytest.approx((probabilities.argmax(1) == places).mean())

    two = np.round(np.stack([1 - raw[:, 0], raw[:, 0]], axis=1), 1)  # rounded: with ties
    predicted = Predicted(two.argmax(1), nothing, nothing, two, nothing, nothing, nothing, nothing)
    found = {one.name: one.value for one in score(Target("y", "classification", ("a", "b")), predicted, places % 2)}
    assert found["AUROC"] == pytest.approx(roc_auc_score(places % 2, two[:, 1]))

    center, values = generator.normal(size=50), generator.normal(size=50)
    predicted = Predicted(center, center - 1, center + 1, raw[:, :0], nothing, nothing, nothing, nothing)
    found = {one.name: one.value for one in score(Target("y", "regression", ()), predicted, values)}
    assert found["R2"] == pytest.approx(r2_score(values, center))
    assert found["coverage"] == pytest.approx((abs(values - center) <= 1).mean())


def test_noise_has_no_bias_in_a_linear_model() -> None:
    """Mean of e^2 / (1 - h) over many draws of the noise is the noise variance, with 12 weights for 30 examples."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 12, dtype=torch.float64, generator=generator)
    found = []
    for _ in range(60):
        y = 2.0 * torch.randn(30, 1, dtype=torch.float64, generator=generator)
        network = nn.Linear(12, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            network.weight.copy_(torch.linalg.lstsq(x, y).solution.T)
        found.append(noise_of(whence.fit(network.eval(), [(x, y)], ridge=1e-9, progress=False)))
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - 4.0) < 3 * error
    assert error < 0.3


def test_width_and_structure_go_by_size() -> None:
    assert weights_of(8, 32, 1) == sum(
        parameter.numel() for parameter in build(8, 32, target_of(torch.randn(9))).parameters()
    )
    assert choose_width(3, 1, 1_000) == 32
    assert choose_width(100, 1, 1_000) < 16
    assert choose_width(20, 1, 40_000) < choose_width(20, 1, 1_000)
    assert choose_structure(1_000, 1, 1_000) == "exact"
    assert choose_structure(300, 1, 50_000) == "exact"  # the dual road
    assert choose_structure(50_000, 10, 50_000) == "core"


def test_verdicts_of_held_out_rows_come_first() -> None:
    rows, held_out = np.arange(50_000), np.arange(0, 50_000, 5)
    few = affordable(rows, held_out, 40_000, 10, 1_500)
    assert 0 < len(few) < len(held_out)
    assert set(few) <= set(held_out)
    assert len(affordable(rows[:1000], held_out[:200], 800, 1, 1_000)) == 1000


def test_network_that_stops_short_is_recentered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.tabular.training.STEPS", 1)
    monkeypatch.setattr("whence.tabular.training.LAST_ROUNDS", 1)
    x, y = data(80, 0.3)
    cells = {name: np.array([f"{value:.4f}" for value in values.tolist()], dtype=object) for name, values in (
        ("a", x[:, 0]), ("b", x[:, 1]), ("y", y))}  # fmt: skip
    table = Table(cells, np.arange(1, 81), 80, ())
    options = Options(target="y", width=6)
    done = study(prepare(table, options), options, QUIET, show=False)
    assert done.recentered
    assert done.tracer.loo.recenter


@pytest.mark.slow  # the same as for the exact structure, whose tests run by default
def test_core_serves_where_it_is_asked_for() -> None:
    x, y = data(50, 0.3)
    cells = {name: np.array([f"{value:.4f}" for value in values.tolist()], dtype=object) for name, values in (
        ("a", x[:, 0]), ("b", x[:, 1]), ("y", y))}  # fmt: skip
    options = Options(target="y", width=4, structure="core")
    done = study(prepare(Table(cells, np.arange(1, 51), 50, ()), options), options, QUIET, show=False)
    assert done.structure == "core"
    inputs, targets = training_data(done.model, done.inputs[done.parts.train], done.values[done.parts.train])[0]
    exact = whence.fit(
        done.tracer.problem.network.model, [(inputs, targets)], ridge=done.tracer.ridge, recenter=done.recentered,
        progress=False,
    )  # fmt: skip
    ratio = done.tracer.predict(done.inputs).hec3 / exact.predict(done.inputs).hec3
    assert 0.8 < float(ratio.median()) < 1.25
