"""Captured tangents against one backward pass for every example and cotangent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from capture_models import MODELS, Model
from whence.tangents.capture import Capture
from whence.tangents.forms import Tangent


def call_of(model: nn.Module) -> Any:
    return lambda inputs: model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def selected(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def oracle(model: nn.Module, inputs: Any, cotangents: Tensor) -> dict[str, Tensor]:
    """Gradients (n, c, *shape), by running every example alone."""
    parameters, call = selected(model), call_of(model)
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(cotangents.shape[1]):
        output = call(tree_map(lambda leaf, i=i: leaf[i : i + 1], inputs))
        rows = [
            torch.autograd.grad(output, list(parameters.values()), v[i : i + 1], retain_graph=True, allow_unused=True)
            for v in cotangents
        ]
        for name, each in zip(parameters, zip(*rows, strict=True), strict=True):
            zero = torch.zeros_like(parameters[name])
            found[name].append(torch.stack([zero if g is None else g.to_dense() if g.is_sparse else g for g in each]))
    return {name: torch.stack(each) for name, each in found.items()}


def by_parameter(tangents: list[Tangent]) -> dict[str, Tensor]:
    found = {}
    for tangent in tangents:
        found.update(tangent.block.from_matrix(tangent.materialize()))
    return found


def check(model: nn.Module, capture: Capture, inputs: Any, n: int, cotangents: int = 2) -> None:
    captured = capture.run(inputs)
    torch.testing.assert_close(captured.outputs, call_of(model)(inputs).detach(), rtol=1e-10, atol=1e-12)
    v = torch.randn(cotangents, n, captured.outputs.shape[1], dtype=torch.float64)
    expected = oracle(model, inputs, v)
    got = by_parameter(captured.tangents(v))
    assert set(got) == set(expected)
    for name in expected:
        torch.testing.assert_close(
            got[name], expected[name], rtol=1e-8, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


def prepared(case: Model) -> nn.Module:
    return case.build().double().eval()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("case", MODELS.values(), ids=MODELS.keys())
def test_tangents_are_the_gradients_of_single_examples(case: Model) -> None:
    model = prepared(case)
    capture = Capture(call_of(model), selected(model), example_inputs=case.inputs(6))
    for n in (4, 1):
        check(model, capture, case.inputs(n), n)
    assert set(capture.generic) == case.generic
