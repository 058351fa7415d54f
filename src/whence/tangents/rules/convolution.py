"""Convolutions and transposed convolutions over one, two or three axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.tangents.factors import Factor, Whole
from whence.tangents.forms import Kind
from whence.tangents.layout import Layout
from whence.tangents.rules.base import Arguments, Function, Keywords, Reader, Recorder, Use, bind, promoted
from whence.tangents.rules.unfold import CONVOLUTIONS, Unfolded, Windows


def _grouped(grads: Tensor, groups: int, dims: int) -> Tensor:
    """Gradients (n, c, [m,] e o, *sizes) as (n, c, e, t, o), the m images of an example among the positions."""
    shape = grads.shape[: -dims - 1]
    flat = grads.reshape(*shape, groups, grads.shape[-dims - 1] // groups, -1)  # (n, c, [m,] e, o, t)
    if flat.dim() == 6:
        flat = flat.permute(0, 1, 3, 4, 2, 5).flatten(4)
    return flat.transpose(-1, -2)


@dataclass(frozen=True)
class _WindowsUse(Use):
    """Either kind of convolution."""

    inputs: Tensor  # (b, channels, *sizes)
    windows: Windows
    kind: ClassVar[Kind] = "kronecker"

    @property
    def groups(self) -> int:  # type: ignore[override]
        """Groups of channels."""
        return self.windows.groups

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """The first, if there is one beside the channels."""
        return (0,) if len(shape) == self.windows.dims + 2 else ()


@dataclass(frozen=True)
class ConvolutionUse(_WindowsUse):
    """A convolution: a linear map of the windows of its input, shared by all positions."""

    joint: ClassVar[bool] = True

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """Inputs are unfolded on demand."""
        a = Unfolded(self.inputs, self.windows, layout, grads.shape[0], ones)
        return a, Whole(_grouped(grads, self.groups, self.windows.dims))

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """The bias gets the sum over positions."""
        a, g = self.factors(layout, grads, ones=False)
        if role == "bias":
            return g.tensor().sum(3).flatten(2)
        inputs, outputs = promoted(a.tensor(), g.tensor())
        weight = torch.einsum("neti,nceto->nceoi", inputs, outputs)
        channels = self.inputs.shape[1] // self.groups
        return weight.reshape(*grads.shape[:2], -1, channels, *self.windows.kernel)


@dataclass(frozen=True)
class TransposedConvolutionUse(_WindowsUse):
    """A transposed convolution: inputs and output gradients change places, so the gradients are unfolded."""

    transposed: bool = True

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """Gradients are unfolded on demand."""
        dims = self.windows.dims
        n = grads.shape[0]
        inputs = layout.canonical(self.inputs, n).unsqueeze(1)  # (n, 1, [m,] channels, *sizes)
        a = Whole(_grouped(inputs, self.groups, dims).squeeze(1))
        counts = tuple(self.inputs.shape[-dims:])
        if grads.dim() == dims + 3:
            return a, Unfolded(grads, self.windows, counts=counts)
        unfolded = Unfolded(grads, self.windows, counts=counts).tensor()  # (n, c, m, e, t, o)
        return a, Whole(unfolded.transpose(2, 3).flatten(3, 4))

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """The bias gets the sum over positions."""
        dims = self.windows.dims
        if role == "bias":
            return _grouped(grads, 1, dims).sum(3).flatten(2)
        a, g = self.factors(layout, grads, ones=False)
        inputs, outputs = promoted(a.tensor(), g.tensor())
        weight = torch.einsum("neti,nceto->nceio", inputs, outputs)
        return weight.reshape(*grads.shape[:2], self.inputs.shape[1], -1, *self.windows.kernel)


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _padding(value: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> Any:
    if value == "valid":
        return ((0, 0),) * len(kernel)
    if value == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    assert not isinstance(value, str)
    return tuple((pad, pad) for pad in _tuple(value, len(kernel)))


def _reader(dims: int, names: tuple[str, ...], use: Callable[[Tensor, Windows], Use]) -> Reader:
    def read(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(names, args, kwargs)
        inputs, weight, bias = given["input"], given["weight"], given.get("bias")
        out = function(*args, **kwargs)
        if recorder.follows(weight, bias):
            kernel = tuple(weight.shape[2:])
            dilation = _tuple(given.get("dilation", 1), dims)
            stride = _tuple(given.get("stride", 1), dims)
            padding = _padding(given.get("padding", 0), kernel, dilation)
            windows = Windows(kernel, stride, padding, dilation, given.get("groups", 1))
            recorder.record(use(inputs.detach(), windows), out, weight=weight, bias=bias)
        return out

    return read


FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

READERS: dict[Function, Reader] = {
    **{function: _reader(dims, FORWARD, ConvolutionUse) for dims, function in CONVOLUTIONS.items()},
    F.conv_transpose1d: _reader(1, TRANSPOSED, TransposedConvolutionUse),
    F.conv_transpose2d: _reader(2, TRANSPOSED, TransposedConvolutionUse),
    F.conv_transpose3d: _reader(3, TRANSPOSED, TransposedConvolutionUse),
}
