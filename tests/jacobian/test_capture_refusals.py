"""Models, parameters and shapes that a capture refuses, by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from capture_modules import WIDTH, Flat, small, vectors
from capture_oracle import assert_captures, selected
from whence.errors import ShapeError, UncapturedParameterError, UnsupportedLayerError
from whence.jacobian.capture import Capture

# --- Refusals ---------------------------------------------------------------------------------------------------------


class MixedBackward(torch.autograd.Function):
    """The forward pass keeps examples apart, the backward pass does not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad + grad.flip(0)


class LyingGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return MixedBackward.apply(self.linear(x))


def test_gradients_that_do_not_add_up_are_refused_by_name() -> None:
    model = LyingGradient().double()
    with pytest.raises(UncapturedParameterError, match=r"linear\.weight.*norm.*got norm.*Leave linear\.weight out"):
        Capture(model, selected(model), example_inputs=vectors(6))


class Branching(nn.Module):
    """Another path for other data."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(x, self.weight)
        if float(x.detach().abs().max()) > 100:
            out = out + F.linear(torch.stack([x, x], 1), self.weight).sum(1)
        return out[:, :2]


def test_another_path_than_on_the_first_batch_is_proved_where_it_is_taken() -> None:
    model = Branching().double()
    capture = Capture(model, selected(model), example_inputs=vectors(6))
    for inputs in (vectors(4), vectors(4) * 1000, vectors(5)):
        assert_captures(capture, model, inputs)


def test_an_embedding_that_rescales_itself_is_refused() -> None:
    for option in ({"max_norm": 1.0}, {"max_norm": 0.0}, {"scale_grad_by_freq": True}):
        model = Flat(nn.Embedding(6, 2, **option)).double()
        words = torch.zeros(4, 3, dtype=torch.long)
        with pytest.raises(UnsupportedLayerError, match=next(iter(option))):
            Capture(model, selected(model), example_inputs=words)


def test_wrong_shapes_are_refused() -> None:
    flat = nn.Sequential(small(), nn.Flatten(0))
    with pytest.raises(ShapeError, match=r"\(3, k\)"):
        Capture(flat, selected(flat), example_inputs=vectors(3))
