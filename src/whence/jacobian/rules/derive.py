"""What is made of parameters alone: views, casts, slices and functions of them are followed to where they are used."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.jacobian.rules.base import Arguments, Followed, Function, Keywords, Reader, Recorder, View, functions
from whence.jacobian.rules.embeddings import look_up

VIEWS = (
    *("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "permute", "transpose", "swapaxes", "movedim"),
    *("narrow", "select", "diagonal", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16"),
    *("clone", "view_as", "reshape_as", "flip", "roll", "tril", "triu", "diag", "diag_embed"),
)
UNARY = (
    *("neg", "exp", "log", "sqrt", "rsqrt", "square", "abs", "reciprocal", "sigmoid", "tanh", "softmax", "log_softmax"),
    *("relu", "clamp", "sum", "mean", "norm", "expm1", "log1p", "sin", "cos", "positive", "cumsum", "negative"),
)
ACTIVATIONS = ("softplus", "relu", "gelu", "silu", "elu", "normalize", "softmax", "log_softmax", "sigmoid", "tanh")
RESIZED = ("interpolate", "pad")
PARTS = ("chunk", "split", "unbind", "tensor_split")


def alone(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Functions of one tensor; those of several tensors are followed if all of them are."""
    out = function(*args, **kwargs)
    if recorder.follows(*args):
        sources = [recorder.source(value) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        known = [source for source in sources if source is not None]
        if len(known) == len(sources):
            recorder.derive(out, *known)
    return out


def transpose(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`W.t()`, `W.T`, `W.mT`: still the parameter, stored the other way round."""
    out = function(*args, **kwargs)
    source = recorder.source(args[0] if args else kwargs.get("input"))
    if source is not None:
        view = source.view
        plain = view is not None and source.tensor.dim() == 2 and view.rows is None
        recorder.derive(out, source, view=View(transposed=not view.transposed) if plain and view is not None else None)
    return out


def item(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`W[...]`: rows of a matrix, a lookup by an index tensor, or any other slice."""
    out = function(*args, **kwargs)
    source = recorder.source(args[0])
    if source is None:
        return out
    index = args[1]
    if isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool:
        return look_up(recorder, out, args[0], index, None)
    recorder.derive(out, source, view=_row_view(source, index))
    return out


def _row_view(source: Followed, index: Any) -> View | None:
    if not source.whole or not isinstance(index, slice):
        return None
    start, stop, step = index.indices(source.tensor.shape[0])
    return View(rows=(start, max(start, stop))) if step == 1 else None


def parts(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`chunk`, `split` and `unbind`: several tensors, each followed."""
    out = function(*args, **kwargs)
    source = recorder.source(args[0] if args else None)
    if source is None:
        return out
    start = 0
    dim = kwargs.get("dim", args[2] if len(args) > 2 else 0)
    for part in out:
        rows = source.whole and dim == 0 and part.dim() == source.tensor.dim()
        view = View(rows=(start, start + part.shape[0])) if rows else None
        start += part.shape[0] if rows else 0
        recorder.derive(part, source, view=view)
    return out


def joined(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`cat` and `stack` of followed tensors, constants between them (the zeros of a missing bias) allowed."""
    out = function(*args, **kwargs)
    tensors: Any = kwargs.get("tensors", args[0] if args else ())
    sources = [source for source in map(recorder.source, tensors) if source is not None]
    if sources and not any(tensor.requires_grad for tensor in tensors if not recorder.follows(tensor)):
        recorder.derive(out, *sources)
    return out


READERS: dict[Function, Reader] = {
    **dict.fromkeys(functions(torch, *VIEWS, *UNARY, "_weight_norm"), alone),
    **dict.fromkeys(functions(Tensor, *VIEWS, *UNARY, "__neg__"), alone),
    **dict.fromkeys(functions(F, *ACTIVATIONS, *RESIZED), alone),
    **dict.fromkeys([torch.t, Tensor.t, *(getattr(Tensor, name).__get__ for name in ("T", "mT"))], transpose),
    **dict.fromkeys(functions(torch, *PARTS), parts),
    **dict.fromkeys(functions(Tensor, *PARTS), parts),
    **dict.fromkeys(functions(torch, "cat", "concat", "concatenate", "stack", "hstack", "vstack"), joined),
    Tensor.__getitem__: item,
}
