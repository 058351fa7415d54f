"""Residuals and roots of Hessians are the derivatives of torch's own losses, with every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence

N, K = 6, 4
WEIGHT = [0.5, 2.0, 0.0, 1.5]


def outputs(k: int = K) -> Tensor:
    return 2 * torch.randn(N, k, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def labels(k: int = K) -> Tensor:
    return torch.randint(0, k, (N,), generator=torch.Generator().manual_seed(2))


def probabilities() -> Tensor:
    return torch.randn(N, K, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).softmax(1)


def some_ignored(index: int) -> Tensor:
    found = labels()
    found[1], found[4] = index, index
    return found


def check(likelihood: whence.Likelihood, loss: nn.Module, targets: Tensor, torch_targets: Tensor, k: int = K) -> None:
    """Minus the gradient and the Hessian of the summed loss, example by example."""
    f = outputs(k)
    known = likelihood.check_targets(targets, f, "batch 0")

    def summed(row: Tensor, at: int) -> Tensor:
        return loss(row.unsqueeze(0), torch_targets[at : at + 1])

    for at in range(N):
        gradient = torch.func.grad(summed)(f[at], at)
        hessian = torch.func.hessian(summed)(f[at], at)
        root = likelihood.hessian_root(f, known)
        assert root is not None
        torch.testing.assert_close(likelihood.residuals(f, known)[at], -gradient, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(root[at] @ root[at].T, hessian, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, WEIGHT])
@pytest.mark.parametrize(
    "targets", [labels(), probabilities(), some_ignored(-100)], ids=["indices", "probabilities", "ignored"]
)
def test_categorical_is_cross_entropy(targets: Tensor, weight: Any, smoothing: float) -> None:
    options = {"weight": None if weight is None else torch.tensor(weight, dtype=torch.float64)}
    loss = nn.CrossEntropyLoss(**options, label_smoothing=smoothing, reduction="sum")
    check(whence.Categorical(weight=weight, label_smoothing=smoothing), loss, targets, targets)


@pytest.mark.parametrize("index", [2, 7, -1])
def test_any_index_can_be_ignored(index: int) -> None:
    targets = some_ignored(index)
    loss = nn.CrossEntropyLoss(ignore_index=index, reduction="sum")
    likelihood = whence.Categorical(ignore_index=index)
    check(likelihood, loss, targets, targets)
    counted = likelihood.counted(likelihood.check_targets(targets, outputs(), "batch 0"))
    assert counted is not None
    assert counted.tolist() == (targets != index).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_class_indices_of_any_integer_type(dtype: torch.dtype) -> None:
    check(whence.Categorical(), nn.CrossEntropyLoss(reduction="sum"), labels().to(dtype), labels())


@pytest.mark.parametrize(
    "weight", [None, 3.0, torch.tensor(3), [0.5, 2.0, 0.0, 1.5], torch.tensor([0.5, 2.0, 1.0, 1.5])]
)
@pytest.mark.parametrize("targets", [probabilities(), (probabilities() > 0.25).double()], ids=["soft", "hard"])
def test_bernoulli_is_binary_cross_entropy(targets: Tensor, weight: Any) -> None:
    positive = None if weight is None else torch.as_tensor(weight, dtype=torch.float64)
    loss = nn.BCEWithLogitsLoss(pos_weight=positive, reduction="sum")
    check(whence.Bernoulli(pos_weight=weight), loss, targets, targets)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("shape", [(N,), (N, 1)])
def test_bernoulli_takes_single_labels_of_any_type(kind: torch.dtype, shape: tuple[int, ...]) -> None:
    yes = labels(2).to(kind)
    check(whence.Bernoulli(), nn.BCEWithLogitsLoss(reduction="sum"), yes.reshape(shape), yes.double().unsqueeze(1), k=1)


def test_extreme_outputs_stay_finite() -> None:
    f = torch.tensor([[800.0, -800.0, 0.0], [0.0, 1e5, 1e5]], dtype=torch.float64)
    one, many = whence.Categorical(), whence.Bernoulli()
    y = one.check_targets(torch.tensor([1, 2]), f, "batch 0")
    torch.testing.assert_close(one.residuals(f, y)[0], torch.tensor([-1.0, 1.0, 0.0], dtype=torch.float64))
    for likelihood in (one, many):
        root = likelihood.hessian_root(f, y)
        assert root is not None
        assert bool(torch.isfinite(root).all())
        assert bool(torch.isfinite(likelihood.residuals(f, y)).all())
