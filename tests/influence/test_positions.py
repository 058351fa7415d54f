"""Variances at single positions traced to whole training examples, against the sums written out by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whence

N, T, K, RIDGE = 6, 3, 4, 0.7


class Tagger(nn.Module):
    """An answer for every token, with all tokens of its sentence in sight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last = nn.Linear(2, 3).double(), nn.Linear(3, K).double()

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        hidden = self.first(x).tanh()
        return self.last(hidden + hidden.mean(1, keepdim=True))


def sentences(n: int, t: int, seed: int) -> Tensor:
    return torch.randn(n, t, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, TEST = sentences(N, T, 0), sentences(2, 5, 1)
Y = torch.randint(0, K, (N, T), generator=torch.Generator().manual_seed(2))
Y[1, 2] = -100  # a token without a label


def gradients(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Logits (t, k) and their gradients (t, k, d) of one sentence."""
    model = Tagger()
    out = model(x.unsqueeze(0))[0]
    rows = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in out.reshape(-1)]
    flat = torch.stack([torch.cat([part.reshape(-1) for part in row]) for row in rows])
    return out.detach().numpy(), flat.reshape(*out.shape, -1).numpy()


def by_hand(losses: Tensor | None = None) -> dict[str, np.ndarray]:
    """(m t, n) terms of HeC3 and Ho of the predicted class at every position: leave one sentence out, one step.

    Or (m, n) those of the losses of TEST with these targets, and pulls.
    """
    parts = []
    for x, y in zip(X, Y.numpy(), strict=True):
        logits, rows = gradients(x)
        kept = y >= 0
        p = np.exp(logits[kept] - logits[kept].max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        hessian = np.zeros((kept.sum() * K,) * 2)
        for at, one in enumerate(p):
            hessian[at * K : (at + 1) * K, at * K : (at + 1) * K] = np.diag(one) - np.outer(one, one)
        parts.append((rows[kept].reshape(-1, rows.shape[2]), hessian, (np.eye(K)[y[kept]] - p).reshape(-1)))
    inverse = np.linalg.inv(sum(j.T @ h @ j for j, h, _ in parts) + RIDGE * np.eye(parts[0][0].shape[1]))
    asked = []
    for at, x in enumerate(TEST):
        logits, rows = gradients(x)
        if losses is None:
            asked.append(rows[np.arange(len(rows)), logits.argmax(1)])
        else:
            kept = losses[at].numpy() >= 0
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            slope = (p - np.eye(K)[losses[at].clamp_min(0).numpy()]) * kept[:, None]
            asked.append(np.einsum("tk,tkd->d", slope, rows)[None])
    found: dict[str, list[np.ndarray]] = {"hec3": [], "ho": [], "pull": []}
    for j, h, r in parts:
        aligned = np.concatenate(asked) @ inverse @ j.T
        left_out = np.linalg.solve(np.eye(len(r)) - h @ j @ inverse @ j.T, r)
        found["pull"].append(aligned @ left_out)
        found["hec3"].append(found["pull"][-1] ** 2)
        found["ho"].append(np.einsum("mi,ij,mj->m", aligned, h, aligned))
    return {name: np.stack(terms, 1) for name, terms in found.items()}


def fitted(structure: Any = "exact") -> whence.Tracer:
    return whence.fit(Tagger(), [(X, Y)], "categorical", structure, ridge=RIDGE, progress=False)


@pytest.mark.parametrize(
    "structure",
    [whence.Exact("primal"), whence.Exact("dual"), whence.Exact("matrix_free"), whence.Core(size=100, tolerance=0)],
    ids=str,
)
def test_each_position_is_a_prediction(structure: Any) -> None:
    tracer = fitted(structure)
    found = tracer.attribute(TEST, top=3, matrix=True, positions="each")
    assert found.where is not None
    assert found.where.tolist() == [[row, at] for row in range(2) for at in range(5)]
    sums = by_hand()
    for name, wanted in ((name, sums[name]) for name in ("hec3", "ho")):
        shares = found.shares(name)
        assert shares.matrix is not None
        np.testing.assert_allclose(shares.matrix * shares.total.unsqueeze(1), wanted, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(shares.variance, wanted.sum(1), rtol=1e-6)
        np.testing.assert_array_equal(shares.index, np.argsort(-wanted, axis=1)[:, :3])
    variances = tracer.predict(TEST, outputs="predicted").hec3
    np.testing.assert_allclose(found.hec3.variance, variances.reshape(-1), rtol=1e-6)
    together = tracer.attribute(TEST, top=3)
    np.testing.assert_allclose(found.hec3.total.reshape(2, 5).sum(1), together.hec3.total, rtol=1e-6)


@pytest.mark.parametrize("structure", ["ekfac", "core", "sketch"])
def test_some_positions_in_the_order_asked_for(structure: str) -> None:
    tracer = fitted(structure)
    every = tracer.attribute(TEST, matrix=True, positions="each")
    some = tracer.attribute([TEST[:1], TEST[1:]], matrix=True, positions=torch.tensor([-1, 2]))
    assert some.where is not None
    assert some.where.tolist() == [[0, 4], [0, 2], [1, 4], [1, 2]]
    rows = torch.tensor([4, 2, 9, 7])
    assert every.hec3.matrix is not None
    torch.testing.assert_close(some.hec3.matrix, every.hec3.matrix[rows])
    torch.testing.assert_close(some.ho.variance, every.ho.variance[rows])
    table = some.to_frame()
    assert table["position"].unique().tolist() == [4, 2]
    assert table["input"].unique().tolist() == [0, 1]
    np.testing.assert_allclose(some.by(["a", "b"] * (N // 2)).sum(axis=1), np.ones(4))


def test_padding_is_left_out() -> None:
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[1, 3:] = 0
    batches = [{"x": X, "attention_mask": torch.ones(N, T), "labels": Y}]
    tracer = whence.fit(Tagger(), batches, "categorical", ridge=RIDGE, progress=False)
    found = tracer.attribute({"x": TEST, "attention_mask": mask}, positions="each")
    assert found.where is not None
    assert found.where.tolist() == [[0, at] for at in range(5)] + [[1, at] for at in range(3)]
    assert len(found) == len(found.hec3.variance) == 8


@pytest.mark.parametrize(
    ("given", "words"),
    [([5], "between -5 and 4, got 5"), ("all", '"each" or a list'), ([], "list"), ([True], "list"), ([0.5], "list")],
)
def test_wrong_positions_are_told(given: Any, words: str) -> None:
    with pytest.raises(whence.InputError, match=words):
        fitted().attribute(TEST, positions=given)


def test_networks_without_positions_or_classes_have_none() -> None:
    plain = nn.Linear(2, 2).double()
    x = sentences(1, 8, 3)[0]
    with pytest.raises(whence.InputError, match="several positions"):
        whence.fit(plain, [(x, x)], ridge=RIDGE, progress=False).attribute(x, positions="each")
    dense = whence.fit(Tagger(), [(X, torch.zeros(N, T, K).double())], ridge=RIDGE, progress=False)
    with pytest.raises(whence.InputError, match="one class at each position"):
        dense.attribute(TEST, positions="each")


@pytest.mark.parametrize(
    "structure", [whence.Exact("primal"), whence.Exact("dual"), whence.Core(size=100, tolerance=0)], ids=str
)
def test_losses_are_attributed(structure: Any) -> None:
    tracer = fitted(structure)
    answers = torch.tensor([[-100, 3, 0, 1, -100], [2, -100, -100, 1, 1]])
    found = tracer.attribute((TEST, answers), top=N, matrix=True, loss=True)
    sums = by_hand(answers)
    order = found.hec3.index.argsort(1)
    np.testing.assert_allclose(found.hec3.pull.squeeze(2).gather(1, order), sums["pull"], rtol=1e-6, atol=1e-12)
    for name in ("hec3", "ho"):
        shares = found.shares(name)
        assert shares.matrix is not None
        np.testing.assert_allclose(shares.matrix * shares.total.unsqueeze(1), sums[name], rtol=1e-6, atol=1e-12)
    parts = tracer.attribute([(TEST[:1], answers[:1]), (TEST[1:], answers[1:])], top=N, loss=True)
    torch.testing.assert_close(parts.hec3.pull, found.hec3.pull)
    with pytest.raises(whence.InputError, match="positions or loss=True"):
        tracer.attribute((TEST, answers), positions="each", loss=True)


def test_the_loss_of_a_number_moves_by_its_slope_times_the_pull() -> None:
    plain = nn.Linear(2, 2).double()
    x, y = sentences(1, 8, 3)[0], sentences(1, 8, 4)[0]
    tracer = whence.fit(plain, [(x, y)], ridge=RIDGE, progress=False)
    outputs, losses = tracer.attribute(x[:3], top=8).hec3, tracer.attribute((x[:3], y[:3]), top=8, loss=True).hec3
    slope = (plain(x[:3]) - y[:3]).detach()
    pulls = [one.pull.gather(1, one.index.argsort(1).unsqueeze(2).expand_as(one.pull)) for one in (outputs, losses)]
    ratio = torch.einsum("mnk,mk->mn", pulls[0], slope) / pulls[1].squeeze(2)
    torch.testing.assert_close(ratio, ratio[:1, :1].expand_as(ratio))
    assert float(ratio[0, 0]) == pytest.approx(1.0)
