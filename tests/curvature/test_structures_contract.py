"""What every structure promises, exact or not: written once, run by all of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import oracles
import whence
from curvature_matrices import close
from structures import (
    ESTIMATORS,
    STRUCTURES,
    assert_alike,
    assert_same,
    covariances,
    every_structure,
    fit,
)
from whence.api import STRUCTURES as KNOWN
from whence.curvature import Auto
from whence.influence.fitted import whole_alignments


def test_every_structure_runs_the_contract() -> None:
    assert {type(structure) for structure in STRUCTURES.values()} == set(KNOWN.values()) - {Auto}


# --- Shapes and signs ------------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("name", networks.NAMES)
def test_everything_has_its_shape_and_sign(structure: whence.Structure, name: str) -> None:
    case = networks.build(name)
    n, k = case.targets.shape
    tracer = fit(case, structure)
    for each in (tracer.residuals, tracer.leverage, tracer.loo_residuals):
        assert each.shape == (n, k)
        assert bool(torch.isfinite(each).all())
    assert tracer.sigma.shape == (k, k)
    assert tracer.degrees_of_freedom > 0
    found = tracer.predict(case.test_inputs)
    m = networks.TEST_POINTS
    assert found.mean.shape == (m, k)
    assert found.ratio.shape == (m,)
    for estimator in ESTIMATORS:
        covariance = found.covariance(estimator)
        assert covariance.shape == (m, k, k)
        assert getattr(found, estimator).shape == (m, k)
        if estimator == "hec1" and tracer.degrees_of_freedom >= n * k:
            assert bool(torch.isinf(found.hec1).all())  # there is no correction for more freedom than numbers
            continue
        torch.testing.assert_close(covariance, covariance.transpose(1, 2), rtol=1e-10, atol=1e-12)
        size = float(covariance.abs().max())
        assert float(torch.linalg.eigvalsh(covariance).min()) >= -1e-10 * size, estimator
        assert size > 0, estimator


@every_structure
def test_the_model_is_left_as_it_was(structure: whence.Structure) -> None:
    case = networks.build("norms")
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    fit(case, structure).predict(case.test_inputs)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in case.model.modules())


# --- One matrix behind all answers -----------------------------------------------------------------------------------

ALL_INVERSES: dict[str, whence.Structure] = {
    **STRUCTURES,
    "matrix free": whence.Exact(road="matrix_free"),
    "two bases": whence.EKFAC(meat="two_bases", corner=2),
    "truncated": whence.EKFAC(tolerance=0.3),
}


@pytest.mark.parametrize("structure", ALL_INVERSES.values(), ids=ALL_INVERSES.keys())
@pytest.mark.parametrize("name", ["mlp", "convolution", "norms"])
def test_leverages_alignments_and_laplace_are_those_of_the_dense_inverse(
    structure: whence.Structure, name: str
) -> None:
    case = networks.build(name)
    tracer = fit(case, structure)
    inverse = tracer.bread.to_dense().numpy()
    training = oracles.tangents_of(case.model, case.inputs)[1]
    test = oracles.tangents_of(case.model, case.test_inputs)[1]
    close(tracer.bread.leverage_blocks, training @ inverse @ training.transpose(0, 2, 1), rtol=1e-6)
    wanted = np.einsum("mkp,pq,njq->mknj", test, inverse, training)
    close(torch.cat([one for _, one in whole_alignments(tracer, case.test_inputs)]), wanted, rtol=1e-6)
    laplace = tracer.noise_scale * test @ inverse @ test.transpose(0, 2, 1)
    close(covariances(tracer, case.test_inputs)["laplace"], laplace, rtol=1e-6)
    if isinstance(structure, whence.Exact):
        rows = training.reshape(-1, training.shape[-1])
        close(inverse, np.linalg.inv(rows.T @ rows + 0.6 * np.eye(rows.shape[1])), rtol=1e-6)


# --- What must not matter --------------------------------------------------------------------------------------------


@every_structure
def test_batches_and_chunks_do_not_matter(structure: whence.Structure) -> None:
    cases = {name: networks.build(name) for name in ("mlp", "convolution", "embedding")}
    whole = {name: fit(case, structure, batch=networks.EXAMPLES) for name, case in cases.items()}

    @settings(max_examples=4)
    @given(st.sampled_from(list(cases)), st.integers(1, 11), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)))
    def holds(name: str, batch: int, test_batch: int, chunk: int | None) -> None:
        case = cases[name]
        split = fit(case, structure, batch=batch, execution=whence.Execution(chunk_size=chunk))
        parts = case.test_inputs.split(test_batch)
        assert_alike(whole[name], split, list(parts))

    holds()


@every_structure
def test_a_loader_may_give_batches_of_any_sizes(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    ragged = list(zip(case.inputs.split([1, 6, 2]), case.targets.split([1, 6, 2]), strict=True))
    set_of_rows = torch.utils.data.TensorDataset(case.inputs, case.targets)
    for loader in (ragged, torch.utils.data.DataLoader(set_of_rows, batch_size=5)):
        other = whence.fit(case.model, loader, structure=structure, ridge=0.6, progress=False)
        assert_alike(fit(case, structure), other, case.test_inputs)


@every_structure
def test_order_does_not_matter(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    order = torch.randperm(networks.EXAMPLES, generator=torch.Generator().manual_seed(3))
    one, two = (
        fit(case, structure),
        fit(replace(case, inputs=case.inputs[order], targets=case.targets[order]), structure),
    )
    assert_same(covariances(two, case.test_inputs), covariances(one, case.test_inputs))
    for name in ("residuals", "leverage", "loo_residuals"):
        np.testing.assert_allclose(getattr(two, name), np.asarray(getattr(one, name))[order], rtol=1e-8, atol=1e-10)


@every_structure
def test_the_same_fit_twice_is_the_same_to_the_bit(structure: whence.Structure) -> None:
    case = networks.build("convolution")
    one, two = (covariances(fit(case, structure), case.test_inputs) for _ in range(2))
    for name in ESTIMATORS:
        np.testing.assert_array_equal(two[name], one[name])


# --- What must matter in a known way ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, network: nn.Module, size: float) -> None:
        super().__init__()
        self.network, self.size = network, size

    def forward(self, x: Tensor) -> Tensor:
        return self.size * self.network(x)


@every_structure
def test_scaled_outputs_scale_variances_by_the_square(structure: whence.Structure) -> None:
    # J -> s J and e -> s e: with the ridge times s^2 alignments stay, and every variance is multiplied by s^2.
    case, s = networks.build("convolution"), 7.0
    other = replace(case, model=Scaled(case.model, s).eval(), targets=s * case.targets)
    one, two = fit(case, structure), fit(other, structure, ridge=0.6 * s**2)
    wanted = {name: s**2 * value for name, value in covariances(one, case.test_inputs).items()}
    assert_same(covariances(two, case.test_inputs), wanted)
    np.testing.assert_allclose(two.leverage, one.leverage, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(two.loo_residuals, s * one.loo_residuals, rtol=1e-8, atol=1e-12)
    ratios = (tracer.predict(case.test_inputs).ratio for tracer in (two, one))
    np.testing.assert_allclose(*ratios, rtol=1e-8)


@every_structure
def test_duplicated_data_halve_variances(structure: whence.Structure) -> None:
    # Twice the data and twice the ridge: F_lam doubles, alignments and leverages halve, and there are twice as many.
    case = networks.build("mlp")
    twice = replace(case, inputs=case.inputs.repeat(2, 1), targets=case.targets.repeat(2, 1))
    one, two = fit(case, structure), fit(twice, structure, ridge=1.2)
    before, after = covariances(one, case.test_inputs), covariances(two, case.test_inputs)
    linear = ("ho", "hec0", "laplace")
    assert_same({n: after[n] for n in linear}, {n: before[n] / 2 for n in linear})
    leverage_blocks = np.asarray(one.bread.leverage_blocks)
    np.testing.assert_allclose(
        two.bread.leverage_blocks, np.concatenate([leverage_blocks, leverage_blocks]) / 2, rtol=1e-8, atol=1e-12
    )
    np.testing.assert_allclose(two.sigma, one.sigma, rtol=1e-9)
    assert two.degrees_of_freedom == pytest.approx(one.degrees_of_freedom)


@every_structure
def test_more_ridge_means_less_variance(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracers = [fit(case, structure, ridge=ridge) for ridge in (0.1, 1.0, 10.0)]
    for estimator in ("ho", "hec0", "laplace"):
        traces = np.stack([tracer.predict(case.test_inputs).variance(estimator).sum(1) for tracer in tracers])
        assert (np.diff(traces, axis=0) < 0).all(), estimator
    freedom = [tracer.degrees_of_freedom for tracer in tracers]
    assert freedom == sorted(freedom, reverse=True)
