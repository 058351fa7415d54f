"""Bare parameters: functions of parameters alone, tracked up to the call that uses them; and broadcasting.

A tracked tensor that meets the examples in an elementwise operation is first expanded to the operation's full shape.
The gradient in the expanded tensor then holds each example's own part, to be summed over the other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import Layout
from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, Tracked, Use, bind, functions
from whence.jacobian.rules.embeddings import look_up

# --- Functions of parameters alone ------------------------------------------------------------------------------------


def transpose(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`W.t()`, `W.T`, `W.mT`: still the parameter, transposed."""
    out = function(*args, **kwargs)
    source = recorder.source(args[0] if args else kwargs.get("input"))
    if source is not None:
        matrix = source.parameter is not None and source.tensor.dim() == 2
        recorder.track(out, source, transposed=not source.transposed if matrix else None)
    return out


def item(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`W[...]`: a lookup by an index tensor, or any other slice."""
    out = function(*args, **kwargs)
    tensor, index = args
    if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool:
        return look_up(recorder, out, tensor, index, None)
    source = recorder.source(tensor)
    if source is not None:
        recorder.track(out, source)
    return out


def concatenation(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`cat` and `stack` of tracked tensors; constants (the zeros of a missing bias) are allowed."""
    out = function(*args, **kwargs)
    tensors: Any = kwargs.get("tensors", args[0] if args else ())
    sources = [source for source in map(recorder.source, tensors) if source is not None]
    if sources and not any(tensor.requires_grad for tensor in tensors if not recorder.tracks(tensor)):
        recorder.track(out, *sources)
    return out


# --- Broadcasting over the examples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class BroadcastUse(Use):
    """A tensor of this shape, broadcast to a larger one."""

    shape: tuple[int, ...]
    examples: int  # n
    has_inputs: ClassVar[bool] = False

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """Axes of broadcasting such that, without the examples, all axes are the tensor's own or broadcast."""
        own = (1,) * (len(shape) - len(self.shape)) + self.shape
        for axis, size in enumerate(shape):
            left = (*shape[:axis], size // self.examples, *shape[axis + 1 :])
            if own[axis] != size and all(one in (1, rest) for one, rest in zip(own, left, strict=True)):
                yield axis

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Sum over the axes along which the tensor was broadcast."""
        if layout.place == "whole":
            grads = grads.unsqueeze(layout.axis + 2)  # the batch axis, now of size one
        extra = grads.dim() - 2 - len(self.shape)
        if extra:
            grads = grads.sum(tuple(range(2, 2 + extra)))
        axes = [axis + 2 for axis, size in enumerate(self.shape) if size == 1 and grads.shape[axis + 2] != 1]
        return grads.sum(axes, keepdim=True) if axes else grads


def _broadcast(recorder: Recorder, source: Tracked, expanded: Tensor) -> Tensor:
    recorder.record(BroadcastUse(tuple(source.tensor.shape), recorder.examples), expanded, weight=source.tensor)
    return expanded


def elementwise(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Operations that broadcast their operands."""
    if not recorder.tracks(*args):
        return function(*args, **kwargs)
    operands = [operand for operand in args if isinstance(operand, Tensor)]
    sources = [source for source in map(recorder.source, operands) if source is not None]
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    if len(sources) == len(operands) or not recorder.has_batch_axis("elementwise", sources, shape):
        out = function(*args, **kwargs)
        recorder.track(out, *sources)
        return out
    expanded = []
    for operand in args:
        source = recorder.source(operand)
        expanded.append(operand if source is None else _broadcast(recorder, source, source.tensor.expand(shape)))
    return function(*expanded, **kwargs)


def in_place(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """As `elementwise`, in place; a tracked tensor that is written to is no longer tracked."""
    if recorder.tracks(args[0]):
        return function(*args, **kwargs)
    return elementwise(recorder, function, args, kwargs)


def explicit(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`expand`, `repeat` and similar: over the examples, or over other axes."""
    out = function(*args, **kwargs)
    source = recorder.source(args[0] if args else None)
    if source is None:
        return out
    if recorder.has_batch_axis("expand", [source], out.shape):
        return _broadcast(recorder, source, out)
    recorder.track(out, source)
    return out


def prelu(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`F.prelu(input, weight)`, as a product where the input is negative; with one slope, or one per channel."""
    given = bind(("input", "weight"), args, kwargs)
    inputs, slopes = given["input"], given["weight"]
    if not recorder.tracks(slopes):
        return function(*args, **kwargs)
    with recorder:
        slopes = slopes if slopes.numel() == 1 else slopes.reshape(-1, *(1,) * (inputs.dim() - 2))
        return torch.where(inputs >= 0, inputs, slopes * inputs)


BINARY = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "maximum", "minimum")
MORE = ("where", "lerp", "addcmul", "addcdiv", "rsub", "float_power")
OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "div", "rdiv", "pow", "rpow")
METHODS = tuple(f"__{name}__" for name in OPERATORS)
IN_PLACE = tuple(f"{name}_" for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp"))
IN_PLACE_METHODS = tuple(f"__{name}__" for name in ("iadd", "isub", "imul", "itruediv", "idiv"))

PARAMETER_READERS: dict[Function, Reader] = {
    **dict.fromkeys([torch.t, Tensor.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))], transpose),
    **dict.fromkeys(functions(torch, "cat", "concat", "concatenate", "stack", "hstack", "vstack"), concatenation),
    Tensor.__getitem__: item,
}

BROADCAST_READERS: dict[Function, Reader] = {
    **dict.fromkeys(functions(torch, *BINARY, *MORE), elementwise),
    **dict.fromkeys(functions(Tensor, *BINARY, *MORE, *METHODS), elementwise),
    **dict.fromkeys(functions(Tensor, *IN_PLACE, *IN_PLACE_METHODS), in_place),
    **dict.fromkeys(functions(torch, "broadcast_to", "tile", "repeat_interleave"), explicit),
    **dict.fromkeys(
        functions(Tensor, "expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"), explicit
    ),
    F.prelu: prelu,
}

READERS = BROADCAST_READERS | PARAMETER_READERS
