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


def test_pearson_is_the_mean_of_squared_standardized_residuals() -> None:
    f, y = outputs(), labels()
    p = f.softmax(1)
    onehot = nn.functional.one_hot(y, K).double()
    statistic = ((onehot - p) ** 2 / p).sum()
    weight = torch.tensor([0.5, 2.0, 3.0, 1.5], dtype=torch.float64)
    for likelihood, size in (
        (whence.Categorical(dispersion="pearson"), torch.ones(N, dtype=torch.float64)),
        (whence.Categorical(dispersion="pearson", weight=weight), weight[y]),
    ):
        known = likelihood.check_targets(y, f, "batch 0")
        root = likelihood.hessian_root(f, known)
        found = likelihood.noise(likelihood.residuals(f, known), f, root, None)
        weighted = (size.unsqueeze(1) * (onehot - p) ** 2 / p).sum()
        assert found.scale == pytest.approx(float(weighted) / (N * (K - 1)))
        assert root is not None
        torch.testing.assert_close(found.roots @ found.roots.mT, found.scale * root @ root.mT)
        torch.testing.assert_close(found.covariance, (found.roots @ found.roots.mT).mean(0))
    plain = whence.Categorical(dispersion="pearson")
    known = plain.check_targets(y, f, "batch 0")
    left = plain.noise(plain.residuals(f, known), f, plain.hessian_root(f, known), 5.0)
    assert left.scale == pytest.approx(float(statistic) / (N * (K - 1) - 5))


def test_pearson_for_yes_or_no() -> None:
    f, y = outputs(2), torch.stack([labels(2), 1 - labels(2)], dim=1).double()
    likelihood = whence.Bernoulli(dispersion="pearson")
    p = f.sigmoid()
    found = likelihood.noise(likelihood.residuals(f, y), f, likelihood.hessian_root(f, y), 3.0)
    assert found.scale == pytest.approx(float(((y - p) ** 2 / (p * (1 - p))).sum()) / (2 * N - 3))
    assert whence.Bernoulli().noise(likelihood.residuals(f, y), f, likelihood.hessian_root(f, y), 3.0).scale == 1.0


def test_pearson_where_it_has_no_value() -> None:
    f = torch.tensor([[2000.0, 0.0]], dtype=torch.float64)
    likelihood = whence.Categorical(dispersion="pearson")
    right, wrong = (likelihood.check_targets(torch.tensor([c]), f, "batch 0") for c in (0, 1))
    root = likelihood.hessian_root(f, right)
    assert likelihood.noise(likelihood.residuals(f, right), f, root, None).scale == 0.0
    with pytest.raises(whence.InputError, match="finite Pearson statistic, got a training example whose observed cl"):
        likelihood.noise(likelihood.residuals(f, wrong), f, root, None)
    with pytest.raises(whence.InputError, match=r"more numbers \(1\) than effective degrees of freedom \(1\.5\)"):
        likelihood.noise(likelihood.residuals(f, right), f, root, 1.5)
