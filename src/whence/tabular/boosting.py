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
from whence.runtime.execution import Progress
from whence.tabular.network import CHOOSING, Trained, mean_loss
from whence.tabular.target import Target
from whence.trees import TreeEnsemble

LEARNING_RATE = 0.1
MOST_TREES, STEP = 400, 50  # most trees of each output, and how many are grown between checks on validation rows
# Tried in this order; other settings are scikit-learn's defaults.
SETTINGS: tuple[dict[str, int], ...] = ({"max_leaf_nodes": 8}, {"max_leaf_nodes": 31})
# Among validation losses within this factor, the first setting and the fewest trees win: tracing them takes less time.
AS_GOOD = 1.005
NODES_AT_ONCE = 2**20


@dataclass(frozen=True)
class Trees:
    """Trees as plain arrays over all their nodes, which can be saved and do not need scikit-learn."""

    feature: NDArray[numpy.int64]  # (nodes,) column that a node tests
    threshold: NDArray[numpy.float64]  # (nodes,) numbers up to this go left
    subset: NDArray[numpy.int64]  # (nodes,) row of `subsets` for a node that tests a category, -1 for other nodes
    subsets: NDArray[numpy.bool_]  # (subsets, categories) which categories go left
    missing_left: NDArray[numpy.bool_]  # (nodes,) whether missing values go left
    left: NDArray[numpy.int64]  # (nodes,) the next node on the left; a leaf points to itself
    right: NDArray[numpy.int64]  # (nodes,) the same on the right
    values: NDArray[numpy.float64]  # (nodes,) value of a leaf
    roots: NDArray[numpy.int64]  # (trees,) first node of each tree
    outputs: NDArray[numpy.int64]  # (trees,) the output that each tree adds to
    base: NDArray[numpy.float64]  # (k,) outputs without trees

    @property
    def is_leaf(self) -> NDArray[numpy.bool_]:
        """(nodes,) which nodes are leaves."""
        return numpy.equal(self.left, numpy.arange(len(self.left)))

    def leaves(self, x: Any) -> NDArray[numpy.int64]:
        """(n, trees) leaf of each row of (n, columns) in each tree, numbered over all trees together."""
        rows, numbers = numpy.asarray(x, dtype=numpy.float64), self.is_leaf.cumsum() - 1
        step = max(1, NODES_AT_ONCE // len(self.roots))
        parts = [self._last_nodes(rows[low : low + step]) for low in range(0, max(len(rows), 1), step)]
        found: NDArray[numpy.int64] = numbers[numpy.concatenate(parts)]
        return found

    def _last_nodes(self, rows: NDArray[numpy.float64]) -> NDArray[numpy.int64]:
        nodes = numpy.tile(self.roots, (len(rows), 1))
        row, tree = (place.ravel() for place in numpy.indices(nodes.shape))
        is_leaf = self.is_leaf
        while True:
            at = nodes[row, tree]
            inner = ~is_leaf[at]
            row, tree, at = row[inner], tree[inner], at[inner]
            if not len(at):
                return nodes
            value, subset = rows[row, self.feature[at]], self.subset[at]
            missing = numpy.isnan(value)
            goes_left = numpy.where(missing, self.missing_left[at], value <= self.threshold[at])
            category = (subset >= 0) & ~missing
            goes_left[category] = self.subsets[subset[category], value[category].astype(numpy.int64)]
            nodes[row, tree] = numpy.where(goes_left, self.left[at], self.right[at])

    def ensemble(self, target: Target) -> TreeEnsemble:
        """The ensemble for `whence.fit`; classes are numbered."""
        return TreeEnsemble(
            leaves=self.leaves,
            values=self.values[self.is_leaf][:, None],
            outputs=None if len(self.base) == 1 else self.outputs,
            base=self.base,
            likelihood=target.likelihood,
            shrinkage=LEARNING_RATE,
            classes=tuple(float(index) for index in range(len(target.classes))) or None,
        )


def read_trees(model: Any, columns: int) -> Trees:
    """The trees of scikit-learn's histogram gradient boosting, in which categories come before all numbers."""
    predictors = [one for iteration in model._predictors for one in iteration]
    nodes = numpy.concatenate([one.nodes for one in predictors])
    counts = [len(one.nodes) for one in predictors]
    first = numpy.repeat(numpy.cumsum([0, *counts[:-1]]), counts)
    bits = numpy.concatenate([one.raw_left_cat_bitsets for one in predictors]).astype(numpy.uint32)  # (subsets, 8)
    subsets = (bits[:, :, None] >> numpy.arange(32, dtype=numpy.uint32) & 1).reshape(len(bits), 256).astype(bool)
    sets = numpy.repeat(numpy.cumsum([0, *(len(one.raw_left_cat_bitsets) for one in predictors[:-1])]), counts)
    is_leaf, own = nodes["is_leaf"].astype(bool), numpy.arange(len(nodes))
    base = numpy.asarray(model._baseline_prediction, dtype=numpy.float64).reshape(-1)
    return Trees(
        feature=nodes["feature_idx"].astype(numpy.int64).clip(0, columns - 1),
        threshold=nodes["num_threshold"].astype(numpy.float64),
        subset=numpy.where(nodes["is_categorical"].astype(bool), sets + nodes["bitset_idx"], -1).astype(numpy.int64),
        subsets=subsets if len(subsets) else numpy.zeros((1, 256), dtype=bool),
        missing_left=nodes["missing_go_to_left"].astype(bool),
        left=numpy.where(is_leaf, own, first + nodes["left"]).astype(numpy.int64),
        right=numpy.where(is_leaf, own, first + nodes["right"]).astype(numpy.int64),
        values=numpy.where(is_leaf, nodes["value"], 0.0).astype(numpy.float64),
        roots=numpy.cumsum([0, *counts[:-1]]),
        outputs=numpy.arange(len(predictors)) % len(base),
        base=base,
    )


def grow(
    target: Target, inputs: Tensor, categories: int, values: Any, folds: list[Tensor], progress: Progress
) -> Trained:
    """Choose settings and the number of trees on folds of validation rows, and grow trees on all rows with them.

    The first `categories` columns of the inputs hold codes of categories. Folds are masks (n,). The first `CHOOSING`
    are used for the choice; the rows of the others are also predicted by trees that were grown without them.
    """
    x, known = inputs.numpy(), torch.from_numpy(values)
    mask = numpy.arange(x.shape[1]) < categories

    def grown(rows: Any, trees: int, setting: dict[str, int]) -> Any:
        return _model(target, mask, trees, setting).fit(x[rows], values[rows])

    def last_outputs(model: Any, rows: Any) -> Tensor:
        *_, outputs = _staged(model, x[rows], target)
        return outputs  # type: ignore[no-any-return]  # of a model without annotations

    usable = [fold.numpy() for fold in folds if len(numpy.unique(values[~fold.numpy()])) >= len(target.classes)]
    if not usable:
        raise InputError("expected rows of every class beside the validation rows, got none. Pass --model network.")
    best, chosen, last = math.inf, SETTINGS[0], 1
    for setting in progress.track(SETTINGS, "settings of trees tried:", len(SETTINGS)):
        models = [(_model(target, mask, STEP, setting), fold) for fold in usable[:CHOOSING]]
        loss = numpy.full(1, math.inf)
        while loss.argmin() > len(loss) - STEP // 2 - 1 and len(loss) < MOST_TREES:
            stages = []
            for model, fold in models:
                model.set_params(max_iter=min(len(loss) // STEP * STEP + STEP, MOST_TREES)).fit(x[~fold], values[~fold])
                staged = _staged(model, x[fold], target)
                stages.append([float(mean_loss(target, outputs, known[fold])) for outputs in staged])
            loss = numpy.mean(stages, axis=0)
        if loss.min() < best / AS_GOOD:
            enough = int((loss <= AS_GOOD * loss.min()).argmax())  # the smallest number of trees that is as good
            best, chosen, last = float(loss.min()), setting, enough + 1
    held_out = torch.full((len(x), target.outputs), math.nan, dtype=torch.float64, device="cpu")
    for fold in usable:
        held_out[torch.from_numpy(fold)] = last_outputs(grown(~fold, last, chosen), fold)
    model = grown(slice(None), last, chosen)
    trees, outputs = read_trees(model, x.shape[1]), last_outputs(model, slice(None))
    gap = float(numpy.abs(trees.ensemble(target).raw(x) - outputs.numpy()).max())
    if gap > 1e-6 * max(1.0, float(outputs.abs().max())):
        raise RuntimeError(f"expected trees that predict as scikit-learn does, got predictions that differ by {gap:g}.")
    settings = {"trees": len(trees.roots), "leaves": int(trees.is_leaf.sum()), "learning_rate": LEARNING_RATE, **chosen}
    return Trained(trees, held_out, settings)


def _model(target: Target, mask: Any, trees: int, setting: dict[str, int]) -> Any:
    # an extra: only tables need it
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    kind = HistGradientBoostingRegressor if target.task == "regression" else HistGradientBoostingClassifier
    options = {"learning_rate": LEARNING_RATE, "early_stopping": False, "random_state": 0, "warm_start": True}
    return kind(max_iter=trees, categorical_features=mask if mask.any() else None, **options, **setting)


def _staged(model: Any, x: Any, target: Target) -> Any:
    """Yield the outputs (m, k) after each iteration."""
    for stage in model.staged_predict(x) if target.task == "regression" else model.staged_decision_function(x):
        yield torch.from_numpy(numpy.asarray(stage, dtype=numpy.float64).reshape(len(x), -1))
