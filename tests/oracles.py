"""Slow and obvious answers to compare the package with. Nothing here imports it.

Everything is float64 numpy, written as the loops in the definitions. Letters: n training examples, m test points,
k outputs, d parameters. `tangents` is J, (n, k, d); `residuals` is E, (n, k).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray


# --- Tangents -------------------------------------------------------------------------------------------------------


def tangents_of(
    model: nn.Module, inputs: Any, keep: Callable[[str], bool] = lambda name: True
) -> tuple[Array, Array, Array]:
    """Outputs (n, k), tangents (n, k, d) and weights (d,) by one backward pass per example and output.

    Inputs are a tensor, a tuple of positional arguments or a dict of keyword arguments.
    """
    parameters = [parameter for name, parameter in model.named_parameters() if parameter.requires_grad and keep(name)]
    named = inputs if isinstance(inputs, dict) else {}
    ordered = () if named else inputs if isinstance(inputs, tuple) else (inputs,)
    outputs, tangents = [], []
    for i in range(len([*ordered, *named.values()][0])):
        one = slice(i, i + 1)
        output = model(*(value[one] for value in ordered), **{key: value[one] for key, value in named.items()})
        output = output.reshape(-1)  # (k,)
        rows = []
        for value in output:
            gradients = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
            filled = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
            rows.append(torch.cat([g.reshape(-1) for g in filled]))
        outputs.append(output.detach())
        tangents.append(torch.stack(rows))
    weights = torch.cat([p.detach().reshape(-1) for p in parameters])
    return torch.stack(outputs).double().numpy(), torch.stack(tangents).double().numpy(), weights.double().numpy()


def linear_tangents(design: Array, outputs: int) -> Array:
    """Tangents (n, k, k * p) of x -> W x with W (k, p): output c sees only row c of W."""
    n, p = design.shape
    tangents = np.zeros((n, outputs, outputs * p))
    for c in range(outputs):
        tangents[:, c, c * p : (c + 1) * p] = design
    return tangents


# --- The linear algebra of the estimators ---------------------------------------------------------------------------


def curvature(tangents: Array) -> Array:
    """F = sum_i J_i^T J_i, (d, d)."""
    total = np.zeros((tangents.shape[2], tangents.shape[2]))
    for block in tangents:
        total += block.T @ block
    return total


def damped_curvature(tangents: Array, ridge: float) -> Array:
    """F + ridge I."""
    return curvature(tangents) + ridge * np.eye(tangents.shape[2])


def leverage_blocks(tangents: Array, ridge: float) -> Array:
    """H_ii = J_i F_lam^-1 J_i^T, (n, k, k)."""
    damped = damped_curvature(tangents, ridge)
    return np.stack([block @ np.linalg.solve(damped, block.T) for block in tangents])


def alignments(test_tangents: Array, tangents: Array, ridge: float) -> Array:
    """a_i = J F_lam^-1 J_i^T for every test point and training example, (m, n, k, k)."""
    damped = damped_curvature(tangents, ridge)
    return np.stack([[test @ np.linalg.solve(damped, block.T) for block in tangents] for test in test_tangents])


def inflated_residuals(residuals: Array, leverage: Array, power: float) -> Array:
    """(I - H_ii)^-power e_i: power 0 leaves e_i, 1/2 is HC2's, 1 is the leave-one-example-out residual u_i."""
    rows = []
    for residual, block in zip(residuals, leverage, strict=True):
        values, vectors = np.linalg.eigh(np.eye(len(residual)) - (block + block.T) / 2)
        rows.append(vectors @ (values**-power * (vectors.T @ residual)))
    return np.stack(rows)


def inflated_residuals_apart(residuals: Array, leverage: Array, power: float) -> Array:
    """e_ic / (1 - h_ic)^power with scalar leverages: every output of every example left out alone."""
    result = np.empty_like(residuals)
    for i, c in np.ndindex(*residuals.shape):
        result[i, c] = residuals[i, c] / (1 - leverage[i, c, c]) ** power
    return result


def degrees_of_freedom(leverage: Array) -> float:
    """Trace of the hat matrix."""
    return float(sum(np.trace(block) for block in leverage))


def noise_covariance(residuals: Array, dof: float = 0.0) -> Array:
    """E^T E / n, times nk / (nk - dof)."""
    n, k = residuals.shape
    return sum(np.outer(row, row) for row in residuals) / n * (n * k / (n * k - dof))


def covariances(
    test_tangents: Array, tangents: Array, residuals: Array, ridge: float, *, sigma: Array, apart: bool = False
) -> dict[str, Array]:
    """Every estimator's covariance, (m, k, k), at every test point. `apart` is the output-wise leave-one-out."""
    leverage = leverage_blocks(tangents, ridge)
    n, k = residuals.shape
    inflate = inflated_residuals_apart if apart else inflated_residuals
    pulls = alignments(test_tangents, tangents, ridge)
    result: dict[str, list[Array]] = {name: [] for name in ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife")}
    for pull in pulls:  # (n, k, k)
        result["ho"].append(sum(a @ sigma @ a.T for a in pull))
        for name, power in (("hec0", 0.0), ("hec2", 0.5), ("hec3", 1.0)):
            result[name].append(_meat(pull, inflate(residuals, leverage, power), apart=apart, centred=False))
        result["hec1"].append(result["hec0"][-1] * n * k / (n * k - degrees_of_freedom(leverage)))
        result["jackknife"].append(_meat(pull, inflate(residuals, leverage, 1.0), apart=apart, centred=True))
    damped = damped_curvature(tangents, ridge)
    laplace = [np.trace(sigma) / k * test @ np.linalg.solve(damped, test.T) for test in test_tangents]
    return {name: np.stack(values) for name, values in result.items()} | {"laplace": np.stack(laplace)}


def _meat(pull: Array, inflated: Array, *, apart: bool, centred: bool) -> Array:
    """Sum over deletions of the outer square of what each deletion moves the prediction by."""
    if apart:
        moves = [a[:, c] * u[c] for a, u in zip(pull, inflated, strict=True) for c in range(len(u))]
    else:
        moves = [a @ u for a, u in zip(pull, inflated, strict=True)]
    return jackknife_of(np.stack(moves), centred=centred)


def jackknife_of(moves: Array, *, centred: bool) -> Array:
    """sum_i d_i d_i^T, or its centred form (n - 1) / n sum_i (d_i - mean)(d_i - mean)^T; moves is (deletions, k)."""
    if not centred:
        return sum(np.outer(move, move) for move in moves)
    n, mean = len(moves), moves.mean(axis=0)
    return (n - 1) / n * sum(np.outer(move - mean, move - mean) for move in moves)


def recentring_step(tangents: Array, residuals: Array, weights: Array, ridge: float) -> Array:
    """Delta w = F_lam^-1 (Phi^T r - lam w): from `weights` to the optimum of the linearized objective."""
    gradient = sum(block.T @ row for block, row in zip(tangents, residuals, strict=True)) - ridge * weights
    return np.linalg.solve(damped_curvature(tangents, ridge), gradient)


def recentred_residuals(tangents: Array, residuals: Array, weights: Array, ridge: float) -> Array:
    """Residuals of the linearized model at its optimum, (n, k)."""
    return residuals - tangents @ recentring_step(tangents, residuals, weights, ridge)


def loo_error(tangents: Array, residuals: Array, weights: Array, ridge: float) -> float:
    """Mean over examples of |y_i - f_(-i)(x_i)|^2 for the linearized model at its own optimum for this ridge."""
    at_optimum = recentred_residuals(tangents, residuals, weights, ridge)
    left_out = inflated_residuals(at_optimum, leverage_blocks(tangents, ridge), 1.0)
    return float((left_out**2).sum() / len(left_out))


# --- Refits: no formula for leaving out, the model is fitted again ---------------------------------------------------


def ridge_fit(tangents: Array, targets: Array, ridge: float) -> Array:
    """The minimiser of sum_i |y_i - J_i w|^2 + ridge |w|^2, (d,), by least squares on stacked rows."""
    d = tangents.shape[2]
    rows = np.concatenate([tangents.reshape(-1, d), np.sqrt(ridge) * np.eye(d)])
    return np.linalg.lstsq(rows, np.concatenate([targets.reshape(-1), np.zeros(d)]), rcond=None)[0]


def refits(tangents: Array, targets: Array, ridge: float) -> Array:
    """Weights of n fits, each without one example, (n, d)."""
    everyone = np.arange(len(tangents))
    return np.stack([ridge_fit(tangents[everyone != i], targets[everyone != i], ridge) for i in everyone])


def refits_apart(tangents: Array, targets: Array, ridge: float) -> Array:
    """Weights of n k fits, each without one output of one example, (n * k, d)."""
    rows = tangents.reshape(-1, 1, tangents.shape[2])
    return refits(rows, targets.reshape(-1, 1), ridge)


def refit_moves(test_tangents: Array, full: Array, without: Iterable[Array]) -> Array:
    """f(x) - f_(-i)(x) for every test point and refit, (m, refits, k)."""
    return np.stack([[test @ full - test @ weights for weights in without] for test in test_tangents])
