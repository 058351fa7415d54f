"""EKFAC and KFAC against curvlinops', an independent implementation, where both apply."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvature_matrices as dense
import oracles
import whence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it compiles with a part of torch that is deprecated
    curvlinops = pytest.importorskip(
        "curvlinops", reason="curvlinops is not installed: pip install --no-deps -r benchmarks/peers.txt"
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def cnn() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 2), nn.Tanh())
    return nn.Sequential(body, nn.Flatten(), nn.Linear(12, 3))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {"mlp": (mlp, (4,)), "cnn": (cnn, (2, 6, 6))}


def theirs(kind: Any, model: nn.Module, batches: list[tuple[Tensor, Tensor]], **options: Any) -> np.ndarray:
    """Their operator as a matrix. The Hessian of a sum of squares is 2 J^T J."""
    loss, parameters = nn.MSELoss(reduction="sum"), list(model.parameters())
    operator = kind(model, loss, parameters, batches, check_deterministic=False, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (operator @ torch.eye(operator.shape[1], dtype=torch.float64)).detach().numpy() / 2


@pytest.fixture(params=NETWORKS.keys())
def problem(request: pytest.FixtureRequest) -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    build, shape = NETWORKS[request.param]
    model = build().double().eval()
    x, y = torch.randn(10, *shape, dtype=torch.float64), torch.randn(10, 3, dtype=torch.float64)
    return model, list(zip(x.split(4), y.split(4), strict=True))


def ours(model: nn.Module, batches: list[tuple[Tensor, Tensor]], structure: whence.Structure) -> whence.Tracer:
    return whence.fit(model, batches, structure=structure, ridge=0.5, progress=False)


def test_ekfac_is_the_same_operator(problem: tuple[nn.Module, list[tuple[Tensor, Tensor]]]) -> None:
    tracer = ours(*problem, whence.EKFAC(tolerance=0.0))
    found = dense.curvature_of(tracer.bread)
    wanted = theirs(
        curvlinops.EKFACLinearOperator,
        *problem,
        fisher_type=curvlinops.FisherType.TYPE2,
        separate_weight_and_bias=False,
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * abs(wanted).max())
    # And so are the quadratic forms that predictions are made of.
    model, batches = problem
    inputs = batches[0][0]
    _, tangents, _ = oracles.tangents_of(model, inputs)
    damped = wanted + 0.5 * np.eye(len(wanted))
    laplace = np.stack([one @ np.linalg.solve(damped, one.T) for one in tangents])
    noise = np.diag(np.asarray(tracer.sigma)).mean()
    np.testing.assert_allclose(tracer.predict(inputs).covariance("laplace"), noise * laplace, rtol=1e-8, atol=1e-10)


def test_kfac_is_the_same_operator(problem: tuple[nn.Module, list[tuple[Tensor, Tensor]]]) -> None:
    found = dense.curvature_of(ours(*problem, whence.KFAC()).bread)
    wanted = theirs(
        curvlinops.KFACLinearOperator,
        *problem,
        fisher_type=curvlinops.FisherType.TYPE2,
        separate_weight_and_bias=False,
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9 * abs(wanted).max())


def test_the_truth_is_the_same(problem: tuple[nn.Module, list[tuple[Tensor, Tensor]]]) -> None:
    model, batches = problem
    _, tangents, _ = oracles.tangents_of(model, torch.cat([x for x, _ in batches]))
    wanted = theirs(curvlinops.GGNLinearOperator, *problem)
    np.testing.assert_allclose(oracles.curvature(tangents), wanted, rtol=1e-9, atol=1e-9 * abs(wanted).max())
