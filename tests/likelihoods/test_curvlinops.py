"""The generalized Gauss-Newton matrix and its EKFAC, held against curvlinops where both apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import curvature_matrices
import whence
from classification import PROBLEMS, Problem

curvlinops = pytest.importorskip("curvlinops", reason="curvlinops, a peer, is not installed")

LOSSES = {"three classes": nn.CrossEntropyLoss(reduction="sum"), "three logits": nn.BCEWithLogitsLoss(reduction="sum")}
every_loss = pytest.mark.parametrize("name", LOSSES)


def dense(operator: Any, size: int) -> np.ndarray:
    found = operator @ torch.eye(size, dtype=torch.float64)
    return np.asarray(found.detach() if isinstance(found, torch.Tensor) else found)


def data_of(problem: Problem) -> list[Any]:
    return [(problem.x[:9], problem.y[:9]), (problem.x[9:], problem.y[9:])]


@every_loss
def test_exact_curvature_is_their_ggn(name: str) -> None:
    problem = PROBLEMS[name]
    parameters = list(problem.model.parameters())
    size = sum(p.numel() for p in parameters)
    operator = curvlinops.GGNLinearOperator(
        problem.model, LOSSES[name], parameters, data_of(problem), check_deterministic=False
    )
    ggn = dense(operator, size)
    tracer = problem.fit(ridge=0.7, structure=whence.Exact(road="primal"))
    inverse = np.asarray(tracer.bread.whiten(torch.eye(size, dtype=torch.float64)))  # type: ignore[attr-defined]
    np.testing.assert_allclose(inverse @ inverse.T, np.linalg.inv(ggn + 0.7 * np.eye(size)), rtol=1e-8, atol=1e-10)


def test_ekfac_is_their_ekfac() -> None:
    # Theirs estimates the input factor as a mean and ours as a sum: the eigenvectors, and so the matrix, are the same.
    problem = PROBLEMS["three classes"]
    parameters = list(problem.model.parameters())
    size = sum(p.numel() for p in parameters)
    operator = curvlinops.EKFACLinearOperator(
        problem.model,
        LOSSES["three classes"],
        parameters,
        data_of(problem),
        fisher_type=curvlinops.FisherType.TYPE2,
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    ours = curvature_matrices.curvature_of(problem.fit(structure=whence.EKFAC(tolerance=0.0)).bread)
    np.testing.assert_allclose(ours, dense(operator, size), rtol=1e-7, atol=1e-9)


def test_class_weights_reach_the_ggn() -> None:
    problem, weight = PROBLEMS["three classes"], torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
    weighted = replace(problem, likelihood=whence.Categorical(weight=weight))
    parameters = list(problem.model.parameters())
    size = sum(p.numel() for p in parameters)
    loss = nn.CrossEntropyLoss(weight=weight, reduction="sum")
    operator = curvlinops.GGNLinearOperator(
        problem.model, loss, parameters, data_of(problem), check_deterministic=False
    )
    ours = curvature_matrices.curvature_of(weighted.fit(structure=whence.Diagonal()).bread)
    np.testing.assert_allclose(np.diag(ours), np.diag(dense(operator, size)), rtol=1e-9)
