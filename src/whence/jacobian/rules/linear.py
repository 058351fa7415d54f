"""Linear maps: `F.linear`, products with a matrix, and convolutions as linear maps of the windows of an image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_weight

from whence.jacobian.gradients import Factor, Kind, Layout, Whole, matched
from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, Use, bind, functions, positions
from whence.jacobian.rules.channels_last import ConvolutionBackward, has_channels_last, run


@dataclass(frozen=True)
class LinearUse(Use):
    """y_t = W a_t + b: the gradient is the sum over t of g_t a_t^T."""

    inputs: Tensor  # a, (..., i), or (..., i, t) if the weight is on the left
    transposed: bool = False  # whether the weight is (i, o) instead of (o, i)
    left: bool = False  # whether the weight is on the left
    kind: ClassVar[Kind] = "kronecker"
    joint: ClassVar[bool] = True

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """Those before the axis of features; behind it, for a weight on the left, examples would be columns."""
        return range(len(shape) - 1 - self.left)

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """Views, unless a folded layout needs a copy."""
        inputs = layout.canonical(self.inputs, len(grads))
        if self.left:
            inputs, grads = inputs.transpose(-1, -2), grads.transpose(-1, -2)
        return Whole(positions(inputs, 1).unsqueeze(1), ones), Whole(positions(grads, 1, lead=2).unsqueeze(2))


def linear(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`F.linear(input, weight, bias)`."""
    given = bind(("input", "weight", "bias"), args, kwargs)
    out = function(*args, **kwargs)
    recorder.record(LinearUse(given["input"].detach()), out, weight=given["weight"], bias=given.get("bias"))
    return out


def addmm(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`torch.addmm(bias, input, weight)`, as in Hugging Face's Conv1D; not with alpha or beta."""
    given = bind(("input", "mat1", "mat2"), args, kwargs)
    out = function(*args, **kwargs)
    bias, inputs, weight = given.pop("input"), given.pop("mat1"), given.pop("mat2")
    if not given and not recorder.tracks(inputs) and bias.shape == out.shape[-1:]:
        recorder.record(LinearUse(inputs.detach(), transposed=True), out, weight=weight, bias=bias)
    return out


def product(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`x @ W` and `W @ x`, with a matrix W; a product of tracked tensors is tracked itself."""
    given = bind(("input", "other"), args, kwargs)
    left: Any = given.get("input")
    right: Any = given.get("other", given.get("mat2"))
    out = function(*args, **kwargs)
    first, second = recorder.source(left), recorder.source(right)
    if first is not None and second is not None:
        recorder.track(out, first, second)
    elif second is not None and right.dim() == 2:
        recorder.record(LinearUse(left.detach(), transposed=True), out, weight=right)
    elif first is not None and left.dim() == 2 and right.dim() > 1:
        recorder.record(LinearUse(right.detach(), left=True), out, weight=left)
    return out


# --- Convolutions: windows are unfolded only when needed --------------------------------------------------------------

FEW_WINDOWS = 16  # with so few windows an image, unfolding is faster on a GPU than a convolution
CONVOLUTIONS: dict[int, Callable[..., Tensor]] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class Windows:
    """The geometry of a convolution, one entry for each spatial axis; `padding` is (before, after)."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1

    @property
    def dims(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)

    def count(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each axis of an image of these sizes."""
        each = zip(sizes, self.padding, self.dilation, self.kernel, self.stride, strict=True)
        return tuple((size + sum(pad) - d * (kernel - 1) - 1) // stride + 1 for size, pad, d, kernel, stride in each)

    def padded(self, images: Tensor) -> Tensor:
        """The images with their border of zeros."""
        if not any(map(any, self.padding)):
            return images
        return F.pad(images, [side for pad in reversed(self.padding) for side in pad])

    def unfold(self, images: Tensor, counts: Sequence[int] | None = None, ones: bool = False) -> Tensor:
        """All windows, or the first `counts` along each axis: (b, channels, *sizes) to (b, e, i, t), ones after i."""
        b, channels = images.shape[:2]
        counts = counts or self.count(images.shape[2:])
        images = self.padded(images.contiguous())  # copying windows of channels-last images would be slow
        inside, between = (map(mul, images.stride()[2:], steps) for steps in (self.dilation, self.stride))
        strides = (*images.stride()[:2], *inside, *between)
        view = images.as_strided((b, channels, *self.kernel, *counts), strides)
        t = torch.Size(counts).numel()
        found = view.reshape(b, self.groups, -1, t)
        return F.pad(found, (0, 0, 0, 1), value=1.0) if ones else found

    def convolve(self, images: Tensor, kernels: Tensor, offsets: Tensor | None) -> Tensor:
        """Convolve with kernels (e, i, r) of this geometry: the projected windows, (b, e, r, t)."""
        e, _, r = kernels.shape
        weight = kernels.transpose(1, 2).reshape(e * r, -1, *self.kernel)
        images = self.padded(images)
        if images.dtype == torch.float16 and self.dims == 2 and not (weight.shape[0] % 8 or weight.shape[1] % 8):
            # the memory order for a GPU's tensor units; images are smaller than windows
            images, weight = (one.contiguous(memory_format=torch.channels_last) for one in (images, weight))
        bias = None if offsets is None else offsets.flatten()
        out = CONVOLUTIONS[self.dims](images, weight, bias, self.stride, 0, self.dilation, self.groups)
        return out.reshape(images.shape[0], e, r, -1)  # from (b, e r, *counts)


@dataclass(frozen=True)
class Unfolded(Factor):
    """The windows of images as a factor (n, e, t, i), unfolded on demand."""

    images: Tensor  # (b, channels, *sizes)
    windows: Windows  # the geometry
    layout: Layout  # where the examples are among the b images
    examples: int  # n
    ones: bool = False  # whether a column of ones is appended

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, e, t, i), without unfolding."""
        b, channels, *sizes = self.images.shape
        e, t = self.windows.groups, torch.Size(self.windows.count(sizes)).numel()
        i = channels // e * torch.Size(self.windows.kernel).numel() + self.ones
        return (self.examples, e, t * (b // self.examples), i)

    @property
    def numel(self) -> int:
        """Number of values in the images."""
        return self.images.numel()

    def tensor(self) -> Tensor:
        """The windows, with the column of ones."""
        return self._arrange(self.windows.unfold(self.images, ones=self.ones))  # from (b, e, i, t)

    def project(self, basis: Tensor) -> Tensor:
        """A convolution with the columns of the basis as kernels: the windows are never built."""
        images, basis = matched(self.images, basis)
        if (
            images.dtype == torch.float16
            and self.shape[-2] <= FEW_WINDOWS
            and not self.ones
            and self.windows.groups == 1
        ):
            rows = self.windows.unfold(images).squeeze(1).transpose(1, 2).contiguous()
            return self._arrange((rows @ basis[0]).transpose(1, 2).unsqueeze(1))
        kernels, offsets = (basis[:, :-1], basis[:, -1]) if self.ones else (basis, None)
        return self._arrange(self.windows.convolve(images, kernels, offsets))

    def total(self, g: Tensor) -> Tensor:
        """sum_n sum_t g_t a_t^T: for half-precision images by a convolution, without building the windows."""
        n, e, _, o = g.shape
        if self.images.dtype != torch.float16 or self.windows.dims != 2 or self.layout != Layout() or self.ones:
            return super().total(g)
        images, windows = self.windows.padded(self.images), self.windows
        shape = (e * o, images.shape[1] // e, *windows.kernel)
        grads = g.transpose(2, 3).reshape(n, e * o, *windows.count(self.images.shape[2:]))
        geometry = (windows.stride, 0, windows.dilation, windows.groups)
        found: Tensor = conv2d_weight(images.to(g.dtype), shape, grads, *geometry)
        return found.reshape(e, o, -1)

    def _arrange(self, windows: Tensor) -> Tensor:  # (b, e, i, t) to (n, e, t, i)
        canonical = self.layout.canonical(windows, self.examples)
        if canonical.dim() == 5:  # (n, m, e, i, t): the m images of an example become positions
            canonical = canonical.permute(0, 2, 3, 1, 4).flatten(3)
        return canonical.transpose(-1, -2)


def _grouped(grads: Tensor, groups: int, dims: int) -> Tensor:
    """Gradients (n, c, [m,] e o, *sizes) to (n, c, e, t, o); the m images of an example become positions."""
    shape = grads.shape[: -dims - 1]
    flat = grads.reshape(*shape, groups, grads.shape[-dims - 1] // groups, -1)  # (n, c, [m,] e, o, t)
    if flat.dim() == 6:
        flat = flat.permute(0, 1, 3, 4, 2, 5).flatten(4)
    return flat.transpose(-1, -2)


@dataclass(frozen=True)
class _WindowsUse(Use):
    """Base of both kinds of convolution."""

    inputs: Tensor  # (b, channels, *sizes)
    windows: Windows
    groups: int
    kind: ClassVar[Kind] = "kronecker"

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """The first axis, if it is not the channels."""
        return (0,) if len(shape) == self.windows.dims + 2 else ()


@dataclass(frozen=True)
class ConvolutionUse(_WindowsUse):
    """A convolution: a linear map of the windows of its input, shared by all positions."""

    joint: ClassVar[bool] = True

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """Inputs are unfolded on demand."""
        rounded = self.inputs.to(grads.dtype) if grads.dtype == torch.float16 else self.inputs  # as under autocast
        a = Unfolded(rounded, self.windows, layout, grads.shape[0], ones)
        return a, Whole(_grouped(grads, self.groups, self.windows.dims))


@dataclass(frozen=True)
class TransposedConvolutionUse(_WindowsUse):
    """A transposed convolution: inputs and output gradients swap roles, so the gradients are unfolded."""

    transposed: bool = True

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """Gradients are unfolded: one window for each position of the input."""
        dims = self.windows.dims
        inputs = layout.canonical(self.inputs, len(grads)).unsqueeze(1)  # (n, 1, [m,] channels, *sizes)
        a = Whole(_grouped(inputs, self.groups, dims).squeeze(1))
        lead, counts = grads.shape[: -dims - 1], tuple(self.inputs.shape[-dims:])  # (n, c, [m])
        g = self.windows.unfold(grads.flatten(0, -dims - 2), counts).unflatten(0, lead).transpose(-1, -2)
        return a, Whole(g if len(lead) == 2 else g.transpose(2, 3).flatten(3, 4))  # from (n, c, m, e, t, o)

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """The bias gets the sum over positions, not over windows."""
        if role == "bias":
            return _grouped(grads, 1, self.windows.dims).sum(3)
        return super().dense(role, layout, grads)


def _tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value)
    return values * dims if len(values) == 1 else values


def _padding(value: str | int | Sequence[int], kernel: Sequence[int], dilation: Sequence[int]) -> Any:
    if value == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((total // 2, total - total // 2) for total in totals)
    return tuple((pad, pad) for pad in _tuple(0 if isinstance(value, str) else value, len(kernel)))


def _reader(dims: int, names: tuple[str, ...], use: Callable[[Tensor, Windows, int], Use]) -> Reader:
    def read(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(names, args, kwargs)
        weight = given["weight"]
        kernel = tuple(weight.shape[2:])
        dilation, stride = (_tuple(given.get(name, 1), dims) for name in ("dilation", "stride"))
        padding = _padding(given.get("padding", 0), kernel, dilation)
        windows = Windows(kernel, stride, padding, dilation, given.get("groups", 1))
        alike = all(before == after for before, after in padding)
        if use is ConvolutionUse and dims == 2 and alike and has_channels_last(given["input"]):
            out = function(**{**given, "input": given["input"].detach()})  # with a graph to weight and bias
            geometry = (stride, [before for before, _ in padding], dilation, windows.groups)
            out = run(ConvolutionBackward, out, given["input"], weight.detach(), geometry)
        else:
            out = function(*args, **kwargs)
        recorded = use(given["input"].detach(), windows, windows.groups)
        recorder.record(recorded, out, weight=weight, bias=given.get("bias"))
        return out

    return read


FORWARD = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

READERS: dict[Function, Reader] = {
    F.linear: linear,
    **dict.fromkeys([torch.addmm, Tensor.addmm], addmm),
    **dict.fromkeys([*functions(torch, "matmul", "mm"), *functions(Tensor, "matmul", "mm")], product),
    **{function: _reader(dims, FORWARD, ConvolutionUse) for dims, function in CONVOLUTIONS.items()},
    **{getattr(F, f"conv_transpose{d}d"): _reader(d, TRANSPOSED, TransposedConvolutionUse) for d in (1, 2, 3)},
}
