"""Use a model and give it back exactly as it was found."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd

from whence.errors import InputError, NotDeterministicError


@contextmanager
def borrowed(model: nn.Module) -> Iterator[None]:
    """Restore buffers, gradients, flags, submodules' modes and random states on the way out, errors included."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    parameters = [(p, p.grad, p.requires_grad) for p in model.parameters()]
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        try:
            yield
        finally:
            for parameter, grad, requires_grad in parameters:
                parameter.grad = grad
                parameter.requires_grad_(requires_grad)
            for module, training in modes:
                module.training = training
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers and not torch.equal(buffer, buffers[name]):
                        buffer.copy_(buffers[name])


def check_model(model: nn.Module) -> None:
    """Refuse a model whose outputs would depend on chance or on the batch, or whose weights are not finite."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module as model, got {type(model).__name__}.")
    restless = [name or type(module).__name__ for name, module in model.named_modules() if _restless(module)]
    if restless:
        shown = ", ".join(restless[:8]) + (", ..." if len(restless) > 8 else "")
        raise NotDeterministicError(
            f"expected a model in evaluation mode, got training mode with dropout or batch normalisation in: {shown}. "
            "Call model.eval() first."
        )
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise InputError(f"expected finite weights, got NaN or infinity in {name}. The training has diverged.")


def _restless(module: nn.Module) -> bool:
    if not module.training:
        return False
    if isinstance(module, _DropoutNd):
        return module.p > 0
    if isinstance(module, _NormBase):
        return True
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and module.dropout > 0


def fingerprint(model: nn.Module) -> dict[str, int]:
    """A number for each parameter and buffer that changes when its bits do."""
    marks: dict[str, int] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            marks[name] = _bits(tensor.detach())
    return marks


def _bits(tensor: Tensor) -> int:
    words = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        words = {8: torch.int32, 16: torch.int64, 4: torch.int16}[tensor.element_size() * 2]
    flat = tensor.contiguous().view(-1)
    return int(flat.view(words).sum(dtype=torch.int64)) if flat.numel() else 0
