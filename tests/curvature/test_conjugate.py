"""Conjugate gradients, what they start from, and curvatures at another ridge."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import networks
import oracles
import whence
from classification import PROBLEMS
from doubles import fit
from whence.curvature.aligned import conjugate_gradients

RIDGE = 0.5
EXACT = {"primal": whence.Exact(road="primal"), "dual": whence.Exact(road="dual")}
ROUGH = {
    "core": whence.Core(size=9),
    "whole core": whence.Core(size=10_000, tolerance=0.0),
    "sketch": whence.Sketch(size=12),
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
    "matrix_free": whence.Exact(road="matrix_free"),
}


def positive(size: int, generator: torch.Generator) -> torch.Tensor:
    root = torch.randn(size, size, generator=generator, dtype=torch.float64)
    return root @ root.T + torch.diag(torch.logspace(-2, 2, size, dtype=torch.float64))


@pytest.mark.parametrize("preconditioned", [False, True])
def test_every_right_hand_side_is_solved(preconditioned: bool, generator: torch.Generator) -> None:
    matrix = positive(8, generator)
    vectors = torch.randn(5, 8, generator=generator, dtype=torch.float64)
    vectors[2] = 0.0
    near = torch.linalg.inv(matrix + 0.1 * torch.eye(8)) if preconditioned else None
    found = conjugate_gradients(
        lambda v, at: v @ matrix,
        vectors,
        tolerance=1e-13,
        iterations=60,
        precondition=None if near is None else lambda v: v @ near,
    )
    torch.testing.assert_close(found.solution, torch.linalg.solve(matrix, vectors.T).T, rtol=1e-9, atol=1e-12)
    assert float(found.reached.max()) <= 1e-13
    assert found.lowest > 0
    assert found.steps < (12 if preconditioned else 40)


def test_it_stops_when_told_and_says_how_far_it_came(generator: torch.Generator) -> None:
    matrix, vectors = positive(8, generator), torch.randn(2, 8, generator=generator, dtype=torch.float64)
    left = iter([True, True, False])
    found = conjugate_gradients(
        lambda v, at: v @ matrix, vectors, tolerance=1e-13, iterations=60, going=lambda: next(left)
    )
    assert found.steps == 2
    assert float(found.reached.min()) > 1e-6


def test_a_matrix_that_is_not_positive_is_told(generator: torch.Generator) -> None:
    vectors = torch.randn(2, 4, generator=generator, dtype=torch.float64)
    found = conjugate_gradients(lambda v, at: -v, vectors, tolerance=1e-9, iterations=9)
    assert found.lowest < 0
    assert not bool(found.solution.any())


@pytest.mark.parametrize("road", EXACT)
@pytest.mark.parametrize("name", ["gaussian", "three classes"])
def test_exact_curvatures_start_from_the_solution(road: str, name: str, generator: torch.Generator) -> None:
    case, problem = networks.build("mlp"), PROBLEMS["three classes"]
    if name == "gaussian":
        tracer = fit(case.model, case.batches(4), structure=EXACT[road], ridge=RIDGE)
        _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
        curved = np.einsum("nkp,nkq->pq", tangents, tangents)
    else:
        tracer = problem.fit(structure=EXACT[road], ridge=RIDGE)
        outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
        curved = np.einsum("nkp,nkl,nlq->pq", tangents, problem.terms(outputs)[1], tangents)
    vectors = torch.randn(3, len(curved), generator=generator, dtype=torch.float64)
    wanted = np.linalg.solve(curved + RIDGE * np.eye(len(curved)), vectors.numpy().T).T
    np.testing.assert_allclose(tracer.bread.precondition(vectors), wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ROUGH)
@pytest.mark.parametrize("name", ["mlp", "convolution", "embedding"])
def test_approximate_curvatures_start_from_something_symmetric_and_positive(structure: str, name: str) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=ROUGH[structure], ridge=RIDGE)
    eye = torch.eye(tracer.problem.selection.size, dtype=torch.float64)
    matrix = tracer.bread.precondition(eye)
    torch.testing.assert_close(matrix, matrix.T, rtol=1e-8, atol=1e-10)
    assert float(torch.linalg.eigvalsh(matrix).min()) > 0
    if structure == "whole core":
        _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
        curved = np.einsum("nkp,nkq->pq", tangents, tangents) + RIDGE * np.eye(len(eye))
        np.testing.assert_allclose(matrix.numpy() @ curved, eye, atol=1e-7)
