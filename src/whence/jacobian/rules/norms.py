"""Normalisations with a scale and a shift: y = weight * z + bias. z is recomputed, not obtained by division."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import Layout, fused_kernels, promoted
from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, Use, bind
from whence.jacobian.rules.channels_last import ScaleBackward, has_channels_last, run


@dataclass(frozen=True)
class NormUse(Use):
    """y = weight * z + bias; weight and bias have the last axes of y (LayerNorm, RMSNorm) or the second (channels)."""

    normalized: Callable[[], Tensor]  # computes z with torch
    trailing: int = 0  # number of last axes of weight and bias; 0 for the axis of channels
    joint: ClassVar[bool] = True

    @cached_property
    def z(self) -> Tensor:
        """The normalised input, computed once for all cotangents."""
        return self.normalized()

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """All axes before those of weight and bias."""
        return range(len(shape) - self.trailing if self.trailing else min(len(shape) - 1, 1))

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Sums over positions: of g z for the weight, of g for the bias."""
        channel = 2 + (layout.place != "whole")  # after n, c and images folded into the batch
        z = layout.canonical(self.z, len(grads)) if role == "weight" else None
        if grads.is_cuda and not self.trailing and channel == 2 and grads.dim() > 3:
            return over_positions(grads, z)
        if z is not None:
            z, grads = promoted(z, grads)
            grads = grads * z.unsqueeze(1)
        own = range(grads.dim() - self.trailing, grads.dim()) if self.trailing else (channel,)
        others = [axis for axis in range(2, grads.dim()) if axis not in own]
        return grads.sum(others) if others else grads


def over_positions(grads: Tensor, z: Tensor | None) -> Tensor:
    """Sums (n, c, x) over positions of g (n, c, x, ...), or of g z for z (n, x, ...), that read g once on a GPU."""
    rows = grads.flatten(3).permute(1, 0, 3, 2)  # (c, n, t, x)
    kernels = fused_kernels(grads)
    if kernels is not None and rows.is_contiguous():  # channels last
        factors = None if z is None else z.flatten(2).mT.to(grads.dtype).contiguous()
        found: Tensor = kernels.over_positions(rows, factors)
        return found
    if z is None:  # as a product: sums of a few numbers are slow
        return (rows.mT @ rows.new_ones(rows.shape[2])).transpose(0, 1)
    z, grads = promoted(z, grads)
    return torch.einsum("ncxt,nxt->ncx", grads.flatten(3), z.flatten(2))


def _reader(norm: Function, *names: str) -> Reader:
    def read(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
        given = bind(names, args, kwargs)
        weight, bias = given.get("weight"), given.get("bias")
        fixed = norm is F.batch_norm and not given.get("training") and weight is not None
        if fixed and given["input"].dtype == torch.float16:
            out = _as_product(given)
        else:
            out = function(*args, **kwargs)
            if fixed:  # torch's own values, with the graph of the product
                values, out = out, _as_product(given)
                with torch.no_grad():
                    out.copy_(values)
        if recorder.tracks(weight, bias):
            options = {name: given[name] for name in names if name in given and name not in ("weight", "bias")}
            if norm is F.layer_norm and weight is not None:  # twice as fast with a weight as without
                options["weight"] = torch.ones_like(weight)
            plain = partial(norm, **{**options, "input": given["input"].detach()})
            recorder.record(NormUse(plain, len(given.get("normalized_shape", ()))), out, weight=weight, bias=bias)
        return out

    return read


def _as_product(given: Keywords) -> Tensor:
    """A batch norm in eval mode, with a product as backward pass: half the time, one call for all cotangents."""
    inputs, bias = given["input"], given.get("bias")
    shape = (1, -1, *[1] * (inputs.dim() - 2))
    scale = given["weight"] * (given["running_var"] + given.get("eps", 1e-5)).rsqrt()
    shift = (0.0 if bias is None else bias) - given["running_mean"] * scale
    scale, shift = scale.to(inputs.dtype), shift.to(inputs.dtype).reshape(shape)
    if not has_channels_last(inputs):
        return torch.addcmul(shift, inputs, scale.reshape(shape))
    out = torch.addcmul(shift, inputs.detach(), scale.reshape(shape))  # with a graph to weight and bias
    return run(ScaleBackward, out, inputs, scale.detach())


RUNNING = ("input", "running_mean", "running_var", "weight", "bias")
FEATURES = ("input", "normalized_shape")
READERS: dict[Function, Reader] = {
    **dict.fromkeys([F.layer_norm, torch.layer_norm], _reader(F.layer_norm, *FEATURES, "weight", "bias", "eps")),
    **dict.fromkeys([F.rms_norm, torch.rms_norm], _reader(F.rms_norm, *FEATURES, "weight", "eps")),
    F.batch_norm: _reader(F.batch_norm, *RUNNING, "training", "momentum", "eps"),
    F.group_norm: _reader(F.group_norm, "input", "num_groups", "weight", "bias", "eps"),
    F.instance_norm: _reader(F.instance_norm, *RUNNING, "use_input_stats", "momentum", "eps"),
}
