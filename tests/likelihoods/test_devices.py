"""The same numbers on a GPU, with class weights, sample weights, ignored classes and groups."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch

import whence
from classification import ESTIMATORS, PROBLEMS, M, N, assert_covariances, inputs

TEST = inputs(M, seed=9)
WEIGHTS = torch.rand(N, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
LABELS = torch.where(torch.arange(N) == 5, -100, PROBLEMS["three classes"].y)


def tracer_on(device: str, structure: str, **options: Any) -> whence.Tracer:
    """The data stay on the CPU: `whence` moves them."""
    problem = PROBLEMS["three classes"]
    model = deepcopy(problem.model).to(device)
    loader = list(zip(problem.x.split(5), LABELS.split(5), WEIGHTS.split(5), strict=True))
    likelihood = whence.Categorical(weight=[0.5, 2.0, 1.5], label_smoothing=0.1)
    return whence.fit(model, loader, likelihood, structure, ridge=0.4, progress=False, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("structure", ["exact", "core", "sketch", "ekfac", "kfac", "diagonal"])
def test_a_gpu_gives_the_same(structure: str) -> None:
    groups = {"groups": np.arange(N) // 2} if structure in ("exact", "core", "sketch") else {}
    for options in ({}, groups):
        there, here = (tracer_on(device, structure, **options) for device in ("cuda", "cpu"))
        found, wanted = there.predict(TEST), here.predict(TEST)
        assert found.hec3.is_cuda
        moved = {name: found.covariance(name).cpu() for name in ESTIMATORS}
        on_cpu = whence.Uncertainty(found.mean.cpu(), moved, likelihood=found.likelihood)
        assert_covariances(on_cpu, {name: np.asarray(wanted.covariance(name)) for name in ESTIMATORS})
        torch.testing.assert_close(found.probability_covariance().cpu(), wanted.probability_covariance())
        torch.testing.assert_close(found.margin_variance().cpu(), wanted.margin_variance())
        torch.testing.assert_close(there.loo_residuals.cpu(), here.loo_residuals)


def test_data_on_another_device_than_the_model(device: torch.device) -> None:
    found = tracer_on(device.type, "exact")
    assert found.residuals.device.type == device.type
    assert bool((found.residuals[5] == 0).all())
    assert float(found.residuals.abs().max()) > 0
