"""Networks that answer at several positions of an example, against the same network with one example a position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import loss_oracles
import whence
from classification import ESTIMATORS
from networks import batches_of

N, T, K, RIDGE = 5, 3, 3, 0.6
IGNORED = ((0, 2), (3, 0), (3, 1))
EXACT = (whence.Exact("primal"), whence.Exact("dual"), whence.Exact("matrix_free"), whence.Core(size=100, tolerance=0))


class Tagger(nn.Module):
    """An answer for every token, with all tokens of its sentence in sight."""

    def __init__(self, outputs: int = K) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(2, 3).double(), nn.Linear(3, outputs).double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + hidden.mean(1, keepdim=True))


class Pixels(Tagger):
    """The same in a square of pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1, -2)).unflatten(1, x.shape[1:-1])


def inputs(n: int = N, t: int = T, seed: int = 0) -> Tensor:
    return torch.randn(n, t, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels() -> Tensor:
    y = torch.randint(0, K, (N, T), generator=torch.Generator().manual_seed(5))
    for example, position in IGNORED:
        y[example, position] = -100
    return y


def tangents(model: nn.Module, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Outputs (n t, k) and gradients (n t, k, d), by one backward pass after the other."""
    outputs, rows = [], []
    for example in x:
        out = model(example.unsqueeze(0)).flatten(0, -2)  # (t, k)
        grads = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in out.reshape(-1)]
        rows.append(torch.stack([torch.cat([g.reshape(-1) for g in grad]) for grad in grads]).reshape(*out.shape, -1))
        outputs.append(out.detach())
    return torch.cat(outputs).numpy(), torch.cat(rows).numpy()


def oracle(unit: str, test: Tensor) -> dict[str, np.ndarray]:
    """Covariances (m, t, k, k): each position an example of its own, those of one sentence left out together or not."""
    model, y = Tagger(), labels().reshape(-1)
    outputs, rows = tangents(model, inputs())
    onehot = nn.functional.one_hot(y.clamp_min(0), K).double().numpy()
    counts = (y >= 0).double().numpy()
    residuals, hessians = loss_oracles.weighted(loss_oracles.softmax_terms(onehot), counts)(outputs)
    kept = np.flatnonzero(counts)  # what is ignored is not there
    groups = np.repeat(np.arange(N), T)[kept] if unit == "example" else None
    found = loss_oracles.covariances(
        tangents(model, test)[1],
        rows[kept],
        residuals[kept],
        hessians[kept],
        RIDGE,
        noise=hessians[kept],
        numbers=len(kept) * (K - 1),
        groups=groups,
    )
    if unit == "example":  # clusters of one kind are no sample of clusters: no correction for their number
        plain = loss_oracles.covariances(
            tangents(model, test)[1], rows[kept], residuals[kept], hessians[kept], RIDGE, noise=hessians[kept],
            numbers=len(kept) * (K - 1),
        )  # fmt: skip
        found["hec1"] = found["hec0"] * plain["hec1"] / plain["hec0"]
    return {name: value.reshape(len(test), -1, K, K) for name, value in found.items()}


def assert_close(found: Any, wanted: Any, name: str = "") -> None:
    found, wanted = np.asarray(found), np.asarray(wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-8, atol=1e-10 * np.abs(wanted).max(), err_msg=name)


@pytest.mark.parametrize("unit", ["example", "position"])
@pytest.mark.parametrize("structure", EXACT, ids=str)
def test_positions_are_examples_and_a_sentence_is_a_group(structure: Any, unit: Any) -> None:
    test = inputs(2, 4, seed=1)  # longer sentences than in training
    wanted = oracle(unit, test)
    batches = batches_of(inputs(), labels(), 3)
    tracer = whence.fit(Tagger(), batches, "categorical", structure, ridge=RIDGE, loo=unit, progress=False)
    found = tracer.predict(test)
    assert found.mean.shape == found.hec3.shape == (2, 4, K)
    assert found.ratio.shape == (2, 4)
    for name in ESTIMATORS:
        assert_close(found.covariance(name), wanted[name], name)
    assert_close(found.mean, Tagger()(test).detach())
    assert tracer.problem.numbers == (N * T - len(IGNORED)) * (K - 1)


def test_the_same_as_groups_of_single_positions() -> None:
    """Leaving out sentences is leaving out groups; a network that sees a token alone can be fitted either way."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger().last

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    x = torch.randn(N, T, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    y = labels().clamp_min(0)
    dense = whence.fit(Alone(), [(x, y)], "categorical", ridge=RIDGE, progress=False)
    sentences = torch.arange(N).repeat_interleave(T)
    flat = whence.fit(
        Alone(), [(x.flatten(0, 1), y.reshape(-1))], "categorical", ridge=RIDGE, groups=sentences, progress=False
    )
    for name in ("ho", "hec0", "hec2", "hec3", "jackknife"):
        assert_close(dense.predict(x).variance(name).flatten(0, 1), flat.predict(x.flatten(0, 1)).variance(name), name)
    apart = whence.fit(Alone(), [(x.flatten(0, 1), y.reshape(-1))], "categorical", ridge=RIDGE, progress=False)
    by_position = whence.fit(Alone(), [(x, y)], "categorical", ridge=RIDGE, loo="position", progress=False)
    for name in ESTIMATORS:
        assert_close(by_position.predict(x).variance(name).flatten(0, 1), apart.predict(x.flatten(0, 1)).variance(name))
    assert_close(by_position.leverage.reshape(-1, K), apart.leverage)
    assert_close(by_position.loo_residuals.reshape(-1, K), apart.loo_residuals)


@pytest.mark.parametrize(
    "structure", ["exact", "core", "ekfac", "kfac", "diagonal", whence.EKFAC(meat="two_bases")], ids=str
)
def test_squared_error_at_positions_is_squared_error_of_a_row(structure: Any) -> None:
    """HeC does not care how outputs are arranged; Ho's noise is one covariance for all positions."""

    class Row(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Tagger()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x).flatten(1)

    y = torch.randn(N, T, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {"structure": structure, "ridge": RIDGE, "progress": False}
    dense, row = (
        whence.fit(Tagger(), [(inputs(), y)], **options),
        whence.fit(Row(), [(inputs(), y.flatten(1))], **options),
    )
    test = inputs(4, T, seed=1)
    for name in ("hec0", "hec2", "hec3", "jackknife"):
        assert_close(dense.predict(test).variance(name).flatten(1), row.predict(test).variance(name), name)
    errors = (y - Tagger()(inputs()).detach()).reshape(-1, K)
    assert_close(dense.sigma, errors.T @ errors / len(errors))
    assert_close(dense.predict(test).covariance("hec3").diagonal(dim1=-2, dim2=-1), dense.predict(test).hec3)


def test_noise_is_one_covariance_for_all_positions() -> None:
    y = torch.randn(N, T, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tracer = whence.fit(Tagger(), [(inputs(), y)], ridge=RIDGE, progress=False)
    test = inputs(2, T, seed=1)
    _, rows = tangents(Tagger(), inputs())
    _, test_rows = tangents(Tagger(), test)
    inverse = np.linalg.inv(np.einsum("nkp,nkq->pq", rows, rows) + RIDGE * np.eye(rows.shape[2]))
    pull = np.einsum("mkp,pq,njq->mnkj", test_rows, inverse, rows)
    wanted = np.einsum("mnkj,jl,mnil->mki", pull, tracer.sigma.numpy(), pull)
    assert_close(tracer.predict(test).covariance("ho").flatten(0, 1), wanted)


@pytest.mark.parametrize("structure", ["exact", "ekfac"])
def test_weights_of_positions_mask_squared_error(structure: str) -> None:
    """A weight of zero takes a position out, whatever its target says."""
    y = torch.randn(N, T, K, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    weights = torch.ones(N, T, dtype=torch.float64)
    weights[1, 1] = weights[4] = 0.0
    weights[2, 0] = 2.5
    other = y.clone()
    other[1, 1] += 100.0
    other[4] -= 9.0
    options: dict[str, Any] = {"structure": structure, "ridge": RIDGE, "progress": False}
    one, two = (whence.fit(Tagger(), [(inputs(), one, weights)], **options) for one in (y, other))
    test = inputs(2, T, seed=1)
    for name in ESTIMATORS:
        assert_close(two.predict(test).variance(name), one.predict(test).variance(name), name)
    assert one.problem.counted == N - 1
    assert one.problem.counted_units == N * T - 4
    plain = whence.fit(Tagger(), [(inputs(), y)], **options)
    assert not torch.allclose(plain.predict(test).hec3, one.predict(test).hec3)


def test_pixels() -> None:
    x, y = inputs(5, 4).unflatten(1, (2, 2)), torch.arange(20).reshape(5, 2, 2) % K
    square = whence.fit(Pixels(), [(x, y)], "categorical", ridge=RIDGE, progress=False).predict(x)
    line = whence.fit(Tagger(), [(x.flatten(1, 2), y.flatten(1))], "categorical", ridge=RIDGE, progress=False)
    assert square.hec3.shape == (5, 2, 2, K)
    assert_close(square.hec3.flatten(1, 2), line.predict(x.flatten(1, 2)).hec3)
    assert_close(square.probabilities.sum(-1), np.ones((5, 2, 2)))
    assert square.margin.shape == square.margin_variance().shape == (5, 2, 2)
    assert square.probability_covariance().shape == (5, 2, 2, K, K)
    assert "5 predictions at 2 x 2 positions, 3 outputs" in repr(square)
    table = square.to_frame()
    assert len(table) == 20
    assert table["position"].tolist()[:5] == [0, 1, 2, 3, 0]
    assert_close(table["hec3_2"], square.hec3[..., 2].reshape(-1))


@pytest.mark.parametrize("structure", ["exact", "ekfac", "core"])
def test_some_outputs_at_every_position(structure: str) -> None:
    tracer = whence.fit(Tagger(), [(inputs(), labels())], "categorical", structure, ridge=RIDGE, progress=False)
    test = inputs(2, 4, seed=1)
    every = tracer.predict(test, covariance=True)
    some, best = tracer.predict(test, outputs=[2, 0]), tracer.predict(test, outputs="predicted")
    assert_close(some.hec3, every.hec3[..., [2, 0]])
    assert_close(some.covariance("ho"), every.covariance("ho")[..., [2, 0], :][..., [2, 0]])
    at = every.mean.argmax(-1, keepdim=True)
    assert_close(best.hec3, every.hec3.gather(-1, at))
    assert_close(best.probabilities, every.probabilities.gather(-1, at))


def test_batches_of_other_lengths_are_filled_up() -> None:
    tracer = whence.fit(Tagger(), [(inputs(), labels())], "categorical", ridge=RIDGE, progress=False)
    short, long = inputs(2, 2, seed=1), inputs(3, 5, seed=2)
    found = tracer.predict([short, long], outputs="predicted")
    assert found.hec3.shape == (5, 5, 1)
    assert found.hec3[:2, 2:].isnan().all()
    assert found.chosen is not None
    assert found.chosen.index is not None
    assert (found.chosen.index[:2, 2:] == -1).all()
    assert_close(found.hec3[:2, :2], tracer.predict(short, outputs="predicted").hec3)
    assert not found.hec3[2:].isnan().any()


def test_targets_that_do_not_fit_the_positions() -> None:
    with pytest.raises(whence.errors.ShapeError, match=r"targets of shape \(5, 3\), one for each position"):
        whence.fit(Tagger(), [(inputs(), labels()[:, :2])], "categorical", progress=False)
    with pytest.raises(whence.errors.ShapeError, match=r"movedim\(1, -1\)"):
        whence.fit(Tagger(4), [(inputs(), torch.zeros(N, 4, dtype=torch.long))], "categorical", progress=False)
    with pytest.raises(whence.errors.ShapeError, match=r"\(5,\) or \(5, 3\), one for each position"):
        whence.fit(Tagger(), [(inputs(), labels(), torch.ones(N, 2))], "categorical", progress=False)


def test_training_sequences_of_other_lengths() -> None:
    batches = [(inputs(), labels()), (inputs(2, 2), labels()[:2, :2])]
    with pytest.raises(
        whence.errors.ShapeError, match="3 outputs at 3 positions as in batch 0, got 3 outputs at 2 pos"
    ):
        whence.fit(Tagger(), batches, "categorical", progress=False)


def test_positions_that_are_not_there() -> None:
    net = nn.Linear(2, K, dtype=torch.float64)
    with pytest.raises(whence.errors.InputError, match=r'several positions, .* for loo="position"'):
        whence.fit(net, [(inputs()[:, 0], labels()[:, 1].clamp_min(0))], "categorical", loo="position", progress=False)


def test_everything_ignored() -> None:
    with pytest.raises(whence.errors.TargetError, match="at least one training example that counts"):
        whence.fit(Tagger(), [(inputs(), torch.full((N, T), -100))], "categorical", progress=False)
