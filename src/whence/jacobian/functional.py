"""The functional fallback: per-example gradients of any parameter, whatever the model does with it.

The parameter is replaced, wherever a torch function takes it, by one copy for each example; `torch.vmap` runs the
model on every example with its own copy, and ordinary backward passes give the gradients in the copies. Where vmap
cannot follow (control flow that depends on data), the examples are run one at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from whence.data.batches import Inputs, batch_size, take
from whence.jacobian.record import Call, differentiable, gradients
from whence.runtime.model_state import plain_kernels


class Substitution(TorchFunctionMode):
    """Hands every torch function the given tensors in place of the parameters."""

    def __init__(self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._values = {id(parameter): values[name] for name, parameter in parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*map(self._exchange, args), **{key: self._exchange(value) for key, value in (kwargs or {}).items()})

    def _exchange(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._values.get(id(value), value)
        if type(value) in (list, tuple):
            return type(value)(map(self._exchange, value))
        return value


class Vectorized:
    """All examples at once, through `torch.vmap`."""

    def __init__(self, call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> None:
        n = batch_size(inputs, "this batch")
        self._copies = {name: p.detach().expand(n, *p.shape).requires_grad_() for name, p in parameters.items()}

        def single(values: dict[str, Tensor], example: Inputs) -> Tensor:
            one = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, example)
            with Substitution(parameters, values):
                return call(one).squeeze(0)

        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, inputs)
        with differentiable(), plain_kernels():  # the fused attention kernels have no rule under vmap
            self._outputs: Tensor = torch.vmap(single, in_dims=(0, axes))(self._copies, inputs)

    def gradients(self, cotangents: Tensor, last: bool) -> dict[str, Tensor]:
        """Per-example gradients (n, c, *shape) for cotangents (c, n, k), one backward pass for each."""
        copies = list(self._copies.values())
        found = []
        for number, cotangent in enumerate(cotangents):
            keep = not last or number + 1 < len(cotangents)
            found.append(gradients(self._outputs, copies, cotangent, keep=keep))
        return {name: torch.stack(each, 1) for name, each in zip(self._copies, zip(*found, strict=True), strict=True)}


class OneByOne:
    """The examples one after the other, with the parameters themselves."""

    def __init__(self, call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> None:
        self._parameters = parameters
        with differentiable():
            self._rows = [call(take(inputs, slice(at, at + 1))) for at in range(batch_size(inputs, "this batch"))]

    def gradients(self, cotangents: Tensor, last: bool) -> dict[str, Tensor]:
        """Per-example gradients (n, c, *shape), one backward pass for each example and cotangent."""
        leaves = list(self._parameters.values())
        found: dict[str, list[Tensor]] = {name: [] for name in self._parameters}
        for at, row in enumerate(self._rows):
            pulled = [gradients(row, leaves, cotangent) for cotangent in cotangents[:, at : at + 1]]
            for name, each in zip(self._parameters, zip(*pulled, strict=True), strict=True):
                found[name].append(torch.stack(each))
        return {name: torch.stack(rows) for name, rows in found.items()}


Run = Vectorized | OneByOne
