"""The ridge of a weight decay, for each kind of mean: at the optimum of that mean, no Newton step is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import whence
from whence import Bernoulli, Categorical, InputError
from whence.integrations import decay_of, ridge_of

DECAY = 0.03


@pytest.mark.parametrize(
    ("likelihood", "targets", "expected"),
    [
        ("gaussian", torch.zeros(10), 20 * 0.1 / 2),
        ("gaussian", torch.zeros(10, 3), 20 * 3 * 0.1 / 2),
        ("categorical", torch.zeros(10, dtype=torch.long), 20 * 0.1),
        (Categorical(), torch.zeros(10, dtype=torch.long), 20 * 0.1),
        ("categorical", torch.full((10, 2), 0.5), 20 * 0.1),
        ("bernoulli", torch.zeros(10, 4), 20 * 4 * 0.1),
    ],
)
def test_lambda_counts_what_the_mean_divides_by(likelihood: object, targets: Tensor, expected: float) -> None:
    loader = [(torch.zeros(10, 2), targets), {"input": torch.zeros(10, 2), "labels": targets}]
    assert ridge_of(0.1, loader, likelihood, nn.Linear(2, 2)) == pytest.approx(expected)  # type: ignore[arg-type]


def test_the_largest_decay_of_all_groups_counts() -> None:
    weight, bias = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    adam = torch.optim.Adam([{"params": [weight], "weight_decay": 0.3}, {"params": [bias]}])
    assert decay_of([adam]) == 0.3
    assert decay_of([]) == 0.0
    assert ridge_of(0.0, [], "gaussian", nn.Linear(1, 1)) == "auto"


# --- Against training ------------------------------------------------------------------------------------------------

Loss = Callable[[Tensor, Tensor], Tensor]


def trained(x: Tensor, y: Tensor, outputs: int, loss: Loss) -> nn.Module:
    """At the optimum of torch's mean loss + decay / 2 |w|^2, which is what torch's optimisers go to."""
    torch.manual_seed(1)
    model = nn.Linear(x.shape[-1], outputs).double()
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=500, tolerance_grad=1e-13, tolerance_change=0.0, line_search_fn="strong_wolfe"
    )

    def objective() -> Tensor:
        optimizer.zero_grad()
        size = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        value = loss(model(x), y) + DECAY / 2 * size
        value.backward()  # type: ignore[no-untyped-call]  # torch carries no annotation here
        return value

    optimizer.step(objective)  # type: ignore[arg-type]  # torch expects a float, and takes a tensor
    return model.requires_grad_(True).eval()


def left_to_go(model: nn.Module, data: Any, likelihood: Any, ridge: float) -> float:
    """The Newton step to the optimum of sum of losses + ridge, over the size of the weights."""
    tracer = whence.fit(model, data, likelihood, ridge=ridge, progress=False)
    return float(tracer.diagnostics["Newton step"])


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(*shape: int, ignored: bool = False) -> Tensor:
    y = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(2))
    if ignored:
        y.view(-1)[::4] = -100
        y[1] = -100  # a whole example
    return y


def cross_entropy(outputs: Tensor, y: Tensor, **options: Any) -> Tensor:
    return functional.cross_entropy(outputs.reshape(-1, 3), y.reshape(-1), **options)


WEIGHT = torch.tensor([0.5, 1.0, 3.0], dtype=torch.float64)
MEANS: dict[str, tuple[tuple[int, ...], Tensor, Any, Loss]] = {
    "squared error": ((12, 2), drawn(12, 3, seed=5), "gaussian", functional.mse_loss),
    "squared error at positions": ((6, 4, 2), drawn(6, 4, 3, seed=5), "gaussian", functional.mse_loss),
    "classes": ((12, 2), classes(12), "categorical", cross_entropy),
    "some ignored": ((12, 2), classes(12, ignored=True), "categorical", cross_entropy),
    "tokens, some ignored": ((6, 5, 2), classes(6, 5, ignored=True), "categorical", cross_entropy),
    "pixels": ((3, 4, 4, 2), classes(3, 4, 4, ignored=True), "categorical", cross_entropy),
    "class weights": (
        (6, 5, 2), classes(6, 5, ignored=True), Categorical(weight=WEIGHT),
        lambda f, y: cross_entropy(f, y, weight=WEIGHT),
    ),
    "soft targets": (
        (12, 2), drawn(12, 3, seed=6).softmax(1), "categorical", lambda f, y: functional.cross_entropy(f, y),
    ),
    "soft targets of tokens": (
        (6, 5, 2), drawn(6, 5, 3, seed=6).softmax(2), "categorical",
        lambda f, y: functional.cross_entropy(f.flatten(0, 1), y.flatten(0, 1)),
    ),
    "many logits": (
        (12, 2), (drawn(12, 3, seed=7) > 0).double(), "bernoulli", functional.binary_cross_entropy_with_logits,
    ),
    "logits at positions": (
        (6, 4, 2), (drawn(6, 4, 3, seed=7) > 0).double(), Bernoulli(pos_weight=2.0),
        lambda f, y: functional.binary_cross_entropy_with_logits(f, y, pos_weight=torch.tensor(2.0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MEANS)
def test_training_ends_where_this_ridge_has_its_optimum(name: str) -> None:
    shape, y, likelihood, loss = MEANS[name]
    x = drawn(*shape, seed=8)
    model = trained(x, y, 3, loss)
    half = len(x) // 2
    data = [(x[:half], y[:half]), (x[half:], y[half:])]
    ridge = ridge_of(DECAY, data, likelihood, model)
    assert left_to_go(model, data, likelihood, ridge) < 1e-6
    assert left_to_go(model, data, likelihood, 1.1 * ridge) > 1e-3


def test_a_weighted_mean() -> None:
    x, y, weights = drawn(12, 2, seed=8), drawn(12, 3, seed=5), 2.0 * drawn(12, seed=9).abs()
    model = trained(x, y, 3, lambda f, y: (weights[:, None] * (f - y).square()).sum() / (3 * weights.sum()))
    data = [(x, y, weights)]
    assert left_to_go(model, data, "gaussian", ridge_of(DECAY, data, "gaussian", model)) < 1e-6


@pytest.mark.parametrize(
    ("name", "loss", "options"),
    [
        ("squared error", "mse", {"outputs": 3}),
        ("classes", "cross_entropy", {}),
        ("many logits", "binary_cross_entropy", {"outputs": 3}),
    ],
)
def test_by_hand(name: str, loss: Any, options: dict[str, Any]) -> None:
    shape, y, likelihood, trained_with = MEANS[name]
    x = drawn(*shape, seed=8)
    model = trained(x, y, 3, trained_with)
    ridge = whence.ridge_from_weight_decay(DECAY, len(x), loss=loss, **options)
    assert left_to_go(model, [(x, y)], likelihood, ridge) < 1e-6


def test_classes_are_no_logits_of_their_own() -> None:
    assert whence.ridge_from_weight_decay(0.01, 200, outputs=8, loss="binary_cross_entropy") == pytest.approx(16.0)
    with pytest.raises(InputError, match=r"got outputs=8.*binary_cross_entropy"):
        whence.ridge_from_weight_decay(0.01, 200, outputs=8, loss="cross_entropy")


class NextToken(nn.Module):
    """A model that tells its own loss from labels, each compared with the position before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(3, 4).double(), nn.Linear(4, 3).double()

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.embedding(input_ids))
        found = {"logits": logits}
        if labels is not None:
            found["loss"] = cross_entropy(logits[:, :-1], labels[:, 1:])
        return found


def test_language_models_count_the_labels_they_are_compared_with() -> None:
    labels = classes(6, 5, ignored=True)
    data = [{"input_ids": labels.clamp_min(0), "labels": labels}]
    assert ridge_of(0.1, data, "categorical", NextToken()) == pytest.approx(0.1 * int((labels[:, 1:] != -100).sum()))
