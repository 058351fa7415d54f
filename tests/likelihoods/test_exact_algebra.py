"""Cross-entropy through the exact roads equals the formulas worked out one by one, k x k blocks included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import loss_oracles
import oracles
import whence
from classification import PROBLEMS, M, N, Problem, assert_covariances, inputs
from whence.estimators import leave_one_out

ROADS = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(size=1000, tolerance=0.0),
    "sketch": whence.Sketch(size=1000),
}

every_problem = pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS.keys())
every_road = pytest.mark.parametrize("structure", ROADS.values(), ids=ROADS.keys())


@every_road
@every_problem
def test_covariances_are_those_of_the_definitions(problem: Problem, structure: whence.Structure) -> None:
    test = inputs(M, seed=9)
    assert_covariances(problem.fit(structure=structure).predict(test), problem.expected(test))


def test_conjugate_gradients_come_to_the_same() -> None:
    problem, test = PROBLEMS["three classes"], inputs(M, seed=9)
    free, dense = (problem.fit(structure=whence.Exact(road=r), recenter=True) for r in ("matrix_free", "primal"))
    wanted = {name: np.asarray(value) for name, value in dense.predict(test).covariances.items()}
    assert_covariances(free.predict(test), wanted, 1e-7)
    for name in ("residuals", "loo_residuals", "leverage"):
        np.testing.assert_allclose(getattr(free, name), getattr(dense, name), rtol=1e-7, atol=1e-8)


@every_road
@every_problem
def test_leave_one_out_residuals_solve_the_block_equation(problem: Problem, structure: whence.Structure) -> None:
    tracer = problem.fit(structure=structure)
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    residuals, hessians = problem.terms(outputs)
    np.testing.assert_allclose(tracer.residuals, residuals, rtol=1e-10, atol=1e-12)
    u = loss_oracles.left_out(tangents, residuals, hessians, 0.4, 1.0, np.arange(N))
    np.testing.assert_allclose(tracer.loo_residuals, u, rtol=1e-7, atol=1e-8)
    inverse = np.linalg.inv(loss_oracles.curvature(tangents, hessians, 0.4))
    leverage_blocks = np.stack([h @ j @ inverse @ j.T for h, j in zip(hessians, tangents, strict=True)])
    np.testing.assert_allclose(
        tracer.leverage.sum(1), np.trace(leverage_blocks, axis1=1, axis2=2), rtol=1e-7, atol=1e-9
    )
    assert float(tracer.leverage.min()) >= 0
    assert float(tracer.leverage.max()) < 1
    if problem.likelihood == "bernoulli":
        np.testing.assert_allclose(
            tracer.leverage, np.diagonal(leverage_blocks, axis1=1, axis2=2), rtol=1e-7, atol=1e-9
        )
    assert tracer.degrees_of_freedom == pytest.approx(np.trace(leverage_blocks.sum(0)), rel=1e-8)
    assert tracer.degrees_of_freedom < problem.numbers
    np.testing.assert_allclose(tracer.sigma, hessians.mean(0), rtol=1e-10, atol=1e-12)


@every_road
@every_problem
def test_recentring_takes_the_newton_step(problem: Problem, structure: whence.Structure) -> None:
    tracer = problem.fit(structure=structure, recenter=True)
    outputs, tangents, weights = oracles.tangents_of(problem.model, problem.x)
    residuals, hessians = problem.terms(outputs)
    step = loss_oracles.step(tangents, residuals, hessians, weights, 0.4)
    moved = residuals - np.einsum("nij,nj->ni", hessians, tangents @ step)
    np.testing.assert_allclose(tracer.residuals, moved, rtol=1e-7, atol=1e-8)
    test = inputs(M, seed=9)
    test_outputs, test_tangents, _ = oracles.tangents_of(problem.model, test)
    found = tracer.predict(test)
    np.testing.assert_allclose(found.mean, test_outputs + test_tangents @ step, rtol=1e-7, atol=1e-8)
    wanted = loss_oracles.covariances(
        test_tangents, tangents, moved, hessians, 0.4, noise=hessians, numbers=problem.numbers
    )
    assert_covariances(found, wanted, 1e-7)
    assert tracer.diagnostics["Newton step"] == pytest.approx(np.linalg.norm(step) / np.linalg.norm(weights), rel=1e-6)
    lost = np.sqrt(((residuals - moved) ** 2).mean()) / np.sqrt((residuals**2).mean())
    assert tracer.diagnostics["Newton change"] == pytest.approx(lost, rel=1e-6)


@every_problem
def test_single_precision_agrees_to_single_precision(problem: Problem) -> None:
    test = inputs(M, seed=9)
    wanted = problem.expected(test)
    found = problem.fit(structure="exact", execution=whence.Execution(dtype=torch.float32)).predict(test)
    assert_covariances(found, wanted, 1e-3)


@pytest.mark.parametrize("option", [{"policy": "one_plus_q"}, {"policy": "clip"}])
def test_other_leverage_policies(option: dict[str, Any]) -> None:
    problem = PROBLEMS["three classes"]
    tracer = problem.fit(structure="exact", leverage=option["policy"])
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    residuals, hessians = problem.terms(outputs)
    inverse = np.linalg.inv(loss_oracles.curvature(tangents, hessians, 0.4))
    for at in range(N):
        hat = hessians[at] @ tangents[at] @ inverse @ tangents[at].T
        grown = residuals[at] + hat @ residuals[at]
        if option["policy"] == "clip":  # no leverage here is near one
            grown = np.linalg.solve(np.eye(3) - hat, residuals[at])
        np.testing.assert_allclose(tracer.loo_residuals[at], grown, rtol=1e-8, atol=1e-10)


def test_leverages_of_classes_are_never_below_zero() -> None:
    # The diagonal of L Q is: with p = (1/2, 1/2) and Q = v v^T, v = (1, 3), it is (-1/2, 3/2). A class's leverage is
    # p_c (e_c - p)^T Q (e_c - p), of which the sum is the same.
    tracer = PROBLEMS["three classes"].fit(structure="exact")
    p = tracer.problem.outputs.softmax(1)
    away = torch.eye(3, dtype=torch.float64) - p.unsqueeze(1)  # (n, c, k)
    wanted = p * torch.einsum("nck,nkj,ncj->nc", away, tracer.bread.leverage_blocks, away)
    torch.testing.assert_close(tracer.leverage, wanted)
    v = torch.tensor([1.0, 3.0], dtype=torch.float64)
    half = torch.full((1, 2), 0.5, dtype=torch.float64)
    root = whence.Categorical().hessian_root(torch.zeros(1, 2, dtype=torch.float64), half)
    found = leave_one_out(half - half.flip(1) + 0.1, torch.outer(v, v).unsqueeze(0) / 4, root, "exact")
    assert found.leverage.tolist() == [pytest.approx([0.125, 0.125])]


def test_single_logits_can_be_left_out_and_single_classes_cannot() -> None:
    problem = PROBLEMS["three logits"]
    tracer = problem.fit(structure="exact", loo="output")
    np.testing.assert_allclose(tracer.loo_residuals, tracer.residuals / (1 - tracer.leverage), rtol=1e-10)
    with pytest.raises(whence.InputError, match=r'loo="example" with likelihood \'categorical\'.*cannot be left out'):
        PROBLEMS["three classes"].fit(loo="output")
