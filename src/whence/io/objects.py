"""Objects of whence as JSON and tensors, and back: fields are checked against their annotations and shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from whence.curvature import FittedCurvature, Meats
from whence.curvature.accumulate import LayerGradients, LayerSizes
from whence.curvature.features import Features, TrainingRows
from whence.curvature.leaves import LeafFeatures
from whence.curvature.primal import Projected
from whence.data.batches import Batches
from whence.errors import CorruptArtifactError, InputError, printable
from whence.jacobian.jacobian import Jacobian
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization
from whence.jacobian.network import Network, Selection
from whence.likelihoods import Likelihood
from whence.runtime.execution import Progress
from whence.runtime.files import SavedFile, damaged
from whence.runtime.memory import Budget

FEATURES: tuple[type, ...] = (Jacobian, Projected, LeafFeatures)  # the classes of the protocol `Features`
LIVE: tuple[type, ...] = (
    *(Network, Selection, Batches, Likelihood, Progress, Budget, LeafSum, torch.dtype),
    *(Linearization, FittedCurvature, Meats),
)
"""Types of fields that are not saved: who reads a file has such an object."""

DERIVED = {"captures", "folds", "passes", "saved", "summed_meats", "white_curvature"}  # fields that are not saved
PARTIAL: dict[type, dict[str, Any]] = {
    LayerGradients: {"sizes": LayerSizes, "notes": list[str]},
    TrainingRows: {"features": Features},
    Jacobian: {"notes": list[str]},
}
"""What is saved of objects that are built from a problem."""

SHAPES = {
    "Linearization": {
        "outputs": "n k",
        "residuals": "n k",
        "hessian_roots": "n k q",
        "sample_weights": "n",
        "class_targets": "n k",
    },
    "Labels": {"floors": "n s"},
    "AdjustedResiduals": {"hec2": "n k", "hec3": "n k", "leverage": "n k"},
    "NewtonStep": {"change": "n k", "direction": "d"},
    "FittedCurvature": {"leverage_blocks": "n k k"},
    "FittedPrimal": {"step": "r", "change": "n k"},
    "Whitening": {"scale": "r", "inverse": "r r"},
    "PrimalSandwich": {"matrices": "r r", "total": "r"},
    "LeafFeatures": {"basis": "leaves directions", "sums": "leaves sums"},
    "FittedDual": {"kernel": "nk nk", "factor": "nq nq", "inner_weights": "n k"},
    "FittedSpectral": {"noise": "k k", "change": "n k"},
}
"""Axes of tensors in the dtype of the algebra, by class and field. The first tensor with an axis sets its size."""


@cache
def annotated(kind: type) -> dict[str, Any]:
    """Names and annotations of the fields of a dataclass or a NamedTuple."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind)} if is_dataclass(kind) else hints


@cache
def saved_fields(kind: type) -> dict[str, Any]:
    """Names and annotations of what a file holds of an object."""
    if kind in PARTIAL:
        return PARTIAL[kind]
    named = annotated(kind).items()
    return {name: hint for name, hint in named if name not in DERIVED and live_type(hint) is None}


def saved_classes(hint: type) -> list[type]:
    """The classes whose objects a field may hold: those of the package that the annotation is from."""
    if hint is Features:
        return list(FEATURES)
    found = [hint]
    for kind in found:
        found += kind.__subclasses__()
    return [kind for kind in found if kind.__module__.startswith(hint.__module__.rpartition(".")[0])]


def live_type(hint: Any) -> type | None:
    """The type in `LIVE` that an annotation names, if any."""
    kind = get_args(hint)[0] if get_origin(hint) in (Union, UnionType) else hint
    plain = isinstance(kind, type) and get_origin(kind) is None
    return next((one for one in LIVE if plain and issubclass(kind, one)), None)


class Writer:
    """Turns objects into what JSON can hold, and collects their tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._known: dict[int, Any] = {}  # what stands for objects and tensors that were written before

    def write(self, value: Any, name: str) -> Any:
        """What stands for a value in JSON; names of its tensors begin with `name`."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Mapping):
            return {key: self.write(one, f"{name}.{key}") for key, one in value.items()}
        if type(value) in (list, tuple):
            return [self.write(one, f"{name}.{at}") for at, one in enumerate(value)]
        if id(value) in self._known:
            return self._known[id(value)]
        if isinstance(value, Tensor):
            found = self._known[id(value)] = self._tensor(value, name)
            return found
        kind: type = type(value)
        if not kind.__module__.startswith("whence."):
            raise InputError(
                f"expected a structure of whence itself to save, got {kind.__name__}, which whence cannot write. Fit "
                "with one of whence's structures, or save the model and fit again."
            )
        self._known[id(value)] = {"same": name}
        parts = {part: self.write(getattr(value, part), f"{name}.{part}") for part in saved_fields(kind)}
        return {"class": kind.__name__, **parts}

    def _tensor(self, tensor: Tensor, name: str) -> dict[str, Any]:
        """Its name, and how it lies in memory: matrix products round differently in another order of the axes."""
        found: dict[str, Any] = {"tensor": name}
        shape, strides = tensor.shape, tensor.stride()
        whole = tensor[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)]
        if whole.shape != shape:  # expanded, such as one matrix for all examples
            found["shape"] = list(shape)
        order = sorted(range(len(shape)), key=strides.__getitem__, reverse=True)
        if not whole.is_contiguous() and whole.permute(order).is_contiguous():
            found["order"], whole = order, whole.permute(order)
        self.tensors[name] = whole
        return found


class Reader:
    """Builds objects from a file, with `live` objects, by type, for fields that are not saved.

    Raises `CorruptArtifactError` for fields of another type or shape, and any error for other things that do not fit
    together.
    """

    def __init__(self, saved: SavedFile, device: torch.device) -> None:
        self.saved, self.device = saved, device
        self.live: dict[type, Any] = {}
        self.sizes: dict[str, int] = {}  # of axes, by name
        self._known: dict[str, Any] = {}  # objects and tensors that were read before

    def read(self, hint: Any, name: str) -> Any:
        """A part of the manifest, of the type that an annotation names."""
        return self._value(hint, self.saved.manifest.get(name), name)

    def _value(self, hint: Any, node: Any, name: str) -> Any:
        kind, args = get_origin(hint), get_args(hint)
        if kind in (Union, UnionType):
            return self._option(args, node, name)
        if kind is Literal and type(node) is str and node in args:
            return node
        if kind in (list, tuple, Sequence) and type(node) is list:
            listed = [self._value(args[0], one, f"{name}.{at}") for at, one in enumerate(node)]
            return tuple(listed) if kind is tuple else listed
        if kind in (dict, Mapping) and type(node) is dict:
            return {key: self._value(args[1], one, f"{name}.{key}") for key, one in node.items()}
        if hint is str and type(node) is str:
            return printable(node)
        if (hint in (bool, int) and type(node) is hint) or (hint is float and type(node) in (int, float)):
            return node
        if kind is None and isinstance(hint, type) and hint.__module__ != "builtins" and type(node) is dict:
            found = self._tensor(node) if hint is Tensor else self._object(hint, node, name)
            if isinstance(found, FEATURES if hint is Features else hint):
                return found
        raise self.wrong(name, getattr(hint, "__name__", str(hint)))

    def _option(self, options: Sequence[Any], node: Any, name: str) -> Any:
        """The first of several annotations that fits."""
        if node is None and NoneType in options:
            return None
        *others, last = (one for one in options if one is not NoneType)
        for option in others:
            with suppress(CorruptArtifactError):
                return self._value(option, node, name)
        return self._value(last, node, name)

    def _tensor(self, node: dict[str, Any]) -> Any:
        name, order, shape = str(node.get("tensor")), node.get("order"), node.get("shape")
        if name not in self._known:
            found = self.saved.tensor(name).to(self.device)
            found = found if order is None else found.permute([order.index(axis) for axis in range(len(order))])
            self._known[name] = found if shape is None else found.expand(shape)
        return self._known[name]

    def _object(self, hint: type, node: dict[str, Any], name: str) -> Any:
        if "same" in node:
            return self._known.get(str(node["same"]))
        kind = next((one for one in saved_classes(hint) if one.__name__ == node.get("class")), None)
        if kind is None:
            raise self.wrong(name, getattr(hint, "__name__", str(hint)))
        parts = {part: self._value(of, node.get(part), f"{name}.{part}") for part, of in saved_fields(kind).items()}
        for base in kind.__mro__:
            for part, axes in SHAPES.get(base.__name__, {}).items():
                for tensor in parts[part].values() if isinstance(parts[part], dict) else [parts[part]]:
                    self.check(f"{name}.{part}", tensor, *axes.split())
        found = self._known[name] = self._from_problem(kind, parts) if kind in PARTIAL else self._built(kind, parts)
        return found

    def _built(self, kind: type, parts: dict[str, Any]) -> Any:
        for name, hint in annotated(kind).items():
            live = self.live.get(live_type(hint) or NoneType)
            if live is not None:
                if not isinstance(live, hint):
                    raise self.wrong(name, getattr(hint, "__name__", str(hint)))
                parts[name] = live
        return kind(**parts)

    def _from_problem(self, kind: type, parts: dict[str, Any]) -> Any:
        problem, notes = self.live[Linearization], parts.pop("notes", None)
        found = problem.jacobian() if kind is Jacobian else kind(problem, **parts)
        if notes is not None:
            found.notes[:] = notes
        return found

    def check(self, name: str, tensor: Tensor | None, *axes: str | int, dtype: torch.dtype | None = None) -> None:
        """Raise for a tensor with axes of other sizes, or of another dtype than that of the algebra; `None` is fine."""
        if tensor is None:
            return
        wanted = dtype or self.live[torch.dtype]
        for axis, size in zip(axes, tensor.shape, strict=False):
            if isinstance(axis, str):
                self.sizes.setdefault(axis, size)
        shape = [axis if isinstance(axis, int) else self.sizes.get(axis) for axis in axes]
        if tensor.dtype != wanted or list(tensor.shape) != shape:
            raise self.wrong(name, f"a tensor of {wanted} and shape {shape}")

    def require(self, fine: bool, name: str, wanted: str) -> None:
        """Raise unless a part is as it must be."""
        if not fine:
            raise self.wrong(name, wanted)

    def wrong(self, name: str, wanted: str) -> CorruptArtifactError:
        """The error for something missing or wrong."""
        return damaged(self.saved.path, f"{printable(name, 80)} is missing, or not {wanted}")
