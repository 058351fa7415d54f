"""Covariances that are computed later belong to the predictions, whatever became of the inputs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import curvature_matrices as dense
import whence
from whence.influence import fitted as input_cache

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


class Seen:
    """A loader that remembers what it gave in its first reading."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.given: list[Tensor] = []

    def __iter__(self) -> Iterator[Any]:
        fresh = not self.given
        for (batch,) in self.loader:
            if fresh:
                self.given.append(batch.clone())
            yield batch


def shuffling(x: Tensor) -> Seen:
    return Seen(DataLoader(TensorDataset(x), batch_size=4, shuffle=True))


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


def test_a_loader_that_shuffles() -> None:
    tracer, loader = fit(), shuffling(drawn(20, 2, seed=3))
    torch.manual_seed(0)
    found = tracer.predict(loader)
    assert not found.covariances, "computed later"
    torch.manual_seed(1)  # the next order is another
    check(tracer, found, torch.cat(loader.given))


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [x[:7], x[7:]], lambda x: {"input": x}, lambda x: (x,)])
def test_a_tensor_that_changes(wrap: Any) -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    before = x.clone()
    found = tracer.predict(wrap(x))
    x.mul_(-3.0)
    check(tracer, found, before)


def test_an_array_that_changes() -> None:
    """numpy writes behind torch's back."""
    tracer, array = fit(), np.asarray(drawn(10, 2, seed=4))
    found, before = tracer.predict(torch.from_numpy(array)), torch.tensor(array)
    array += 1.0
    check(tracer, found, before)


def test_what_can_be_read_once() -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    check(tracer, tracer.predict(iter([x[:6], x[6:]])), x)
    check(tracer, tracer.predict(part for part in x.split(3)), x)


def test_some_outputs_and_mixtures() -> None:
    x = drawn(10, 2, seed=4)
    before = x.clone()
    for tracer, outputs in ((fit(), [2, 0]), (fit(), "all"), (fit(hessian_columns=2), "all")):
        now = tracer.predict(before, outputs=outputs, covariance=True)
        x.copy_(before)
        found = tracer.predict(x, outputs=outputs)
        x.zero_()
        dense.close(found.covariance("hec3"), now.covariance("hec3"), 1e-9)


# --- Inputs too large to keep ----------------------------------------------------------------------------------------


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows fit, ten do not."""
    monkeypatch.setattr(input_cache, "MOST", 32)


@pytest.mark.usefixtures("no_room")
def test_large_inputs_are_read_again() -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    check(tracer, tracer.predict(x), x)
    check(tracer, tracer.predict([x[:1], x[1:]]), x)
    check(tracer, tracer.predict(DataLoader(TensorDataset(x), batch_size=4)), x)


@pytest.mark.usefixtures("no_room")
def test_large_inputs_that_changed_are_refused() -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    found, both = tracer.predict(x), tracer.predict([x[:1], x[1:]])
    x[3, 1] += 1e-9
    with pytest.raises(whence.InputError, match=r"got other inputs in batch 0: they were changed.*covariance=True"):
        found.covariance("hec3")
    with pytest.raises(whence.InputError, match="got other inputs in batch 1"):
        both.margin_variance()
    torch.manual_seed(0)
    shuffled = tracer.predict(shuffling(drawn(20, 2, seed=3)))
    torch.manual_seed(1)
    for number in (shuffled.probability_covariance, shuffled.margin_variance, shuffled.covariance):
        with pytest.raises(whence.LoaderError, match=r"got other inputs in batch 0: this loader.*shuffle=False"):
            number()


@pytest.mark.usefixtures("no_room")
def test_more_or_fewer_batches_are_refused() -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    for change, got in (("append", "other inputs in batch 2"), ("pop", "1 batches for 2")):
        batches = [x[:5], x[5:]]
        found = tracer.predict(batches)
        batches.append(x) if change == "append" else batches.pop()
        with pytest.raises(whence.InputError, match=f"got {got}"):
            found.covariance()


@pytest.mark.usefixtures("no_room")
def test_a_large_iterator_is_spent() -> None:
    tracer, x = fit(), drawn(10, 2, seed=4)
    found = tracer.predict(iter([x]))
    assert found.hec3.shape == (10, K)
    with pytest.raises(whence.InputError, match=r"large iterator is spent.*covariance=True"):
        found.covariance()
    check(tracer, tracer.predict(iter([x]), covariance=True), x)
