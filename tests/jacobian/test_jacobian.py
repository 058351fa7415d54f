"""Rows of the Jacobian, and products with it, against one backward pass an example and output; for any model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capture_models import MODELS, Model, prepared
from doubles import inputs_and_targets, mlp
from oracles import tangents_of
from whence.data.batches import tensors_of, to_device
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.network import Choice, Network, select
from whence.jacobian.record import gradients

CPU = torch.device("cpu")


def jacobian_of(model: nn.Module, chunk_size: int | None = None, parameters: Choice = "all") -> Jacobian:
    return Jacobian(Network(model), select(Network(model), parameters, None), chunk_size, torch.float64)


def all_rows(jacobian: Jacobian, inputs: Any, outputs: int = 2) -> Tensor:
    return torch.cat([rows for _, rows in jacobian.rows(inputs, outputs)])


def check(model: nn.Module, inputs: Any, tolerance: float = 1e-9, chunk_size: int | None = None) -> list[str]:
    """Rows, J v and J^T u against the oracle, which sees the model on the CPU; what was noted on the way."""
    device = next(model.parameters()).device
    sparse = [module for module in model.modules() if getattr(module, "sparse", False)]
    for module in sparse:
        module.sparse = False  # the oracle knows dense gradients only
    _, expected, weights = tangents_of(model.cpu(), to_device(inputs, CPU))
    for module in sparse:
        module.sparse = True
    model.to(device)
    jacobian = jacobian_of(model, chunk_size)
    n, k, d = expected.shape
    directions = torch.randn(3, d, dtype=torch.float64)
    cotangents = torch.randn(3, n, k, dtype=torch.float64)
    with device:  # where the models make masks and positions
        found = all_rows(jacobian, inputs, k).cpu()
        moved = jacobian.jvp(inputs, directions.to(device)).cpu()
        pulled = jacobian.vjp(inputs, cotangents.to(device)).cpu()
    scale = {"rtol": 0, "atol": tolerance * max(1.0, float(np.abs(expected).max()))}
    rows = torch.from_numpy(expected)
    assert jacobian.size == d
    torch.testing.assert_close(jacobian.weights().cpu(), torch.from_numpy(weights))
    torch.testing.assert_close(found, rows, **scale)
    torch.testing.assert_close(moved, torch.einsum("nkp,qp->qnk", rows, directions), rtol=0, atol=10 * scale["atol"])
    torch.testing.assert_close(pulled, torch.einsum("nkp,qnk->qp", rows, cotangents), rtol=0, atol=10 * scale["atol"])
    assert not found.requires_grad
    assert not moved.requires_grad
    assert not pulled.requires_grad
    return jacobian.notes


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", MODELS)
def test_any_layer(name: str, device: torch.device) -> None:
    case: Model = MODELS[name]
    coarse = name == "weight norm" and device.type == "cuda"  # torch's kernel takes the norm in single precision
    model, inputs = prepared(case).to(device), to_device(case.inputs(4), device)
    check(model, inputs, 1e-6 if coarse else 1e-9, chunk_size=3)


class Branching(nn.Module):
    """Asks for values of the data: nothing that `torch.vmap` can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.left(row) if row.sum().item() > 0 else self.right(row).tanh() for row in x])


class OldStyle(torch.autograd.Function):
    """A function that `torch.func` cannot transform, and that can be differentiated once only."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return gradient * x.exp()


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return OldStyle.apply(self.layer(x))  # type: ignore[no-any-return]


class Changing(nn.Module):
    """Writes into its own intermediate results, and into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        hidden += x[:, :2] ** 2
        hidden[:, 0] *= 2
        self.largest.copy_(hidden.detach().max())
        return hidden.tanh_()


HARD: dict[str, tuple[type[nn.Module], tuple[str, ...]]] = {
    "control flow": (Branching, ("torch.vmap cannot run this model",)),
    "custom function": (Custom, ("forward-mode derivatives failed",)),
    "in place": (Changing, ()),
}


@pytest.mark.parametrize("name", HARD)
def test_models_that_torch_func_cannot_follow(name: str, device: torch.device) -> None:
    kind, failures = HARD[name]
    notes = check(kind().double().to(device), inputs_and_targets(device)[0])
    for failure in failures:
        assert any(failure in note for note in notes), notes


class Constant(nn.Module):
    """Some examples do not touch a parameter at all."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = [self.layer(row) if float(row[0]) > 0 else row[:2] for row in x]
        return torch.stack(rows)


def test_examples_that_use_no_parameter(device: torch.device) -> None:
    model, x = Constant().double().to(device), inputs_and_targets(device)[0]
    jacobian = jacobian_of(model)
    found = all_rows(jacobian, x)
    expected = all_rows(jacobian_of(model.layer), x) * (x[:, 0] > 0)[:, None, None]
    torch.testing.assert_close(found, expected)
    cotangents = torch.randn(2, 8, 2, dtype=torch.float64, device=device)
    torch.testing.assert_close(jacobian.vjp(x, cotangents), torch.einsum("nkp,qnk->qp", expected, cotangents))
    untouched = x[x[:, 0] <= 0]
    assert jacobian.vjp(untouched, torch.ones(1, len(untouched), 2, device=device)).abs().max() == 0
    assert jacobian.jvp(untouched, torch.ones(1, 8, dtype=torch.float64, device=device)).abs().max() == 0


@pytest.mark.parametrize("squeezed", [lambda out: out.squeeze(), lambda out: out[:, 0]], ids=["squeeze", "index"])
def test_one_output_in_one_axis(squeezed: Any, device: torch.device) -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return squeezed(self.layer(x))

    x = inputs_and_targets(device)[0]
    assert check(Flat().to(device), x) == []
    assert check(Flat().to(device), x[:1]) == []


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05), (torch.float16, 5e-3)])
def test_other_precisions(dtype: torch.dtype, tolerance: float, device: torch.device) -> None:
    model, x = mlp(device, dtype), inputs_and_targets(device)[0].to(dtype)
    jacobian = jacobian_of(model)
    found = all_rows(jacobian, x)
    assert found.dtype == torch.float64
    expected = tangents_of(model.double().cpu(), x.double().cpu())[1]
    torch.testing.assert_close(found.cpu(), torch.from_numpy(expected), rtol=0, atol=tolerance)
    assert jacobian.notes == []


class MixedPrecision(nn.Module):
    """A half-precision body, a head in float32 and a scale in float64, as in models trained by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4, dtype=torch.bfloat16), nn.Linear(4, 2, dtype=torch.float32)
        self.scale = nn.Parameter(torch.tensor([1.5, 0.5], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.bfloat16()).tanh().float()) * self.scale


def test_parameters_of_several_dtypes(device: torch.device) -> None:
    """The rows of the head are the hidden units times the scale, to the precision of the body."""
    model, x = MixedPrecision().to(device), inputs_and_targets(device)[0]
    jacobian = jacobian_of(model)
    rows = jacobian.selection.unflatten(all_rows(jacobian, x))
    hidden = model.body(x.bfloat16()).tanh().double()
    expected = torch.zeros(8, 2, 2, 4, dtype=torch.float64, device=device)
    for c in range(2):
        expected[:, c, c] = hidden * model.scale[c]
    torch.testing.assert_close(rows["head.weight"], expected.detach(), rtol=0, atol=2e-2)
    direction = torch.randn(1, jacobian.size, dtype=torch.float64, device=device)
    flat = all_rows(jacobian, x)
    torch.testing.assert_close(jacobian.jvp(x, direction)[0], flat @ direction[0], rtol=0, atol=0.1)
    cotangent = torch.randn(2, 8, 2, dtype=torch.float64, device=device)
    pulled = torch.einsum("nkp,qnk->qp", flat, cotangent)
    torch.testing.assert_close(jacobian.vjp(x, cotangent), pulled, rtol=0, atol=0.2)


def test_selected_parameters_only(device: torch.device) -> None:
    model, x = mlp(device), inputs_and_targets(device)[0]
    whole, part = jacobian_of(model), jacobian_of(model, parameters=["2.weight", "0.bias"])
    everything = whole.selection.unflatten(all_rows(whole, x))
    some = part.selection.unflatten(all_rows(part, x))
    assert list(some) == ["0.bias", "2.weight"]
    for name, rows in some.items():
        torch.testing.assert_close(rows, everything[name])
        assert not rows.requires_grad


# --- Memory ---------------------------------------------------------------------------------------------------------


class Watched(nn.Module):
    """Notes how many examples come at once; under `torch.vmap` one comes at a time, in name."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        outputs: Tensor = self.net(x)
        return outputs


@pytest.mark.parametrize("chunk_size", [1, 3, 8, 100])
def test_chunks_hold_no_more_examples_than_asked(chunk_size: int) -> None:
    x = inputs_and_targets()[0]
    parts = list(jacobian_of(mlp(), chunk_size).rows(x, 2))
    assert all(len(rows) <= chunk_size for _, rows in parts)
    assert [where for where, _ in parts][-1].stop == 8
    torch.testing.assert_close(torch.cat([rows for _, rows in parts]), all_rows(jacobian_of(mlp()), x))


@pytest.mark.parametrize("chunk_size", [1, 3, 8])
def test_products_hold_no_more_examples_than_asked(chunk_size: int) -> None:
    model, x = Watched(), inputs_and_targets()[0]
    jacobian, plain = jacobian_of(model, chunk_size), jacobian_of(mlp())
    directions, cotangents = torch.randn(5, 26).double(), torch.randn(5, 8, 2).double()
    torch.testing.assert_close(jacobian.jvp(x, directions), plain.jvp(x, directions))
    torch.testing.assert_close(jacobian.vjp(x, cotangents), plain.vjp(x, cotangents))
    assert max(model.seen) == chunk_size


def test_without_an_option_a_chunk_is_bounded_in_bytes() -> None:
    network = Network(mlp())
    bounded = Jacobian(network, select(network, "all", None), None, torch.float64, chunk_bytes=2 * 2 * 26 * 16)
    assert bounded.chunk(2) == 2
    assert [len(rows) for _, rows in bounded.rows(inputs_and_targets()[0], 2)] == [2, 2, 2, 2]
    tiny = Jacobian(network, select(network, "all", None), None, torch.float64, chunk_bytes=1)
    assert tiny.chunk(2) == 1


def test_tensors_inside_the_inputs_are_cut_alike() -> None:
    nested = {"a": [torch.arange(4), (torch.arange(8).reshape(4, 2), "name")]}
    assert [leaf.shape for leaf in tensors_of(nested)] == [(4,), (4, 2)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_slopes_at_sizes_where_torch_vmap_is_wrong(size: int) -> None:
    """torch's rule for the slopes of PReLU raises at most sizes of a batch, and is silently wrong at others."""
    model = nn.Sequential(nn.PReLU(2), nn.Flatten(), nn.Linear(18, 2)).double()
    check(model, torch.randn(size, 2, 3, 3, dtype=torch.float64))


def test_weights_without_a_part_in_the_outputs(generator: torch.Generator) -> None:
    """Zeros for them want no gradients of their own, and are as many as the cotangents that are pulled back at once."""
    used, unused = (torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
    inputs = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    cotangents = torch.randn(5, 4, 2, generator=generator, dtype=torch.float64)
    outputs = inputs @ used
    for some in (cotangents, cotangents[:1]):
        found = gradients(outputs, [used, unused], some)
        torch.testing.assert_close(found[0], torch.einsum("ni,cno->cio", inputs, some))
        assert found[1].shape == found[0].shape
        assert not any(one.requires_grad or bool(one.any()) for one in found[1:])
