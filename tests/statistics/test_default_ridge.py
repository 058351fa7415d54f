"""The ridge where none is given: arithmetic by hand, the same problem in other units, and what the diagnostics say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import inputs_and_targets, mlp

DECAY = 0.01
X, Y = inputs_and_targets(n=12)
WEIGHTS = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) + 0.5
WEIGHTS[4] = 0.0


def told(tracer: whence.Tracer) -> str:
    return next(one.words for one in tracer.diagnostics if one.name == "ridge")


@pytest.mark.parametrize("structure", ["auto", "exact", "core", "sketch", "ekfac", "kfac", "diagonal"])
def test_half_the_decay_times_the_squares_of_the_targets(structure: str) -> None:
    tracer = whence.fit(mlp(), list(zip(X.split(5), Y.split(5), strict=True)), structure=structure, progress=False)
    y = Y.numpy()
    assert tracer.ridge == pytest.approx(DECAY / 2 * ((y - y.mean(0)) ** 2).sum(), rel=1e-9)
    assert tracer.ridge == pytest.approx(whence.ridge_from_weight_decay(DECAY, 12, outputs=2) * y.var(0).mean())
    words = (
        f"of an assumed weight decay of 0.01 of the mean over 24 terms, for targets of variance {y.var(0).mean():.3g}"
    )
    assert told(tracer) == f"lambda on the sum scale: {words}"


def test_sample_weights_count() -> None:
    y, w = Y.numpy(), WEIGHTS.numpy()[:, None]
    expected = DECAY / 2 * (w * (y - (w * y).sum(0) / w.sum()) ** 2).sum()
    assert whence.fit(mlp(), [(X, Y, WEIGHTS)], progress=False).ridge == pytest.approx(expected, rel=1e-9)
    doubled = whence.fit(mlp(), [(X, Y, torch.full((12,), 2.0))], progress=False)
    repeated = whence.fit(mlp(), [(X, Y), (X, Y)], progress=False)
    assert doubled.ridge == pytest.approx(repeated.ridge, rel=1e-9)


@pytest.mark.parametrize("offset", [0.0, 1e3])
def test_it_goes_with_the_units_of_the_targets(offset: float) -> None:
    """Outputs and targets times c, and shifted: the same ridge times c^2, and all variances too."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = 50.0 * self.net(x) + offset
            return found

    plain = whence.fit(mlp(), [(X, Y)], progress=False)
    scaled = whence.fit(Scaled().eval(), [(X, 50.0 * Y + offset)], progress=False)
    assert scaled.ridge == pytest.approx(2500.0 * plain.ridge, rel=1e-8)
    torch.testing.assert_close(scaled.predict(X).hec3, 2500.0 * plain.predict(X).hec3, rtol=1e-6, atol=0.0)


def test_other_losses_count_their_terms() -> None:
    labels = torch.arange(12) % 2
    tracer = whence.fit(mlp(), [(X, labels)], "categorical", progress=False)
    assert tracer.ridge == pytest.approx(DECAY * 12, rel=1e-12)
    assert told(tracer) == "lambda on the sum scale: of an assumed weight decay of 0.01 of the mean over 12 terms"
    weighted = whence.fit(mlp(), [(X, labels, WEIGHTS)], "categorical", progress=False)
    assert weighted.ridge == pytest.approx(DECAY * float(WEIGHTS.sum()), rel=1e-12)
    logits = whence.fit(mlp(), [(X, (Y > 0).double())], "bernoulli", progress=False)
    assert logits.ridge == whence.ridge_from_weight_decay(DECAY, 12, outputs=2, loss="binary_cross_entropy")


class Tagger(nn.Module):
    """Two outputs at each of three positions."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found


def test_positions_count_where_the_loss_does() -> None:
    x, labels = X.reshape(4, 3, 3), torch.arange(12).reshape(4, 3) % 2
    labels[1, 2] = labels[3, 0] = -100
    tracer = whence.fit(Tagger().eval(), [(x, labels)], "categorical", progress=False)
    assert tracer.ridge == pytest.approx(DECAY * 10, rel=1e-12)
    squares = whence.fit(Tagger().eval(), [(x, Y.reshape(4, 3, 2))], progress=False)
    assert squares.ridge == pytest.approx(whence.fit(mlp(), [(X, Y)], progress=False).ridge, rel=1e-9)


def test_mixtures_of_outputs_tell_the_mean_square_on_average() -> None:
    torch.manual_seed(0)
    wide, x = nn.Linear(3, 100).double().eval(), torch.randn(400, 3, dtype=torch.float64)
    y = torch.randn(400, 100, dtype=torch.float64)
    tracer = whence.fit(wide, [(x, y)], structure="ekfac", progress=False)
    assert tracer.ridge == pytest.approx(DECAY / 2 * float(y.square().sum()), rel=0.1)
    assert "targets of mean square" in told(tracer)


def test_equal_targets_have_no_variance() -> None:
    tracer = whence.fit(mlp(), [(X, torch.full_like(Y, 0.3))], progress=False)
    assert tracer.ridge == pytest.approx(DECAY * 24, rel=1e-12)
    assert told(tracer).endswith("the mean over 24 terms")


def test_where_a_ridge_came_from() -> None:
    given, chosen = (whence.fit(mlp(), [(X, Y)], ridge=ridge, progress=False) for ridge in (0.3, "loo"))
    assert told(given) == "lambda on the sum scale: given"
    assert told(chosen) == "lambda on the sum scale: leave-one-out error of training examples over 49 values"
    assert np.isfinite(chosen.ridge)
