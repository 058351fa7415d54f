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
def test_inputs_are_chosen_as_brute_force_chooses(structure: str) -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE)
    generator = torch.Generator().manual_seed(3)
    pool = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    pool[5] = pool[2]  # a copy
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, pooled, _ = oracles.tangents_of(case.model, pool)
    damped = curvature(tracer, structure, tangents)

    def total(matrix: np.ndarray) -> float:
        return sum(np.trace(J @ np.linalg.solve(matrix, J.T)) for J in pooled)

    wanted, left = [], []
    for _ in range(4):
        scores = [np.inf if i in wanted else total(damped + J.T @ J) for i, J in enumerate(pooled)]
        wanted.append(int(np.argmin(scores)))
        damped = damped + pooled[wanted[-1]].T @ pooled[wanted[-1]]
        left.append(total(damped))
    found = tracer.suggest(4, [pool[:3], pool[3:]])
    assert [2 if i == 5 else i for i in found.index.tolist()] == [2 if i == 5 else i for i in wanted]
    np.testing.assert_allclose(found.total, np.array(left) * tracer.noise_scale, rtol=1e-8)
    assert len(set(found.index.tolist())) == 4
    assert not {2, 5} <= set(found.index[:2].tolist())  # the copy has to wait
    assert len(found.to_frame()) == 4
    assert repr(found).startswith("Suggestion(4 inputs to label: ")


@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli"])
def test_classes_are_weighed_by_what_their_labels_tell(likelihood: str, generator: torch.Generator) -> None:
    """A label adds J^T L J with L the Hessian of cross-entropy; what is to fall is tr L J G^-1 J^T."""
    x = torch.randn(10, 2, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (10,), generator=generator)
    pool = 2 * torch.randn(7, 2, generator=generator, dtype=torch.float64)
    pool[4] = pool[1]
    model = networks.linear(2 * torch.randn(3, 2, generator=generator, dtype=torch.float64))
    targets = y if likelihood == "categorical" else torch.nn.functional.one_hot(y, 3).double()
    tracer = fit(model, [(x, targets)], likelihood=likelihood, ridge=RIDGE)

    def terms(inputs: torch.Tensor) -> list[tuple[np.ndarray, np.ndarray]]:
        outputs = model(inputs).detach()
        if likelihood == "categorical":
            p = outputs.softmax(1).numpy()
            hessians = [np.diag(row) - np.outer(row, row) for row in p]
        else:
            p = outputs.sigmoid().numpy()
            hessians = [np.diag(row * (1 - row)) for row in p]
        return list(zip(oracles.linear_tangents(inputs.numpy(), 3), hessians, strict=True))

    curved = RIDGE * np.eye(6) + sum(J.T @ L @ J for J, L in terms(x))

    def total(matrix: np.ndarray) -> float:
        return sum(np.trace(L @ J @ np.linalg.solve(matrix, J.T)) for J, L in terms(pool))

    chosen, left = [], []
    for _ in range(4):
        scores = [np.inf if i in chosen else total(curved + J.T @ L @ J) for i, (J, L) in enumerate(terms(pool))]
        chosen.append(int(np.argmin(scores)))
        J, L = terms(pool)[chosen[-1]]
        curved = curved + J.T @ L @ J
        left.append(total(curved))
    found = tracer.suggest(4, [pool[:3], pool[3:]])
    assert [1 if i == 4 else i for i in found.index.tolist()] == [1 if i == 4 else i for i in chosen]
    np.testing.assert_allclose(found.total, left, rtol=1e-8)


@pytest.mark.parametrize("structure", ["primal", "ekfac"])
def test_of_many_copies_one_is_chosen(structure: str) -> None:
    """A pool of five inputs, eight times over: the first five suggestions are five different inputs."""
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), structure=STRUCTURES[structure], ridge=RIDGE)
    once = torch.randn(5, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    found = tracer.suggest(5, 20 * once.repeat(8, 1))  # far out, where a label leaves little to tell
    assert sorted((found.index % 5).tolist()) == [0, 1, 2, 3, 4]


def test_a_pool_beyond_memory_is_refused_before_it_is_built() -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE)
    tracer.problem.budget.limit = 100
    with pytest.raises(whence.TooLargeError, match="smaller pool"):
        tracer.suggest(2, case.test_inputs)


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
