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


Piece = tuple[slice, list[Tangent]]
"""Which examples, and their gradients."""


class Kept:
    """Gradients of the first pieces of a training set, kept while several passes want the same of them.

    Args:
        most: examples that are kept.
    """

    def __init__(self, most: int = 0) -> None:
        """Nothing yet."""
        self.most = most
        self._rows: Tensor | None = None
        self._open = True
        self._pieces: dict[tuple[int, int], Piece] = {}
        self._views: dict[int, tuple[Sequence[Basis], list[View]]] = {}

    def wants(self, cotangents: Cotangents) -> bool:
        """Whether the gradients of these cotangents are to be kept."""
        return self.most > 0 and self._rows is None and isinstance(cotangents, Same)

    def keep(self, cotangents: Cotangents, where: slice, tangents: list[Tangent]) -> None:
        """Remember a piece, if it and those before it are few enough."""
        assert isinstance(cotangents, Same)
        self._rows = cotangents.rows
        self._open = self._open and where.stop <= self.most
        if self._open:
            self._pieces[where.start, where.stop] = where, tangents

    def of(self, cotangents: Cotangents) -> dict[tuple[int, int], Piece]:
        """The pieces that are kept of these cotangents, by their first and last examples."""
        same = self._rows is not None and isinstance(cotangents, Same) and torch.equal(cotangents.rows, self._rows)
        return self._pieces if same else {}

    def views(self, tangents: list[Tangent], bases: Sequence[Basis], device: torch.device) -> list[View] | None:
        """The gradients of a piece seen from these bases, where the piece is kept.

        The views alone hold its gradients from then on; the empty list goes on to stand for it.
        """
        if not any(tangents is kept for _, kept in self._pieces.values()):
            return None
        if id(tangents) not in self._views:
            self._views[id(tangents)] = bases, views(tangents, bases, device)
            tangents.clear()
        of, found = self._views[id(tangents)]
        assert of is bases, "gradients that are kept for other bases"
        return found

    def forget(self, where: slice) -> None:
        """Let go of a piece that no later pass will want."""
        _, tangents = self._pieces.pop((where.start, where.stop), (where, []))
        self._views.pop(id(tangents), None)
