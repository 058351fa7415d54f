"""Convolutions as linear maps: the windows of an image, taken out only when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.tangents.layout import Layout

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

    @property
    def pointwise(self) -> bool:
        """Whether every window is a single position and every position a window."""
        ones = (1,) * self.dims
        return self.kernel == ones and self.stride == ones and not any(map(any, self.padding))

    def count(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Number of windows along each axis of an image of these sizes."""
        return tuple(
            (size + sum(pad) - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, pad, dilation in zip(
                sizes, self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )

    def padded(self, images: Tensor) -> Tensor:
        """The images with their border of zeros."""
        if not any(map(any, self.padding)):
            return images
        return F.pad(images, [side for pad in reversed(self.padding) for side in pad])

    def unfold(self, images: Tensor, counts: Sequence[int] | None = None, ones: bool = False) -> Tensor:
        """Take out all windows: (b, channels, *sizes) to (b, e, i, t), one strided copy.

        Args:
            images: The images.
            counts: Number of windows to take along each axis, if not all.
            ones: Whether a row of ones is appended to i.
        """
        b, channels = images.shape[:2]
        counts = counts or self.count(images.shape[2:])
        if self.pointwise and not ones:
            return images.reshape(b, self.groups, channels // self.groups, -1)
        images = self.padded(images)
        steps = images.stride()[2:]
        view = images.as_strided(
            (b, channels, *self.kernel, *counts),
            (
                *images.stride()[:2],
                *(step * dilation for step, dilation in zip(steps, self.dilation, strict=True)),
                *(step * stride for step, stride in zip(steps, self.stride, strict=True)),
            ),
        )
        t = torch.Size(counts).numel()
        if not ones:
            return view.reshape(b, self.groups, -1, t)
        inner = (channels // self.groups, *self.kernel)
        found = images.new_empty(b, self.groups, torch.Size(inner).numel() + 1, t)
        found[:, :, -1] = 1.0
        found[:, :, :-1].unflatten(3, tuple(counts)).unflatten(2, inner).copy_(view.unflatten(1, (self.groups, -1)))
        return found

    def convolve(self, images: Tensor, kernels: Tensor, offsets: Tensor | None) -> Tensor:
        """Convolve with kernels (e, i, r) of this geometry: the projected windows, (b, e, r, t)."""
        e, _, r = kernels.shape
        weight = kernels.transpose(1, 2).reshape(e * r, -1, *self.kernel)
        bias = None if offsets is None else offsets.flatten()
        out = CONVOLUTIONS[self.dims](
            self.padded(images), weight, bias, self.stride, 0, self.dilation, self.groups
        )  # (b, e r, *counts)
        return out.reshape(images.shape[0], e, r, -1)


@dataclass(frozen=True)
class Unfolded:
    """The windows of images (..., channels, *sizes) as a factor (..., e, t, i), unfolded on demand.

    Args:
        images: (b, channels, *sizes) where b holds the examples as `layout` says; (n, c, ..., channels, *sizes),
            already in order, where `layout` is None.
        windows: The geometry.
        layout: Where the examples are among the images.
        examples: n, for `layout`.
        ones: Whether a column of ones is appended.
        counts: Number of windows to take along each axis, if not all.
    """

    images: Tensor
    windows: Windows
    layout: Layout | None = None
    examples: int = 0
    ones: bool = False
    counts: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(..., e, t, i), without unfolding."""
        sizes = self.images.shape[-self.windows.dims :]
        channels = self.images.shape[-self.windows.dims - 1]
        e = self.windows.groups
        t = torch.Size(self.counts or self.windows.count(sizes)).numel()
        i = channels // e * torch.Size(self.windows.kernel).numel() + self.ones
        if self.layout is None:
            return (*self.images.shape[: -self.windows.dims - 1], e, t, i)
        return (self.examples, e, t * (self.images.shape[0] // self.examples), i)

    def tensor(self) -> Tensor:
        """The windows, and the column of ones."""
        flat = self.images.flatten(0, -self.windows.dims - 2)
        return self._arrange(self.windows.unfold(flat, self.counts, self.ones))  # from (b, e, i, t)

    def project(self, basis: Tensor) -> Tensor:
        """A convolution with the columns of the basis as kernels: the windows are never built."""
        if self.counts is not None:
            return self.tensor().to(basis.dtype) @ basis
        kernels, offsets = (basis[:, :-1], basis[:, -1]) if self.ones else (basis, None)
        flat = self.images.flatten(0, -self.windows.dims - 2).to(basis.dtype)
        return self._arrange(self.windows.convolve(flat, kernels, offsets))

    def _arrange(self, windows: Tensor) -> Tensor:  # (b, e, i, t) to (..., e, t, i)
        if self.layout is None:
            lead = self.images.shape[: -self.windows.dims - 1]
            return windows.reshape(*lead, *windows.shape[1:]).transpose(-1, -2)
        return share(self.layout.canonical(windows, self.examples)).transpose(-1, -2)


def share(tensor: Tensor) -> Tensor:
    """Images of one example become positions: (n, ..., m, e, i, t) to (n, ..., e, i, m t); without m, nothing to do.

    The example axis is the first; gradients have their cotangents behind it, moved out of the way by the caller.
    """
    if tensor.dim() == 4:
        return tensor
    return tensor.permute(0, 2, 3, 1, 4).flatten(3)
