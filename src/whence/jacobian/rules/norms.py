"""Normalisations with a scale and a shift: what they multiply is recomputed, never divided out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import Layout
from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, Use, bind, functions, promoted


@dataclass(frozen=True)
class FeatureNormUse(Use):
    """y = weight * z + bias over the last axes (LayerNorm, RMSNorm)."""

    normalized: Callable[[], Tensor]
    shape: tuple[int, ...]
    joint: ClassVar[bool] = True

    def ready(self) -> Use:
        """With z computed."""
        z = self.normalized()
        return replace(self, normalized=lambda: z)

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """All but those that are normalised."""
        return range(len(shape) - len(self.shape))

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Sums over positions, of g z and of g."""
        n, c = grads.shape[:2]
        size = math.prod(self.shape)
        if role == "weight":
            z = layout.canonical(self.normalized(), n)
            z, grads = promoted(z, grads)
            grads = grads * z.unsqueeze(1)
        if grads.dim() == 2 + len(self.shape):
            return grads
        return grads.reshape(n, c, -1, size).sum(2).reshape(n, c, *self.shape)


@dataclass(frozen=True)
class ChannelNormUse(Use):
    """y = weight * z + bias along the second axis (batch, group and instance norm)."""

    normalized: Callable[[], Tensor]
    joint: ClassVar[bool] = True

    def ready(self) -> Use:
        """With z computed."""
        z = self.normalized()
        return replace(self, normalized=lambda: z)

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """The first."""
        return (0,) if len(shape) > 1 else ()

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Sums over positions, of g z and of g."""
        n = grads.shape[0]
        channel = 2 + (layout.place != "whole")  # behind n, c and the images folded into the batch
        if role == "weight":
            z = layout.canonical(self.normalized(), n)
            z, grads = promoted(z, grads)
            if grads.is_cuda and channel == 2 and grads.dim() > 3:  # reads the gradients once
                return torch.einsum("ncxt,nxt->ncx", grads.flatten(3), z.flatten(2))
            grads = grads * z.unsqueeze(1)
        others = [axis for axis in range(2, grads.dim()) if axis != channel]
        return grads.sum(others) if others else grads


def _over_features(function: Function, names: tuple[str, ...]) -> Reader:
    def read(recorder: Recorder, called: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(names, args, kwargs)
        out = called(*args, **kwargs)
        weight, bias = given.get("weight"), given.get("bias")
        if recorder.follows(weight, bias):
            inputs, shape, eps = given["input"].detach(), tuple(given["normalized_shape"]), given.get("eps")
            # Without eps the functions differ in their default; with it they do not.
            options = {} if eps is None else {"eps": eps}
            use = FeatureNormUse(_standardized(out, inputs) or (lambda: function(inputs, shape, **options)), shape)
            recorder.record(use, out, weight=weight, bias=bias)
        return out

    return read


def _standardized(out: Tensor, inputs: Tensor) -> Callable[[], Tensor] | None:
    """As z: by the means and scales that a layer norm holds for its backward pass, if it does, in a fifth of the time.

    Not in half precision, where products would be rounded that the norm itself does not round.
    """
    mean, scale = (getattr(out.grad_fn, name, None) for name in ("_saved_result1", "_saved_result2"))
    exact = inputs.dtype in (torch.float32, torch.float64)
    if not exact or not isinstance(mean, Tensor) or not isinstance(scale, Tensor) or mean.dtype != inputs.dtype:
        return None
    return lambda: (inputs - mean).mul_(scale)


def _over_channels(function: Function, names: tuple[str, ...]) -> Reader:
    def read(recorder: Recorder, called: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(names, args, kwargs)
        out = called(*args, **kwargs)
        weight, bias = given.get("weight"), given.get("bias")
        if recorder.follows(weight, bias):
            plain = {**given, "weight": None, "bias": None, "input": given["input"].detach()}
            recorder.record(ChannelNormUse(lambda: function(**plain)), out, weight=weight, bias=bias)
        return out

    return read


LAYER = ("input", "normalized_shape", "weight", "bias", "eps")
RMS = ("input", "normalized_shape", "weight", "eps")
BATCH = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
GROUP = ("input", "num_groups", "weight", "bias", "eps")
INSTANCE = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")

READERS: dict[Function, Reader] = {
    F.layer_norm: _over_features(F.layer_norm, LAYER),
    torch.layer_norm: _over_features(F.layer_norm, LAYER),
    **dict.fromkeys([*functions(F, "rms_norm"), *functions(torch, "rms_norm")], _over_features(F.rms_norm, RMS)),
    F.batch_norm: _over_channels(F.batch_norm, BATCH),
    F.group_norm: _over_channels(F.group_norm, GROUP),
    F.instance_norm: _over_channels(F.instance_norm, INSTANCE),
}
