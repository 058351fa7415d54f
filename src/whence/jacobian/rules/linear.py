"""Linear maps: `F.linear`, `addmm`, matrix products with a weight on the right or on the left."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import Factor, Kind, Layout, Whole
from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, Use, bind, functions, positions


@dataclass(frozen=True)
class LinearUse(Use):
    """y_t = W a_t + b: the gradient is the sum over t of g_t a_t^T."""

    inputs: Tensor  # a, (..., i), or (..., i, t) where the weight stood on the left
    transposed: bool = False  # whether the weight is (i, o) instead of (o, i)
    left: bool = False  # whether the weight stood on the left
    kind: ClassVar[Kind] = "kronecker"
    joint: ClassVar[bool] = True

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """All but the features'."""
        last = len(shape) - 1
        return (axis for axis in range(len(shape)) if axis != last - self.left)

    def factors(self, layout: Layout, grads: Tensor, ones: bool) -> tuple[Factor, Factor]:
        """Views, except where a folded layout needs a copy."""
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
    """`torch.addmm(bias, input, weight)`, as in Hugging Face's Conv1D; not where alpha or beta scale it."""
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


READERS: dict[Function, Reader] = {
    F.linear: linear,
    **dict.fromkeys([torch.addmm, Tensor.addmm], addmm),
    **dict.fromkeys(functions(torch, "matmul", "mm"), product),
    **dict.fromkeys(functions(Tensor, "matmul", "mm"), product),
}
