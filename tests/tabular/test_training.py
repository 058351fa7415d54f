"""Training ends near an optimum of the penalized loss, with a weight decay that suits the data; scores and choices."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.metrics import log_loss, r2_score, roc_auc_score
from torch import Tensor, nn

import whence
from whence.estimators import observation_noise
from whence.runtime.execution import Progress
from whence.tabular.files import as_text
from whence.tabular.fitted import Prepared, fit_table, prepare, ridge
from whence.tabular.network import build_network, choose_width, count_weights, initialize, mean_loss, train
from whence.tabular.predictions import affordable_rows, predict_rows, score_classes, score_numbers
from whence.tabular.target import Target

QUIET = Progress(enabled=False)


def trained(target: Target, x: Tensor, y: Tensor, width: int = 5) -> tuple[nn.Module, float]:
    network = build_network(x.shape[1], width, target)
    initialize(network, torch.Generator().manual_seed(0))
    folds = [torch.arange(len(x)) % 5 == rest for rest in (1, 3, 4)]
    decay = train(network, target, x, y, folds, QUIET).settings["weight_decay"]
    return network.eval(), decay


def data(n: int, noise: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, generator=generator)
    return x, 50 + 10 * (torch.sin(2 * x[:, 0]) + x[:, 1] + noise * torch.randn(n, generator=generator))


def target_of(y: Tensor) -> Target:
    return Target("y", "regression", (), shift=float(y.mean()), scale=float(y.std()))


def test_gradient_of_the_penalized_loss_is_nearly_zero() -> None:
    x, y = data(100, 0.3)
    target = target_of(y)
    network, decay = trained(target, x, y)
    penalty = sum(weight.square().sum() for weight in network.parameters())
    loss = mean_loss(target, network(x), y) + decay / 2 * penalty
    loss.backward()
    size = torch.cat([weight.grad.flatten() for weight in network.parameters() if weight.grad is not None]).norm()
    assert float(size) < 0.01
    with torch.no_grad():
        assert float(mean_loss(target, network(x), y)) < 0.2


def test_noise_gets_a_stronger_decay() -> None:
    decays = []
    for noise in (0.05, 3.0):
        x, y = data(100, noise)
        decays.append(trained(target_of(y), x, y)[1])
    assert decays[1] > decays[0]


def test_pure_noise_is_not_learnt() -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(100, 3, generator=generator), torch.randn(100, generator=generator)
    target = target_of(y)
    network, _ = trained(target, x, y)
    fresh, other = torch.randn(500, 3, generator=generator), torch.randn(500, generator=generator)
    with torch.no_grad():
        assert float(mean_loss(target, network(fresh), other)) < 1.4  # always saying the mean gives about 1


def test_ridge_of_the_fit_is_the_penalty_of_the_training() -> None:
    """The Newton step left at the optimum is small only with the right ridge."""
    x, y = data(100, 0.3)
    target = target_of(y)
    network, decay = trained(target, x, y)
    loader = [(x, y.unsqueeze(1))]
    lam = ridge(target, decay, len(x))
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
    network, decay = trained(target, x, values)
    loader = [(x, values.long())] if len(classes) > 2 else [(x, values.unsqueeze(1))]
    lam = ridge(target, decay, len(x))
    tracer = whence.fit(network, loader, likelihood=target.likelihood, ridge=lam, progress=False)
    assert float(tracer.diagnostics["Newton change"]) < 0.05


def test_scores_are_those_of_scikit_learn() -> None:
    generator = np.random.default_rng(0)
    raw = generator.random((50, 3))
    probabilities = raw / raw.sum(1, keepdims=True)
    places = generator.integers(0, 3, 50)
    found = {one.name: one.value for one in score_classes(places, probabilities, ("a", "b", "c"))}
    assert found["log loss"] == pytest.approx(log_loss(places, probabilities))
    assert found["accuracy"] == pytest.approx((probabilities.argmax(1) == places).mean())

    two = np.round(np.stack([1 - raw[:, 0], raw[:, 0]], axis=1), 1)  # rounded: with ties
    found = {one.name: one.value for one in score_classes(places % 2, two, ("a", "b"))}
    assert found["AUROC"] == pytest.approx(roc_auc_score(places % 2, two[:, 1]))

    center, values = generator.normal(size=50), generator.normal(size=50)
    found = {one.name: one.value for one in score_numbers(values, center, center - 1, center + 1)}
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
        tracer = whence.fit(network.eval(), [(x, y)], ridge=1e-9, progress=False)
        found.append(float(observation_noise(tracer.residuals, tracer.loo_residuals)))
    error = np.std(found) / len(found) ** 0.5
    assert abs(np.mean(found) - 4.0) < 3 * error
    assert error < 0.3


def test_width_goes_by_size() -> None:
    assert count_weights(8, 32, 1) == sum(
        parameter.numel() for parameter in build_network(8, 32, target_of(torch.randn(9))).parameters()
    )
    assert choose_width(3, 1, 1_000) == 32
    assert choose_width(100, 1, 1_000) < 16
    assert choose_width(20, 1, 40_000) < choose_width(20, 1, 1_000)


def test_verdicts_of_held_out_rows_come_first() -> None:
    rows, held_out = np.arange(50_000), np.arange(0, 50_000, 5)
    few = affordable_rows(rows, held_out, fit_of(40_000, 10, 1_500))
    assert 0 < len(few) < len(held_out)
    assert set(few) <= set(held_out)
    assert len(affordable_rows(rows[:1000], held_out[:200], fit_of(800, 1, 1_000))) == 1000


def fit_of(rows: int, outputs: int, weights: int) -> Any:
    """As much of a fit as the time of its verdicts depends on."""
    model = SimpleNamespace(target=SimpleNamespace(outputs=outputs))
    tracer = SimpleNamespace(problem=SimpleNamespace(selection=SimpleNamespace(size=weights)))
    return SimpleNamespace(rows=np.arange(rows), model=model, tracer=tracer)


def prepared(rows: int, width: int, names: tuple[str, str, str] = ("a", "b", "y")) -> Prepared:
    x, y = data(rows, 0.3)
    frame = as_text(pd.DataFrame(torch.column_stack([x, y]).numpy(), columns=names))
    return prepare(frame.set_index(np.arange(rows) + 1), names[2], width=width)


def test_network_that_stops_short_is_recentered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.tabular.network.STEPS", 1)
    monkeypatch.setattr("whence.tabular.network.LAST_ROUNDS", 1)
    fitted = fit_table(prepared(80, 6), learner="network")
    assert fitted.tracer.loo.recenter


def test_columns_named_like_results_get_another_name() -> None:
    ready = prepared(40, 3, ("a", "b", "hec3"))
    frame = predict_rows(fit_table(ready, learner="network"), ready.frame).rows_frame()
    assert list(frame.columns)[:3] == ["row", "hec3_", "prediction"]
    assert (frame["hec3_"] == ready.frame["hec3"].to_numpy()).all()
    assert (frame["hec3"] > 0).all()


@pytest.mark.slow  # the same as for the exact structure, whose tests run by default
def test_core_serves_where_it_is_asked_for() -> None:
    ready = prepared(50, 4)
    fitted = fit_table(ready, learner="network", structure="core")
    assert fitted.tracer.diagnostics["structure"] == "core"
    exact = whence.fit(
        *fitted.model.fitted_with(fitted.predictor, fitted.inputs, fitted.values),
        ridge=fitted.tracer.ridge,
        recenter=fitted.tracer.loo.recenter,
        progress=False,
    )
    inputs = fitted.model.encode(ready.frame)
    ratio = fitted.tracer.predict(inputs).hec3 / exact.predict(inputs).hec3
    assert 0.8 < float(ratio.median()) < 1.25
