"""Covariances that are computed later belong to the predictions, or are refused where the inputs changed meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature_matrices as dense
import whence

N, K, RIDGE = 14, 3, 0.4


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, K)).double().eval()


def fit(**options: Any) -> whence.Tracer:
    labels = torch.randint(0, K, (N,), generator=torch.Generator().manual_seed(2))
    options = {"structure": whence.EKFAC(tolerance=0.0), **options}
    return whence.fit(network(), [(drawn(N, 2), labels)], "categorical", ridge=RIDGE, progress=False, **options)


def wanted(tracer: whence.Tracer, tested: Tensor) -> np.ndarray:
    """(m, k, k) HeC3 of these inputs by dense algebra."""
    model = network()
    return dense.covariances(tracer, dense.tangents_of(model, drawn(N, 2)), dense.tangents_of(model, tested))["hec3"]


def shuffling(x: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x), batch_size=4, shuffle=True)


def check(tracer: whence.Tracer, found: whence.Uncertainty, tested: Tensor) -> None:
    """The covariance, and all that is made of it, against dense algebra at the inputs that were predicted."""
    full = wanted(tracer, tested)
    dense.close(found.variance("hec3"), np.einsum("mcc->mc", full), 1e-8)
    dense.close(found.covariance("hec3"), full, 1e-8)
    with torch.no_grad():
        mean = np.asarray(network()(tested))
    dense.close(found.mean, mean)
    order = np.argsort(mean, axis=1)
    pick = np.eye(K)[order[:, -1]] - np.eye(K)[order[:, -2]]
    dense.close(found.margin_variance("hec3"), np.einsum("mi,mij,mj->m", pick, full, pick), 1e-8)
    p = np.exp(mean) / np.exp(mean).sum(1, keepdims=True)
    slope = np.stack([np.diag(one) - np.outer(one, one) for one in p])
    dense.close(found.probability_covariance("hec3"), slope @ full @ slope, 1e-8)


CHANGED = r"expected the same inputs in every pass.*shuffle=False.*covariance=True"


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x[:7], x[7:]], lambda x: {"input": x}, lambda x: (x,)])
def test_inputs_are_read_again(wrap: Any) -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    found = tracer.predict(wrap(x))
    assert not found.covariances, "computed later"
    check(tracer, found, x)
    check(tracer, tracer.predict(DataLoader(TensorDataset(x), batch_size=4)), x)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x[:7], x[7:]], lambda x: {"input": x}, lambda x: (x,)])
def test_inputs_that_changed_are_refused(wrap: Any) -> None:
    tracer, array = fit(), drawn(10, 2, seed=4).numpy()  # numpy writes behind torch's back
    found = tracer.predict(wrap(torch.from_numpy(array)))
    array[3, 1] += 1e-4
    for number in (found.probability_covariance, found.margin_variance, found.covariance):
        with pytest.raises(whence.LoaderError, match=CHANGED):
            number()


def test_inputs_whose_predictions_stay_the_same_but_not_their_variances_are_refused() -> None:
    model = nn.Linear(2, K).double()
    model.weight.data[:, 1] = 0.0
    labels = torch.randint(0, K, (N,), generator=torch.Generator().manual_seed(2))
    ekfac = whence.EKFAC(tolerance=0.0)
    tracer = whence.fit(model, [(drawn(N, 2), labels)], "categorical", structure=ekfac, ridge=RIDGE, progress=False)
    x = drawn(10, 2, seed=4)
    found = tracer.predict(x)
    x[3, 1] += 1.0
    torch.testing.assert_close(tracer.predict(x).mean, found.mean)
    with pytest.raises(whence.LoaderError, match=CHANGED):
        found.covariance()


def test_a_loader_that_shuffles_is_refused() -> None:
    tracer, loader = fit(), shuffling(drawn(20, 2, seed=3))
    torch.manual_seed(0)
    found = tracer.predict(loader)
    torch.manual_seed(1)  # the next order is another
    with pytest.raises(whence.LoaderError, match=CHANGED):
        found.covariance()


@pytest.mark.parametrize("change", ["append", "pop"])
def test_more_or_fewer_batches_are_refused(change: str) -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    batches = [x[:5], x[5:]]
    found = tracer.predict(batches)
    batches.append(x) if change == "append" else batches.pop()
    with pytest.raises(whence.LoaderError, match=CHANGED):
        found.covariance()


def test_some_outputs_and_mixtures() -> None:
    x = drawn(10, 2, seed=4)
    for tracer, outputs in ((fit(), [2, 0]), (fit(), "all"), (fit(hessian_columns=2), "all")):
        now = tracer.predict(x, outputs=outputs, covariance=True)
        dense.close(tracer.predict(x, outputs=outputs).covariance("hec3"), now.covariance("hec3"), 1e-9)


def test_an_iterator_is_spent() -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    found = tracer.predict(iter([x]))
    assert found.hec3.shape == (10, K)
    with pytest.raises(whence.InputError, match=r"iterator is spent.*covariance=True"):
        found.covariance()
    check(tracer, tracer.predict(iter([x]), covariance=True), x)
