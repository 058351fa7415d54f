"""What `explain` compares inputs by: what each layer is given, whatever the batch, the padding and the calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import whence


def trained(model: nn.Module, inputs: tuple[Tensor, ...], targets: Tensor, steps: int = 150) -> nn.Module:
    loss = nn.functional.mse_loss if targets.is_floating_point() else nn.functional.cross_entropy
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(steps):
        optimiser.zero_grad()
        loss(model(*inputs), targets).backward()
        optimiser.step()
    return model.eval()


class Reader(nn.Module):
    """Mean of what is read at the positions that count."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read, self.answer = nn.Embedding(30, 8), nn.Linear(8, 16), nn.Linear(16, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        read = self.read(self.words(input_ids)).tanh() * attention_mask.unsqueeze(2)
        found: Tensor = self.answer(read.sum(1) / attention_mask.sum(1, keepdim=True))
        return found


def texts(count: int, longest: int) -> tuple[Tensor, Tensor]:
    length = torch.randint(2, longest + 1, (count, 1))
    mask = (torch.arange(16) < length).long()
    return torch.randint(1, 30, (count, 16)) * mask, mask


def as_batch(ids: Tensor, mask: Tensor, length: int = 16) -> dict[str, Tensor]:
    return {"input_ids": ids[:, :length], "attention_mask": mask[:, :length]}


def test_padding_that_the_model_ignores_changes_no_verdict() -> None:
    torch.manual_seed(0)
    ids, mask = texts(300, 16)
    labels = ((ids > 15).sum(1) * 2 > mask.sum(1)).long()
    model = trained(Reader(), (ids, mask), labels)
    batches = [{**as_batch(ids[i : i + 50], mask[i : i + 50]), "labels": labels[i : i + 50]} for i in range(0, 300, 50)]
    tracer = whence.fit(model, batches, likelihood="categorical", progress=False)
    ids, mask = texts(60, 5)
    padded, short = tracer.explain(as_batch(ids, mask)), tracer.explain(as_batch(ids, mask, 5))
    lengths = mask.sum(1).tolist()
    alone = tracer.explain([as_batch(ids[i : i + 1], mask[i : i + 1], lengths[i]) for i in range(60)])
    for found in (short, alone):
        torch.testing.assert_close(found.scarcity, padded.scarcity, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(found.disagreement, padded.disagreement, rtol=1e-2, atol=1e-2)


class Tagger(nn.Module):
    """An answer for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.answer = nn.Embedding(30, 8), nn.Linear(8, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        found: Tensor = self.answer(self.words(input_ids))
        return found


def test_sequences_of_any_length_and_padding_have_the_same_verdicts() -> None:
    torch.manual_seed(0)
    batches = []
    for length in (16, 5, 9):
        ids, mask = texts(40, length)
        batch = as_batch(ids, mask, length)
        labels = (batch["input_ids"] % 5).masked_fill(batch["attention_mask"] == 0, -100)
        batches.append({**batch, "labels": labels})
    tracer = whence.fit(
        Tagger(), batches, likelihood="categorical", structure="core", hessian_columns=4, ridge=1.0, progress=False
    )
    ids, mask = texts(20, 7)
    padded, short = tracer.explain(as_batch(ids, mask)), tracer.explain(as_batch(ids, mask, 7))
    for name in ("scarcity", "disagreement", "ambiguity", "probability", "noise"):
        torch.testing.assert_close(getattr(padded, name), getattr(short, name), rtol=1e-3, atol=1e-4)


def test_short_sequences_are_as_noisy_as_long_ones_whatever_the_columns() -> None:
    torch.manual_seed(0)
    ids = torch.randint(1, 30, (120, 16))
    mask = torch.ones_like(ids)
    mask[::2, 4:] = 0
    labels = torch.randint(5, (120, 16)).masked_fill(mask == 0, -100)
    batches = [{**as_batch(ids, mask), "labels": labels}]
    noise = []
    for columns in ("all", 16):
        tracer = whence.fit(
            Tagger(), batches, likelihood="categorical", hessian_columns=columns, structure="core", progress=False
        )
        found = tracer.explain(as_batch(ids[:60], mask[:60]))
        noise.append([float(found.disagreement[start::2].mean()) for start in (0, 1)])
    for short, long in noise:
        assert 0.75 < short / long < 1.33


class Pair(nn.Module):
    """The squared distance of two inputs, by one network that both pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 6))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.tower(a) - self.tower(b)).square().sum(1, keepdim=True)


def test_both_inputs_of_a_shared_tower_count() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(400, 4), torch.randn(400, 4)
    targets = (a - b).square().sum(1, keepdim=True) / 8
    tracer = whence.fit(trained(Pair(), (a, b), targets), [((a, b), targets)], progress=False)
    near, far = torch.randn(80, 4), 8 * torch.randn(80, 4)
    assert float(tracer.explain((near, b[:80])).scarce.double().mean()) < 0.2
    for pair in ((far, b[:80]), (b[:80], far)):
        assert float(tracer.explain(pair).scarce.double().mean()) > 0.8


class Unrolled(nn.Module):
    """One cell, called once for every step of a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.answer = nn.Linear(6, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            state = self.cell(torch.cat([step, state], 1)).tanh()
        found: Tensor = self.answer(state)
        return found


def test_a_cell_may_be_called_another_number_of_times() -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(60, 5, 2), torch.randn(60, 1)
    tracer = whence.fit(Unrolled(), [(x, targets)], progress=False)
    once, often = tracer.explain(x[:7, :1]), tracer.explain(torch.randn(7, 9, 2))
    assert bool(once.scarcity.isfinite().all() & often.scarcity.isfinite().all())
    tracer = whence.fit(Unrolled(), [(x[:, :1], targets)], progress=False)
    assert bool(tracer.explain(x).scarcity.isfinite().all())


def test_copies_of_examples_do_not_make_others_scarce() -> None:
    """As after a class was sampled several times to balance a table."""
    torch.manual_seed(0)
    x = torch.randn(300, 3)
    targets = x[:, :1].sin() + 0.1 * torch.randn(300, 1)
    model = trained(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1)), (x,), targets)
    asked = torch.randn(200, 3)
    scarcity = []
    for copies in (1, 5):
        some = [one.repeat(copies, 1) for one in (x, targets)]
        found = whence.fit(model, [tuple(some)], ridge=0.1, progress=False).explain(asked)
        scarcity.append(found.scarcity.log())
        assert float(found.scarce.double().mean()) < 0.15
    torch.testing.assert_close(scarcity[1], scarcity[0], rtol=0.1, atol=0.1)


class Twice(nn.Module):
    """A layer that sees each example once, and then with its mirror image."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.answer = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        once = self.layer(x).tanh()
        both = self.layer(torch.cat([x, -x])).tanh()
        found: Tensor = self.answer(once + both[: len(x)] + both[len(x) :])
        return found


def test_a_layer_may_be_called_with_another_number_of_rows() -> None:
    torch.manual_seed(0)
    x, targets = torch.randn(60, 3), torch.randn(60, 1)
    found = whence.fit(Twice(), [(x, targets)], progress=False).explain(torch.randn(7, 3))
    assert bool(found.scarcity.isfinite().all())


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 4), nn.Embedding(30, 4)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return (self.users(users) * self.items(items)).sum(1, keepdim=True)


def test_a_model_of_embeddings_alone_is_compared_by_their_rows() -> None:
    torch.manual_seed(0)
    users, items = torch.randint(30, (800,)), torch.randint(30, (800,))
    taste: Any = torch.randn(40, 4), torch.randn(30, 4)
    targets = (taste[0][users] * taste[1][items]).sum(1, keepdim=True)
    tracer = whence.fit(trained(Recommender(), (users, items), targets), [((users, items), targets)], progress=False)
    seen = tracer.explain((users[:100], items[:100]))
    unseen = tracer.explain((torch.randint(30, 40, (100,)), items[:100]))
    assert float(unseen.scarcity.median()) > 1.5 * float(seen.scarcity.median())
