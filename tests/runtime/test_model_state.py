"""A model is given back as it was found, whatever a forward pass does to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from doubles import Counting, mlp
from whence.runtime.model_state import fingerprint, preserved


def test_everything_that_can_be_set_is_set_back(device: torch.device) -> None:
    model = mlp(device)
    model.register_buffer("shift", torch.ones(2, device=device))
    weight, shift = model[0].weight, model.shift
    weight.grad = torch.ones_like(weight)
    kept = weight.grad
    before = fingerprint(model)
    with preserved(model):
        model.train()
        model[0].weight.requires_grad_(False)
        model[0].weight.grad = None
        model.shift.mul_(3)
        model.shift = torch.zeros(2, device=device)
        model.note = "new"
        model[1].register_forward_hook(lambda *_: None)
        model.register_buffer("more", torch.zeros(1))
        model.add_module("extra", nn.Linear(2, 2))
        model[2].bias.grad = torch.ones_like(model[2].bias)
    assert not any(module.training for module in model.modules())
    assert model[0].weight is weight
    assert weight.requires_grad
    assert weight.grad is kept
    assert model[2].bias.grad is None
    assert model.shift is shift
    assert shift.tolist() == [1, 1]
    assert not hasattr(model, "note")
    assert not hasattr(model, "more")
    assert not hasattr(model, "extra")
    assert not model[1]._forward_hooks
    assert fingerprint(model) == before


def test_lists_dicts_and_counters(device: torch.device) -> None:
    model = Counting(device)
    history, cache = model.history, model.cache
    with preserved(model):
        model(torch.zeros(2, 3, dtype=torch.float64, device=device))
        assert (model.times, int(model.calls), len(model.history)) == (1, 1, 1)
    assert (model.times, int(model.calls), model.last) == (0, 0, None)
    assert model.history is history == []
    assert model.cache is cache == {}


def test_buffers_with_nan_and_sparse_buffers() -> None:
    model = mlp()
    model.register_buffer("mask", torch.tensor([float("nan"), float("-inf")]))
    model.register_buffer("graph", torch.eye(3).to_sparse())
    before = fingerprint(model)
    with preserved(model):
        model.mask.zero_()
    assert fingerprint(model) == before


def test_inside_tensors_are_normal_and_without_a_graph() -> None:
    model = mlp()
    with torch.inference_mode(), preserved(model):
        outputs = model(torch.zeros(1, 3, dtype=torch.float64))
        assert not outputs.is_inference()
        assert not outputs.requires_grad
        with torch.enable_grad():
            assert model(torch.zeros(1, 3, dtype=torch.float64)).requires_grad


def test_borrowed_twice() -> None:
    model = Counting()
    with preserved(model):
        model.times = 5
        with preserved(model):
            model.times = 7
        assert model.times == 5
    assert model.times == 0


def test_the_random_state_is_the_users() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with preserved(mlp()):
        torch.rand(100)
    assert torch.equal(torch.rand(3), expected)


def test_errors_pass_through() -> None:
    with pytest.raises(ZeroDivisionError), preserved(mlp()):
        raise ZeroDivisionError


def test_fingerprints_name_parameters_and_buffers_of_every_kind() -> None:
    model = Counting()
    model.register_buffer("phase", torch.ones(2, dtype=torch.complex128))
    assert set(fingerprint(model)) == {
        "net.0.weight",
        "net.0.bias",
        "net.2.weight",
        "net.2.bias",
        "calls",
        "hidden",
        "phase",
    }
