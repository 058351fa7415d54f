"""Small tables and fitted trees, and dense algebra on the matrix of their leaves: the slow truth."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import sqrtm
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)

from whence.trees import TreeEnsemble, read

Array = NDArray[np.float64]

MODELS: dict[str, Any] = {
    "regression": GradientBoostingRegressor(n_estimators=12, max_depth=3, random_state=0),
    "two classes": GradientBoostingClassifier(n_estimators=8, max_depth=2, random_state=0),
    "three classes": GradientBoostingClassifier(n_estimators=4, max_depth=2, random_state=0),
    "forest": RandomForestRegressor(8, max_leaf_nodes=12, random_state=0),
    "forest of classes": RandomForestClassifier(5, max_leaf_nodes=8, random_state=0),
}
CLASSES = {"two classes": 2, "three classes": 3, "forest of classes": 3}


def table(n: int = 200, seed: int = 0) -> tuple[Array, Array]:
    """Rows and noisy numbers."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(-1, 1, (n, 4))
    return x, np.sin(3 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.2 * (1 + x[:, 3]) * draw.standard_normal(n)


def task(name: str, n: int = 200, seed: int = 0) -> tuple[Array, NDArray[Any]]:
    """Rows, and numbers or the names of classes."""
    x, y = table(n, seed)
    if name not in CLASSES:
        return x, y
    cut = np.digitize(y, [0.1] if CLASSES[name] == 2 else [-0.4, 0.5])
    return x, np.array(["low", "some", "top"])[cut]


class Leaves(NamedTuple):
    """The linear model of leaf values: rows (n, k, d) in them, residuals (n, k), Hessians (n, k, k), penalty (d,)."""

    rows: Array
    residuals: Array
    hessians: Array
    penalty: Array


def one_hot(ensemble: TreeEnsemble, x: Array) -> Array:
    """(n, k, d) derivatives of the outputs in the leaf values, d = leaves times outputs of a leaf."""
    leaves = ensemble.leaves(x)
    n, trees = leaves.shape
    k, (count, width) = len(ensemble.base), ensemble.values.shape
    rows = np.zeros((n, k, count, width))
    for tree in range(trees):
        for output in range(k) if ensemble.outputs is None else [ensemble.outputs[tree]]:
            rows[np.arange(n), output, leaves[:, tree], output if width > 1 else 0] = 1.0
    return rows.reshape(n, k, -1)


def dense_leaves(model: Any, x: Array, y: NDArray[Any]) -> Leaves:
    """With the trees' own penalty: n (1 - shrinkage) / shrinkage + L2 / shrinkage for a leaf of mass n."""
    ensemble = read(model)
    assert ensemble is not None
    rows = one_hot(ensemble, x)
    raw = ensemble.base + rows @ ensemble.values.reshape(-1)
    n, k = raw.shape
    codes = y[:, None]
    hessians = np.tile(np.eye(k), (n, 1, 1))
    if ensemble.classes is not None:
        codes = (y[:, None] == np.array(ensemble.classes)).astype(float)
    if ensemble.likelihood == "bernoulli":
        codes, p = codes[:, 1:], 1 / (1 + np.exp(-raw))
        residuals, hessians = codes - p, (p * (1 - p))[:, :, None]
    elif ensemble.likelihood == "categorical":
        p = np.exp(raw) / np.exp(raw).sum(1, keepdims=True)
        residuals, hessians = codes - p, p[:, :, None] * np.eye(k) - p[:, :, None] * p[:, None]
    else:
        residuals = codes - raw
    mass = np.einsum("nkd,nkk->d", rows, hessians)
    eta = ensemble.shrinkage
    return Leaves(rows, residuals, hessians, mass * (1 - eta) / eta + ensemble.l2 / eta)


def dense_variances(leaves: Leaves, test: Array, squared_error: bool) -> dict[str, Array]:
    """(m, k, k) covariances of predictions with rows (m, k, d), one training row after the other."""
    rows, residuals, hessians, penalty = leaves
    n, k, _ = rows.shape
    inverse = np.linalg.inv(np.einsum("nkd,nkj,nje->de", rows, hessians, rows) + np.diag(penalty))
    noise = np.tile(residuals.T @ residuals / n, (n, 1, 1)) if squared_error else hessians
    found = {name: np.zeros((len(test), k, k)) for name in ("ho", "hec0", "hec2", "hec3")}
    trace = 0.0
    for row, residual, hessian, covariance in zip(rows, residuals, hessians, noise, strict=True):
        aligned = test @ inverse @ row.T
        hat = hessian @ (row @ inverse @ row.T)
        trace += np.trace(hat)
        left_out = np.linalg.solve(np.eye(k) - hat, residual)
        halfway = np.linalg.solve(sqrtm(np.eye(k) - hat).real, residual)
        found["ho"] += aligned @ covariance @ aligned.transpose(0, 2, 1)
        for name, vector in (("hec0", residual), ("hec2", halfway), ("hec3", left_out)):
            pull = aligned @ vector
            found[name] += pull[:, :, None] * pull[:, None]
    numbers = n * k if squared_error else n * max(1, k - 1)
    return {**found, "hec1": found["hec0"] * numbers / (numbers - trace)}
