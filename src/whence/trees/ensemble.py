"""A fitted ensemble of trees as a sum of leaf values, its structure being fixed; and what all adapters share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from whence.errors import InputError

Loss = Literal["gaussian", "bernoulli", "categorical"]


@dataclass(frozen=True)
class TreeEnsemble:
    """The content of a fitted model: the leaf of each row in each tree, and the values of the leaves.

    The raw output is base + sum over trees of values[leaf]. It is the prediction itself for squared error, log-odds for
    "bernoulli", and one score per class for "categorical", to which the softmax is applied. Forests of classifiers
    average shares of classes: they are squared error on zeros and ones, with one output per class.
    """

    leaves: Callable[[Any], NDArray[numpy.int64]]  # from X to (n, trees) leaf numbers, over all trees together
    values: NDArray[numpy.float64]  # (leaves, w) what each leaf adds to the outputs, with shrinkage and averaging
    # (trees,) the output that each tree adds to, if w is 1 and there are several; `None` if a leaf adds to all w
    outputs: NDArray[numpy.int64] | None
    base: NDArray[numpy.float64]  # (k,) outputs without trees
    likelihood: Loss  # of the loss that the trees were grown with
    shrinkage: float = 1.0  # of a leaf's own optimum: the learning rate, or one over the number of trees of a forest
    l2: float = 0.0  # the library's own penalty of squared leaf values, before shrinkage
    l2_by_weight: bool = False  # whether the library multiplies it by the mean weight of the training rows
    classes: tuple[Any, ...] | None = None  # labels in the order of the classes; `None` for regression
    notes: tuple[str, ...] = ()  # what users should know, such as a bootstrap
    own_raw: Callable[[Any], Any] | None = None  # from X to the library's own raw outputs, to compare with

    def raw(self, x: Any) -> NDArray[numpy.float64]:
        """(n, k) the outputs as the sum of leaf values, which must equal the model's own."""
        leaves = self.leaves(x)
        if self.outputs is None:
            found: NDArray[numpy.float64] = self.base + self.values[leaves].sum(1)
            return found
        found = numpy.tile(self.base, (len(leaves), 1))
        for output in range(len(self.base)):
            found[:, output] += self.values[leaves[:, self.outputs == output], 0].sum(1)
        return found


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
