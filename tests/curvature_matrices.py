"""Approximate curvatures as dense matrices, to be held against the dense truth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

import oracles
from whence.jacobian.gradients import Block

Array = np.ndarray


@dataclass(frozen=True)
class Dense:
    """One block of a spectral curvature: directions V (d, r) among all weights, and the block's own weights."""

    block: Block
    directions: Array  # (d, r): columns are the basis vectors of the block
    owned: Array  # (d,): which weights belong to it
    outside: int  # directions that the columns do not span

    def spread(self, inside: Array, outside: float) -> Array:
        """V diag(inside) V^T + outside (I - V V^T), on the block's own weights."""
        V = self.directions
        rest = np.diag(self.owned.astype(float)) - V @ V.T
        return (V * inside) @ V.T + outside * rest

    def squares(self, rows: Array) -> tuple[Array, float]:
        """Sums of squares of rows (m, d): along each direction, and the mean of those outside."""
        inside = ((rows @ self.directions) ** 2).sum(0)
        length = (rows[:, self.owned] ** 2).sum()
        return inside, (length - inside.sum()) / self.outside if self.outside else 0.0


def tangents_of(model: nn.Module, inputs: Any) -> Array:
    """Tangents (n, k, d), also where gradients come sparse."""
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False
    return oracles.tangents_of(model, inputs)[1]


def close(got: Any, wanted: Any, rtol: float = 1e-9) -> None:
    """Assert that numbers agree, relative to the largest of them."""
    wanted = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(got), wanted, rtol=rtol, atol=rtol * max(abs(wanted).max(), 1e-300))


def blocks_of(bread: Any) -> list[Dense]:
    """The bases of a spectral bread, as vectors among the selected weights."""
    selection = bread.problem.selection
    offsets, start = {}, 0
    for name, parameter in selection.parameters.items():
        offsets[name] = start
        start += parameter.numel()
    found = []
    for basis in (block.basis for block in bread.blocks):
        size = math.prod(basis.shape)
        eye = torch.eye(size, dtype=torch.float64).reshape(size, *basis.shape)
        moved = basis.block.from_matrix(basis.to(torch.float64).from_coordinates(eye))
        directions, owned = np.zeros((start, size)), np.zeros(start, dtype=bool)
        for name, tensor in moved.items():
            here = slice(offsets[name], offsets[name] + tensor[0].numel())
            directions[here] = tensor.reshape(size, -1).T
            owned[here] = True
        found.append(Dense(basis.block, directions, owned, int(owned.sum()) - size))
    return found


def curvature_of(bread: Any) -> Array:
    """The curvature that a spectral bread stands for, (d, d), without the ridge."""
    pairs = zip(blocks_of(bread), [block.curvature for block in bread.blocks], strict=True)
    return sum(block.spread(one.inside.numpy().reshape(-1), one.outside) for block, one in pairs)


def diagonal_in_basis(bread: Any, rows: Array) -> Array:
    """The diagonal of sum_m row row^T in the bases of a spectral bread, as a matrix (d, d); rows (m, d)."""
    return sum(block.spread(*block.squares(rows)) for block in blocks_of(bread))


def block_diagonal(bread: Any, matrix: Array) -> Array:
    """What is left of a matrix (d, d) without the terms between blocks."""
    return sum(matrix * np.outer(block.owned, block.owned) for block in blocks_of(bread))


def covariances(tracer: Any, tangents: Array, test_tangents: Array, width: int | None = None) -> dict[str, Array]:
    """J F_lam^-1 M F_lam^-1 J^T, with the diagonal of each meat in the basis for M, and Laplace's."""
    curved = curvature_of(tracer.bread)
    damped = curved + tracer.ridge * np.eye(len(curved))
    solved = np.stack([np.linalg.solve(damped, one.T).T for one in test_tangents])
    flipped = solved.transpose(0, 2, 1)
    meats = meats_of(np.asarray(tracer.residuals), np.asarray(tracer.loo_residuals), tangents, width)
    found = {name: solved @ diagonal_in_basis(tracer.bread, rows) @ flipped for name, rows in meats.items()}
    noise = np.diag(oracles.noise_covariance(np.asarray(tracer.residuals))).mean()
    return found | {"laplace": noise * test_tangents @ flipped}


def meats_of(residuals: Array, left_out: Array, tangents: Array, width: int | None = None) -> dict[str, Array]:
    """Rows J_i^T W_i of each estimator's meat, (m, d); of so many outputs of an example as are left out together."""
    n, k = residuals.shape
    width = width or k
    values, vectors = np.linalg.eigh(oracles.noise_covariance(residuals))
    root = vectors * np.sqrt(values.clip(0))
    apart = (n * k // width, width)  # what is left out, one after the other
    jackknife = np.einsum("ucp,uc->up", tangents.reshape(*apart, -1), left_out.reshape(apart))
    units = len(jackknife)
    return {
        "ho": np.einsum("ncp,cq->nqp", tangents, root).reshape(n * k, -1),
        "hec0": np.einsum("ucp,uc->up", tangents.reshape(*apart, -1), residuals.reshape(apart)),
        "hec3": jackknife,
        "jackknife": np.sqrt((units - 1) / units) * (jackknife - jackknife.mean(0)),
    }
