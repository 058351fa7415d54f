"""HeC3 and the jackknife are the variance over n real refits, exactly, when the model is linear in its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import oracles
import whence
from networks import SharedOutputs, batches_of, linear

N, M, K, P = 13, 5, 3, 4


@dataclass(frozen=True)
class Problem:
    """A model at the optimum of `sum of squares + ridge |w|^2`, and its dense tangents."""

    model: nn.Module
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    tangents: np.ndarray
    test_tangents: np.ndarray
    weights: np.ndarray
    ridge: float

    def fit(self, **options: object) -> whence.Tracer:
        batches = batches_of(self.inputs, self.targets, 5)
        return whence.fit(self.model, batches, ridge=self.ridge, progress=False, **options)

    def moves(self, *, apart: bool = False) -> np.ndarray:
        """What each deletion moves each test prediction by, from refits alone, (m, deletions, k)."""
        refit = oracles.refits_apart if apart else oracles.refits
        without = refit(self.tangents, self.targets.numpy(), self.ridge)
        return oracles.refit_moves(self.test_tangents, self.weights, without)


def multi_output(rng: np.random.Generator, ridge: float) -> Problem:
    """Multi-output ridge regression with a penalised intercept column; leverage blocks are h_i I."""
    inputs, test_inputs = (np.column_stack([np.ones(r), rng.normal(size=(r, P - 1))]) for r in (N, M))
    targets = rng.normal(size=(N, K)) @ rng.normal(size=(K, K)) + inputs @ rng.normal(size=(P, K))
    tangents, test_tangents = oracles.linear_tangents(inputs, K), oracles.linear_tangents(test_inputs, K)
    weights = oracles.ridge_fit(tangents, targets, ridge)
    tensors = (torch.as_tensor(array) for array in (inputs, targets, test_inputs))
    return Problem(linear(weights.reshape(K, P)), *tensors, tangents, test_tangents, weights, ridge)


def shared_weights(rng: np.random.Generator, ridge: float) -> Problem:
    """All outputs use the same weights; leverage blocks are full matrices."""
    inputs, test_inputs, mixing = rng.normal(size=(N, P)), rng.normal(size=(M, P)), rng.normal(size=(K, P, 6))
    tangents, test_tangents = (np.einsum("ni,cip->ncp", x, mixing) for x in (inputs, test_inputs))
    targets = rng.normal(size=(N, K)) + tangents @ rng.normal(size=6)
    weights = oracles.ridge_fit(tangents, targets, ridge)
    model = SharedOutputs(torch.as_tensor(mixing), torch.as_tensor(weights)).eval()
    tensors = (torch.as_tensor(array) for array in (inputs, targets, test_inputs))
    return Problem(model, *tensors, tangents, test_tangents, weights, ridge)


@pytest.fixture(params=[multi_output, shared_weights], ids=["multi-output", "shared-weights"])
def problem(request: pytest.FixtureRequest, rng: np.random.Generator) -> Problem:
    return request.param(rng, 0.8)


def assert_close(got: object, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=1e-9, atol=1e-10 * abs(wanted).max())


@pytest.mark.parametrize(("name", "centred"), [("hec3", False), ("jackknife", True)])
@pytest.mark.parametrize("road", ["primal", "dual", "matrix_free"])
def test_leave_one_example_out(problem: Problem, road: str, name: str, centred: bool) -> None:
    wanted = np.stack([oracles.jackknife_of(moves, centred=centred) for moves in problem.moves()])
    uncertainty = problem.fit(structure=whence.Exact(road=road)).predict(problem.test_inputs)
    np.testing.assert_allclose(getattr(uncertainty, name), np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-9)
    assert_close(uncertainty.covariance(name), wanted)


def test_leave_one_output_out(problem: Problem) -> None:
    wanted = np.stack([oracles.jackknife_of(moves, centred=False) for moves in problem.moves(apart=True)])
    uncertainty = problem.fit(loo="output").predict(problem.test_inputs)
    np.testing.assert_allclose(uncertainty.hec3, np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-9)
    assert_close(uncertainty.covariance("hec3"), wanted)


def test_loo_residuals_are_the_errors_of_refits(problem: Problem) -> None:
    without = oracles.refits(problem.tangents, problem.targets.numpy(), problem.ridge)
    wanted = np.stack([y - J @ w for y, J, w in zip(problem.targets.numpy(), problem.tangents, without, strict=True)])
    assert_close(problem.fit().loo_residuals, wanted)
    apart = oracles.refits_apart(problem.tangents, problem.targets.numpy(), problem.ridge)
    rows, flat = problem.tangents.reshape(N * K, -1), problem.targets.numpy().reshape(-1)
    wanted = np.stack([y - row @ w for y, row, w in zip(flat, rows, apart, strict=True)]).reshape(N, K)
    assert_close(problem.fit(loo="output").loo_residuals, wanted)


def test_the_two_readings_differ_where_outputs_share_weights(rng: np.random.Generator) -> None:
    problem = shared_weights(rng, 0.8)
    example = np.asarray(problem.fit().predict(problem.test_inputs).hec3)
    output = np.asarray(problem.fit(loo="output").predict(problem.test_inputs).hec3)
    assert abs(output / example - 1).max() > 0.01


def test_recentring_from_any_weights_is_the_refitted_model(problem: Problem, rng: np.random.Generator) -> None:
    uncertainty = problem.fit().predict(problem.test_inputs)
    tracer = problem.fit()
    with torch.no_grad():
        for parameter in problem.model.parameters():
            parameter.copy_(torch.as_tensor(rng.normal(size=tuple(parameter.shape))))
    moved = problem.fit(recenter=True)
    assert_close(moved.residuals, np.asarray(tracer.residuals))
    assert_close(moved.loo_residuals, np.asarray(tracer.loo_residuals))
    assert_close(moved.sigma, np.asarray(tracer.sigma))
    again = moved.predict(problem.test_inputs)
    assert_close(again.mean, problem.test_tangents @ problem.weights)
    for name in ("ho", "hec0", "hec1", "hec2", "hec3", "laplace", "jackknife"):
        assert_close(again.covariance(name), np.asarray(uncertainty.covariance(name)))
