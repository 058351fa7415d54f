"""Use a model and give it back exactly as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from whence.errors import InputError, NotDeterministicError

from .claims import claimed
from .marks import mark
from .switches import same_draws

ROUNDED = 1e-5
"""Rows of an embedding may be longer than its `max_norm` by this share at least, as after it has shortened them."""


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Restore what a forward pass may change on the way out, errors and interrupts included.

    That is: gradients, `requires_grad`, the values of buffers, attributes of every submodule (its mode, hooks, caches
    and counters among them), and the random states of torch, numpy and Python. Inside, the caller's inference mode and
    autocast are off, so that numbers do not depend on where a call stands, no graph is built unless asked for, and
    embeddings leave their weights alone: `check_model` has seen that no row is longer than `max_norm`.
    Another thread that borrows the model, or one that shares a submodule, waits.
    """
    with ExitStack() as stack:
        stack.enter_context(claimed(model))
        modules = [_Attributes(module) for module in model.modules()]
        parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
        stack.enter_context(same_draws())
        stack.enter_context(torch.random.fork_rng(devices=devices, enabled=bool(devices)))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.no_grad())
        for kind in {"cpu", *(p.device.type for p in model.parameters())}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            for _, layer in _limited(model):
                layer.max_norm = None  # it shortens rows of the weight in place
            yield
        finally:
            for attributes in modules:
                attributes.restore()
            for parameter, grad, requires_grad in parameters:
                if parameter.grad is not grad:
                    parameter.grad = grad
                if parameter.requires_grad != requires_grad:
                    parameter.requires_grad_(requires_grad)
            for buffer, before in buffers:
                if mark(buffer) != mark(before):
                    buffer.copy_(before)


class _Attributes:
    """The attributes of a module, and what its dicts and lists hold (parameters, buffers, hooks, caches)."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = dict(vars(module))
        self.inside: list[tuple[Any, Any]] = [
            (value, value.copy()) for value in self.values.values() if isinstance(value, (dict, list))
        ]

    def restore(self) -> None:
        here = vars(self.module)
        if not _same(here, self.values):
            here.clear()
            here.update(self.values)
        for value, before in self.inside:
            if not _same(value, before):
                value.clear()
                value.extend(before) if isinstance(value, list) else value.update(before)


def _same(one: Any, other: Any) -> bool:
    """Whether two dicts or two lists hold the same objects."""
    if len(one) != len(other):
        return False
    if isinstance(one, list):
        return all(a is b for a, b in zip(one, other, strict=True))
    return all(key in other and other[key] is value for key, value in one.items())


def check_model(model: nn.Module) -> None:
    """Refuse a model whose outputs depend on chance or on the batch, or whose weights are not there or not finite."""
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "expected a module of Python, got one compiled by torch.jit, whose layers cannot be watched. "
            "Pass the module it was made from, with the same weights."
        )
    with claimed(model):
        check_calm(model)
        devices = {tensor.device for tensor in model.parameters()}
        if len(devices) > 1 or any(device.type == "meta" for device in devices):
            raise InputError(
                f"expected all weights on one device, got {', '.join(sorted(map(str, devices)))}. "
                "Move the model to one device with model.to(...)."
            )
        for name, parameter in model.named_parameters():
            _check_parameter(name, parameter)
        for name, layer in _limited(model):
            _check_rows(name, layer)


def _limited(model: nn.Module) -> list[tuple[str, nn.Embedding | nn.EmbeddingBag]]:
    """Embeddings with `max_norm`, whose forward pass shortens the rows it looks up, in place."""
    found = [(name, one) for name, one in model.named_modules() if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
    return [(name, one) for name, one in found if one.max_norm is not None]


def _check_rows(name: str, layer: nn.Embedding | nn.EmbeddingBag) -> None:
    """Refuse an embedding whose rows the next forward pass would shorten."""
    assert layer.max_norm is not None
    lengths = torch.linalg.vector_norm(layer.weight.detach().double(), layer.norm_type, dim=1)
    rounding = max(ROUNDED, 4 * torch.finfo(layer.weight.dtype).eps)
    long = int((lengths > layer.max_norm * (1 + rounding)).sum())
    if long:
        weight = f"model.{name}.weight" if name else "model.weight"
        raise InputError(
            f"expected rows of {weight} no longer than its max_norm={layer.max_norm:g}, got {long} of {len(lengths)} "
            "that are: a forward pass would change them, and the model with them. Shorten them first, as it does: "
            f"with torch.no_grad(): torch.embedding_renorm_({weight}, torch.arange({len(lengths)}), "
            f"{layer.max_norm:g}, {layer.norm_type:g})."
        )


def _check_parameter(name: str, parameter: Tensor) -> None:
    if is_lazy(parameter):
        raise InputError(
            f"expected initialised weights, got the lazy parameter {name} without a shape. "
            "Call the model once on a batch, and train it."
        )
    if parameter.is_inference():
        raise InputError(
            f"expected weights that can be differentiated, got {name} made under torch.inference_mode(). "
            "Build or load the model outside of it."
        )
    if not bool(torch.isfinite(parameter).all()):
        raise InputError(f"expected finite weights, got NaN or infinity in {name}. The training has diverged.")


def check_calm(model: nn.Module) -> None:
    """Refuse a model with dropout or batch normalisation at work."""
    restless = [name or type(module).__name__ for name, module in model.named_modules() if _restless(module)]
    if restless:
        raise NotDeterministicError(
            "expected a model in evaluation mode, got training mode with dropout or batch normalisation in: "
            f"{_listing(restless)}. Call model.eval() first."
        )
    mixing = [name or type(module).__name__ for name, module in model.named_modules() if _mixing(module)]
    if mixing:
        raise NotDeterministicError(
            "expected outputs that do not depend on the other examples of a batch, got batch normalisation without "
            f"running statistics in: {_listing(mixing)}. Use track_running_stats=True, or another normalisation."
        )


def _restless(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return isinstance(module, _BatchNorm) or module.track_running_stats
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


def _mixing(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and module.running_mean is None


def _listing(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def fingerprint(model: nn.Module) -> dict[str, int]:
    """A number for each parameter and buffer that changes when its bits do."""
    with claimed(model):
        tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return {name: mark(tensor) for name, tensor in tensors.items()}
