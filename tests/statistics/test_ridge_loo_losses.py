"""`ridge="loo"` for losses other than squared error, against refits of softmax and logistic regressions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import whence
from whence.curvature import ridge as ridges
from whence.curvature.ridge import LinearizedModel

N, D, K = 40, 4, 3
ROADS = (whence.Exact("primal"), whence.Exact("dual"), whence.Core(size=100, tolerance=0))


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def loss(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    return -np.log(softmax(logits)[np.arange(len(y)), y])


def curvature(x: np.ndarray, p: np.ndarray, ridge: float) -> np.ndarray:
    hessian = sum(
        np.einsum("cd,i,j->icjd", np.diag(one) - np.outer(one, one), row, row) for row, one in zip(x, p, strict=True)
    )
    return hessian.reshape(D * K, D * K) + ridge * np.eye(D * K)


def refit(x: np.ndarray, y: np.ndarray, ridge: float) -> np.ndarray:
    """Weights (d, k) at the optimum of sum of cross-entropies + ridge / 2 |w|^2, by Newton's method."""
    w = np.zeros((D, K))
    for _ in range(100):
        p = softmax(x @ w)
        gradient = x.T @ (p - np.eye(K)[y]) + ridge * w
        step = np.linalg.solve(curvature(x, p, ridge), gradient.reshape(-1)).reshape(D, K)
        w -= step
        if abs(step).max() < 1e-12:
            break
    return w


def one_step(x: np.ndarray, y: np.ndarray, ridge: float) -> float:
    """Mean loss without each example, in one step from the optimum: the block formula by hand."""
    w = refit(x, y, ridge)
    p = softmax(x @ w)
    inverse = np.linalg.inv(curvature(x, p, ridge))
    total = 0.0
    for row, label, one in zip(x, y, p, strict=True):
        tangent = np.einsum("i,cd->cid", row, np.eye(K)).reshape(K, D * K)
        q, inner = tangent @ inverse @ tangent.T, np.diag(one) - np.outer(one, one)
        u = np.linalg.solve(np.eye(K) - inner @ q, np.eye(K)[label] - one)
        total += loss((row @ w - q @ u)[None], np.array([label]))[0]
    return total / len(x)


def refits(x: np.ndarray, y: np.ndarray, ridge: float) -> float:
    """The same with n true refits."""
    keep = ~np.eye(len(x), dtype=bool)
    return float(np.mean([loss((x[i] @ refit(x[k], y[k], ridge))[None], y[i : i + 1])[0] for i, k in enumerate(keep)]))


@pytest.fixture(scope="module")
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D))
    return x, (softmax(x @ rng.normal(size=(D, K))).cumsum(1) < rng.uniform(size=(N, 1))).sum(1)


def regression(weights: np.ndarray) -> nn.Module:
    model = nn.Linear(D, len(weights.T), bias=False).double()
    model.weight.data = torch.tensor(weights.T.copy())
    return model.eval()


def fit(model: nn.Module, x: Any, y: Any, structure: Any = "exact", **options: Any) -> whence.Tracer:
    options = {"likelihood": "categorical", **options}
    loader = [(torch.as_tensor(x), torch.as_tensor(y))]
    return whence.fit(model, loader, structure=structure, ridge="loo", progress=False, **options)


@pytest.mark.parametrize("structure", ROADS, ids=str)
def test_the_curve_is_one_step_from_each_optimum(structure: Any, data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    weights = refit(x, y, 2.0)  # trained with another ridge than the best
    path = fit(regression(weights), x, y, structure).ridge_path
    assert path is not None
    wanted = [one_step(x, y, ridge) for ridge in path.ridges.tolist()]
    np.testing.assert_allclose(path.errors + loss(x @ weights, y).mean(), wanted, rtol=1e-4)


def test_the_choice_is_that_of_true_refits(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    tracer = fit(regression(refit(x, y, 2.0)), x, y)
    path = tracer.ridge_path
    assert path is not None
    assert 0 < int(path.errors.argmin()) < len(path.ridges) - 1
    least = min(refits(x, y, ridge) for ridge in path.ridges[:: len(path.ridges) // 8].tolist())
    assert refits(x, y, tracer.ridge) < 1.01 * least
    assert "leave-one-out error of training examples over" in str(tracer.diagnostics)
    plain = whence.fit(
        regression(refit(x, y, 2.0)),
        [(torch.tensor(x), torch.tensor(y))],
        "categorical",
        ridge=tracer.ridge,
        progress=False,
    )
    np.testing.assert_allclose(tracer.predict(torch.tensor(x)).hec3, plain.predict(torch.tensor(x)).hec3, rtol=1e-9)


def test_single_logits() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, D))
    y = (x @ rng.normal(size=D) + rng.logistic(size=N) > 0).astype(float)
    tracer = fit(regression(np.zeros((D, 1))), x, y[:, None], likelihood="bernoulli")
    path = tracer.ridge_path
    assert path is not None

    def left_out(ridge: float) -> float:
        total = 0.0
        for i in range(N):
            keep, w = np.arange(N) != i, np.zeros(D)
            for _ in range(60):
                p = 1 / (1 + np.exp(-x[keep] @ w))
                hessian = (x[keep].T * (p * (1 - p))) @ x[keep] + ridge * np.eye(D)
                w -= np.linalg.solve(hessian, x[keep].T @ (p - y[keep]) + ridge * w)
            total += np.logaddexp(0.0, (1 - 2 * y[i]) * (x[i] @ w))
        return total / N

    middle = int(path.errors.argmin())
    for at in (middle, min(middle + 4, len(path.ridges) - 1)):
        assert float(path.errors[at]) + np.log(2) == pytest.approx(left_out(float(path.ridges[at])), rel=0.02)


def test_weighted_squared_error_is_exact() -> None:
    rng = np.random.default_rng(2)
    x, weights = rng.normal(size=(15, D)), rng.uniform(0.5, 3.0, size=15)
    y = x @ rng.normal(size=D) + 2.0 * rng.normal(size=15)
    loader = [(torch.tensor(x), torch.tensor(y[:, None]), torch.tensor(weights))]
    tracer = whence.fit(regression(np.zeros((D, 1))), loader, ridge="loo", progress=False)
    path = tracer.ridge_path
    assert path is not None
    for at in (0, int(path.errors.argmin()), len(path.ridges) - 1):
        total = 0.0
        for i in range(15):
            keep = np.arange(15) != i
            inner = (x[keep].T * weights[keep]) @ x[keep] + float(path.ridges[at]) * np.eye(D)
            w = np.linalg.solve(inner, x[keep].T @ (weights[keep] * y[keep]))
            total += 0.5 * weights[i] * ((y[i] - x[i] @ w) ** 2 - y[i] ** 2)
        assert float(path.errors[at]) == pytest.approx(total / 15, rel=1e-7)


def test_a_network_and_positions() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(12, 3, 2).double(), torch.randint(0, 3, (12, 3))
    y[0, 0] = -100
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double().eval()
    found = [fit(net, x, y, structure).ridge for structure in (whence.Exact("primal"), whence.Exact("dual"))]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_what_cannot_be_is_told(data: tuple[np.ndarray, np.ndarray]) -> None:
    x, y = data
    model = regression(np.zeros((D, K)))
    for structure in ("ekfac", whence.Exact("matrix_free")):
        with pytest.raises(whence.InputError, match=r'got "loo", which needs true leverages'):
            fit(model, x, y, structure)
    with pytest.raises(whence.InputError, match="mixtures of the outputs"):
        fit(model, x, y, hessian_columns=1)


def test_curvatures_without_an_inverse_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no ridge of the search gives a Cholesky factor, as for a network that is certain of all its examples."""

    def none(self: LinearizedModel, weights: torch.Tensor, ridge: float) -> torch.Tensor:
        raise whence.SingularCurvatureError("expected a curvature with an inverse, got none.")

    monkeypatch.setattr(LinearizedModel, "_newton", none)
    x, y = torch.randn(12, 2, dtype=torch.float64), torch.arange(12) % 3
    with pytest.raises(whence.SingularCurvatureError, match="finite leave-one-out loss"):
        whence.fit(torch.nn.Linear(2, 3).double(), [(x, y)], "categorical", ridge="loo", progress=False)


def test_fewer_coordinates_choose_nearly_the_same_ridge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond so many weights ridges are compared along the directions in which outputs vary most."""
    torch.manual_seed(0)
    x = torch.randn(60, 4).double()
    y = (x[:, 0] > 0).long() + (x[:, 1] + 0.5 * torch.randn(60).double() > 1).long()
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3)).double().eval()
    whole = fit(net, x, y).ridge_path
    monkeypatch.setattr(ridges, "COORDINATES", 60)
    for structure in (whence.Exact("primal"), whence.Exact("dual")):
        some = fit(net, x, y, structure).ridge_path
        assert whole is not None
        assert some is not None
        at = int((whole.ridges.log() - some.ridges[some.errors.argmin()].log()).abs().argmin())
        assert float(whole.errors[at] - whole.errors.min()) < 0.01 * float(whole.errors.max() - whole.errors.min())


def test_single_precision_ends() -> None:
    """The last Newton steps drown in rounding; they must not be repeated."""
    torch.manual_seed(0)
    x, y = torch.randn(30, 3), torch.arange(30) % 3
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).eval()
    single = fit(net, x, y, execution=whence.Execution(dtype=torch.float32))
    assert single.ridge == pytest.approx(fit(net, x, y).ridge, rel=1e-4)
