"""What must not matter, or must matter in a known way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import networks
import whence

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")
ROADS = ("primal", "dual")
"""Conjugate gradients are slow: the matrix-free road is compared with the others, and here only for how it batches."""


class Mixed(nn.Module):
    """The outputs of a network, multiplied by a fixed matrix."""

    def __init__(self, network: nn.Module, matrix: Tensor) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("matrix", matrix)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x) @ self.matrix.T


def fit(case: networks.Case, road: str, ridge: float = 0.6, batch: int = 5, **options: object) -> whence.Tracer:
    structure = whence.Exact(road=road)
    return whence.fit(case.model, case.batches(batch), structure=structure, ridge=ridge, progress=False, **options)


def covariances(tracer: whence.Tracer, inputs: Any) -> dict[str, np.ndarray]:
    uncertainty = tracer.predict(inputs)
    return {name: np.asarray(uncertainty.covariance(name)) for name in ESTIMATORS}


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-8, atol=1e-9 * abs(value).max(), err_msg=name)


@pytest.mark.parametrize("road", ROADS)
@settings(max_examples=15)
@given(batch=st.integers(1, 10), test_batch=st.integers(1, 4))
def test_batch_size_does_not_matter(road: str, batch: int, test_batch: int) -> None:
    case = networks.build("mlp")
    whole, split = fit(case, road, batch=networks.EXAMPLES), fit(case, road, batch=batch)
    wanted = covariances(whole, case.test_inputs)
    parts = [covariances(split, rows) for rows in case.test_inputs.split(test_batch)]
    assert_same({name: np.concatenate([part[name] for part in parts]) for name in ESTIMATORS}, wanted)
    np.testing.assert_allclose(split.leverage, whole.leverage, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("batch", "chunk"), [(2, None), (9, 2)])
def test_batches_and_chunks_do_not_matter_without_a_matrix(batch: int, chunk: int | None) -> None:
    case = networks.build("two_inputs")
    wanted = covariances(fit(case, "dual"), case.test_inputs)
    assert_same(
        covariances(
            fit(case, "matrix_free", batch=batch, execution=whence.Execution(chunk_size=chunk)), case.test_inputs
        ),
        wanted,
    )


@pytest.mark.parametrize("road", ROADS)
def test_order_does_not_matter(road: str) -> None:
    case = networks.build("mlp")
    order = torch.randperm(networks.EXAMPLES, generator=torch.Generator().manual_seed(3))
    other = networks.Case(case.model, case.inputs[order], case.targets[order], case.test_inputs)
    one, two = fit(case, road), fit(other, road)
    assert_same(covariances(two, case.test_inputs), covariances(one, case.test_inputs))
    for name in ("residuals", "leverage", "loo_residuals"):
        np.testing.assert_allclose(getattr(two, name), np.asarray(getattr(one, name))[order], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("road", ROADS)
def test_scaled_outputs_scale_variances_by_the_square(road: str) -> None:
    # J -> s J and e -> s e: with the ridge times s^2 alignments stay, and every variance is multiplied by s^2.
    case, s = networks.build("mlp"), 7.0
    scaled = Mixed(case.model, s * torch.eye(2, dtype=torch.float64)).eval()
    other = networks.Case(scaled, case.inputs, s * case.targets, case.test_inputs)
    one, two = fit(case, road), fit(other, road, ridge=0.6 * s**2)
    wanted = {name: s**2 * value for name, value in covariances(one, case.test_inputs).items()}
    assert_same(covariances(two, case.test_inputs), wanted)
    np.testing.assert_allclose(two.leverage, one.leverage, rtol=1e-9)
    ratios = (tracer.predict(case.test_inputs).ratio for tracer in (two, one))
    np.testing.assert_allclose(*ratios, rtol=1e-9)


@pytest.mark.parametrize("road", ROADS)
def test_rotated_outputs_rotate_covariances(road: str) -> None:
    # The example-wise estimators know no axes; the output-wise reading does.
    case, angle = networks.build("mlp"), torch.tensor(0.7, dtype=torch.float64)
    turn = torch.stack([torch.stack([angle.cos(), -angle.sin()]), torch.stack([angle.sin(), angle.cos()])])
    other = networks.Case(Mixed(case.model, turn).eval(), case.inputs, case.targets @ turn.T, case.test_inputs)
    before = covariances(fit(case, road), case.test_inputs)
    after = covariances(fit(other, road), case.test_inputs)
    assert_same(after, {name: turn.numpy() @ value @ turn.numpy().T for name, value in before.items()})
    apart = [fit(each, road, loo="output").predict(case.test_inputs) for each in (case, other)]
    traces = [np.asarray(each.hec3).sum(axis=1) for each in apart]
    assert abs(traces[1] / traces[0] - 1).max() > 1e-3


@pytest.mark.parametrize("road", ROADS)
def test_duplicated_data_halve_variances(road: str) -> None:
    # Twice the data and twice the ridge: F_lam doubles, alignments and leverages halve, and there are twice as many.
    case = networks.build("mlp")
    twice = networks.Case(case.model, case.inputs.repeat(2, 1), case.targets.repeat(2, 1), case.test_inputs)
    one, two = fit(case, road), fit(twice, road, ridge=1.2)
    before, after = covariances(one, case.test_inputs), covariances(two, case.test_inputs)
    assert_same({n: after[n] for n in ("ho", "hec0", "laplace")}, {n: before[n] / 2 for n in ("ho", "hec0", "laplace")})
    np.testing.assert_allclose(two.leverage, np.tile(np.asarray(one.leverage) / 2, (2, 1)), rtol=1e-9)
    np.testing.assert_allclose(two.sigma, one.sigma, rtol=1e-9)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("road", ROADS)
def test_chunking_does_not_matter(road: str, chunk: int) -> None:
    case = networks.build("embedding")
    wanted = covariances(fit(case, road), case.test_inputs)
    assert_same(covariances(fit(case, road, execution=whence.Execution(chunk_size=chunk)), case.test_inputs), wanted)
