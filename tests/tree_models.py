"""Small fitted trees, and the ensembles that they are, written out by hand."""

from __future__ import annotations

import numpy
from sklearn.ensemble import GradientBoostingRegressor
from sklearn.tree import DecisionTreeRegressor

from whence.trees import TreeEnsemble


def table(n: int = 200, seed: int = 0) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Rows and noisy numbers."""
    draw = numpy.random.default_rng(seed)
    x = draw.uniform(-1, 1, (n, 4))
    return x, numpy.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.2 * (1 + x[:, 3]) * draw.standard_normal(n)


def boosting_ensemble(model: GradientBoostingRegressor) -> TreeEnsemble:
    """By hand, from scikit-learn's own arrays."""
    trees = [one.tree_ for one in model.estimators_[:, 0]]
    starts = numpy.cumsum([0] + [tree.node_count for tree in trees[:-1]])
    values = numpy.concatenate([tree.value[:, 0, 0] for tree in trees]) * model.learning_rate
    used = numpy.concatenate([tree.children_left == -1 for tree in trees])
    number = numpy.cumsum(used) - 1

    def leaves(x: numpy.ndarray) -> numpy.ndarray:
        nodes = numpy.stack([tree.apply(numpy.asarray(x, dtype=numpy.float32)) for tree in trees], axis=1)
        return number[nodes + starts]

    base = numpy.asarray(model.init_.predict(numpy.zeros((1, model.n_features_in_)))).reshape(1)
    outputs = numpy.zeros(len(trees), dtype=numpy.int64)
    return TreeEnsemble(leaves, values[used].reshape(-1, 1), outputs, base, "gaussian", model.learning_rate)


def tree_ensemble(model: DecisionTreeRegressor) -> TreeEnsemble:
    """One tree."""
    tree = model.tree_
    used = tree.children_left == -1
    number = numpy.cumsum(used) - 1
    return TreeEnsemble(
        lambda x: number[tree.apply(numpy.asarray(x, dtype=numpy.float32))][:, None],
        tree.value[used, 0, :1],
        numpy.zeros(1, dtype=numpy.int64),
        numpy.zeros(1),
        "gaussian",
    )
