"""A trained skorch net can be traced, whichever of its criteria it was trained with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence

skorch = pytest.importorskip("skorch", reason="skorch is not installed: pip install 'whence[integrations]'")

from whence.integrations import skorch as guest  # noqa: E402  after the check that it is there

X = np.linspace(-2, 2, 21, dtype=np.float32).reshape(-1, 1)


class Small(nn.Module):
    """Outputs, or with `chances` their softmax, as skorch's NLLLoss wants them."""

    def __init__(self, outputs: int = 1, chances: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, outputs))
        self.chances = chances

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layers(x)
        return outputs.softmax(1) if self.chances else outputs


def net(kind: Any, **options: Any) -> Any:
    base = {"max_epochs": 3, "batch_size": 8, "train_split": None, "verbose": 0, "iterator_train__shuffle": True}
    torch.manual_seed(0)
    return kind(Small, **{**base, "optimizer__weight_decay": 0.02, "optimizer": torch.optim.Adam, **options})


def test_a_regressor() -> None:
    y = np.sin(X) + 0.1 * np.cos(60 * X)
    trained = net(skorch.NeuralNetRegressor).fit(X, y)
    tracer = guest.fit(trained, X, y, progress=False)
    assert tracer.ridge == pytest.approx(21 * 0.02 / 2)
    by_hand = whence.fit(
        trained.module_.eval(), [(torch.from_numpy(X), torch.from_numpy(y))], ridge=0.21, progress=False
    )
    found = tracer.predict(guest.loader(trained, X[:4]))
    assert found.mean.numpy() == pytest.approx(trained.predict(X[:4]), abs=1e-6)
    assert torch.allclose(found.hec3, by_hand.predict(torch.from_numpy(X[:4])).hec3)


@pytest.mark.parametrize("chances", [False, True])
def test_a_classifier_of_logits_or_of_probabilities(chances: bool) -> None:
    y = (X[:, 0] > 0).astype(np.int64) + (X[:, 0] > 1)
    criterion = nn.NLLLoss if chances else nn.CrossEntropyLoss
    trained = net(skorch.NeuralNetClassifier, module__outputs=3, module__chances=chances, criterion=criterion).fit(X, y)
    tracer = guest.fit(trained, X, y, progress=False)
    assert tracer.problem.likelihood.name == "categorical"
    assert tracer.ridge == pytest.approx(21 * 0.02)
    found = tracer.predict(guest.loader(trained, X))
    expected = trained.predict_proba(X) if chances else trained.forward(X).softmax(1).numpy()
    assert found.probabilities.numpy() == pytest.approx(expected, abs=1e-5)
    logits = Small(3)
    logits.load_state_dict(trained.module_.state_dict())
    loader = [(torch.from_numpy(X), torch.from_numpy(y))]
    by_hand = whence.fit(logits.eval(), loader, "categorical", ridge=0.42, progress=False).predict(torch.from_numpy(X))
    assert torch.allclose(
        found.probability_covariance("hec3"), by_hand.probability_covariance("hec3"), rtol=1e-2, atol=1e-7
    ), "logarithms of probabilities are logits: the covariance of the probabilities is the same"


def test_a_binary_classifier() -> None:
    y = (X[:, 0] > 0).astype(np.float32)
    trained = net(skorch.NeuralNetBinaryClassifier).fit(X, y)
    tracer = guest.fit(trained, X, y.reshape(-1, 1), progress=False)
    assert tracer.problem.likelihood.name == "bernoulli"
    assert tracer.predict(guest.loader(trained, X[:2])).probabilities.shape == (2, 1)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(whence.InputError, match=r"expected a trained net.* Call net.fit\(X, y\) first"):
        guest.fit(net(skorch.NeuralNetRegressor), X, X)
    odd = net(skorch.NeuralNetRegressor, criterion=nn.L1Loss).fit(X, X)
    with pytest.raises(whence.InputError, match="expected MSELoss, CrossEntropyLoss, NLLLoss or BCEWithLogitsLoss"):
        guest.fit(odd, X, X)
