"""A model that is not the one that was fitted any more."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import whence
from doubles import Counting, Wrapped, batches, fit, inputs_and_targets, mlp


def in_place(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("2.bias").add_(1e-12)


def through_data(model: nn.Module) -> None:
    model.get_parameter("2.bias").data[0] *= -1


def exchanged(model: nn.Module) -> None:
    model.get_parameter("2.bias").data.copy_(model.get_parameter("2.bias").data.flip(0))


def loaded(model: nn.Module) -> None:
    other = copy.deepcopy(model)
    other.get_parameter("2.bias").data += 1
    model.load_state_dict(other.state_dict())


def replaced(model: nn.Module) -> None:
    assert isinstance(model, nn.Sequential)
    model[2].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))


def trained(model: nn.Module) -> None:
    optimiser = torch.optim.SGD([model.get_parameter("2.bias")], lr=0.1)
    x, y = inputs_and_targets()
    (model(x) - y).square().sum().backward()
    optimiser.step()


@pytest.mark.parametrize("change", [in_place, through_data, exchanged, loaded, replaced, trained])
def test_changed_weights(change: Callable[[nn.Module], None]) -> None:
    model = mlp()
    tracer = fit(model, batches())
    change(model)
    message = (
        r"weights and buffers that were fitted, got changes in 2\.bias\. Call whence\.fit again, or load the fitted "
        "weights"
    )
    with pytest.raises(whence.StaleModelError, match=message):
        tracer.predict(inputs_and_targets()[0])


def test_the_weights_of_that_time_serve_again() -> None:
    model = mlp()
    kept = copy.deepcopy(model.state_dict())
    tracer = fit(model, batches())
    x, _ = inputs_and_targets()
    before = tracer.predict(x)
    in_place(model)
    with pytest.raises(whence.StaleModelError):
        tracer.predict(x)
    model.load_state_dict(kept)
    torch.testing.assert_close(tracer.predict(x).hec3, before.hec3, rtol=0, atol=0)


def test_another_dtype() -> None:
    model = mlp()
    tracer = fit(model, batches())
    model.float()
    with pytest.raises(whence.StaleModelError, match=r"got changes in 0\.bias, 0\.weight, 2\.bias, 2\.weight"):
        tracer.predict(inputs_and_targets()[0].float())


@pytest.mark.parametrize("persistent", [True, False])
def test_changed_buffers(persistent: bool) -> None:
    model = Wrapped()
    model.register_buffer("shift", torch.zeros(2), persistent=persistent)
    tracer = fit(model, batches())
    model.get_buffer("shift").add_(1)
    with pytest.raises(whence.StaleModelError, match=r"got changes in shift\."):
        tracer.predict(inputs_and_targets()[0])


def test_a_parameter_more_or_less() -> None:
    model = Wrapped()
    tracer = fit(model, batches())
    model.extra = nn.Parameter(torch.zeros(1))
    with pytest.raises(whence.StaleModelError, match=r"got changes in extra\."):
        tracer.predict(inputs_and_targets()[0])
    del model.extra
    assert len(tracer.predict(inputs_and_targets()[0])) == 8


def test_calls_of_our_own_do_not_make_a_model_stale() -> None:
    model = Counting()
    tracer = fit(model, batches())
    x, _ = inputs_and_targets()
    torch.testing.assert_close(tracer.predict(x).hec3, tracer.predict(x).hec3, rtol=0, atol=0)


@pytest.mark.gpu
def test_a_model_on_another_device() -> None:
    model = mlp()
    tracer = fit(model, batches())
    model.cuda()
    with pytest.raises(
        whence.StaleModelError, match=r"expected the model on cpu, where it was fitted, got it on cuda:0"
    ):
        tracer.predict(inputs_and_targets()[0])
