"""Backward passes of half-precision images with channels last in memory, for all cotangents in one pass.

torch's vectorised backward passes copy the gradients of a convolution to channels first and back, and multiply at a
third of the speed of a GPU's memory if one factor is the same for all cotangents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import fused_kernels
from whence.jacobian.rules.base import Arguments, Function, Keywords, bind

RELU: set[Callable[..., Any]] = {F.relu, torch.relu, Tensor.relu}


def has_channels_last(images: Any) -> bool:
    """Whether these are half-precision images with channels last that need a gradient."""
    served = isinstance(images, Tensor) and images.dim() == 4 and images.dtype == torch.float16
    return served and images.requires_grad and images.stride(1) == 1


def run(function: Any, *args: Any) -> Tensor:
    """`function.apply`, which has no annotation in torch."""
    found: Tensor = function.apply(*args)
    return found


class ConvolutionBackward(torch.autograd.Function):
    """Returns a convolution's output unchanged; its backward pass is a transposed convolution."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, images: Tensor, weight: Tensor, geometry: tuple[Any, ...]) -> Tensor:
        """The output; the geometry is stride, padding, dilation and groups."""
        ctx.save_for_backward(weight.to(images.dtype, memory_format=torch.channels_last))
        ctx.geometry, ctx.sizes = geometry, images.shape[2:]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Gradient of the images."""
        (grad,), (weight,), (stride, padding, dilation, groups) = grads, ctx.saved_tensors, ctx.geometry
        each = zip(grad.shape[-2:], stride, padding, dilation, weight.shape[-2:], strict=True)
        # least image sizes with these windows; up to a stride more lies in no window
        least = [(count - 1) * step - 2 * pad + spread * (kernel - 1) + 1 for count, step, pad, spread, kernel in each]
        more = [size - one for size, one in zip(ctx.sizes, least, strict=True)]
        found = torch.conv_transpose2d(grad, weight, None, stride, padding, more, groups, dilation)
        return grad, found, None, None


class ScaleBackward(torch.autograd.Function):
    """Returns the output of a batch norm unchanged; its backward pass multiplies by a scale for each channel."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, images: Tensor, scale: Tensor) -> Tensor:
        """The output."""
        ctx.save_for_backward(scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Gradient of the images."""
        return grads[0], run(_TimesChannels, grads[0], ctx.saved_tensors[0]), None


class Relu(torch.autograd.Function):
    """max(x, 0)."""

    @staticmethod
    def forward(ctx: Any, images: Tensor) -> Tensor:
        """The positive part."""
        out = images.relu()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Tensor:
        """The gradient where the output is positive."""
        return run(_WherePositive, grads[0], ctx.saved_tensors[0])


def fast_relu(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Make a call, through `Relu` if it is a ReLU of images with channels last, not in place."""
    given = bind(("input", "inplace"), args, kwargs) if function in RELU else {}
    if not given.get("inplace") and has_channels_last(given.get("input")):
        return run(Relu, given["input"])
    return function(*args, **kwargs)


class _Elementwise(torch.autograd.Function):
    """Gradients (n, x, h, w) combined with a tensor shared by all cotangents, which a kernel reads once."""

    kernel: ClassVar[str]  # its name in `whence.jacobian.fused`

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing to save: there is no second derivative."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, grad: Tensor, other: Tensor) -> tuple[Tensor, int]:
        """All cotangents at once, along the first axis."""
        grad = grad.movedim(in_dims[0], 0)
        kernels = fused_kernels(grad)
        last = other.dim() == 1 or other.permute(0, 2, 3, 1).is_contiguous()
        if kernels is not None and last and grad.permute(0, 1, 3, 4, 2).is_contiguous():
            return getattr(kernels, cls.kernel)(grad, other), 0
        return cls.forward(grad, other), 0


class _TimesChannels(_Elementwise):
    kernel = "times_channels"

    @staticmethod
    def forward(grad: Tensor, scale: Tensor) -> Tensor:
        return grad * scale.reshape(-1, 1, 1)


class _WherePositive(_Elementwise):
    kernel = "where_positive"

    @staticmethod
    def forward(grad: Tensor, out: Tensor) -> Tensor:
        return torch.where(out > 0, grad, 0.0)
