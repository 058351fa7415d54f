"""Suggestions against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvature_matrices
import networks
import oracles
import whence
from doubles import fit

RIDGE = 0.5
STRUCTURES = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix_free": whence.Exact(road="matrix_free", tolerance=1e-13),
    "ekfac": whence.EKFAC(),
}


def curvature(tracer: whence.Tracer, structure: str, tangents: np.ndarray) -> np.ndarray:
    if structure == "ekfac":
        return curvature_matrices.curvature_of(tracer.bread) + RIDGE * np.eye(tangents.shape[2])
    return oracles.damped_curvature(tangents, RIDGE)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("name", ["mlp", "convolution", "embedding"])
def test_products_are_those_of_dense_matrices(name: str, structure: str) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, test, _ = oracles.tangents_of(case.model, case.test_inputs)
    damped = curvature(tracer, structure, tangents)
    found = tracer.bread.products(case.test_inputs, [case.inputs[:5], case.inputs[5:]])
    wanted = np.einsum("mkp,pq,ncq->mknc", test, np.linalg.inv(damped), tangents)
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-11)


def test_products_with_a_hessian(generator: torch.Generator) -> None:
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    model = networks.linear(torch.randn(3, 2, generator=generator, dtype=torch.float64))
    found = [
        fit(model, [(x, y)], likelihood="categorical", ridge=RIDGE, structure=road).bread.products(x[:3], [x[3:6]])
        for road in (whence.Exact(road="primal"), whence.Exact(road="dual"))
    ]
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("apart", [False, True])
def test_inputs_are_chosen_as_brute_force_chooses(structure: str, apart: bool) -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE)
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    pool[5] = pool[2]  # a copy
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, pooled, _ = oracles.tangents_of(case.model, pool)
    _, aims, _ = oracles.tangents_of(case.model, case.test_inputs) if apart else (None, pooled, None)
    damped = curvature(tracer, structure, tangents)

    def total(matrix: np.ndarray) -> float:
        return sum(np.trace(J @ np.linalg.solve(matrix, J.T)) for J in aims)

    wanted, left = [], []
    for _ in range(4):
        scores = [np.inf if i in wanted else total(damped + J.T @ J) for i, J in enumerate(pooled)]
        wanted.append(int(np.argmin(scores)))
        damped = damped + pooled[wanted[-1]].T @ pooled[wanted[-1]]
        left.append(total(damped))
    found = tracer.suggest(4, [pool[:3], pool[3:]], test=case.test_inputs if apart else None)
    assert [2 if i == 5 else i for i in found.index.tolist()] == [2 if i == 5 else i for i in wanted]
    np.testing.assert_allclose(found.total, np.array(left) * tracer.noise_scale, rtol=1e-8)
    assert len(set(found.index.tolist())) == 4
    assert not {2, 5} <= set(found.index[:2].tolist())  # the copy has to wait
    assert len(found.to_frame()) == 4
    assert repr(found).startswith("Suggestion(4 inputs to label: ")


def test_labels_to_check_are_the_suspects_in_order() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    found = tracer.suggest(budget=3)
    ranks = tracer.training_frame().suspect_rank
    assert [int(ranks[i]) for i in found.index.tolist()] == [1, 2, 3]
    assert list(found.to_frame().columns) == ["index", "score"]


def test_a_budget_above_the_pool_takes_all_of_it() -> None:
    case = networks.build("mlp")
    found = fit(case.model, case.batches(4), ridge=RIDGE).suggest(100, case.test_inputs)
    assert sorted(found.index.tolist()) == list(range(networks.TEST_POINTS))
    assert bool((found.total.diff() <= 0).all())


def test_the_budget_is_a_number() -> None:
    case = networks.build("mlp")
    with pytest.raises(whence.InputError, match="expected budget"):
        fit(case.model, case.batches()).suggest(0)
