"""Slow and obvious answers for other losses than squared error, for weights and groups. Nothing here imports whence.

Letters as in `oracles`: n training examples, m test points, k outputs, d parameters. `tangents` is J, (n, k, d);
`residuals` is r, (n, k), minus the gradient of the loss in the outputs; `hessians` is L, (n, k, k), its Hessian. The
objective is the sum of the losses plus ridge / 2 |w|^2.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import oracles

Array = np.ndarray
Terms = Callable[[Array], tuple[Array, Array]]  # outputs (n, k) to residuals and Hessians


def softmax_terms(targets: Array) -> Terms:
    """Residuals y - p and Hessians diag(p) - p p^T of cross-entropy with targets (n, k) that sum to one."""

    def terms(outputs: Array) -> tuple[Array, Array]:
        grown = np.exp(outputs - outputs.max(axis=1, keepdims=True))
        p = grown / grown.sum(axis=1, keepdims=True)
        return targets - p, np.stack([np.diag(row) - np.outer(row, row) for row in p])

    return terms


def logistic_terms(targets: Array) -> Terms:
    """Residuals y - p and Hessians diag(p (1 - p)) of cross-entropy with targets (n, k) between 0 and 1."""

    def terms(outputs: Array) -> tuple[Array, Array]:
        p = 1 / (1 + np.exp(-outputs))
        return targets - p, np.stack([np.diag(row * (1 - row)) for row in p])

    return terms


def weighted(terms: Terms, weights: Array) -> Terms:
    """The same with each example's loss times its weight."""

    def scaled(outputs: Array) -> tuple[Array, Array]:
        residuals, hessians = terms(outputs)
        return weights[:, None] * residuals, weights[:, None, None] * hessians

    return scaled


def taken(terms: Terms, n: int, rows: Array) -> Terms:
    """The terms of some of n examples alone."""

    def some(outputs: Array) -> tuple[Array, Array]:
        everyone = np.zeros((n, outputs.shape[1]))
        everyone[rows] = outputs
        residuals, hessians = terms(everyone)
        return residuals[rows], hessians[rows]

    return some


def curvature(tangents: Array, hessians: Array, ridge: float) -> Array:
    """G_lam = sum_i J_i^T L_i J_i + ridge I."""
    total = ridge * np.eye(tangents.shape[2])
    for block, hessian in zip(tangents, hessians, strict=True):
        total += block.T @ hessian @ block
    return total


def step(tangents: Array, residuals: Array, hessians: Array, weights: Array, ridge: float) -> Array:
    """G_lam^-1 (sum_i J_i^T r_i - ridge w)."""
    score = sum(block.T @ row for block, row in zip(tangents, residuals, strict=True)) - ridge * weights
    return np.linalg.solve(curvature(tangents, hessians, ridge), score)


def newton_fit(tangents: Array, terms: Terms, ridge: float, start: Array | None = None) -> Array:
    """The minimiser over w of the sum of losses of outputs J_i w, plus ridge / 2 |w|^2, to the last digit."""
    weights = np.zeros(tangents.shape[2]) if start is None else start.copy()
    for _ in range(100):
        moved = step(tangents, *terms(tangents @ weights), weights, ridge)
        weights += moved / max(1.0, abs(tangents @ moved).max())  # never more than one unit of any output at once
        if abs(moved).max() < 1e-12 * max(1.0, abs(weights).max()):
            return weights
    raise ArithmeticError(f"no convergence: the last step was {abs(moved).max():.2g}")


def refits(tangents: Array, terms: Terms, ridge: float, groups: Array) -> Array:
    """Weights of fits to convergence, each without one group of examples, (groups, d)."""
    full = newton_fit(tangents, terms, ridge)
    found = []
    for label in np.unique(groups):
        rest = np.flatnonzero(groups != label)
        found.append(newton_fit(tangents[rest], taken(terms, len(tangents), rest), ridge, full))
    return np.stack(found)


def left_out(tangents: Array, residuals: Array, hessians: Array, ridge: float, power: float, groups: Array) -> Array:
    """(I - L_g Q_gg)^-power r_g for each group of examples with Q = J G_lam^-1 J^T, (n, k).

    Powers 0 and 1 by solving; the power 1/2 through the eigenvectors of the matrix, which are not orthogonal.
    """
    inverse = np.linalg.inv(curvature(tangents, hessians, ridge))
    k = residuals.shape[1]
    found = np.empty_like(residuals)
    for label in np.unique(groups):
        rows = np.flatnonzero(groups == label)
        joint = tangents[rows].reshape(-1, tangents.shape[2])
        hessian = np.zeros((len(rows) * k, len(rows) * k))
        for at, row in enumerate(rows):
            hessian[at * k : (at + 1) * k, at * k : (at + 1) * k] = hessians[row]
        rest = np.eye(len(rows) * k) - hessian @ joint @ inverse @ joint.T
        values, vectors = np.linalg.eig(rest)
        grown = (vectors * values.astype(complex) ** -power) @ np.linalg.inv(vectors) @ residuals[rows].reshape(-1)
        assert abs(grown.imag).max() < 1e-8 * max(1e-30, abs(grown.real).max())
        exact = np.linalg.solve(rest, residuals[rows].reshape(-1)) if power == 1.0 else grown.real
        found[rows] = exact.reshape(len(rows), k)
    return found


def covariances(
    test_tangents: Array,
    tangents: Array,
    residuals: Array,
    hessians: Array,
    ridge: float,
    *,
    noise: Array,
    numbers: int,
    groups: Array | None = None,
) -> dict[str, Array]:
    """Every estimator's covariance (m, k, k) by its definition, with `noise` (n, k, k) for Ho; each example a group.

    `numbers` is what HeC1 counts: n k, or n (k - 1) for classes. With groups it is Stata's factor
    G / (G - 1) * (numbers - 1) / (numbers - dof).
    """
    n = len(tangents)
    labels = np.arange(n) if groups is None else groups
    inverse = np.linalg.inv(curvature(tangents, hessians, ridge))
    pull = np.einsum("mkp,pq,njq->mnkj", test_tangents, inverse, tangents, optimize=True)  # a_i of every test point
    freedom = sum(np.trace(h @ block @ inverse @ block.T) for h, block in zip(hessians, tangents, strict=True))
    result: dict[str, Array] = {"ho": np.einsum("mnkj,njl,mnil->mki", pull, noise, pull)}
    for name, power in (("hec0", 0.0), ("hec2", 0.5), ("hec3", 1.0)):
        inflated = left_out(tangents, residuals, hessians, ridge, power, labels)
        moves = _moves(pull, inflated, labels)
        result[name] = np.stack([oracles.jackknife_of(move, centred=False) for move in moves])
    count = len(np.unique(labels))
    result["jackknife"] = np.stack([oracles.jackknife_of(move, centred=True) for move in moves])
    if groups is None:
        result["hec1"] = result["hec0"] * numbers / (numbers - freedom)
    else:
        result["hec1"] = result["hec0"] * count / (count - 1) * (numbers - 1) / (numbers - freedom)
    result["laplace"] = np.einsum("mkp,pq,mjq->mkj", test_tangents, inverse, test_tangents, optimize=True)
    return result


def _moves(pull: Array, inflated: Array, labels: Array) -> Array:
    """What each deletion moves each prediction by, to first order, (m, groups, k)."""
    each = np.einsum("mnkj,nj->mnk", pull, inflated)
    return np.stack([each[:, labels == label].sum(axis=1) for label in np.unique(labels)], axis=1)
