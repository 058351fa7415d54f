"""Gradient boosting for tables: scikit-learn's, with settings chosen on validation rows, and its trees as arrays."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from whence.errors import InputError
from whence.jacobian.leaves import LeafSum, TreeEnsemble
from whence.runtime.execution import Progress
from whence.tabular.network import CHOOSING, Trained
from whence.tabular.target import Target

LEARNING_RATE = 0.1
MOST_TREES, PATIENCE = 400, 25  # most trees of each output, and how many in a row that do not help end the trial
LEAVES = (8, 31)  # of each tree, tried in this order; other settings are scikit-learn's defaults
# Among validation losses within this factor, the first setting and the fewest trees win: tracing them takes less time.
AS_GOOD = 1.005
NODES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Trees:
    """Trees as plain arrays over all their nodes, which can be saved and do not need scikit-learn."""

    feature: NDArray[numpy.int64]  # (nodes,) input that a node tests
    threshold: NDArray[numpy.float64]  # (nodes,) values up to this go left, unless the input is a category
    subset: NDArray[numpy.int64]  # (nodes,) row of `subsets` for a node that tests a category, -1 for other nodes
    subsets: NDArray[numpy.int32]  # (subsets, categories) one for categories that go left, zero for others
    left: NDArray[numpy.int64]  # (nodes,) the next node on the left; a leaf points to itself
    right: NDArray[numpy.int64]  # (nodes,) the same on the right
    values: NDArray[numpy.float64]  # (nodes,) value of a leaf
    roots: NDArray[numpy.int64]  # (trees,) first node of each tree
    base: NDArray[numpy.float64]  # (k,) outputs without trees; trees add to the outputs in turn

    @property
    def is_leaf(self) -> NDArray[numpy.bool_]:
        """(nodes,) which nodes are leaves."""
        return numpy.equal(self.left, numpy.arange(len(self.left)))

    def leaves(self, x: Any) -> NDArray[numpy.int64]:
        """(n, trees) leaf of each row of (n, inputs) in each tree, numbered over all trees together."""
        rows, numbers = numpy.asarray(x, dtype=numpy.float64), self.is_leaf.cumsum() - 1
        step = max(1, NODES_AT_ONCE // len(self.roots))
        parts = [self._last_nodes(rows[low : low + step]) for low in range(0, max(len(rows), 1), step)]
        found: NDArray[numpy.int64] = numbers[numpy.concatenate(parts)]
        return found

    def _last_nodes(self, rows: NDArray[numpy.float64]) -> NDArray[numpy.int64]:
        nodes = numpy.tile(self.roots, (len(rows), 1))
        while True:
            value, subset = numpy.take_along_axis(rows, self.feature[nodes], axis=1), self.subset[nodes]
            goes_left, category = value <= self.threshold[nodes], subset >= 0
            goes_left[category] = self.subsets[subset[category], value[category].astype(numpy.int64)] > 0
            further = numpy.where(goes_left, self.left[nodes], self.right[nodes])
            if numpy.array_equal(further, nodes):
                return nodes
            nodes = further

    def ensemble(self, target: Target) -> TreeEnsemble:
        """The ensemble for `whence.fit`; classes are numbered."""
        outputs = len(self.base)
        return TreeEnsemble(
            leaves=self.leaves,
            values=self.values[self.is_leaf][:, None],
            outputs=None if outputs == 1 else numpy.arange(len(self.roots)) % outputs,
            base=self.base,
            likelihood=target.likelihood,
            shrinkage=LEARNING_RATE,
            classes=tuple(float(index) for index in range(len(target.classes))) or None,
        )


def read_trees(model: Any) -> Trees:
    """The trees of scikit-learn's histogram gradient boosting on inputs without missing values."""
    predictors = [one for iteration in model._predictors for one in iteration]
    nodes, counts = numpy.concatenate([one.nodes for one in predictors]), [len(one.nodes) for one in predictors]
    roots, bits = numpy.cumsum([0, *counts[:-1]]), [one.raw_left_cat_bitsets for one in predictors]  # (subsets, 8) each
    first, is_leaf, own = numpy.repeat(roots, counts), nodes["is_leaf"].astype(bool), numpy.arange(len(nodes))
    subset = numpy.repeat(numpy.cumsum([0, *map(len, bits[:-1])]), counts) + nodes["bitset_idx"]
    words = numpy.concatenate([*bits, numpy.zeros((1, 8), dtype=numpy.uint32)]).astype("<u4")  # never empty
    return Trees(
        feature=numpy.where(is_leaf, 0, nodes["feature_idx"]).astype(numpy.int64),
        threshold=nodes["num_threshold"].astype(numpy.float64),
        subset=numpy.where(nodes["is_categorical"].astype(bool), subset, -1).astype(numpy.int64),
        subsets=numpy.unpackbits(words.view(numpy.uint8), axis=1, bitorder="little").astype(numpy.int32),
        left=numpy.where(is_leaf, own, first + nodes["left"]).astype(numpy.int64),
        right=numpy.where(is_leaf, own, first + nodes["right"]).astype(numpy.int64),
        values=numpy.where(is_leaf, nodes["value"], 0.0).astype(numpy.float64),
        roots=roots,
        base=numpy.asarray(model._baseline_prediction, dtype=numpy.float64).reshape(-1),
    )


def grow(
    target: Target, inputs: Tensor, categories: int, values: Any, folds: list[Tensor], progress: Progress
) -> Trained:
    """Choose settings and the number of trees on folds of validation rows, and grow trees on all rows with them.

    The first `categories` inputs are codes of categories. Folds are masks (n,). The first `CHOOSING` are used for the
    choice; the rows of the others are also predicted by trees that were grown without them.
    """
    # an extra: only tables need it
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    x = inputs.numpy()
    kind = HistGradientBoostingClassifier if target.classes else HistGradientBoostingRegressor
    options: dict[str, Any] = {"learning_rate": LEARNING_RATE, "random_state": 0, "n_iter_no_change": PATIENCE}
    options["categorical_features"] = list(range(categories))

    def outputs(model: Any, rows: Any) -> Tensor:
        found = model.decision_function(x[rows]) if target.classes else model.predict(x[rows])
        return torch.from_numpy(numpy.asarray(found, dtype=numpy.float64).reshape(-1, target.outputs))

    usable = [fold.numpy() for fold in folds if len(numpy.unique(values[~fold.numpy()])) >= len(target.classes)]
    if not usable:
        raise InputError("expected rows of every class beside the validation rows, got none. Pass --model network.")
    best, chosen, last = math.inf, LEAVES[0], 1
    for leaves in progress.track(LEAVES, "sizes of trees tried:", len(LEAVES)):
        curves = []  # validation losses without trees, and after each of them
        for fold in usable[:CHOOSING]:
            model = kind(max_iter=MOST_TREES, max_leaf_nodes=leaves, early_stopping=True, **options)
            model.fit(x[~fold], values[~fold], X_val=x[fold], y_val=values[fold])
            curves.append(-model.validation_score_)
        longest = max(map(len, curves))
        loss = numpy.mean([numpy.pad(curve, (0, longest - len(curve)), mode="edge") for curve in curves], axis=0)
        if loss.min() < best / AS_GOOD:
            enough = int((loss <= AS_GOOD * loss.min()).argmax())  # the smallest number of trees that is as good
            best, chosen, last = float(loss.min()), leaves, max(1, enough)

    def grown(rows: Any) -> Any:
        return kind(max_iter=last, max_leaf_nodes=chosen, early_stopping=False, **options).fit(x[rows], values[rows])

    held_out = torch.full((len(x), target.outputs), math.nan, dtype=torch.float64, device="cpu")
    for fold in usable:
        held_out[torch.from_numpy(fold)] = outputs(grown(~fold), fold)
    model = grown(slice(None))
    trees, expected = read_trees(model), outputs(model, slice(None))
    gap = float((LeafSum(trees.ensemble(target)).raw(x) - expected).abs().max())
    if gap > 1e-6 * max(1.0, float(expected.abs().max())):
        raise RuntimeError(f"expected trees that predict as scikit-learn does, got predictions that differ by {gap:g}.")
    settings = {"trees": len(trees.roots), "leaves": int(trees.is_leaf.sum()), "max_leaf_nodes": chosen}
    return Trained(trees, held_out, settings)
