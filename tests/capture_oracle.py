"""What captured tangents are compared with: every example run and differentiated alone."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

CUDNN = threading.Lock()
"""Its switch is one for the whole process, and a test asks the oracle in several threads."""


def call_of(model: nn.Module) -> Any:
    return lambda inputs: model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def selected(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def oracle(model: nn.Module, inputs: Any, cotangents: Tensor) -> dict[str, Tensor]:
    """Gradients (n, c, *shape), by running every example alone."""
    parameters, call = selected(model), call_of(model)
    found: dict[str, list[Tensor]] = {name: [] for name in parameters}
    for i in range(cotangents.shape[1]):
        # cuDNN's recurrent networks have no backward pass in evaluation mode.
        with CUDNN, torch.backends.cudnn.flags(enabled=False):
            output = call(tree_map(lambda leaf, i=i: leaf[i : i + 1], inputs))
        rows = [
            torch.autograd.grad(output, list(parameters.values()), v[i : i + 1], retain_graph=True, allow_unused=True)
            for v in cotangents
        ]
        for name, each in zip(parameters, zip(*rows, strict=True), strict=True):
            zero = torch.zeros_like(parameters[name])
            found[name].append(torch.stack([zero if g is None else g.to_dense() if g.is_sparse else g for g in each]))
    return {name: torch.stack(each) for name, each in found.items()}


def by_parameter(tangents: list[Any]) -> dict[str, Tensor]:
    """Gradients (n, c, *shape) by parameter."""
    found: dict[str, Tensor] = {}
    for tangent in tangents:
        found.update(tangent.block.from_matrix(tangent.materialize()))
    return found


def assert_captures(capture: Any, model: nn.Module, inputs: Any, tolerance: float = 1e-8) -> None:
    """Outputs and tangents of a batch are those of its examples, run alone."""
    captured = capture.run(inputs)
    torch.testing.assert_close(captured.outputs, call_of(model)(inputs).detach(), rtol=tolerance, atol=tolerance)
    cotangents = torch.randn(2, *captured.outputs.shape, dtype=captured.outputs.dtype)
    expected = oracle(model, inputs, cotangents)
    got = by_parameter(captured.tangents(cotangents))
    assert set(got) == set(expected)
    for name in expected:
        scale = float(expected[name].abs().max())
        torch.testing.assert_close(
            got[name],
            expected[name],
            rtol=tolerance,
            atol=tolerance * (1 + scale),
            check_dtype=False,
            msg=lambda m, name=name: f"{name}: {m}",
        )
