"""Every structure with cross-entropy: what must hold whatever is approximated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import curvature_matrices
import loss_oracles
import networks
import oracles
import whence
from classification import ESTIMATORS, PROBLEMS, M, N, assert_covariances, categorical, inputs, labels, network
from whence.api import STRUCTURES as KNOWN
from whence.curvature import Auto

EXACT = {"exact, primal": whence.Exact(road="primal"), "exact, dual": whence.Exact(road="dual")}
DENSE = {"core": whence.Core(size=12), "sketch": whence.Sketch(size=20)}
SPECTRAL: dict[str, whence.Structure] = {
    "ekfac": whence.EKFAC(),
    "ekfac, whole": whence.EKFAC(tolerance=0.0),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
STRUCTURES: dict[str, whence.Structure] = EXACT | DENSE | SPECTRAL
every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
every_spectral = pytest.mark.parametrize("structure", SPECTRAL.values(), ids=SPECTRAL.keys())
TEST = inputs(M, seed=9)


def covariances(tracer: whence.Tracer) -> dict[str, np.ndarray]:
    found = tracer.predict(TEST)
    return {name: np.asarray(found.covariance(name)) for name in ESTIMATORS}


def test_every_structure_is_here() -> None:
    assert {type(structure) for structure in STRUCTURES.values()} == set(KNOWN.values()) - {Auto}


@every_structure
@pytest.mark.parametrize("name", ["mlp", "convolution", "norms", "embedding", "tied"])
def test_everything_has_its_shape_and_sign(structure: whence.Structure, name: str) -> None:
    case = networks.build(name)
    y = labels(2, networks.EXAMPLES)
    loader = networks.batches_of(case.inputs, y, 4)
    tracer = whence.fit(case.model, loader, "categorical", structure, ridge=0.6, progress=False)
    found = tracer.predict(case.test_inputs)
    assert found.mean.shape == (networks.TEST_POINTS, 2)
    for estimator in ESTIMATORS:
        covariance = found.covariance(estimator)
        torch.testing.assert_close(covariance, covariance.mT, rtol=1e-10, atol=1e-12)
        if estimator == "hec1" and tracer.degrees_of_freedom >= networks.EXAMPLES:
            assert bool(torch.isinf(found.hec1).all())  # there is no correction for more freedom than numbers
            continue
        size = float(covariance.abs().max())
        assert size > 0, estimator
        assert float(torch.linalg.eigvalsh(covariance).min()) >= -1e-10 * size, estimator
    torch.testing.assert_close(tracer.residuals.sum(1), torch.zeros(networks.EXAMPLES, dtype=torch.float64))
    assert bool((tracer.leverage >= 0).all())
    assert bool((tracer.leverage < 1).all())


@every_structure
def test_batches_and_chunks_do_not_matter(structure: whence.Structure) -> None:
    problem = PROBLEMS["three classes"]
    whole = covariances(problem.fit(structure=structure, batch=N))
    for batch, chunk in ((1, None), (5, 2), (N, 3)):
        execution = whence.Execution(chunk_size=chunk)
        assert_covariances(problem.fit(structure=structure, batch=batch, execution=execution).predict(TEST), whole)


class WithZero(nn.Module):
    """Logits 0 and f: softmax over them is the sigmoid of f."""

    def __init__(self, logit: nn.Module) -> None:
        super().__init__()
        self.logit = logit

    def forward(self, x: Tensor) -> Tensor:
        logit = self.logit(x)
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


@every_structure
def test_two_classes_are_yes_or_no(structure: whence.Structure) -> None:
    one = PROBLEMS["one logit"]
    two = replace(one, model=WithZero(one.model).eval(), y=one.y[:, 0].long(), likelihood="categorical")
    single, pair = one.fit(structure=structure), two.fit(structure=structure)
    found, wanted = pair.predict(TEST), single.predict(TEST)
    for name in ESTIMATORS:
        np.testing.assert_allclose(getattr(found, name)[:, 1], getattr(wanted, name)[:, 0], rtol=1e-8, err_msg=name)
        np.testing.assert_allclose(getattr(found, name)[:, 0], 0, atol=1e-14)
    np.testing.assert_allclose(pair.loo_residuals[:, 1], single.loo_residuals[:, 0], rtol=1e-8)
    np.testing.assert_allclose(pair.residuals[:, 0], -pair.residuals[:, 1], rtol=1e-12)
    assert pair.degrees_of_freedom == pytest.approx(single.degrees_of_freedom)


@every_structure
def test_ignored_examples_contribute_nothing(structure: whence.Structure) -> None:
    problem = PROBLEMS["three classes"]
    kept = torch.ones(N, dtype=torch.bool)
    kept[[0, 6, 7]] = False
    some = replace(problem, y=torch.where(kept, problem.y, -100))
    fewer = replace(problem, x=problem.x[kept], y=problem.y[kept])
    with_ignored, without = some.fit(structure=structure), fewer.fit(structure=structure)
    assert_covariances(with_ignored.predict(TEST), covariances(without))
    for name in ("residuals", "loo_residuals"):
        np.testing.assert_allclose(getattr(with_ignored, name)[kept], getattr(without, name), rtol=1e-8, atol=1e-12)
        np.testing.assert_array_equal(getattr(with_ignored, name)[~kept], 0)
    np.testing.assert_allclose(with_ignored.leverage[~kept], 0, atol=1e-14)
    np.testing.assert_allclose(with_ignored.sigma, without.sigma, rtol=1e-10)
    assert with_ignored.degrees_of_freedom == pytest.approx(without.degrees_of_freedom)


@every_spectral
def test_spectral_curvatures_are_diagonal_in_their_own_basis(structure: whence.Structure) -> None:
    problem = PROBLEMS["three classes"]
    tracer = problem.fit(structure=structure)
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    _, test_tangents, _ = oracles.tangents_of(problem.model, TEST)
    residuals, hessians = problem.terms(outputs)
    roots = np.stack([np.linalg.cholesky(h + 1e-15 * np.eye(3)) for h in hessians])
    curved = np.einsum("ncq,ncp->nqp", roots, tangents).reshape(-1, tangents.shape[2])
    if not isinstance(structure, whence.KFAC):  # whose eigenvalues are products
        diagonal = curvature_matrices.diagonal_in_basis(tracer.bread, curved)
        np.testing.assert_allclose(curvature_matrices.curvature_of(tracer.bread), diagonal, rtol=1e-6, atol=1e-7)
    meats = {
        "ho": curved,
        "hec0": np.einsum("ncp,nc->np", tangents, residuals),
        "hec3": np.einsum("ncp,nc->np", tangents, np.asarray(tracer.loo_residuals)),
    }
    curvature = curvature_matrices.curvature_of(tracer.bread)
    inverse = np.linalg.inv(curvature + 0.4 * np.eye(len(curvature)))
    solved = test_tangents @ inverse
    found = tracer.predict(TEST)
    for name, rows in meats.items():
        meat = curvature_matrices.diagonal_in_basis(tracer.bread, rows)
        wanted = solved @ meat @ solved.transpose(0, 2, 1)
        close = {"rtol": 1e-6, "atol": 1e-6 * abs(wanted).max()}
        np.testing.assert_allclose(found.covariance(name), wanted, **close, err_msg=name)
    np.testing.assert_allclose(found.covariance("laplace"), solved @ test_tangents.transpose(0, 2, 1), rtol=1e-6)


@every_spectral
def test_leave_one_out_residuals_of_approximate_structures(structure: whence.Structure) -> None:
    problem = PROBLEMS["three classes"]
    tracer = problem.fit(structure=structure)
    _, hessians = problem.terms(np.asarray(tracer.problem.outputs))
    residuals, leverage_blocks = np.asarray(tracer.residuals), np.asarray(tracer.bread.leverage_blocks)
    grown = residuals + np.einsum("nij,njk,nk->ni", hessians, leverage_blocks, residuals)  # (1 + q) r, as a block
    np.testing.assert_allclose(tracer.loo_residuals, grown, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["core", "sketch", "ekfac", "kfac", "diagonal"])
def test_networks_in_single_precision(structure: str) -> None:
    problem = categorical(3)
    single = replace(problem, model=network(3).float(), x=problem.x.float())
    wanted = covariances(problem.fit(structure=structure))
    found = single.fit(structure=structure).predict(TEST.float())
    assert_covariances(found, wanted, 2e-3)


def test_ekfac_has_the_trace_of_the_truth() -> None:
    problem = PROBLEMS["three classes"]
    tracer = problem.fit(structure=whence.EKFAC(tolerance=0.0))
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    truth = loss_oracles.curvature(tangents, problem.terms(outputs)[1], 0.0)
    assert np.trace(curvature_matrices.curvature_of(tracer.bread)) == pytest.approx(np.trace(truth))
