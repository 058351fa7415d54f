"""What all adapters share: numbers of leaves, and errors for models that are not taken."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
from numpy.typing import NDArray

from whence.errors import InputError


class LeafNumbers:
    """Convert a library's node numbers, which start at zero in each tree, to leaf numbers over all trees together.

    `is_leaf` says for each tree which of its nodes are leaves.

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
        """(n, trees) leaf numbers, from the library's nodes of some rows."""
        places = numpy.array(nodes, numpy.int64).reshape(-1, len(self._first))
        places += self._first
        found: NDArray[numpy.int64] = self._numbers[places]
        return found


def not_fitted(model: Any) -> InputError:
    """The error for a model without trees."""
    name = type(model).__name__
    return InputError(f"expected a fitted {name}, got one without trees. Fit the model first, then give it to whence.")


def loss_not_taken(model: Any, loss: Any, taken: str) -> InputError:
    """The error for a model with a loss whose likelihood whence does not know."""
    name = type(model).__name__
    return InputError(
        f"expected a {name} trained with {taken}, got {loss!r}, which whence has no likelihood for. Train the model "
        "with one of these."
    )


def not_taken(model: Any, expected: str, got: str, advice: str) -> InputError:
    """The error for a model that is not a sum of leaf values, or whose leaf values cannot be read."""
    return InputError(f"expected {expected}, got a {type(model).__name__} {got}. {advice}")


def noted(*notes: tuple[Any, str]) -> tuple[str, ...]:
    """The sentences whose condition holds."""
    return tuple(sentence for holds, sentence in notes if holds)
