"""The calibration of verdicts: HeC3 / Ho of left-out examples against numpy, its limit against scikit-learn."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

import networks
import oracles
import whence
from classification import linear_softmax
from doubles import fit
from whence.influence.explanation import isotonic_threshold, leave_one_out_ratios
from whence.influence.fitted import evenly_spaced

RIDGE = 0.5


def without(tangents: Any, i: int, curvature: Any, noise: Any, left_out: Any) -> float:
    """HeC3 / Ho at an example by the curvature of the others and their residuals."""
    others = [j for j in range(len(tangents)) if j != i]
    inverse = np.linalg.inv(curvature)
    aligned = [tangents[i] @ inverse @ tangents[j].T for j in others]
    hec3 = sum(((a @ left_out[j]) ** 2).sum() for a, j in zip(aligned, others, strict=True))
    ho = sum(np.trace(a @ noise[j] @ a.T) for a, j in zip(aligned, others, strict=True))
    return float(hec3 / ho)


@pytest.mark.parametrize("road", ["primal", "dual", "matrix_free"])
def test_ratios_are_those_of_the_curvature_of_the_others(road: Literal["primal", "dual", "matrix_free"]) -> None:
    case = networks.build("mlp")
    tracer = fit(case.model, case.batches(4), ridge=RIDGE, structure=whence.Exact(road=road))
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs)
    noise = [tracer.sigma.numpy()] * len(tangents)
    found = leave_one_out_ratios(tracer, torch.arange(len(tangents)))
    for i in range(len(tangents)):
        curvature = oracles.damped_curvature(np.delete(tangents, i, axis=0), RIDGE)
        wanted = without(tangents, i, curvature, noise, tracer.loo_residuals.numpy())
        np.testing.assert_allclose(float(found[i]), wanted, rtol=1e-7)


def test_ratios_with_a_hessian(generator: torch.Generator) -> None:
    tracer, tangents, hessians = linear_softmax(generator, RIDGE)
    left_out = tracer.meats.roots["hec3"][:, :, 0].numpy()
    found = leave_one_out_ratios(tracer, torch.tensor([7, 2]))  # in the order asked for
    for place, i in enumerate((7, 2)):
        others = [J.T @ L @ J for j, (J, L) in enumerate(zip(tangents, hessians, strict=True)) if j != i]
        wanted = without(tangents, i, sum(others) + RIDGE * np.eye(9), hessians, left_out)
        np.testing.assert_allclose(float(found[place]), wanted, rtol=1e-7)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_above_the_average_where_isotonic_regression_says_so(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    around = torch.rand(60, generator=generator, dtype=torch.float64)
    own = torch.rand(60, generator=generator, dtype=torch.float64) * (around > 0.6) + 0.1 * around
    limit = isotonic_threshold(around, own)
    fitted = IsotonicRegression().fit_transform(around.numpy(), own.numpy())
    assert ((fitted > own.mean().item()) == (around > limit).numpy()).all()


def test_without_more_noise_above_nothing_lies_beyond_the_limit() -> None:
    around = torch.tensor([3.0, 1.0, 2.0])
    assert isotonic_threshold(around, torch.tensor([0.0, 2.0, 1.0])) == 3.0


def test_evenly_spaced_examples() -> None:
    assert evenly_spaced(torch.tensor([4, 5, 9]), 3).tolist() == [4, 5, 9]
    assert evenly_spaced(torch.arange(0, 100, 2), 3).tolist() == [0, 48, 98]
