"""Is this the model that was fitted? Its modules, names, shapes, dtypes, and a hash of every parameter and buffer."""

from __future__ import annotations

import hashlib
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from whence.display import listing
from whence.errors import StaleModelError
from whence.io.files import Draft, Saved, printable
from whence.jacobian.leaves import LeafSum
from whence.runtime.model_state import as_bytes

ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def write_model(draft: Draft, model: nn.Module) -> None:
    """Write modules, and name, dtype, shape and checksum of every parameter and buffer."""
    draft.put(
        modules=[[name, *_class_and_options(module)] for name, module in model.named_modules(remove_duplicate=False)],
        tensors=[
            [name, owner, str(tensor.dtype), list(tensor.shape), _sha256(tensor)]
            for name, owner, tensor in tensors_of(model)
        ],
    )
    if isinstance(model, LeafSum):
        draft.put(scale=model.scale)


def check_same(saved: Saved, model: nn.Module, same_torch: bool) -> None:
    """Raise unless this is the model that was fitted."""
    _check_modules(saved, model, same_torch)
    found, rows = tensors_of(model), saved.table("tensors", 5)
    here, there = [name for name, _, _ in found], [row[0] for row in rows]
    if here != there:
        odd = [name for name in [*here, *there] if (name in here) != (name in there)] or here
        raise _other_model(f"another set of parameters and buffers ({listing([_safe(name) for name in odd])})")
    changed = []
    for (name, owner, tensor), (_, other, dtype, shape, wanted) in zip(found, rows, strict=True):
        if owner != other:
            raise _other_model(f"{name}, which shared its weights with {_safe(other)} and now shares them with {owner}")
        if list(tensor.shape) != shape:
            raise _other_model(f"{name} of shape {tuple(tensor.shape)} instead of {_safe(shape)}")
        if str(tensor.dtype) != dtype or _sha256(tensor) != wanted:
            changed.append(name)
    if changed:
        raise StaleModelError(
            f"expected the weights and buffers that were fitted, got changes in {listing(changed)}. "
            "Load the weights of that time into the model, in the same dtype, or fit and save again."
        )


def rescale(saved: Saved, model: LeafSum) -> None:
    """Give leaf values the scale of the fit, which came from the training data."""
    if not saved.has("scale"):
        raise _other_model("trees where a network was")
    sizes = {"leaves": tuple(model.scale.shape)}
    here = replace(saved, device=model.scale.device, dtypes={"double": (torch.float64,)}, sizes=sizes)
    scale = here.tensor("scale", "double", "leaves")
    if not bool((torch.isfinite(scale) & (scale > 0)).all()):
        raise saved.wrong("scale", "numbers above zero")
    model.rescale(scale)


def tensors_of(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    """(name, first name of the same tensor, tensor) of all parameters and buffers."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [(name, first.setdefault(id(tensor), name), tensor) for name, tensor in named]


def _sha256(tensor: Tensor) -> str:
    return hashlib.sha256(memoryview(as_bytes(tensor))).hexdigest()


def _check_modules(saved: Saved, model: nn.Module, same_torch: bool) -> None:
    rows = saved.table("modules", 3)
    found = [[name, *_class_and_options(module)] for name, module in model.named_modules(remove_duplicate=False)]
    for here, there in zip(found, rows, strict=False):
        if here[:2] != there[:2] or (same_torch and here != there):
            raise _other_model(f"{_module_text(here)} where {_module_text(there)} was")
    if len(found) != len(rows):
        raise _other_model(f"{len(found)} modules instead of {len(rows)}")


def _class_and_options(module: nn.Module) -> tuple[str, str]:
    """The class of a module, and its options as it prints them, which another torch may print otherwise."""
    return type(module).__name__, ADDRESS.sub("0x", module.extra_repr())


def _module_text(row: list[Any]) -> str:
    name, kind, options = row
    return f"{_safe(name) or 'the model'}: {_safe(kind)}({_safe(options)})"


def _safe(thing: Any) -> str:
    """Something from a file, for a message."""
    return printable(str(thing), 120)


def _other_model(got: str) -> StaleModelError:
    return StaleModelError(
        f"expected the model that was fitted, got {got}. Build it as it was then, and load the weights of that time."
    )
