"""Which parameters are meant."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from doubles import Wrapped, batches, fit, inputs_and_targets, mlp
from networks import build
from whence.jacobian.network import Network, select


def names(model: nn.Module, choice: Any, inputs: Any = None) -> list[str]:
    return list(select(Network(model), choice, inputs).parameters)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("all", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.bias", ["2.bias"]),
        ("*.weight", ["0.weight", "2.weight"]),
        (["2.*", "0.bias"], ["0.bias", "2.weight", "2.bias"]),
        (("?.bias",), ["0.bias", "2.bias"]),
        ((name for name in ["0.bias"]), ["0.bias"]),
        (lambda name, parameter: parameter.ndim == 1, ["0.bias", "2.bias"]),
        (lambda name, parameter: name.startswith("2"), ["2.weight", "2.bias"]),
        ("last_layer", ["2.weight", "2.bias"]),
    ],
)
def test_choices(choice: Any, expected: list[str]) -> None:
    assert names(mlp(), choice, inputs_and_targets()[0]) == expected


def test_frozen_parameters_are_left_out() -> None:
    model = mlp()
    model[0].weight.requires_grad_(False)
    assert names(model, "all") == ["0.bias", "2.weight", "2.bias"]
    assert names(model, "*.weight") == ["2.weight"]
    assert names(model, lambda name, parameter: True) == ["0.bias", "2.weight", "2.bias"]


def test_tied_parameters_count_once_and_answer_to_every_name() -> None:
    case = build("tied")
    assert names(case.model, "all").count("first.weight") == 1
    assert "second.weight" not in names(case.model, "all")
    assert names(case.model, "second.weight") == ["first.weight"]
    assert names(case.model, "second.*") == ["first.weight", "second.bias"]


class WithToken(Wrapped):
    """Holds a parameter of its own, as vision transformers do: its forward starts first and ends last."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + self.token)


def test_the_last_layer_is_the_one_that_starts_last() -> None:
    x = inputs_and_targets()[0]
    assert names(WithToken(), "last_layer", x) == ["net.2.weight", "net.2.bias"]


def test_the_last_layer_in_running_order_not_in_writing_order() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.body = nn.Linear(4, 2).double(), nn.Linear(3, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))

    assert names(Backwards(), "last_layer", inputs_and_targets()[0]) == ["head.weight", "head.bias"]


def test_a_frozen_head_is_not_the_last_layer() -> None:
    model = mlp()
    model[2].requires_grad_(False)
    assert names(model, "last_layer", inputs_and_targets()[0]) == ["0.weight", "0.bias"]


def test_attention_as_the_last_layer_is_taken_whole() -> None:
    """Its output projection is a module that never runs."""

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            hidden = self.body(tokens)
            mixed: Tensor = self.attention(hidden, hidden, hidden)[0]
            return mixed.mean(1)

    chosen = names(Ending().eval(), "last_layer", torch.randn(5, 3, 4))
    assert chosen == [
        f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    ]


def test_vectors_and_parameters_go_back_and_forth() -> None:
    model = mlp()
    selection = select(Network(model), ["0.bias", "2.weight"], None)
    assert selection.size == 4 + 8
    weights = selection.weights(torch.float64)
    torch.testing.assert_close(weights, torch.cat([model[0].bias, model[2].weight.flatten()]).detach())
    parts = selection.unflatten(torch.stack([weights, 2 * weights]))
    assert {name: tuple(part.shape) for name, part in parts.items()} == {"0.bias": (2, 4), "2.weight": (2, 2, 4)}
    torch.testing.assert_close(selection.flatten(parts, leading=1), torch.stack([weights, 2 * weights]))


def test_diagnostics_name_what_was_selected() -> None:
    tracer = fit(mlp(), batches(), parameters="last_layer")
    assert tracer.diagnostics["parameters"] == 10
    assert "parameters: 10 (selected weights: 2.weight, 2.bias)" in str(tracer.diagnostics)


@pytest.mark.parametrize(("parameters", "partly"), [("last_layer", True), ("all", False)])
def test_diagnostics_warn_of_verdicts_by_a_part_of_the_weights(parameters: str, partly: bool) -> None:
    model = mlp()
    every = sum(one.numel() for one in model.parameters())
    told = str(fit(model, batches(), parameters=parameters).diagnostics)
    assert (f"10 of {every:,} that can be trained" in told) == partly
    assert ("for verdicts fit all of them" in told) == partly
