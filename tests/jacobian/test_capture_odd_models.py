"""Odd models, and any selection of their parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import oracles
import whence
from capture_models import MODELS, prepared
from capture_modules import WIDTH, Applied, Flat, small, tokens, vectors
from capture_oracle import assert_captures, by_parameter, oracle, selected
from whence.jacobian.capture import Capture
from whence.jacobian.gradients import Dense

# --- What is captured -------------------------------------------------------------------------------------------------


def test_any_selection_of_parameters() -> None:
    model = small()
    every = selected(model)
    inputs, cotangents = vectors(3), torch.randn(2, 3, 2, dtype=torch.float64)
    expected = oracle(model, inputs, cotangents)
    for name in every:
        capture = Capture(model, {name: every[name]}, example_inputs=vectors(5))
        (tangent,) = capture.run(inputs).tangents(cotangents)
        assert tangent.block.parameters == (name,)
        torch.testing.assert_close(by_parameter([tangent])[name], expected[name])
        if name.endswith("bias"):
            assert isinstance(tangent, Dense)


def test_unused_parameters_are_zero_blocks_that_cost_no_memory() -> None:
    model = Applied(lambda x, used, unused: x * used, used=(WIDTH,), unused=(1000, 1000)).double()
    capture = Capture(model, selected(model), example_inputs=vectors(3))
    assert any("do not depend on unused" in note for note in capture.notes)
    tangent = capture.run(vectors(4)).tangents(torch.ones(1, 4, 2, dtype=torch.float64))[1]
    assert isinstance(tangent, Dense)
    assert tangent.values.shape == (4, 1, 10**6)
    assert tangent.values.untyped_storage().nbytes() == 8
    assert not tangent.values.any()


def test_the_generic_way_is_noted() -> None:
    model = prepared(MODELS["einsum"])
    capture = Capture(model, selected(model), example_inputs=tokens(3))
    assert capture.fallback == {"w"}
    assert "w: gradients example by example, since no rule covers a use of it" in capture.notes


class DataDependent(nn.Module):
    """Control flow that vmap cannot follow, around an operation without a rule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 2))
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [torch.einsum("d,de->e", row * (2 if float(row.detach().sum()) > 0 else 1), self.weight) for row in x]
        return self.linear(torch.stack(rows))


def test_examples_one_at_a_time_where_vmap_cannot_follow() -> None:
    model = DataDependent().double()
    capture = Capture(model, selected(model), example_inputs=vectors(5))
    assert set(capture.fallback) == {"weight"}
    assert any("one example at a time" in note for note in capture.notes)
    assert_captures(capture, model, vectors(3))


class Skipping(DataDependent):
    """As masks of Hugging Face's models: left out, and a parameter used in another way, where nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        whole = bool((x > 0).all())
        return super().forward(torch.einsum("ni,oi->no", x, self.inner.weight) if whole else self.inner(x))


@pytest.mark.parametrize("whole", [[0], [1, 2], [0, 1, 2, 3, 4]])
def test_examples_that_take_another_path_alone_than_together(whole: list[int]) -> None:
    torch.manual_seed(0)
    model, inputs = Skipping().double(), -vectors(5).abs()
    inputs[whole] *= -1
    capture = Capture(model, selected(model), example_inputs=inputs)
    assert capture.fallback == {"weight", "inner.weight"}
    assert_captures(capture, model, inputs)
    assert_captures(capture, model, vectors(3))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(lambda y: self.inner(y).tanh(), x, use_reentrant=False))


class Rounded(torch.autograd.Function):
    """A function of torch's own graph, out of sight of function modes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.T, x.T @ grad


class Frozen(nn.Module):
    """Part of the model runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.inner(x)
        return self.head(x)


ODD = {
    "checkpoint": (Checkpointed, {}),
    "autograd function": (lambda: Applied(lambda x, w: Rounded.apply(x, w), w=(WIDTH, 2)), {"w"}),
    "no gradients inside": (Frozen, {}),
    "channels last": (
        lambda: Flat(nn.Conv2d(2, 3, 2, padding=1), nn.Conv2d(3, 2, 2)).to(memory_format=torch.channels_last),
        {},
    ),
}


@pytest.mark.parametrize(("build", "generic"), ODD.values(), ids=ODD)
def test_odd_models(build: Any, generic: Any) -> None:
    model = build().double().eval()
    make = (lambda n: torch.randn(n, 2, 3, 4, dtype=torch.float64)) if isinstance(model, Flat) else vectors
    capture = Capture(model, selected(model), example_inputs=make(5))
    assert_captures(capture, model, make(3))
    assert set(capture.fallback) == set(generic)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_scripted_models_go_one_example_at_a_time() -> None:
    model = small()
    with torch.jit.optimized_execution(False):
        scripted = torch.jit.trace(model, vectors(2), check_trace=False)
    capture = Capture(scripted, dict(scripted.named_parameters()), example_inputs=vectors(5))
    inputs, cotangents = vectors(3), torch.randn(2, 3, 2, dtype=torch.float64)
    got = by_parameter(capture.run(inputs).tangents(cotangents))
    for name, expected in oracle(model, inputs, cotangents).items():
        torch.testing.assert_close(got[name], expected)


LEFT: dict[str, tuple[Any, Any]] = {
    "W @ x.T": (lambda x, w: (w @ x.T).T, vectors),
    "mm": (lambda x, w: torch.mm(w, x.T).T, vectors),
    "matmul": (lambda x, w: torch.matmul(w, x.permute(1, 2, 0)).permute(2, 0, 1), tokens),
}


@pytest.mark.parametrize("rows", [3, WIDTH])
@pytest.mark.parametrize("way", LEFT)
def test_examples_as_columns_behind_a_weight_on_the_left(way: str, rows: int) -> None:
    """Also where as many examples, positions or outputs as rows or columns of the weight hide which axis is which."""
    torch.manual_seed(0)
    function, inputs = LEFT[way]
    model = Applied(function, w=(rows, WIDTH)).double().eval()
    for first in (2, 3, WIDTH):
        capture = Capture(model, selected(model), example_inputs=inputs(first))
        assert capture.fallback == {"w"}
        for n in (3, WIDTH, 1):
            assert_captures(capture, model, inputs(n))
    x, y, points = inputs(20), torch.randn(20, 2, dtype=torch.float64), inputs(5)
    f, tangents, _ = oracles.tangents_of(model, x)
    residuals = y.numpy() - f
    wanted = oracles.covariances(
        oracles.tangents_of(model, points)[1], tangents, residuals, 0.3, sigma=oracles.noise_covariance(residuals)
    )
    predicted = whence.fit(model, [(x, y)], ridge=0.3, progress=False).predict(points)
    for name in ("hec0", "hec3"):
        found = predicted.covariance(name).numpy()
        np.testing.assert_allclose(found, wanted[name], rtol=1e-6, atol=1e-8 * abs(wanted[name]).max(), err_msg=name)


class Gated(nn.Module):
    """A sequence, of which nothing comes out unless its first number is positive: then no gradient, either."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.GRU(1, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.cell(x.unsqueeze(2))[0][:, -1]) * x[:, :1].sign().relu()
        return found


@pytest.mark.parametrize("length", [2, 3, 5, 7])
def test_sequences_as_long_as_there_are_examples(length: int) -> None:
    """Where gradients of the first batch are zero, they do not tell which axis is which; shapes of fewer do."""
    model = Gated().double().eval()
    inputs = torch.randn(length, length, dtype=torch.float64).abs()
    capture = Capture(model, selected(model), example_inputs=-inputs)
    assert_captures(capture, model, inputs)
    assert_captures(capture, model, inputs[:1])
    if length == 2:
        assert_captures(Capture(model, selected(model), example_inputs=-inputs[:1]), model, inputs)
