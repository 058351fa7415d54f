"""Exact solves on a sample against dense matrices and against exact fits."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import loss_oracles
import networks
import oracles
import whence
from classification import PROBLEMS, Problem
from doubles import fit
from whence.trust.assessment import ExactSolver, most_influential, random_signs, variances_along

RIDGE = 0.5
PRECISE = (1e-13, 2000, float("inf"))
"""Tolerance, most iterations, deadline."""
STRUCTURES = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(size=9),
    "sketch": whence.Sketch(size=12),
    "ekfac": whence.EKFAC(),
    "diagonal": whence.Diagonal(),
}
LOSSES = ("gaussian", "three classes", "three logits")


def problem_of(loss: str) -> Problem:
    """Network, data and the oracle's terms of the loss."""
    if loss != "gaussian":
        return PROBLEMS[loss]
    case = networks.build("mlp")
    y = case.targets.numpy()

    def terms(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return y - outputs, np.stack([np.eye(y.shape[1])] * len(y))

    return Problem(case.model, case.inputs, case.targets, "gaussian", terms, y.size)


def only(tracer: whence.Tracer, *examples: int) -> Tensor:
    """Single examples as units to leave out, (t, n, k)."""
    p = tracer.problem
    return (torch.arange(p.n) == torch.tensor(examples).unsqueeze(1)).unsqueeze(2).expand(-1, -1, p.k)


def inputs_like(problem: Problem, m: int = 4) -> Tensor:
    return torch.randn(m, problem.x.shape[1], generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def dense(problem: Problem, weights: np.ndarray | None = None) -> tuple[Any, ...]:
    """Tangents, residuals, Hessians and the damped curvature."""
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    terms = problem.terms if weights is None else loss_oracles.weighted(problem.terms, weights)
    residuals, hessians = terms(outputs)
    return tangents, residuals, hessians, loss_oracles.curvature(tangents, hessians, RIDGE)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("loss", LOSSES)
def test_variances_are_those_of_dense_matrices(structure: str, loss: str, generator: torch.Generator) -> None:
    """With the weights that the fit gives to its examples, and the exact curvature around them."""
    problem = problem_of(loss)
    tracer = problem.fit(ridge=RIDGE, structure=STRUCTURES[structure])
    test = inputs_like(problem)
    mixtures = random_signs((len(test), tracer.problem.k), tracer.problem.outputs, generator)
    solver = ExactSolver.of(tracer, *PRECISE)
    found = variances_along(solver.sandwich(tracer.meats), [test[:3], test[3:]], [mixtures[:3], mixtures[3:]])
    tangents, _, _, damped = dense(problem)
    _, rows, _ = oracles.tangents_of(problem.model, test)
    solved = np.stack([np.linalg.solve(damped, v @ row) for v, row in zip(mixtures.numpy(), rows, strict=True)])
    pulls = np.einsum("mp,ncp->mnc", solved, tangents)
    wanted = {"laplace": np.einsum("mc,mcp,mp->m", mixtures.numpy(), rows, solved)}
    for name in ("ho", "hec3"):
        root = tracer.meats.roots[name].numpy()
        weighted = np.einsum("mnc,ncq->mnq", pulls, np.broadcast_to(root, (len(tangents), *root.shape[1:])))
        wanted[name] = (weighted**2).sum((1, 2))
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-8, err_msg=name)
    assert solver.residual <= 1e-12


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("structure", ["dual", "ekfac", "sketch"])
def test_steps_are_those_of_dense_matrices(structure: str, loss: str, generator: torch.Generator) -> None:
    problem = problem_of(loss)
    tracer = problem.fit(ridge=RIDGE, structure=STRUCTURES[structure])
    tangents, residuals, hessians, damped = dense(problem)
    roots = tracer.problem.hessian_roots
    n, k, q = len(residuals), residuals.shape[1], residuals.shape[1] if roots is None else roots.shape[2]
    flips = random_signs((2, n, q), tracer.problem.outputs, generator)
    gone = only(tracer, 2, 7)
    found = ExactSolver.of(tracer, *PRECISE).steps(gone, flips)
    _, _, weights = oracles.tangents_of(problem.model, problem.x[:1])
    newton = loss_oracles.step(tangents, residuals, hessians, weights, RIDGE)
    np.testing.assert_allclose(found.newton, newton, rtol=1e-8, atol=1e-10)
    for number, i in enumerate((2, 7)):
        without = damped - tangents[i].T @ hessians[i] @ tangents[i]
        step = -np.linalg.solve(without, tangents[i].T @ residuals[i])
        np.testing.assert_allclose(found.deletions[number], step, rtol=1e-8, atol=1e-10)
        left = residuals[i] - hessians[i] @ tangents[i] @ step
        np.testing.assert_allclose(found.loo_residuals[number][i], left, rtol=1e-8, atol=1e-10)
    each = np.stack([np.eye(k)] * n) if roots is None else roots.numpy()
    features = np.einsum("nkq,nkp->nqp", each, tangents).reshape(-1, len(damped))
    hat = features @ np.linalg.solve(damped, features.T)
    wanted = [v @ hat @ v for v in flips.reshape(2, -1).numpy()]
    np.testing.assert_allclose(found.degrees_of_freedom, wanted, rtol=1e-8)


@pytest.mark.parametrize("recenter", [False, True])
@pytest.mark.parametrize("how", ["example", "output", "groups", "weights"])
@pytest.mark.parametrize("loss", ["gaussian", "three logits"])
def test_what_is_left_out_is_what_an_exact_fit_leaves_out(how: str, loss: str, recenter: bool) -> None:
    """An exact fit knows the residuals in closed form; here they come from solves without a part of the curvature."""
    problem = problem_of(loss)
    n = len(problem.x)
    options: dict[str, Any] = {"recenter": recenter}
    loader: list[Any] = networks.batches_of(problem.x, problem.y, 4)
    if how == "output":
        options["loo"] = "output"
    if how == "groups":
        options["groups"] = [i // 3 for i in range(n)]
    if how == "weights":
        counts = torch.linspace(0.0, 2.0, n, dtype=torch.float64)
        loader = [(x, y, w) for (x, y), w in zip(loader, counts.split(4), strict=True)]
    tracer = fit(problem.model, loader, likelihood=problem.likelihood, ridge=RIDGE, **options)
    gone = most_influential(tracer, [inputs_like(problem)], 3)
    assert gone.any(1).sum(1).tolist() == [1 if how == "output" else tracer.problem.k] * 3
    assert (gone.any(2).sum(1) > 1).tolist() == [how == "groups"] * 3
    found = ExactSolver.of(tracer, *PRECISE).steps(gone, torch.zeros(0, n, tracer.problem.k, dtype=torch.float64))
    torch.testing.assert_close(found.loo_residuals, gone * tracer.adjusted.hec3, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("loo", ["example", "position"])
def test_positions_are_left_out_too(loo: str, generator: torch.Generator) -> None:
    """Two outputs at each of three positions, all looked at."""
    x = torch.randn(7, 3, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(7, 3, 2, generator=generator, dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2)).double().eval()
    tracer = fit(model, [(x, y)], ridge=RIDGE, loo=loo)
    gone = most_influential(tracer, [x[:2]], 3)
    assert gone.any(1).sum(1).tolist() == [2 if loo == "position" else 6] * 3
    found = ExactSolver.of(tracer, *PRECISE).steps(gone, torch.zeros(0, 7, 6, dtype=torch.float64))
    torch.testing.assert_close(found.loo_residuals, gone * tracer.adjusted.hec3, rtol=1e-8, atol=1e-10)
    trust = tracer.trust(x, sample=3, seconds=1e9)
    assert trust["distance"].numbers["hec3"] == pytest.approx(1.0, rel=1e-6)
    assert trust["leverage"].numbers["of"] == (21 if loo == "position" else 7)


def test_many_outputs_are_looked_at_through_a_few_mixtures(generator: torch.Generator) -> None:
    x = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(20, (12,), generator=generator)
    model = torch.nn.Linear(4, 20, dtype=torch.float64).eval()
    tracer = fit(model, [(x[:7], y[:7]), (x[7:], y[7:])], likelihood="categorical", ridge=RIDGE, hessian_columns=5)
    for given in (x[:4], None):
        trust = tracer.trust(given, sample=3, tolerance=1e-10, seconds=1e9)
        assert trust["distance"].numbers["hec3"] == pytest.approx(1.0, rel=1e-6)
        assert trust["leave-one-out"].numbers["factor"] == pytest.approx(1.0, rel=1e-6)


def test_the_most_influential_example_is_the_one_that_moves_predictions_most() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    moved = tracer.attribute(case.test_inputs, matrix=True).hec3
    assert moved.matrix is not None
    total = (moved.matrix * moved.total.unsqueeze(1)).sum(0)
    found = most_influential(tracer, [case.test_inputs], 3)
    assert [int(one.any(1).nonzero()) for one in found] == total.topk(3).indices.tolist()


def test_little_memory_means_more_solves_with_the_same_answers(generator: torch.Generator) -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE, structure="ekfac")
    solver = ExactSolver.of(tracer, *PRECISE)
    points = [case.test_inputs]
    mixtures = random_signs((len(case.test_inputs), 2), tracer.problem.outputs, generator)
    flips = random_signs((2, networks.EXAMPLES, 2), tracer.problem.outputs, generator)
    gone = only(tracer, 2, 7)
    whole, steps = variances_along(solver.sandwich(tracer.meats), points, [mixtures]), solver.steps(gone, flips)
    tracer.problem.budget.limit = 1000
    assert solver.chunk_size == 1
    single, one_by_one = variances_along(solver.sandwich(tracer.meats), points, [mixtures]), solver.steps(gone, flips)
    for name in whole:
        torch.testing.assert_close(single[name], whole[name], rtol=1e-9, atol=0)
    torch.testing.assert_close(one_by_one.newton, steps.newton)
    torch.testing.assert_close(one_by_one.deletions, steps.deletions)
    torch.testing.assert_close(one_by_one.degrees_of_freedom, steps.degrees_of_freedom)


def test_a_good_start_saves_steps() -> None:
    """Curvatures that are exact start at the end."""
    case = networks.build("mlp")
    taken = {}
    for name in ("primal", "dual", "sketch"):
        tracer = fit(case.model, case.batches(4), ridge=1e-3, structure=STRUCTURES[name])
        found = ExactSolver.of(tracer, 1e-6, 2000, float("inf"))
        variances_along(found.sandwich(tracer.meats), [case.test_inputs], [torch.ones(4, 2, dtype=torch.float64)])
        taken[name] = sum(one.steps for one in found.solves)
    assert taken["primal"] <= 2
    assert taken["dual"] <= 2
    assert taken["sketch"] > 10


def test_time_is_up() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE, structure="ekfac")
    found = ExactSolver.of(tracer, 1e-6, 2000, time.monotonic())
    variances_along(found.sandwich(tracer.meats), [case.test_inputs], [torch.ones(4, 2, dtype=torch.float64)])
    assert sum(one.steps for one in found.solves) == 0
    assert found.residual == 1.0
