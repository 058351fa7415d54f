"""Captured tangents against one backward pass for every example and cotangent, for every way to use a parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from capture_models import MODELS, Model, prepared
from capture_modules import WIDTH, mix
from capture_oracle import assert_captures, call_of, selected
from whence.jacobian.capture import Capture
from whence.jacobian.rules import READERS, parameters
from whence.jacobian.rules.base import functions

Function = Callable[..., Any]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_tangents_are_the_gradients_of_single_examples(case: Model) -> None:
    model = prepared(case)
    capture = Capture(call_of(model), selected(model), example_inputs=case.inputs(6))
    for n in (4, 1):
        assert_captures(capture, model, case.inputs(n))
    assert set(capture.fallback) == case.fallback
    kinds = {block.name: block.kind for block in capture.blocks}
    assert {name: kinds[name] for name in case.kinds} == case.kinds


# --- Functions of parameters alone, and functions that broadcast them over the examples -------------------------------

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "view": (4, 3),
    "reshape": (4, 3),
    "unflatten": (1, (2, 2)),
    "unsqueeze": (0,),
    "permute": (1, 0),
    "transpose": (0, 1),
    "swapaxes": (0, 1),
    "movedim": (0, 1),
    "narrow": (0, 1, 2),
    "select": (1, 2),
    "to": (torch.float64,),
    "type": (torch.float64,),
    "flip": ((0,),),
    "roll": (1, 0),
    "softmax": (-1,),
    "log_softmax": (-1,),
    "clamp": (0.6, 1.2),
    "cumsum": (0,),
    "pad": ((1, 0),),
    "chunk": (2,),
    "split": (2,),
    "tensor_split": (2,),
    "__getitem__": ((slice(1, None), 2),),
}
FROM_TENSOR = {"view_as", "reshape_as", "type_as"}  # take a second tensor for its shape or dtype
JOINING = {"cat", "concat", "concatenate", "stack", "hstack", "vstack"}
LOWERED = {"float", "half", "bfloat16"}


class Alone(nn.Module):
    """A function of a parameter, multiplied with the examples."""

    def __init__(self, function: Function, name: str) -> None:
        super().__init__()
        self.function, self.name = function, name
        self.weight = nn.Parameter(torch.rand(3, 4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "_weight_norm":
            made = self.function(self.weight, self.weight[:, :1], 0)
        elif self.name in ("permute", "view", "reshape") and resolve_name(self.function) != f"torch.Tensor.{self.name}":
            made = self.function(self.weight, ARGUMENTS[self.name])
        elif self.name in JOINING:
            made = self.function([self.weight, torch.ones(3, 4, dtype=x.dtype), self.weight.exp()])
        elif self.name == "interpolate":
            made = self.function(self.weight[None], size=6)
        elif self.name in FROM_TENSOR:
            made = self.function(self.weight, self.weight)
        else:
            made = self.function(self.weight, *ARGUMENTS.get(self.name, ()))
        parts = made if isinstance(made, (tuple, list)) else [made]
        return mix(torch.cat([x[:, :1] * part.reshape(-1).to(x.dtype) for part in parts], 1))


def last_name(function: Function) -> str:
    full = resolve_name(function) or function.__name__
    return full.removesuffix(".__get__").rsplit(".", 1)[-1]


VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "swapaxes", "movedim"),
    *("narrow", "select", "diagonal", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
    *("clone", "view_as", "reshape_as", "flip", "roll", "tril", "triu", "diag", "diag_embed"),
)
UNARY = (
    *("neg", "exp", "log", "sqrt", "rsqrt", "square", "abs", "reciprocal", "sigmoid", "tanh", "softmax", "log_softmax"),
    *("relu", "clamp", "sum", "mean", "norm", "expm1", "log1p", "sin", "cos", "positive", "cumsum", "negative"),
    *("unbind", "tensor_split", "_weight_norm", "pinverse"),
)
ACTIVATIONS = ("softplus", "relu", "gelu", "silu", "elu", "normalize", "softmax", "log_softmax", "sigmoid", "tanh")
ALONE = {
    **dict.fromkeys(functions(torch, *VIEWS, *UNARY)),
    **dict.fromkeys(functions(Tensor, *VIEWS, *UNARY, "__neg__")),
    **dict.fromkeys(functions(torch.nn.functional, *ACTIVATIONS, "interpolate", "pad")),
    **parameters.PARAMETER_READERS,
}


@pytest.mark.parametrize("function", ALONE, ids=lambda function: resolve_name(function) or function.__name__)
def test_functions_of_parameters_are_followed(function: Function) -> None:
    name = last_name(function)
    model = Alone(function, name).double()
    capture = Capture(model, selected(model), example_inputs=torch.rand(5, WIDTH, dtype=torch.float64))
    assert_captures(capture, model, torch.rand(3, WIDTH, dtype=torch.float64), 1e-2 if name in LOWERED else 1e-8)
    assert not capture.fallback


SPREADS: dict[str, Callable[[Function, Tensor, Tensor], Tensor]] = {
    "where": lambda f, x, p: f(x > 1, x, p) + f(x < 1, p, x) if f is torch.where else f(x, x > 1, p) + f(p, x < 1, x),
    "lerp": lambda f, x, p: f(x, p, 0.3) + f(p, x, x),
    "addcmul": lambda f, x, p: f(p, x, x) + f(x, p, x, value=0.5),
    "addcdiv": lambda f, x, p: f(p, x, x) + f(x, x, p),
    "lerp_": lambda f, x, p: f(x.clone(), p, 0.3),
    "addcmul_": lambda f, x, p: f(x.clone(), p, x),
    "addcdiv_": lambda f, x, p: f(x.clone(), x, p),
    "expand": lambda f, x, p: f(p, len(x), -1, -1) * x + f(p, 2, 3, 4).sum(0),
    "expand_as": lambda f, x, p: f(p, x) * x,
    "broadcast_to": lambda f, x, p: f(p, x.shape) * x,
    "repeat": lambda f, x, p: f(p, len(x), 1, 1) * x + f(p, len(x), 1).view(x.shape) * x,
    "tile": lambda f, x, p: f(p, (len(x), 1, 1)) * x,
    "repeat_interleave": lambda f, x, p: f(p[None], len(x), 0) * x + f(p, len(x), 0).view(3, -1, 4).transpose(0, 1) * x,
    "prelu": lambda f, x, p: f(x - 1, p[:, 0]) + f((x - 1).transpose(0, 2), p[0, :1]).transpose(0, 2),
}


class Spread(nn.Module):
    """A parameter (3, 4) that meets examples (n, 3, 4)."""

    def __init__(self, function: Function, name: str) -> None:
        super().__init__()
        self.function, self.name = function, name
        self.weight = nn.Parameter(torch.rand(3, 4) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.name in SPREADS:
            return mix(SPREADS[self.name](self.function, x, self.weight))
        if self.name.startswith("__i") or (self.name.endswith("_") and not self.name.endswith("__")):
            return mix(self.function(x.clone(), self.weight))
        return mix(self.function(x, self.weight) + self.function(self.weight[:1], x))


@pytest.mark.parametrize(
    "function", parameters.BROADCAST_READERS, ids=lambda function: resolve_name(function) or str(function)
)
def test_parameters_are_broadcast_over_the_examples(function: Function) -> None:
    model = Spread(function, last_name(function)).double()
    capture = Capture(model, selected(model), example_inputs=torch.rand(5, 3, 4, dtype=torch.float64) + 0.5)
    for n in (4, 1):
        assert_captures(capture, model, torch.rand(n, 3, 4, dtype=torch.float64) + 0.5)
    assert not capture.fallback


# --- The table is complete --------------------------------------------------------------------------------------------


class Called(TorchFunctionMode):
    """Notes the functions that are handed a parameter, or something made of parameters alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pure = {id(parameter): parameter for parameter in model.parameters()}
        self.functions: set[Function] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        values = [*args, *(kwargs or {}).values()]
        flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
        tensors = [one for one in flat if isinstance(one, Tensor)]
        if any(id(one) in self.pure for one in tensors):
            self.functions.add(func)
            if isinstance(out, Tensor) and all(id(one) in self.pure for one in tensors):
                self.pure[id(out)] = out
        return out


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
def test_every_rule_has_a_case() -> None:
    seen = {*parameters.PARAMETER_READERS, *parameters.BROADCAST_READERS}
    for case in MODELS.values():
        model = prepared(case)
        with Called(model) as called:
            call_of(model)(case.inputs(2))
        seen |= called.functions
    assert not [resolve_name(function) or function for function in READERS if function not in seen]


# --- Shapes -----------------------------------------------------------------------------------------------------------


@given(
    n=st.integers(1, 5),
    first=st.integers(1, 5),
    channels=st.sampled_from([(1, 1, 1), (2, 4, 2), (3, 3, 3), (4, 2, 1)]),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    padding=st.integers(0, 2),
    dilation=st.integers(1, 2),
    dims=st.integers(1, 3),
    transposed=st.booleans(),
)
def test_convolutions_of_any_geometry(
    n: int,
    first: int,
    channels: tuple[int, int, int],
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    dims: int,
    transposed: bool,
) -> None:
    torch.manual_seed(0)
    kinds = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}
    inputs, outputs, groups = channels
    padding = min(padding, kernel - 1) if transposed else padding
    layer = kinds[dims][transposed](
        inputs, outputs, kernel, stride=stride, padding=padding, dilation=dilation, groups=groups
    )
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten()).double()
    sizes = (5, 6, 5)[:dims]
    capture = Capture(model, selected(model), example_inputs=torch.randn(first, inputs, *sizes, dtype=torch.float64))
    assert_captures(capture, model, torch.randn(n, inputs, *sizes, dtype=torch.float64))


@given(n=st.integers(1, 14), first=st.integers(1, 14), length=st.integers(1, 14), sequence_first=st.booleans())
def test_sequences_as_long_as_the_batch(n: int, first: int, length: int, sequence_first: bool) -> None:
    torch.manual_seed(0)

    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(2, 3), nn.LayerNorm(3)
            self.position = nn.Parameter(torch.randn(length, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = x.transpose(0, 1) if sequence_first else x
            position = self.position[:, None] if sequence_first else self.position
            x = self.norm(self.linear(x)) * position
            return mix(x.transpose(0, 1) if sequence_first else x)

    model = Tokens().double()
    capture = Capture(model, selected(model), example_inputs=torch.randn(first, length, 2, dtype=torch.float64))
    assert_captures(capture, model, torch.randn(n, length, 2, dtype=torch.float64))
    assert not capture.fallback
