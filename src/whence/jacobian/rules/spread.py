"""Bare parameters: spread over the examples by a broadcasting operation, or explicitly by `expand` and `repeat`.

A followed tensor that meets the examples in an elementwise operation is expanded to the operation's full shape first.
The gradient in the expanded tensor then holds every example's own part, to be summed over the other axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.gradients import Layout
from whence.jacobian.rules.base import (
    Arguments,
    Followed,
    Function,
    Keywords,
    Reader,
    Recorder,
    Use,
    bind,
    functions,
    promoted,
)


@dataclass(frozen=True)
class SpreadUse(Use):
    """A tensor of some shape, spread over a larger one."""

    shape: tuple[int, ...]
    fed: ClassVar[bool] = False

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """Those along which the tensor was spread."""
        own = (1,) * (len(shape) - len(self.shape)) + self.shape
        return (axis for axis in range(len(shape)) if own[axis] != shape[axis])

    def accepts(self, layout: Layout, shape: Sequence[int], n: int) -> bool:
        """What is left of the axes once the examples are taken out must be the tensor's own, or spread whole."""
        left = [*shape]
        left[layout.axis] //= n
        own = (1,) * (len(shape) - len(self.shape)) + self.shape
        return all(size in (1, rest) for size, rest in zip(own, left, strict=True))

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Sum what the tensor was spread over."""
        if layout.place == "whole":
            grads = grads.unsqueeze(layout.axis + 2)  # the examples' own axis, now of size one
        return _sum_to(grads, self.shape)


def _sum_to(grads: Tensor, shape: Sequence[int]) -> Tensor:
    """(n, c, *spread) to (n, c, *shape)."""
    extra = grads.dim() - 2 - len(shape)
    if extra:
        grads = grads.sum(tuple(range(2, 2 + extra)))
    axes = [axis + 2 for axis, size in enumerate(shape) if size == 1 and grads.shape[axis + 2] != 1]
    return grads.sum(axes, keepdim=True) if axes else grads


@dataclass(frozen=True)
class SlopeUse(Use):
    """The slopes of `F.prelu`: one, or one for every entry of the second axis."""

    inputs: Tensor
    size: int

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """All but the channels'."""
        return (axis for axis in range(len(shape)) if axis != 1 or self.size == 1)

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Sum of g x where x is negative."""
        n, c = grads.shape[:2]
        x = layout.canonical(self.inputs.clamp(max=0), n)
        x, grads = promoted(x, grads)
        product = grads * x.unsqueeze(1)
        if self.size == 1:
            return product.reshape(n, c, -1).sum(2, keepdim=True)
        channel = 2 if layout == Layout() else 3  # something of the example itself stands before the channels
        others = [axis for axis in range(2, product.dim()) if axis != channel]
        return product.sum(others) if others else product


def prelu(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`F.prelu(input, weight)`."""
    out = function(*args, **kwargs)
    given = bind(("input", "weight"), args, kwargs)
    if recorder.follows(given["weight"]):
        use = SlopeUse(given["input"].detach(), given["weight"].numel())
        recorder.record(use, out, weight=given["weight"])
    return out


def elementwise(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Operations that broadcast their operands."""
    if not recorder.follows(*args):
        return function(*args, **kwargs)
    operands = [operand for operand in args if isinstance(operand, Tensor)]
    sources = [source for source in map(recorder.source, operands) if source is not None]
    shape = torch.broadcast_shapes(*(operand.shape for operand in operands))
    alone = len(sources) == len(operands)
    if alone or not recorder.carries_examples("elementwise", sources, shape):
        out = function(*args, **kwargs)
        recorder.derive(out, *sources)
        return out
    spread = []
    for operand in args:
        source = recorder.source(operand)
        spread.append(operand if source is None else _spread(recorder, source, shape))
    return function(*spread, **kwargs)


def in_place(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """The same, written into the first operand; a followed tensor that is written to is lost to the capture."""
    if recorder.follows(args[0]):
        return function(*args, **kwargs)
    return elementwise(recorder, function, args, kwargs)


def _spread(recorder: Recorder, source: Followed, shape: Sequence[int]) -> Tensor:
    expanded = source.tensor.expand(shape)
    recorder.record(SpreadUse(tuple(source.tensor.shape)), expanded, weight=source.tensor)
    return expanded


def explicit(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`expand`, `repeat` and their like: spread over the examples, or over something else and still without them."""
    out = function(*args, **kwargs)
    source = recorder.source(args[0] if args else None)
    if source is None:
        return out
    if recorder.carries_examples("expand", [source], out.shape):
        recorder.record(SpreadUse(tuple(source.tensor.shape)), out, weight=source.tensor)
    else:
        recorder.derive(out, source)
    return out


BINARY = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "maximum", "minimum")
MORE = ("where", "lerp", "addcmul", "addcdiv", "rsub", "float_power")
OPERATORS = ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "div", "rdiv", "pow", "rpow")
METHODS = tuple(f"__{name}__" for name in OPERATORS)
IN_PLACE = tuple(f"{name}_" for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp"))
IN_PLACE_METHODS = tuple(f"__{name}__" for name in ("iadd", "isub", "imul", "itruediv", "idiv"))

READERS: dict[Function, Reader] = {
    **dict.fromkeys(functions(torch, *BINARY, *MORE), elementwise),
    **dict.fromkeys(functions(Tensor, *BINARY, *MORE, *METHODS), elementwise),
    **dict.fromkeys(functions(Tensor, *IN_PLACE, *IN_PLACE_METHODS), in_place),
    **dict.fromkeys(functions(torch, "broadcast_to", "tile", "repeat_interleave"), explicit),
    **dict.fromkeys(
        functions(Tensor, "expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"), explicit
    ),
    F.prelu: prelu,
}
