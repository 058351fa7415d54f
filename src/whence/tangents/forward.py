"""Call any model with any inputs and get outputs of shape (n, k)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from whence.errors import InputError, NotDeterministicError, ShapeError

from .batches import Inputs, batch_size, check_finite


class Network:
    """A user's model behind one way of calling it."""

    def __init__(self, model: nn.Module) -> None:
        """Remember the model; nothing is copied or changed."""
        self.model = model
        first = next(model.parameters(), None)
        self.device = first.device if first is not None else torch.device("cpu")

    def __call__(self, inputs: Inputs, where: str = "this batch") -> Tensor:
        """Outputs (n, k) of the model as it is."""
        args, kwargs = arguments(inputs)
        return tidy(self.model(*args, **kwargs), batch_size(inputs, where), where)

    def with_parameters(self, parameters: dict[str, Tensor], inputs: Inputs) -> Tensor:
        """Outputs (n, k) with some parameters replaced, as `torch.func` wants it."""
        args, kwargs = arguments(inputs)
        outputs = functional_call(self.model, parameters, args, kwargs)
        return tidy(outputs, batch_size(inputs, "this batch"), "this batch")

    def check_repeatable(self, inputs: Inputs) -> Tensor:
        """Outputs on the first batch, after making sure that two calls agree."""
        with torch.no_grad():
            once, again = self(inputs, "batch 0"), self(inputs, "batch 0")
        check_finite(once, "outputs of the model", "batch 0")
        if not torch.equal(once, again):
            gap = float((once - again).abs().max())
            raise NotDeterministicError(
                f"expected the same outputs from two calls on batch 0, got a difference of {gap:.3g}. "
                "The model draws random numbers or keeps state: make its forward deterministic in eval mode."
            )
        return once

    def last_module(self, inputs: Inputs) -> str:
        """The name of the module with trainable parameters of its own that runs last."""
        ran: list[str] = []

        def note(name: str) -> Any:
            return lambda *_: ran.append(name)

        handles = [
            module.register_forward_hook(note(name))
            for name, module in self.model.named_modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]
        try:
            with torch.no_grad():
                self(inputs, "batch 0")
        finally:
            for handle in handles:
                handle.remove()
        if not ran:
            raise InputError(
                'expected a module with trainable parameters for parameters="last_layer", got none that runs.'
            )
        return ran[-1]


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments for a model's forward."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)):
        return tuple(inputs), {}
    return (inputs,), {}


def tidy(outputs: Any, n: int, where: str) -> Tensor:
    """Take the tensor out of what a model returned, as (n, k).

    Tensors of shape (n,) become (n, 1); of a Hugging Face output or a dict the `logits` are taken.
    """
    found = outputs
    if isinstance(found, Mapping):
        found = found.get("logits")
    elif hasattr(found, "logits"):
        found = found.logits
    if not isinstance(found, Tensor):
        raise ShapeError(
            f"expected the model to return a tensor, or something with `logits`, got {type(outputs).__name__} in "
            f"{where}. Wrap the model in a module that returns the tensor."
        )
    if found.ndim == 1:
        found = found.unsqueeze(1)
    if found.ndim != 2 or len(found) != n:
        raise ShapeError(
            f"expected outputs of shape ({n}, k), one row for each of the {n} examples, got {tuple(found.shape)} in "
            f"{where}. Wrap the model in a module that returns one row an example."
        )
    return found
