"""What is written down about a fit, part by part, and how it is read back: every number and shape checked.

Reading happens twice. The first time tensors are stand-ins without memory, so that a file that does not fit together
is refused before any of its numbers are in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.errors import CorruptArtifactError, InputError

from .container import Container
from .header import DTYPES, damaged

LARGEST = 2**48
"""Above any size that occurs."""


@dataclass
class Draft:
    """Facts and tensors to be written.

    Attributes:
        facts: numbers and words, in parts.
        tensors: by their full name.
        orders: of the tensors that are not stored axis by axis, how their axes follow each other in memory. Products
            of matrices round differently for another order, so that it is kept.
        name: of this part.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    orders: dict[str, list[int]] = field(default_factory=dict)
    name: str = ""

    def part(self, name: str) -> Draft:
        """A part of its own."""
        facts: dict[str, Any] = {}
        self.facts[name] = facts
        return Draft(facts, self.tensors, self.orders, f"{self.name}{name}.")

    def note(self, **facts: Any) -> None:
        """Write facts down; numbers that JSON does not know become words."""
        self.facts.update({name: plain(fact) for name, fact in facts.items()})

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Write a tensor down, if there is one."""
        if tensor is None:
            return
        if tensor.dtype not in DTYPES.values():
            raise InputError(f"expected tensors of float64, float32 or int64 to save, got {tensor.dtype} in {name}.")
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
        turned = tensor.detach().permute(order)
        if not tensor.is_contiguous() and turned.is_contiguous():
            self.orders[self.name + name] = order
            tensor = turned
        self.tensors[self.name + name] = tensor


def printable(text: str, most: int | None = None) -> str:
    """Words of a file as they may be shown: without the signs that a terminal obeys, and not too long.

    Examples:
        >>> printable(chr(27) + "[2J").isprintable(), printable("longer", 4)
        (True, 'long...')
    """
    shown = text if most is None or len(text) <= most else f"{text[:most]}..."
    return shown if shown.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in shown)


def plain(fact: Any) -> Any:
    """A fact as JSON has it: it knows no infinity."""
    if isinstance(fact, float) and not math.isfinite(fact):
        return [str(fact)]
    return list(fact) if isinstance(fact, tuple) else fact


def number(fact: Any) -> float | None:
    """A number as `plain` left it; `None` for anything else.

    Examples:
        >>> number(plain(0.5)), number(plain(float("inf"))), number("0.5")
        (0.5, inf, None)
    """
    if type(fact) is list and fact in (["inf"], ["-inf"], ["nan"]):
        return float(fact[0])
    return float(fact) if type(fact) in (int, float) and abs(fact) < 2**1000 else None


@dataclass(frozen=True)
class Target:
    """Where and how tensors are wanted.

    Attributes:
        device: of the model.
        algebra: dtype of the algebra, as wanted.
        working: dtype in which gradients are handled, as wanted.
        stored: the same two, as saved.
        empty: whether tensors are stand-ins without memory.
    """

    device: torch.device
    algebra: torch.dtype
    working: torch.dtype
    stored: tuple[torch.dtype, torch.dtype]
    empty: bool


@dataclass(frozen=True)
class Saved:
    """A part of what was saved, read with suspicion."""

    container: Container
    facts: Mapping[str, Any]
    orders: Mapping[str, Any]
    target: Target
    used: set[str]
    name: str = ""

    def part(self, name: str) -> Saved:
        """A part of its own."""
        facts = self._fact(name)
        if not isinstance(facts, dict):
            raise self.wrong(name, "a part")
        return Saved(self.container, facts, self.orders, self.target, self.used, f"{self.name}{name}.")

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self.name + name in self.container.entries

    def sizes(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor with so many axes."""
        entry = self.container.entries.get(self.name + name)
        if entry is None or len(entry.shape) != axes:
            raise self.wrong(name, f"a tensor of {axes} axes")
        order = self._order(self.name + name, axes)
        return tuple(entry.shape[order.index(axis)] for axis in range(axes))

    def algebra(self, name: str, *shape: int) -> Tensor:
        """A tensor in the dtype of the algebra."""
        return self.tensor(name, shape, self.target.stored[0], self.target.algebra)

    def working(self, name: str, *shape: int) -> Tensor:
        """A tensor in the dtype in which gradients are handled."""
        return self.tensor(name, shape, self.target.stored[1], self.target.working)

    def double(self, name: str, *shape: int) -> Tensor:
        """A tensor that is of float64 always."""
        return self.tensor(name, shape, torch.float64, torch.float64)

    def tensor(self, name: str, shape: Sequence[int], stored: torch.dtype, wanted: torch.dtype) -> Tensor:
        """A tensor of exactly this shape and dtype, as it is wanted."""
        if self.sizes(name, len(shape)) != tuple(shape):
            raise self.wrong(name, f"a tensor of shape {tuple(shape)}")
        full = self.name + name
        entry = self.container.entries[full]
        if entry.dtype != stored:
            raise self.wrong(name, f"a tensor of {stored}")
        self.used.add(full)
        if self.target.empty:
            return torch.empty(tuple(shape), dtype=wanted, device="meta")
        order = self._order(full, len(shape))
        back = [order.index(axis) for axis in range(len(shape))]
        return self.container.read(entry).to(self.target.device, wanted).permute(back)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A number within bounds."""
        found = number(self._fact(name))
        if found is None or not low <= found <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return found

    def whole(self, name: str, low: int = 0, high: int = LARGEST) -> int:
        """A whole number within bounds."""
        found = self._fact(name)
        if type(found) is not int or not low <= found <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return found

    def flag(self, name: str) -> bool:
        """Yes or no."""
        found = self._fact(name)
        if type(found) is not bool:
            raise self.wrong(name, "yes or no")
        return found

    def text(self, name: str, *choices: str) -> str:
        """Words, perhaps one of some."""
        found = self._fact(name)
        if not isinstance(found, str) or (choices and found not in choices):
            raise self.wrong(name, " or ".join(map(repr, choices)) or "words")
        return printable(found)

    def texts(self, name: str) -> list[str]:
        """A list of words."""
        found = self._fact(name)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.wrong(name, "a list of words")
        return [printable(one) for one in found]

    def wholes(self, name: str, low: int = 0, high: int = LARGEST) -> list[int]:
        """A list of whole numbers within bounds."""
        found = self._fact(name)
        if not isinstance(found, list) or not all(type(one) is int and low <= one <= high for one in found):
            raise self.wrong(name, f"a list of whole numbers from {low} to {high}")
        return list(found)

    def wrong(self, name: str, wanted: str) -> CorruptArtifactError:
        """The error for something that is missing or not what it must be."""
        return damaged(self.container.path, f"{self.name}{name} is missing, or not {wanted}")

    def _fact(self, name: str) -> Any:
        if name not in self.facts:
            raise self.wrong(name, "there")
        return self.facts[name]

    def _order(self, full: str, axes: int) -> list[int]:
        order = self.orders.get(full, list(range(axes)))
        if not isinstance(order, list) or sorted(map(repr, order)) != [repr(axis) for axis in range(axes)]:
            raise damaged(self.container.path, f"the axes of {full} are in no order")
        return order
