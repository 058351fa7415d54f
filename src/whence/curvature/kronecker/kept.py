"""Gradients of small training sets, kept from pass to pass: there, calls cost more than numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.tangents.forms import Tangent

from .basis import Basis
from .view import View, views

Cotangents = Callable[[slice, int], Tensor]
"""From the place among the training examples and their number n to cotangents (c, n, k)."""


@dataclass(frozen=True)
class Same:
    """The same cotangents (c, k) for every example."""

    rows: Tensor

    def __call__(self, where: slice, n: int) -> Tensor:
        """(c, n, k)."""
        return self.rows.unsqueeze(1).expand(-1, n, -1)


class Kept:
    """The gradients of a whole training set, in pieces, kept while several passes want the same of them.

    Args:
        open: whether anything is kept.
    """

    def __init__(self, open: bool = False) -> None:
        """Nothing yet."""
        self.open = open
        self._rows: Tensor | None = None
        self._pieces: list[tuple[slice, list[Tangent]]] = []
        self._views: dict[int, tuple[Sequence[Basis], list[View]]] = {}

    def wants(self, cotangents: Cotangents) -> bool:
        """Whether the gradients of these cotangents are to be kept."""
        return self.open and self._rows is None and isinstance(cotangents, Same)

    def keep(self, cotangents: Cotangents, pieces: list[tuple[slice, list[Tangent]]]) -> None:
        """Remember all pieces of a pass."""
        assert isinstance(cotangents, Same)
        self._rows, self._pieces = cotangents.rows, pieces

    def of(self, cotangents: Cotangents) -> list[tuple[slice, list[Tangent]]] | None:
        """The pieces, if these are their cotangents."""
        same = self._rows is not None and isinstance(cotangents, Same) and torch.equal(cotangents.rows, self._rows)
        return self._pieces if same else None

    def views(self, tangents: list[Tangent], bases: Sequence[Basis], device: torch.device) -> list[View] | None:
        """The gradients of a piece seen from these bases, where the piece is kept."""
        if not any(tangents is kept for _, kept in self._pieces):
            return None
        of, found = self._views.get(id(tangents), (None, []))
        if of is not bases:
            found = views(tangents, bases, device)
            self._views[id(tangents)] = bases, found
        return found

    def settle(self, tangents: list[Tangent]) -> None:
        """Let go of what the views of a kept piece do not need any more; the empty list goes on to stand for it."""
        _, found = self._views.get(id(tangents), (None, []))
        if found:
            for view in found:
                view.settle()
            tangents.clear()
