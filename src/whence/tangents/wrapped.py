"""Models wrapped for training by several processes: the network inside is what is fitted."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from whence.errors import InputError

FSDP = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
"""Where its classes are, today and in older versions of torch."""


def bare(model: Any) -> Any:
    """The network inside `DistributedDataParallel`; of one sharded by FSDP2, a copy with whole weights.

    All processes must call this together where a model is sharded: each of them gets all weights.

    Examples:
        >>> inner = nn.Linear(1, 1)
        >>> bare(DataParallel(inner)) is inner
        True
    """
    found = model
    while isinstance(found, (DistributedDataParallel, DataParallel)):
        found = found.module
    if not isinstance(found, nn.Module):
        return found
    kinds = {kind for module in found.modules() for kind in type(module).__mro__ if _of_fsdp(kind)}
    if any(kind.__name__ == "FullyShardedDataParallel" for kind in kinds):
        raise InputError(
            "expected a model that is whole, wrapped in DistributedDataParallel or sharded by fully_shard, got the "
            "older FullyShardedDataParallel. Load its full state dict into a plain copy of the model, and fit that."
        )
    return whole_copy(found) if kinds else found


def whole_copy(model: nn.Module) -> nn.Module:
    """The same network without what `fully_shard` did to it, its weights brought together in every process.

    Modules are copied one by one, without their parameters' values, and everything else in them is shared.
    """
    weights: dict[int, nn.Parameter] = {}
    modules: dict[int, nn.Module] = {}

    def whole(parameter: nn.Parameter) -> nn.Parameter:
        if id(parameter) not in weights:
            values: Any = parameter.detach()
            full: Tensor = values.full_tensor() if hasattr(values, "full_tensor") else values  # of a DTensor
            weights[id(parameter)] = nn.Parameter(full, parameter.requires_grad)
        return weights[id(parameter)]

    def copy(module: nn.Module) -> nn.Module:
        if id(module) not in modules:
            kind: Any = next(one for one in type(module).__mro__ if not _of_fsdp(one))
            fresh: nn.Module = kind.__new__(kind)
            modules[id(module)] = fresh
            fresh.__dict__ = {
                name: type(value)(value) if isinstance(value, dict) else value
                for name, value in module.__dict__.items()
                if "fsdp" not in name and not name.startswith("__composable")
            }
            for name, hooks in fresh.__dict__.items():
                if name.endswith("_hooks") and isinstance(hooks, dict):
                    for key in [key for key, hook in hooks.items() if _of_fsdp(getattr(hook, "__self__", hook))]:
                        del hooks[key]
            parameters, children = module._parameters, module._modules
            fresh._parameters = {name: None if one is None else whole(one) for name, one in parameters.items()}
            fresh._modules = {name: None if one is None else copy(one) for name, one in children.items()}
        return modules[id(module)]

    return copy(model)


def _of_fsdp(thing: Any) -> bool:
    """Whether a class, or the class of a thing, was made by torch's FSDP2."""
    kind = thing if isinstance(thing, type) else type(thing)
    return any(one.__module__.startswith(FSDP) for one in kind.__mro__ if one is not object)
