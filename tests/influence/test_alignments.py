"""Alignments of every structure against dense matrices."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import curvature_matrices
import networks
import oracles
import whence
from doubles import fit
from whence.curvature.alignments import align
from whence.jacobian.gradients import Block, Kronecker, Whole

RIDGE = 0.5
EXACT = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "matrix_free": whence.Exact(road="matrix_free", tolerance=1e-13),
}
SPECTRAL = {"ekfac": whence.EKFAC(), "kfac": whence.KFAC(), "diagonal": whence.Diagonal()}


def gathered(tracer: whence.Tracer, inputs: object, m: int) -> np.ndarray:
    """All alignments, (m, n, k, k), and the order in which they came checked."""
    p = tracer.problem
    found = torch.full((m, p.k, p.n, p.k), torch.nan, dtype=torch.float64)
    done = 0
    for where, chunks in tracer.bread.alignments(inputs):
        assert where.start == done
        done, seen = where.stop, 0
        for there, part in chunks:
            assert there.start == seen
            seen = there.stop
            found[where, :, there] = part
        assert seen == p.n
    assert done == m
    return found.permute(0, 2, 1, 3).numpy()


@pytest.mark.parametrize("road", EXACT)
@pytest.mark.parametrize("name", networks.NAMES)
def test_exact_alignments_are_those_of_dense_matrices(name: str, road: str) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=EXACT[road], ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, test, _ = oracles.tangents_of(case.model, case.test_inputs)
    wanted = oracles.alignments(test, tangents, RIDGE)
    np.testing.assert_allclose(gathered(tracer, case.test_inputs, len(test)), wanted, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize("structure", SPECTRAL)
@pytest.mark.parametrize("name", networks.NAMES)
def test_spectral_alignments_are_those_of_the_curvature_they_stand_for(name: str, structure: str) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=SPECTRAL[structure], ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, test, _ = oracles.tangents_of(case.model, case.test_inputs)
    damped = curvature_matrices.curvature_of(tracer.bread) + RIDGE * np.eye(tangents.shape[2])
    wanted = np.einsum("mkp,pq,ncq->mnkc", test, np.linalg.inv(damped), tangents)
    np.testing.assert_allclose(gathered(tracer, case.test_inputs, len(test)), wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["mlp", "single_output", "convolution"])
def test_alignments_outside_of_a_corner(name: str) -> None:
    case = networks.build(name)
    tracer = fit(case.model, case.batches(4), structure=whence.EKFAC(tolerance=0.5), ridge=20.0)
    assert any(
        basis.missing and basis.block.kind == "kronecker" for basis in (block.basis for block in tracer.bread.blocks)
    )
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, test, _ = oracles.tangents_of(case.model, case.test_inputs)
    damped = curvature_matrices.curvature_of(tracer.bread) + 20.0 * np.eye(tangents.shape[2])
    wanted = np.einsum("mkp,pq,ncq->mnkc", test, np.linalg.inv(damped), tangents)
    np.testing.assert_allclose(gathered(tracer, case.test_inputs, len(test)), wanted, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("structure", ["core", "sketch"])
def test_a_core_or_sketch_that_keeps_everything_is_exact(structure: str) -> None:
    case = networks.build("mlp")
    whole = {"core": whence.Core(size=10_000, tolerance=0.0), "sketch": whence.Sketch(size=10_000)}[structure]
    tracer = fit(case.model, case.batches(4), structure=whole, ridge=RIDGE)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    _, test, _ = oracles.tangents_of(case.model, case.test_inputs)
    found = gathered(tracer, case.test_inputs, len(test))
    np.testing.assert_allclose(found, oracles.alignments(test, tangents, RIDGE), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("structure", [whence.EKFAC(), whence.Exact(road="dual"), whence.Exact(road="primal")])
def test_little_memory_changes_the_pieces_only(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracer = fit(
        case.model, case.batches(4), structure=structure, ridge=RIDGE, execution=whence.Execution(chunk_size=2)
    )
    wanted = gathered(tracer, case.test_inputs, networks.TEST_POINTS)
    tracer.bread.problem.budget.limit = 1000  # less than the gradients of one test point take
    pieces = [where.stop - where.start for where, _ in tracer.bread.alignments(case.test_inputs)]
    assert max(pieces) < networks.TEST_POINTS
    found = gathered(tracer, case.test_inputs, networks.TEST_POINTS)
    np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("directions", [1, 40])
@pytest.mark.parametrize("groups", [1, 2])
def test_every_order_of_contraction_gives_the_inner_products(positions: int, directions: int, groups: int) -> None:
    block = Block("w", ("w",), ((2 * groups, 5),), "kronecker", groups=groups)
    tangent = Kronecker(
        block,
        Whole(torch.randn(7, groups, positions, 5, dtype=torch.float64)),
        Whole(torch.randn(7, 3, groups, positions, 2, dtype=torch.float64)),
    )
    along = torch.randn(directions, groups, 2, 5, dtype=torch.float64)
    wanted = torch.einsum("nceoi,qeoi->ncq", tangent.materialize(), along)
    torch.testing.assert_close(align(tangent, along), wanted, rtol=1e-12, atol=1e-12)


class Mean(torch.nn.Module):
    """Tokens through a layer, their mean through another: sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.each, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.each(x).tanh().mean(1))


@pytest.mark.parametrize("name", SPECTRAL)
def test_a_layer_seen_once_in_a_prediction_and_at_several_positions_in_training(
    name: str, generator: torch.Generator
) -> None:
    """A token that is repeated leaves the mean and its tangents as they are."""
    model = Mean().double().eval()
    x = torch.randn(9, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(9, 2, generator=generator, dtype=torch.float64)
    tracer = fit(model, [(x[:4], y[:4]), (x[4:], y[4:])], structure=SPECTRAL[name], ridge=RIDGE)
    token = torch.randn(2, 1, 3, generator=generator, dtype=torch.float64)
    once, thrice = gathered(tracer, token, 2), gathered(tracer, token.repeat(1, 3, 1), 2)
    np.testing.assert_allclose(once, thrice, rtol=1e-9, atol=1e-12)
    damped = curvature_matrices.curvature_of(tracer.bread) + RIDGE * np.eye(26)
    J, test = oracles.tangents_of(model, x)[1], oracles.tangents_of(model, token)[1]
    wanted = np.einsum("mkp,pq,njq->mnkj", test, np.linalg.inv(damped), J)
    np.testing.assert_allclose(once, wanted, rtol=1e-8, atol=1e-10)
    pool = tracer.bread.products(token, [x])  # (m, k, p, k)
    np.testing.assert_allclose(pool.permute(0, 2, 1, 3), wanted, rtol=1e-8, atol=1e-10)
