"""What a capture promises beside right numbers: forms, memory, precision, and a model left as it was."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from capture_models import MODELS, Model, prepared, running
from capture_modules import WIDTH, Flat, mix, small, tokens, vectors
from capture_oracle import assert_captures, by_parameter, call_of, oracle, selected
from whence.errors import ShapeError
from whence.jacobian.capture import Capture
from whence.jacobian.gradients import Kronecker, Rows
from whence.jacobian.network import Network

# --- Forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_factors_know_their_shapes_and_project(case: Model) -> None:
    model = prepared(case)
    capture = Capture(call_of(model), selected(model), example_inputs=case.inputs(5))
    captured = capture.run(case.inputs(3))
    found = captured.tangents(torch.randn(2, *captured.outputs.shape, dtype=torch.float64))
    assert [tangent.block for tangent in found] == list(capture.blocks)
    for tangent in found:
        assert tangent.materialize().shape == (3, 2, *tangent.block.matrix_shape)
        if isinstance(tangent, Kronecker):
            e, o, i = tangent.block.matrix_shape
            assert tangent.inputs().shape == tangent.a.shape == (3, e, tangent.positions, i)
            assert tangent.grads().shape == tangent.g.shape == (3, 2, e, tangent.positions, o)
            for factor, size in ((tangent.a, i), (tangent.g, o)):
                basis = torch.randn(e, size, 2, dtype=torch.float64)
                torch.testing.assert_close(factor.project(basis), factor.tensor() @ basis)
        elif isinstance(tangent, Rows):
            rows, examples, values = tangent.aggregate()
            assert len({*zip(rows.tolist(), examples.tolist(), strict=True)}) == len(rows)
            assert values.shape[1:] == (2, tangent.block.matrix_shape[1])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_blocks_convert_to_matrices_and_back() -> None:
    for case in MODELS.values():
        model = case.build().double().eval()
        capture = Capture(call_of(model), selected(model), example_inputs=case.inputs(3))
        for block in capture.blocks:
            values = {
                name: torch.randn(2, *shape, dtype=torch.float64)
                for name, shape in zip(block.parameters, block.shapes, strict=True)
            }
            matrix = block.to_matrix(values)
            assert matrix.shape == (2, *block.matrix_shape)
            assert matrix[0].numel() == block.numel
            for name, value in block.from_matrix(matrix).items():
                assert torch.equal(value, values[name])


# --- Runs -------------------------------------------------------------------------------------------------------------


def test_tangents_can_be_asked_for_again_until_the_last_time() -> None:
    model = small()
    captured = Capture(model, selected(model), example_inputs=vectors(3)).run(vectors(4))
    cotangents = torch.randn(3, 4, 2, dtype=torch.float64)
    whole = by_parameter(captured.tangents(cotangents))
    parts = [by_parameter(captured.tangents(part, last=at == 1)) for at, part in enumerate(cotangents.split([2, 1]))]
    for name in whole:
        torch.testing.assert_close(torch.cat([part[name] for part in parts], 1), whole[name])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        captured.tangents(cotangents)


@pytest.mark.parametrize("name", ["linear on a sequence", "Conv2d", "folded, inner", "LayerNorm", "LSTM", "Embedding"])
def test_batched_backward_passes_give_the_same(name: str) -> None:
    model = prepared(MODELS[name])
    captured = Capture(model, selected(model), example_inputs=MODELS[name].inputs(3)).run(MODELS[name].inputs(4))
    cotangents = torch.randn(3, 4, 2, dtype=torch.float64)
    one, other = captured.tangents(cotangents), replace(captured, vectorized=True).tangents(cotangents, last=True)
    for ours, theirs in zip(one, other, strict=True):
        torch.testing.assert_close(ours.materialize(), theirs.materialize())


class Unbatched(torch.autograd.Function):
    """A kernel of its own, with no vectorised form."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return 2.0 * x

    @staticmethod
    def backward(context: Any, *grads: Tensor) -> Tensor:
        return 2.0 * torch.from_numpy(grads[0].numpy())


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return Unbatched.apply(self.linear(x))


class WrappedForOne(Wrapped):
    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 1:
            raise ShapeError(f"expected one example, got {len(x)}.")
        return super().forward(x)


def test_models_of_single_examples_that_vmap_cannot_follow_are_found_out() -> None:
    model = WrappedForOne().double()
    capture = Capture(model, selected(model), example_inputs=vectors(1))
    assert not capture.vectorizes(vectors(2))


def test_models_that_vmap_cannot_follow_are_found_out() -> None:
    for model, vectorizes in ((small(), True), (Wrapped().double(), False)):
        capture = Capture(model, selected(model), example_inputs=vectors(3))
        assert capture.vectorizes(vectors(2)) is vectorizes


def test_works_without_gradients_and_leaves_the_model_as_it_was() -> None:
    model = Flat(nn.Conv2d(2, 3, 2), running(nn.BatchNorm2d(3)), nn.ReLU(inplace=True)).double().eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    inputs = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    with torch.no_grad():
        captured = Capture(model, selected(model), example_inputs=inputs).run(inputs)
        captured.tangents(torch.ones(1, 4, 2, dtype=torch.float64))
        assert not torch.is_grad_enabled()
    assert not captured.outputs.requires_grad
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._backward_hooks


def test_works_in_inference_mode() -> None:
    model, inputs = small(), vectors(4)
    with torch.inference_mode():
        captured = Capture(model, selected(model), example_inputs=inputs).run(inputs)
        got = by_parameter(captured.tangents(torch.ones(1, 4, 2, dtype=torch.float64)))
    for name, expected in oracle(model, inputs, torch.ones(1, 4, 2, dtype=torch.float64)).items():
        torch.testing.assert_close(got[name], expected)


def test_a_run_frees_its_graph() -> None:
    model = small()
    capture = Capture(model, selected(model), example_inputs=vectors(3))
    seen: list[Any] = []
    handle = model[0].register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    captured = capture.run(vectors(4))
    captured.tangents(torch.ones(1, 4, 2, dtype=torch.float64))
    handle.remove()
    del captured
    gc.collect()
    assert [reference() for reference in seen] == [None]


def test_threads_do_not_see_each_other() -> None:
    case = MODELS["class token and positions"]
    models = [prepared(case) for _ in range(4)]
    failures: list[BaseException] = []

    def work(model: nn.Module) -> None:
        try:
            capture = Capture(model, selected(model), example_inputs=tokens(4))
            for _ in range(3):
                assert_captures(capture, model, tokens(3))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# --- Devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_every_model_on_a_gpu(case: Model) -> None:
    with torch.device("cuda"):
        model = prepared(case)
        capture = Capture(Network(model), selected(model), example_inputs=case.inputs(6))  # without cuDNN's recurrence
        assert_captures(capture, model, case.inputs(4))
    assert set(capture.fallback) == case.fallback


# --- Precision --------------------------------------------------------------------------------------------------------

PRECISE = ["linear on a sequence", "Conv2d", "LayerNorm", "BatchNorm2d", "transformer", "class token and positions"]


def lowered(inputs: Any, dtype: torch.dtype) -> Any:
    return inputs.to(dtype) if inputs.is_floating_point() else inputs


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1), (torch.float16, 2e-2)], ids=str
)
@pytest.mark.parametrize("name", [*PRECISE, "LSTM", "Embedding", "weight norm"])
def test_models_of_any_precision(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = MODELS[name]
    model = prepared(case).to(dtype)
    reference = prepared(case)
    reference.load_state_dict(model.state_dict())
    capture = Capture(model, selected(model), example_inputs=lowered(case.inputs(5), dtype))
    inputs = lowered(case.inputs(3), dtype)
    captured = capture.run(inputs)
    cotangents = torch.randn(2, 3, 2)
    exact = oracle(reference, lowered(inputs, torch.float64), cotangents.to(dtype).double())
    got = by_parameter(captured.tangents(cotangents, last=True))
    scale = max(float(expected.norm()) for expected in exact.values())
    for parameter, expected in exact.items():
        gap = float((got[parameter].double() - expected).norm())
        assert gap <= tolerance * (float(expected.norm()) + 0.1 * scale), parameter


class Mixed(nn.Module):
    """A float32 model that computes in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mix(self.inner(x)).float()


def test_mixed_precision() -> None:
    model = Mixed()
    capture = Capture(model, selected(model), example_inputs=torch.randn(5, WIDTH))
    assert not capture.fallback
    assert_captures(capture, model, torch.randn(3, WIDTH), 0.05)
