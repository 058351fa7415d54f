"""Labels that a network is certain of, up to logit gaps of a million: against arithmetic with sixty digits."""

from __future__ import annotations

import math
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence.influence import training

mpmath.mp.dps = 60
WRONG = 3
GAPS = [1.0, 30.0, 57.0, 120.0, 410.0, 1200.0, 1e4, 1e6]


def problem(gap: float, dtype: torch.dtype, classes: int = 3) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A linear network with three classes and logit gaps of about so much, one label of which is wrong."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(9, 2, dtype=torch.float64, generator=generator).to(dtype)
    model = nn.Linear(2, classes).to(dtype)
    directions = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=dtype)
    with torch.no_grad():
        model.weight.copy_(gap * directions[:classes])
        model.bias.zero_()
    labels = model(x).argmax(1) if classes > 1 else (model(x)[:, 0] > 0).long()
    labels[WRONG] = (labels[WRONG] + 1) % max(classes, 2)
    return model, x, labels


def exact_doubts(outputs: Any, x: Any, labels: list[int], ridge: float, weights: list[float]) -> list[Any]:
    """1 - p of each label at the prediction without its example: section by section of the definition, dense."""
    n, k = len(outputs), len(outputs[0])
    rows = [[mpmath.mpf(float(value)) for value in row] + [mpmath.mpf(1)] for row in x]
    logits = [[mpmath.mpf(float(value)) for value in row] for row in outputs]
    width = len(rows[0])

    def probabilities(f: list[Any]) -> list[Any]:
        top = max(f)
        each = [mpmath.exp(value - top) for value in f]
        return [value / mpmath.fsum(each) for value in each]

    def jacobian(row: list[Any]) -> Any:
        found = mpmath.zeros(k, k * width)
        for c in range(k):
            for j in range(width):
                found[c, c * width + j] = row[j]
        return found

    curvature = mpmath.eye(k * width) * mpmath.mpf(ridge)
    hessians, jacobians, residuals = [], [], []
    for i in range(n):
        p = probabilities(logits[i])
        size = mpmath.mpf(weights[labels[i]])
        hessian = size * (mpmath.diag(p) - mpmath.matrix(p) * mpmath.matrix(p).T)
        residuals.append(size * mpmath.matrix([(1 if c == labels[i] else 0) - p[c] for c in range(k)]))
        hessians.append(hessian)
        jacobians.append(jacobian(rows[i]))
        curvature += jacobians[i].T * hessian * jacobians[i]
    inverse = curvature**-1
    found = []
    for i in range(n):
        hat = jacobians[i] * inverse * jacobians[i].T
        alone = (mpmath.eye(k) - hat * hessians[i]) ** -1 * hat
        moved = mpmath.matrix(logits[i]) - alone * residuals[i]
        p = probabilities(list(moved))
        others = mpmath.fsum(p[c] for c in range(k) if c != labels[i])
        found.append(mpmath.mpf(weights[labels[i]]) * others)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [None, [1.0, 2.5, 0.25]], ids=["plain", "class weights"])
@pytest.mark.parametrize("gap", GAPS)
def test_suspicion_and_its_order_hold_at_any_gap(
    gap: float, weights: list[float] | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "LEARNED", -math.inf)  # suspects in the order of their suspicion
    model, x, labels = problem(gap, dtype)
    likelihood = whence.Categorical(weight=weights)
    tracer = whence.fit(model, [(x, labels)], likelihood=likelihood, structure="exact", ridge=0.5, progress=False)
    outputs = model(x).detach().tolist()
    wanted = exact_doubts(outputs, x.tolist(), labels.tolist(), 0.5, weights or [1.0] * 3)
    table = tracer.training_frame()
    order = sorted(range(len(wanted)), key=lambda at: -wanted[at])
    assert table.suspect_rank.sort_values().index.tolist() == order
    assert tracer.suggest(len(order)).index.tolist() == order
    rtol = 1e-4 if dtype == torch.float32 else 1e-7
    np.testing.assert_allclose(table.suspicion, [float(value) for value in wanted], rtol=rtol, atol=1e-290)
    assert np.isfinite(table.to_numpy()).all()


@pytest.mark.parametrize("structure", ["exact", "core", "ekfac", "kfac", "diagonal", "sketch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [57.0, 500.0, 1200.0])
def test_nothing_overflows_and_the_wrong_label_leads(gap: float, dtype: torch.dtype, structure: str) -> None:
    model, x, labels = problem(gap, dtype)
    tracer = whence.fit(model, [(x, labels)], likelihood="categorical", structure=structure, ridge=0.5, progress=False)
    table = tracer.training_frame(x)
    assert not table.isna().to_numpy().any()
    assert table.suspect_rank.idxmin() == WRONG
    assert tracer.suggest(1).index.tolist() == [WRONG]
    found = tracer.explain(x)
    assert bool(torch.isfinite(found.noise_p).all())
    assert bool(torch.isfinite(found.scarcity_p).all())
    assert tracer.trust(x[:2], sample=2).level in ("fine", "careful", "do not trust")
    assert bool(torch.isfinite(tracer.predict(x).hec3).all())
    assert not bool(tracer.attribute(x).hec3.share.isnan().any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", GAPS)
def test_yes_or_no_labels(gap: float, dtype: torch.dtype) -> None:
    """The log-odds against a label order the labels: a single logit has a leverage that changes nothing about it."""
    model, x, labels = problem(gap, dtype, classes=1)
    tracer = whence.fit(
        model, [(x, labels.to(dtype))], likelihood="bernoulli", structure="exact", ridge=1e12, progress=False
    )
    logits = model(x).detach().double()[:, 0]
    odds = torch.where(labels == 1, -logits, logits)
    table = tracer.training_frame()
    assert table.suspect_rank.sort_values().index.tolist() == odds.argsort(descending=True).tolist()
    wanted = [float(1 / (1 + mpmath.exp(-mpmath.mpf(value)))) for value in odds.tolist()]
    np.testing.assert_allclose(table.suspicion, wanted, rtol=1e-4 if dtype == torch.float32 else 1e-7, atol=1e-290)


def test_residuals_of_certain_labels_keep_their_digits() -> None:
    """1 - p of a label at a gap of 100 is 3.7e-44; one less p would be nothing."""
    outputs = torch.tensor([[100.0, 0.0, 1.0]], dtype=torch.float64)
    loss = whence.Categorical()
    found = loss.residuals(outputs, loss.check_targets(torch.tensor([0]), outputs, "here"))[0].tolist()
    total = mpmath.exp(100) + 1 + mpmath.e
    wanted = [float((1 + mpmath.e) / total), float(-1 / total), float(-mpmath.e / total)]
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_a_recentred_fit_doubts_labels_at_its_own_predictions() -> None:
    """1 - p of the label at f + change - q r, with sample weights that must not matter for the scale."""
    model, x, labels = problem(1.0, torch.float64)
    weights = torch.linspace(0.5, 2.0, len(x), dtype=torch.float64)
    tracer = whence.fit(
        model, [(x, labels, weights)], likelihood="categorical", structure="exact", ridge=0.5, recenter=True
    )
    bread, problem_ = tracer.bread, tracer.problem
    assert problem_.hessian_roots is not None
    wanted = []
    for i in range(len(x)):
        hat = bread.leverage_blocks[i]
        hessian = problem_.hessian_roots[i] @ problem_.hessian_roots[i].T
        alone = torch.linalg.solve(torch.eye(3, dtype=torch.float64) - hat @ hessian, hat)
        centred = problem_.residuals[i] - hessian @ tracer.step.change[i]
        moved = problem_.outputs[i] + tracer.step.change[i] - alone @ centred
        wanted.append(1.0 - float(moved.softmax(0)[labels[i]]))
    np.testing.assert_allclose(tracer.training_frame().suspicion, wanted, rtol=1e-9)


def test_ridge_by_leave_one_out_survives_certain_labels() -> None:
    model, x, labels = problem(2000.0, torch.float64)
    tracer = whence.fit(model, [(x, labels)], likelihood="categorical", structure="exact", ridge="loo", progress=False)
    assert 0 < tracer.bread.ridge < float("inf")
    assert tracer.bread.path is not None
    assert bool(torch.isfinite(tracer.bread.path.errors).any())
