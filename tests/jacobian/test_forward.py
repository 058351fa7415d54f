"""One way of calling any model."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import Wrapped, inputs_and_targets, mlp
from whence.errors import first_line
from whence.jacobian.network import CheckedOutputs, Network, arguments, as_outputs, unwrap

TWO = torch.arange(6.0).reshape(3, 2)


@pytest.mark.parametrize(
    "returned",
    [TWO, {"logits": TWO}, OrderedDict(logits=TWO), UserDict(logits=TWO), SimpleNamespace(logits=TWO)],
    ids=["tensor", "dict", "ordered", "mapping", "object"],
)
def test_outputs_are_found(returned: Any) -> None:
    assert as_outputs(returned, 3, "here") is TWO


@pytest.mark.parametrize(
    ("shape", "n", "tidied"),
    [
        ((3,), 3, (3, 1)),
        ((), 1, (1, 1)),
        ((2,), 1, (1, 2)),
        ((1,), 1, (1, 1)),
        ((1, 2), 1, (1, 2)),
        ((3, 1), 3, (3, 1)),
        ((3, 5, 2), 3, (3, 5, 2)),
    ],
)
def test_axes_that_were_squeezed_come_back(shape: tuple[int, ...], n: int, tidied: tuple[int, ...]) -> None:
    assert as_outputs(torch.zeros(shape), n, "here").shape == tidied


@pytest.mark.parametrize(("shape", "n"), [((4, 2, 2), 2), ((4, 2), 2), ((4,), 2), ((1, 2), 2)])
def test_axes_that_do_not_fit(shape: tuple[int, ...], n: int) -> None:
    with pytest.raises(
        whence.ShapeError, match=rf"expected outputs of shape \({n}, k\), one row for each of the {n} examples"
    ):
        as_outputs(torch.zeros(shape), n, "here")


def test_arguments() -> None:
    x = torch.zeros(1)
    assert arguments(x) == ((x,), {})
    assert arguments((x, 2)) == ((x, 2), {})
    assert arguments([x]) == ((x,), {})
    assert arguments(UserDict(a=x)) == ((), {"a": x})


def test_replaced_parameters(device: torch.device) -> None:
    model, x = mlp(device), inputs_and_targets(device)[0]
    network = Network(model)
    assert network.device.type == device.type
    moved = network.with_parameters({"2.bias": torch.full((2,), 3.0, dtype=torch.float64, device=device)}, x)
    torch.testing.assert_close(moved, model(x) - model[2].bias + 3)


def test_a_model_without_parameters_is_on_the_cpu() -> None:
    assert Network(nn.Tanh()).device == torch.device("cpu")


def test_errors_of_the_model_keep_their_cause() -> None:
    with pytest.raises(whence.InputError, match="got RuntimeError from its forward on batch 7") as caught:
        Network(mlp())(torch.zeros(2, 9, dtype=torch.float64), "batch 7")
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_out_of_memory_comes_through() -> None:
    class Full(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            raise torch.cuda.OutOfMemoryError("full")

    with pytest.raises(torch.cuda.OutOfMemoryError, match="full"):
        Network(Full())(torch.zeros(2, 3))


def test_one_example_is_not_asked_about_its_neighbours() -> None:
    class Counted(Wrapped):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.net(x)

    model = Counted()
    CheckedOutputs(Network(model), same_positions=True)(inputs_and_targets()[0][:1], "batch 0")
    assert model.calls == 1


def test_a_model_that_takes_no_single_example_is_told() -> None:
    class Paired(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.reshape(-1, 2, 3)).reshape(-1, 2)

    checked = CheckedOutputs(Network(Paired()), same_positions=True)
    with pytest.raises(whence.InputError, match=r"from its forward on example \d of batch 0 alone with inputs"):
        checked(inputs_and_targets()[0], "batch 0")


def test_models_sharded_by_the_older_fsdp_are_refused() -> None:
    kind = type("FullyShardedDataParallel", (nn.Linear,), {"__module__": "torch.distributed.fsdp"})
    with pytest.raises(whence.InputError, match=r"got the older FullyShardedDataParallel\. Load its full state dict"):
        unwrap(nn.Sequential(kind(3, 2)))


def test_the_first_line_of_an_error() -> None:
    assert first_line(ValueError("one.\ntwo")) == "one"
    assert first_line(ValueError()) == "ValueError"
    assert len(first_line(ValueError("x" * 999))) == 160
