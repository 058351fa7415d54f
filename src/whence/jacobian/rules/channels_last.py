"""Backward passes of images with channels last in memory, in half precision, for all cotangents in one pass.

torch's own, when they are vectorised, copy the gradients of a convolution to channels first and back, and multiply at a
third of the speed of a GPU's memory where one factor is the same for all cotangents.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import fused_kernels
from whence.jacobian.rules.base import Arguments, Function, Keywords, bind

RELU: set[Callable[..., Any]] = {F.relu, torch.relu, Tensor.relu}


def has_channels_last(images: Any) -> bool:
    """Whether these are images in half precision, with channels last, that need a gradient."""
    served = isinstance(images, Tensor) and images.dim() == 4 and images.dtype == torch.float16
    return served and images.requires_grad and images.stride(1) == 1


def run(function: Any, *args: Any) -> Tensor:
    """`function.apply`, which has no annotation in torch."""
    found: Tensor = function.apply(*args)
    return found


class ConvolutionBackward(torch.autograd.Function):
    """Gives a convolution's output as it is, and a backward pass to its input by a transposed convolution."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        images: Tensor,
        weight: Tensor,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        """The output."""
        ctx.save_for_backward(weight.to(images.dtype, memory_format=torch.channels_last))
        ctx.geometry, ctx.sizes = (stride, padding, dilation, groups), images.shape[2:]
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Of the images."""
        (grad,), (weight,), (stride, padding, dilation, groups) = grads, ctx.saved_tensors, ctx.geometry
        each = zip(grad.shape[-2:], stride, padding, dilation, weight.shape[-2:], strict=True)
        # sizes of images whose windows these may be; up to a stride more is not seen by any
        least = [(count - 1) * step - 2 * pad + spread * (kernel - 1) + 1 for count, step, pad, spread, kernel in each]
        more = [size - one for size, one in zip(ctx.sizes, least, strict=True)]
        found = torch.conv_transpose2d(grad, weight, None, stride, padding, more, groups, dilation)
        return grad, found, *[None] * 5


class ScaleBackward(torch.autograd.Function):
    """Gives the output of a batch norm as it is, and a backward pass to its input, times a scale for each channel."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, images: Tensor, scale: Tensor) -> Tensor:
        """The output."""
        ctx.save_for_backward(scale)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        """Of the images."""
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
        """Where the output is positive."""
        return run(_WherePositive, grads[0], ctx.saved_tensors[0])


def fast_relu(function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """A call, by `Relu` where it is a ReLU of images with channels last, and not in place."""
    given = bind(("input", "inplace"), args, kwargs) if function in RELU else {}
    if not given.get("inplace") and has_channels_last(given.get("input")):
        return run(Relu, given["input"])
    return function(*args, **kwargs)


class _Elementwise(torch.autograd.Function):
    """Gradients (n, x, h, w) and something that is the same for all cotangents, which a kernel reads once for all."""

    kernel: ClassVar[str]  # its name in `whence.jacobian.fused`

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated twice."""

    @classmethod
    def vmap(cls, info: Any, in_dims: Any, grad: Tensor, other: Tensor) -> tuple[Tensor, int]:
        """For all cotangents, which come first."""
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
