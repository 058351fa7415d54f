"""Training by a plan is ordinary training: the same weights as a plain loop with torch's optimisers leads to."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

from whence_paper.captured import (
    Adam,
    Kind,
    Momentum,
    Plan,
    Trainer,
    constant,
    drawn_moves,
    in_a_stream,
    in_batches,
    one_cycle,
)
from whence_paper.networks import resnet9


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(outputs, labels, reduction="none")


def images(n: int, side: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, side, side, generator=draw, dtype=torch.float64), torch.randint(4, (n,), generator=draw)


def small() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 4)).double()


def plain(network: nn.Module, optimiser: torch.optim.Optimizer, data: tuple[Tensor, Tensor], plan: Plan, cycle: float):
    """The loop that everybody writes."""
    steps = plan.steps
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, cycle, total_steps=steps) if cycle else None
    network.train()
    for index, weight in zip(plan.index, plan.weight, strict=True):
        chosen = index[weight > 0]
        optimiser.zero_grad()
        F.cross_entropy(network(data[0][chosen]), data[1][chosen]).backward()
        optimiser.step()
        if schedule is not None:
            schedule.step()


def same(one: nn.Module, other: nn.Module) -> None:
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_adam_with_a_cycle(decay):
    data, draw = images(50), torch.Generator().manual_seed(1)
    steps = 3 * 4
    plan = Plan(*in_batches(50, 3, 16, draw), *one_cycle(2e-3, steps))
    network, other = small(), small()
    Trainer(Adam(decay), cross_entropy)(network, *data, plan)
    optimiser = torch.optim.AdamW(other.parameters(), lr=2e-3, weight_decay=decay)
    plain(other, optimiser, data, plan, 2e-3)
    same(network, other)
    assert plan.weight.sum() == 150  # the last batch of an epoch has two examples


def test_momentum():
    data, draw = images(40), torch.Generator().manual_seed(1)
    plan = Plan(*in_batches(40, 2, 16, draw), *constant(0.01, 0.9, 6))
    network, other = small(), small()
    Trainer(Momentum(), cross_entropy)(network, *data, plan)
    plain(other, torch.optim.SGD(other.parameters(), lr=0.01, momentum=0.9), data, plan, 0)
    same(network, other)


def test_batch_norm_keeps_its_running_means():
    data, draw = images(48, 16), torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    network = resnet9(4, width=2).double()
    other = deepcopy(network)
    index, weight = in_a_stream(48, 2, 16, draw)
    plan = Plan(index, weight, *one_cycle(3e-3, len(index)))
    Trainer(Adam(0.01), cross_entropy)(network, *data, plan)
    plain(other, torch.optim.AdamW(other.parameters(), lr=3e-3, weight_decay=0.01), data, plan, 3e-3)
    same(network, other)
    assert int(network[1].num_batches_tracked) == 6


def test_memory_is_used_again_for_other_weights_and_fewer_examples():
    draw = torch.Generator().manual_seed(1)
    data = images(50)
    trainer = Trainer(Adam(), cross_entropy)
    first = Plan(*in_batches(50, 3, 16, draw), *constant(1e-3, 0.9, 12))
    trainer(small(), *data, first)
    part = (data[0][20:], data[1][20:].flip(0))
    second = Plan(*in_batches(30, 2, 16, draw), *constant(1e-3, 0.9, 4))
    network, other = small(), small()
    trainer(network, *part, second)
    assert len(trainer.kinds) == 1
    Trainer(Adam(), cross_entropy)(other, *part, second)
    same(network, other)


def test_images_are_mirrored_and_shifted_each_by_itself():
    x, y = images(30, 8)
    index, weight = in_a_stream(30, 1, 10, torch.Generator().manual_seed(1))
    moves = drawn_moves(index, 2, torch.Generator().manual_seed(2))
    assert moves[:, 0].unique().tolist() == [0, 1]
    assert moves[:, 1:].unique().tolist() == [0, 1, 2, 3, 4]
    seen: list[Tensor] = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3 * 64, 4, dtype=torch.float64)

        def forward(self, some: Tensor) -> Tensor:
            seen.append(some)
            return self.last(some.flatten(1))

    plan = Plan(index, weight, *constant(0.1, 0.9, 3), moves)
    Trainer(Momentum(), cross_entropy, shift=2)(Looks(), x, y, plan)
    for step, some in enumerate(seen):
        for place, at in enumerate(index[step].tolist()):
            mirrored, down, right = moves[step, :, place].tolist()
            wanted = F.pad(x[at], (2, 2, 2, 2))[:, down : down + 8, right : right + 8]
            assert torch.equal(some[place], wanted.flip(2) if mirrored else wanted)


def test_moves_without_a_shift_are_refused():
    x, y = images(10)
    index, weight = in_a_stream(10, 1, 10, torch.Generator().manual_seed(1))
    plan = Plan(index, weight, *constant(0.1, 0.9, 1), drawn_moves(index, 2, torch.Generator()))
    with pytest.raises(ValueError, match="if and only if shift"):
        Trainer(Momentum(), cross_entropy)(small(), x, y, plan)


@pytest.mark.parametrize("fails", [False, True])
def test_steps_before_the_capture_count(monkeypatch, fails):
    """What a GPU does is played: in a capture nothing is computed, and a replay is a step."""
    data, draw = images(40), torch.Generator().manual_seed(1)
    plan = Plan(*in_batches(40, 3, 16, draw), *one_cycle(2e-3, 9))
    trainer = Trainer(Adam(0.01), cross_entropy)
    network, other = small(), small()
    kind = Kind(trainer, network, *data, plan)
    kind.captures = True
    step, made = kind._step, []

    def counted() -> None:
        made.append("step")
        step()

    def replayed() -> None:
        made.append("replay")
        step()

    @contextmanager
    def capture(graph: object, stream: object):
        kind._step = lambda: made.append("noted")  # type: ignore[method-assign]
        yield
        kind._step = counted  # type: ignore[method-assign]
        if fails:
            raise RuntimeError("operation not permitted when stream is capturing")

    kind._step = counted  # type: ignore[method-assign]
    nothing = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: nothing)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=replayed))
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with pytest.warns(UserWarning, match="made one by one.*not permitted") if fails else nullcontext():
        kind.run(network, *data, plan)
    assert made == 3 * ["step"] + ["noted"] + 6 * ["step" if fails else "replay"]
    Trainer(Adam(0.01), cross_entropy)(other, *data, plan)
    same(network, other)
    again = small()
    kind.run(again, *data, plan)
    assert made[10:] == 9 * ["step" if fails else "replay"]
    same(again, other)


@pytest.mark.gpu
def test_captured_steps_are_the_same_steps():
    device = torch.device("cuda")
    x, y = (part.to(device) for part in images(400, 16))
    x = x.float()
    index, weight = in_a_stream(400, 3, 50, torch.Generator().manual_seed(1))
    plan = Plan(index, weight, *one_cycle(1e-3, len(index)), drawn_moves(index, 2, torch.Generator().manual_seed(2)))
    found, start = [], torch.zeros(0)
    for graphs in (True, False):
        torch.manual_seed(0)
        network = resnet9(4, width=8).to(device)
        start = parameters_to_vector(network.parameters()).detach()
        Trainer(Adam(0.01), cross_entropy, shift=2, graphs=graphs)(network, x, y, plan)
        assert int(network[1].num_batches_tracked) == len(index)
        found.append(parameters_to_vector(network.parameters()).detach())
    # A GPU adds in any order, and Adam moves a weight as far for a gradient of rounding errors as for another.
    captured, plain = found
    assert (captured - plain).norm() < 0.02 * (plain - start).norm()
