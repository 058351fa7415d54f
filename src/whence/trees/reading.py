"""What the adapters of all libraries share: numbers for leaves, and the words of refusals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from whence.errors import InputError


class LeafNumbers:
    """From a library's own node numbers, which start at zero in each tree, to leaves counted over all trees together.

    Args:
        is_leaf: for each tree, whether each of its nodes is a leaf.

    Examples:
        >>> numbers = LeafNumbers([numpy.array([False, True, True]), numpy.array([True])])
        >>> numbers(numpy.array([[1, 0], [2, 0]])).tolist()
        [[0, 2], [1, 2]]
    """

    def __init__(self, is_leaf: Sequence[NDArray[numpy.bool_]]) -> None:
        self.is_leaf = numpy.concatenate(is_leaf)
        self._first = numpy.cumsum([0, *map(len, is_leaf)])[:-1]
        self._numbers = self.is_leaf.cumsum() - 1

    def __call__(self, nodes: Any) -> NDArray[numpy.int64]:
        """(n, trees) leaf numbers, of the nodes that a library sends rows to."""
        places = numpy.array(nodes, numpy.int64).reshape(-1, len(self._first))
        places += self._first
        found: NDArray[numpy.int64] = self._numbers[places]
        return found


def not_fitted(model: Any) -> InputError:
    """The error for a model without trees."""
    name = type(model).__name__
    return InputError(f"expected a fitted {name}, got one without trees. Fit the model first, then give it to whence.")


def loss_not_taken(model: Any, loss: Any, taken: str) -> InputError:
    """The error for a model of another loss than those whose likelihood whence knows."""
    name = type(model).__name__
    return InputError(
        f"expected a {name} trained with {taken}, got {loss!r}, which whence has no likelihood for. Train the model "
        "with one of these."
    )


def not_taken(model: Any, expected: str, got: str, advice: str) -> InputError:
    """The error for a model that is no sum of leaf values, or not one that can be read off it."""
    return InputError(f"expected {expected}, got a {type(model).__name__} {got}. {advice}")


def noted(notes: Iterable[tuple[Any, str]]) -> tuple[str, ...]:
    """The sentences whose condition holds."""
    return tuple(sentence for holds, sentence in notes if holds)
