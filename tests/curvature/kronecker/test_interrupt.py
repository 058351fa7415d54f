"""Ctrl-C at any moment leaves the model, and torch, as they were."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import whence

STRUCTURES = {
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
    "core": whence.Core(size=20),
    "sketch": whence.Sketch(size=20),
}


class Model(nn.Module):
    """Layers of every kind; it can be told to be interrupted in the middle of its n-th forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(2, 4, 2), nn.BatchNorm1d(4)
        self.scale, self.head = nn.Parameter(torch.ones(4)), nn.Linear(4, 2)
        self.calls, self.stop = 0, -1

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x)).tanh().mean(2)
        self.calls += 1
        if self.calls == self.stop:
            raise KeyboardInterrupt
        return self.head(hidden * self.scale)


class Loader:
    """Batches that can be read again and again, until the n-th of them."""

    def __init__(self, stop: int = -1) -> None:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(10, 2, 5, generator=generator)
        self.batches = list(zip(x.split(4), torch.ones(10, 2).split(4), strict=True))
        self.read, self.stop = 0, stop

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in self.batches:
            self.read += 1
            if self.read == self.stop:
                raise KeyboardInterrupt
            yield batch

    def __len__(self) -> int:
        return len(self.batches)


def state(model: nn.Module) -> dict[str, Any]:
    """Everything that could have changed, in comparable form."""
    return {
        "objects": [id(tensor) for tensor in (*model.parameters(), *model.buffers())],
        "values": [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())],
        "needed": [parameter.requires_grad for parameter in model.parameters()],
        "grads": [id(parameter.grad) for parameter in model.parameters()],
        "modes": [module.training for module in model.modules()],
        "hooks": [
            len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
            for module in model.modules()
        ],
        "dispatch": len(_get_current_function_mode_stack()),
        "graphs": torch.is_grad_enabled(),
        "chance": torch.get_rng_state(),
    }


def assert_same(got: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name, value in wanted.items():
        if name == "values":
            assert all(map(torch.equal, got[name], value))
        elif isinstance(value, Tensor):
            assert torch.equal(got[name], value)
        else:
            assert got[name] == value, name


def fit(model: nn.Module, loader: Loader, structure: whence.Structure) -> whence.Tracer:
    return whence.fit(model, loader, structure=structure, progress=False)


@pytest.fixture
def model() -> Model:
    made = Model().eval()
    made.head.weight.grad = torch.ones_like(made.head.weight)
    made.norm.bias.requires_grad_(False)
    return made


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_an_interrupt_while_reading_leaves_nothing_behind(structure: whence.Structure, model: Model) -> None:
    before, complete = state(model), Loader()
    reference = fit(model, complete, structure)
    assert_same(state(model), before)
    assert complete.read >= 6
    for stop in range(1, complete.read + 1):
        with pytest.raises(KeyboardInterrupt):
            fit(model, Loader(stop), structure)
        assert_same(state(model), before)
    again = fit(model, Loader(), structure)
    x = complete.batches[0][0]
    assert torch.equal(again.predict(x).hec3, reference.predict(x).hec3)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
def test_an_interrupt_inside_the_model_leaves_nothing_behind(structure: whence.Structure, model: Model) -> None:
    before = state(model)
    tracer, x = fit(model, Loader(), structure), Loader().batches[0][0]
    stop = 0
    while True:
        stop += 1
        model.calls, model.stop = 0, stop
        try:
            fit(model, Loader(), structure)
        except KeyboardInterrupt:
            assert_same(state(model), before)
            continue
        break
    assert stop > 10
    wanted = tracer.predict(x).ho
    model.calls, model.stop = 0, 1
    with pytest.raises(KeyboardInterrupt):
        tracer.predict(x)
    assert_same(state(model), before)
    model.stop = -1
    assert torch.equal(tracer.predict(x).ho, wanted)


def test_passes_are_told_with_the_batch_and_the_time_left(model: Model, capsys: pytest.CaptureFixture[str]) -> None:
    class Slow(Loader):
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in super().__iter__():
                clock.append(clock[-1] + 20.0)
                yield batch

    clock = [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("whence.runtime.execution.time.monotonic", lambda: clock[-1])
        patch.setattr("whence.curvature.accumulate.CACHE_BYTES", {"cpu": 0, "cuda": 0})  # else one pass is read
        whence.fit(model, Slow(), structure="ekfac", progress=True)
    told = capsys.readouterr().err
    for label in ("Kronecker factors", "eigenvalues", "leverage"):
        assert f"{label}, batch 2 of 3" in told or f"{label}, batch 1 of 3" in told, told
    assert "left" in told
