"""`ridge="loo"` leaves out what the fit leaves out: whole groups, positions or outputs, against refits without each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import whence
from networks import SharedOutputs, batches_of

EXACT = (whence.Exact("primal"), whence.Exact("dual"), whence.Core(size=100, tolerance=0))


def linear_model(rng: np.random.Generator, n: int, k: int, d: int = 9) -> tuple[nn.Module, np.ndarray, np.ndarray, Any]:
    """Linear in its weights, started anywhere; with noise that members of a group share."""
    mixing, inputs = rng.normal(size=(k, 4, d)), rng.normal(size=(n, 4))
    tangents = np.einsum("ni,cip->ncp", inputs, mixing)
    groups = rng.permutation(np.repeat(np.arange(5), [1, 2, 4, 4, n - 11]))
    shared = 4.0 * rng.normal(size=(5, k))
    targets = tangents @ rng.normal(size=d) + shared[groups] + rng.normal(size=(n, k))
    model = SharedOutputs(torch.as_tensor(mixing), torch.as_tensor(rng.normal(size=d))).eval()
    return model, tangents, targets, (torch.as_tensor(inputs), torch.as_tensor(targets), groups)


def refit_error(tangents: np.ndarray, targets: np.ndarray, folds: np.ndarray, ridge: float) -> float:
    """Squared errors of refits without each fold, (n, k) numbers of folds, over the number of examples."""
    rows, aims, which, total = tangents.reshape(-1, tangents.shape[2]), targets.reshape(-1), folds.reshape(-1), 0.0
    for fold in np.unique(which):
        kept, gone = which != fold, which == fold
        inner = rows[kept].T @ rows[kept] + ridge * np.eye(rows.shape[1])
        weights = np.linalg.solve(inner, rows[kept].T @ aims[kept])
        total += np.sum((aims[gone] - rows[gone] @ weights) ** 2)
    return total / len(targets)


@pytest.mark.parametrize("left_out", ["groups", "output", "example"])
@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_squared_error(structure: Any, left_out: str) -> None:
    model, tangents, targets, (x, y, groups) = linear_model(np.random.default_rng(0), 18, 2)
    folds = {
        "groups": np.repeat(groups[:, None], 2, 1),
        "example": np.repeat(np.arange(18)[:, None], 2, 1),
        "output": np.arange(36).reshape(18, 2),
    }[left_out]
    options: dict[str, Any] = {"groups": groups} if left_out == "groups" else {"loo": left_out}
    tracer = whence.fit(model, batches_of(x, y), structure=structure, ridge="loo", progress=False, **options)
    path = tracer.ridge_path
    assert path is not None
    picked = list(range(14, len(path.ridges), 5))
    wanted = [refit_error(tangents, targets, folds, float(path.ridges[g])) for g in picked]
    np.testing.assert_allclose(path.errors[picked], wanted, rtol=1e-7)
    ours = refit_error(tangents, targets, folds, tracer.ridge)
    assert ours <= min(refit_error(tangents, targets, folds, tracer.ridge * by) for by in (0.5, 2.0)) * (1 + 1e-9)
    name = {"groups": "groups", "output": "outputs", "example": "training examples"}[left_out]
    assert f"leave-one-out error of {name} over" in str(tracer.diagnostics)


def test_groups_choose_another_ridge_than_their_members() -> None:
    model, tangents, targets, (x, y, groups) = linear_model(np.random.default_rng(0), 18, 2)
    whole, single = (
        whence.fit(model, batches_of(x, y), ridge="loo", progress=False, **options)
        for options in ({"groups": groups}, {})
    )
    folds = np.repeat(groups[:, None], 2, 1)
    errors = [refit_error(tangents, targets, folds, tracer.ridge) for tracer in (whole, single)]
    assert errors[0] < 0.99 * errors[1]


def test_pieces_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many groups at once as memory allows: the same curve from one group at a time."""
    from whence.curvature import features, ridge

    model, _, _, (x, y, groups) = linear_model(np.random.default_rng(1), 18, 2)

    def path(road: Any) -> Any:
        tracer = whence.fit(
            model, batches_of(x, y), structure=whence.Exact(road), ridge="loo", groups=groups, progress=False
        )
        assert tracer.ridge_path is not None
        return tracer.ridge_path.errors

    roads = ("primal", "dual")
    at_once = [path(road) for road in roads]
    many = features.groups_within_memory
    for module in (features, ridge):
        monkeypatch.setattr(
            module, "groups_within_memory", lambda *given: (one for some in many(*given) for one in some.split(1))
        )
    for road, wanted in zip(roads, at_once, strict=True):
        np.testing.assert_allclose(path(road), wanted, rtol=1e-9)


@pytest.mark.parametrize("road", ["primal", "dual"])
def test_positions(road: Any) -> None:
    torch.manual_seed(0)
    n, t, k = 7, 3, 2
    model = nn.Linear(3, k).double().eval()
    x, y = torch.randn(n, t, 3).double(), 2.0 * torch.randn(n, t, k).double()
    tracer = whence.fit(model, [(x, y)], structure=whence.Exact(road), ridge="loo", loo="position", progress=False)
    path = tracer.ridge_path
    assert path is not None
    design = np.concatenate([x.reshape(-1, 3), np.ones((n * t, 1))], 1)
    tangents = np.einsum("ni,cd->ncdi", design, np.eye(k)).reshape(n * t, k, -1)
    folds = np.repeat(np.arange(n * t)[:, None], k, 1)
    picked = list(range(18, len(path.ridges), 6))
    wanted = [refit_error(tangents, np.asarray(y.reshape(-1, k)), folds, float(path.ridges[g])) * t for g in picked]
    np.testing.assert_allclose(path.errors[picked], wanted, rtol=1e-7)


@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_weighted_squared_error_and_groups(structure: Any) -> None:
    """With sample weights the loss is a general one; for squared error one step is the refit."""
    model, tangents, targets, (x, y, groups) = linear_model(np.random.default_rng(2), 18, 2)
    weights = np.random.default_rng(3).uniform(0.5, 3.0, size=18)
    outputs = np.asarray(model(x).detach())
    tracer = whence.fit(
        model, [(x, y, torch.as_tensor(weights))], structure=structure, ridge="loo", groups=groups, progress=False
    )
    path = tracer.ridge_path
    assert path is not None
    for at in (int(path.errors.argmin()), len(path.ridges) // 2, len(path.ridges) - 1):
        total = 0.0
        for group in range(5):
            kept = np.repeat((groups != group) * weights, 2)
            rows = tangents.reshape(36, -1)
            inner = (rows.T * kept) @ rows + float(path.ridges[at]) * np.eye(rows.shape[1])
            w = np.linalg.solve(inner, rows.T @ (kept * targets.reshape(-1)))
            here = groups == group
            gained = (targets[here] - tangents[here] @ w) ** 2 - (targets[here] - outputs[here]) ** 2
            total += 0.5 * float((weights[here, None] * gained).sum())
        assert float(path.errors[at]) == pytest.approx(total / 18, rel=1e-6)


def test_logistic_regression_and_groups() -> None:
    """Refits of a logistic regression without each group err as the one-step curve says, to first order."""
    rng = np.random.default_rng(4)
    n, d = 60, 3
    x, groups = rng.normal(size=(n, d)), np.repeat(np.arange(12), 5)
    y = (x @ rng.normal(size=d) + 1.5 * rng.normal(size=12)[groups] + rng.logistic(size=n) > 0).astype(float)
    model = nn.Linear(d, 1, bias=False).double().eval()
    model.weight.data.zero_()
    loader = [(torch.as_tensor(x), torch.as_tensor(y[:, None]))]
    tracer = whence.fit(model, loader, "bernoulli", ridge="loo", groups=groups, progress=False)
    path = tracer.ridge_path
    assert path is not None

    def left_out(ridge: float) -> float:
        total = 0.0
        for group in range(12):
            keep, w = groups != group, np.zeros(d)
            for _ in range(60):
                p = 1 / (1 + np.exp(-x[keep] @ w))
                hessian = (x[keep].T * (p * (1 - p))) @ x[keep] + ridge * np.eye(d)
                w -= np.linalg.solve(hessian, x[keep].T @ (p - y[keep]) + ridge * w)
            total += np.logaddexp(0.0, (1 - 2 * y[~keep]) * (x[~keep] @ w)).sum()
        return total / n

    middle = int(path.errors.argmin())
    for at in (middle, min(middle + 4, len(path.ridges) - 1)):
        assert float(path.errors[at]) + np.log(2) == pytest.approx(left_out(float(path.ridges[at])), rel=0.01)
