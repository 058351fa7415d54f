"""A fitted ensemble of trees as what it is once its trees stand: a sum of leaf values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy

Loss = Literal["gaussian", "bernoulli", "categorical"]


@dataclass(frozen=True)
class TreeEnsemble:
    """What an adapter reads off a fitted model: which leaf each tree sends a row to, and what the leaf adds.

    The raw output is base + sum over trees of values[leaf]. It is the prediction itself for squared error, log-odds for
    "bernoulli", and one score for each class for "categorical", to which the softmax is applied. Forests of classifiers
    average shares of classes: they are squared error on zeros and ones, with one output for each class.

    Attributes:
        leaves: from X, as the model takes it, to (n, trees) leaf numbers, counted over all trees together.
        values: (leaves, w) what each leaf adds to the outputs, shrinkage and averaging included.
        outputs: (trees,) the output that each tree adds to, where w is 1 and there are several outputs; `None` where a
            leaf adds to all w outputs.
        base: (k,) what the outputs are without trees.
        likelihood: of the loss that the trees were grown with.
        shrinkage: what a leaf's own optimum is multiplied by: the learning rate of boosting, one over the number of
            trees for a forest.
        l2: the library's own penalty of squared leaf values, before shrinkage.
        l2_by_weight: whether the library multiplies that penalty by the mean weight of the training rows.
        classes: labels in the order of the classes; `None` for regression.
        sample_share: of the training rows that each tree saw; one where all saw all of them.
        notes: what users should know, such as a bootstrap.
        own_raw: from X to the raw outputs by the library itself, to compare the sum of leaf values with.
    """

    leaves: Callable[[Any], numpy.ndarray[Any, numpy.dtype[numpy.int64]]]
    values: numpy.ndarray[Any, numpy.dtype[numpy.float64]]
    outputs: numpy.ndarray[Any, numpy.dtype[numpy.int64]] | None
    base: numpy.ndarray[Any, numpy.dtype[numpy.float64]]
    likelihood: Loss
    shrinkage: float = 1.0
    l2: float = 0.0
    l2_by_weight: bool = False
    classes: tuple[Any, ...] | None = None
    sample_share: float = 1.0
    notes: tuple[str, ...] = ()
    own_raw: Callable[[Any], Any] | None = None

    def raw(self, x: Any) -> numpy.ndarray[Any, numpy.dtype[numpy.float64]]:
        """(n, k) the outputs as the sum of leaf values: what the model itself must say."""
        leaves = self.leaves(x)
        if self.outputs is None:
            found: numpy.ndarray[Any, numpy.dtype[numpy.float64]] = self.base + self.values[leaves].sum(1)
            return found
        found = numpy.tile(self.base, (len(leaves), 1))
        for output in range(len(self.base)):
            found[:, output] += self.values[leaves[:, self.outputs == output], 0].sum(1)
        return found
