"""What every structure promises about leverages, recentring, precision, and what it tells."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import curvature_matrices
import networks
import oracles
import whence
from structures import (
    ESTIMATORS,
    EXACT,
    STRUCTURES,
    covariances,
    every_dense,
    every_spectral,
    every_structure,
    fit,
)

# --- Leverage --------------------------------------------------------------------------------------------------------


@every_dense
@pytest.mark.parametrize("ridge", [1e-6, 0.6])
def test_dense_algebra_has_true_leverages(structure: whence.Structure, ridge: float) -> None:
    case = networks.build("mlp")
    tracer = fit(case, structure, ridge=ridge)
    assert tracer.diagnostics["leverage policy"] == "exact"
    assert float(tracer.leverage.min()) >= 0
    assert float(tracer.leverage.max()) < 1
    blocks = torch.linalg.eigvalsh(tracer.bread.leverage_blocks)
    assert float(blocks.max()) < 1
    assert tracer.degrees_of_freedom == pytest.approx(float(tracer.leverage.sum()))
    assert tracer.degrees_of_freedom < case.targets.numel()
    eye = torch.eye(2, dtype=torch.float64)
    left_out = torch.linalg.solve(eye - tracer.bread.leverage_blocks, tracer.residuals)
    torch.testing.assert_close(tracer.loo_residuals, left_out, rtol=1e-6, atol=1e-9)


@every_spectral
def test_diagonal_algebra_adds_one_to_q(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracer = fit(case, structure, ridge=1e-3)
    assert tracer.diagnostics["leverage policy"] == "one_plus_q"
    leverage_blocks = tracer.bread.leverage_blocks
    q = torch.diagonal(leverage_blocks, dim1=1, dim2=2)
    torch.testing.assert_close(tracer.leverage, q / (1 + q))
    assert float(tracer.leverage.min()) >= 0
    assert float(tracer.leverage.max()) < 1
    left_out = tracer.residuals + (leverage_blocks @ tracer.residuals.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(tracer.loo_residuals, left_out, rtol=1e-9, atol=1e-12)
    apart = fit(case, structure, ridge=1e-3, loo="output")
    torch.testing.assert_close(apart.loo_residuals, (1 + q) * tracer.residuals, rtol=1e-9, atol=1e-12)
    above = int((torch.linalg.eigvalsh(leverage_blocks) >= 1).any(1).sum())
    assert tracer.diagnostics["guarded leverages"] == above
    assert apart.diagnostics["guarded leverages"] == int((q >= 1).sum())  # outputs one by one
    assert above > 0  # at this ridge an approximate curvature is short of some example's own part


@every_spectral
def test_clipping_as_in_the_paper(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracer = fit(case, structure, ridge=1e-3, leverage="clip", loo="output")
    q = torch.diagonal(tracer.bread.leverage_blocks, dim1=1, dim2=2)
    clipped = q.clamp_max(1 - 1e-4)
    torch.testing.assert_close(tracer.leverage, clipped)
    torch.testing.assert_close(tracer.loo_residuals, tracer.residuals / (1 - clipped), rtol=1e-8, atol=1e-10)
    assert tracer.diagnostics["leverage policy"] == "clip"
    assert tracer.diagnostics["guarded leverages"] == int((q >= 1 - 1e-4).sum())
    assert float(tracer.leverage.max()) == pytest.approx(1 - 1e-4)
    blocks = fit(case, structure, ridge=1e-3, leverage="clip")
    values, vectors = torch.linalg.eigh(blocks.bread.leverage_blocks)
    grown = vectors @ torch.diag_embed(1 / (1 - values.clamp(0, 1 - 1e-4))) @ vectors.transpose(1, 2)
    wanted = (grown @ blocks.residuals.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(blocks.loo_residuals, wanted, rtol=1e-8, atol=1e-9)


@every_structure
def test_policies_are_at_anyones_choice(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    growth: dict[str, Callable[[Tensor], Tensor]] = {
        "exact": lambda q: 1 / (1 - q),
        "one_plus_q": lambda q: 1 + q,
        "clip": lambda q: 1 / (1 - q.clamp_max(1 - 1e-4)),
    }
    for policy, grow in growth.items():
        tracer = fit(case, structure, ridge=50.0, leverage=policy, loo="output")
        q = torch.diagonal(tracer.bread.leverage_blocks, dim1=1, dim2=2)
        assert float(q.max()) < 1
        torch.testing.assert_close(tracer.loo_residuals, grow(q) * tracer.residuals, rtol=1e-9, atol=1e-12)


# --- Recentring ------------------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("name", ["norms", "embedding"])
def test_recentring_moves_along_the_newton_step(structure: whence.Structure, name: str) -> None:
    case = networks.build(name)
    plain, moved = fit(case, structure), fit(case, structure, recenter=True)
    direction = moved.step.direction
    assert direction is not None
    _, tangents, weights = oracles.tangents_of(case.model, case.inputs)
    _, test_tangents, _ = oracles.tangents_of(case.model, case.test_inputs)
    change = torch.as_tensor(tangents @ np.asarray(direction))
    torch.testing.assert_close(moved.residuals, plain.residuals - change, rtol=1e-8, atol=1e-10)
    shift = torch.as_tensor(test_tangents @ np.asarray(direction))
    means = [tracer.predict(case.test_inputs).mean for tracer in (plain, moved)]
    torch.testing.assert_close(means[1], means[0] + shift, rtol=1e-8, atol=1e-10)
    relative = float(direction.norm()) / float(np.linalg.norm(weights))
    assert moved.diagnostics["Newton step"] == pytest.approx(relative, rel=1e-6)
    torch.testing.assert_close(moved.sigma, moved.residuals.T @ moved.residuals / len(change))
    torch.testing.assert_close(moved.bread.leverage_blocks, plain.bread.leverage_blocks)


# --- Precision of the model ------------------------------------------------------------------------------------------


def in_precision(case: networks.Case, dtype: torch.dtype) -> networks.Case:
    """The same network with weights and inputs rounded to `dtype`. Integers stay."""
    inputs, test_inputs = (x.to(dtype) if x.is_floating_point() else x for x in (case.inputs, case.test_inputs))
    return replace(case, model=deepcopy(case.model).to(dtype), inputs=inputs, test_inputs=test_inputs)


SEVERAL = {name: STRUCTURES[name] for name in ("exact, primal", "core", "sketch", "ekfac", "diagonal")}
PRECISIONS = {"float32": (torch.float32, 1e-4), "float16": (torch.float16, 0.02), "bfloat16": (torch.bfloat16, 0.15)}


@pytest.mark.parametrize("structure", SEVERAL.values(), ids=SEVERAL.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), PRECISIONS.values(), ids=PRECISIONS.keys())
@pytest.mark.parametrize("name", ["convolution", "norms", "embedding"])
def test_lower_precision_is_close(structure: whence.Structure, name: str, dtype: torch.dtype, tolerance: float) -> None:
    # The same weights and inputs, exactly, in float64: what differs is the arithmetic of the network alone.
    low = in_precision(networks.build(name), dtype)
    high = in_precision(low, torch.float64)
    found, exact = fit(low, structure, ridge=5.0), fit(high, structure, ridge=5.0)
    assert found.predict(low.test_inputs).mean.dtype == torch.float64
    got, wanted = covariances(found, low.test_inputs), covariances(exact, high.test_inputs)
    for estimator in set(ESTIMATORS) - {"hec1"}:  # whose factor grows without bound as the freedom nears n k
        traces = [np.trace(each[estimator], axis1=1, axis2=2) for each in (got, wanted)]
        errors = abs(traces[0] / traces[1] - 1)
        assert np.median(errors) < tolerance, estimator
        assert errors.max() < 10 * tolerance, estimator
    errors = (found.leverage - exact.leverage).abs()
    assert float(errors.median()) < tolerance
    assert float(errors.max()) < 2 * tolerance


# --- Which parameters ------------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("choice", ["*weight", "*bias", "last_layer"], ids=str)
def test_a_choice_of_parameters(structure: whence.Structure, choice: str) -> None:
    case = networks.build("mlp")
    kept = {
        "*weight": ("0.weight", "2.weight"),
        "*bias": ("0.bias", "2.bias"),
        "last_layer": ("2.weight", "2.bias"),
    }[choice]
    tracer = fit(case, structure, parameters=choice)
    _, tangents, _ = oracles.tangents_of(case.model, case.inputs, lambda name: name in kept)
    assert tracer.diagnostics["parameters"] == tangents.shape[2]
    if structure in EXACT.values():
        leverage_blocks = oracles.leverage_blocks(tangents, 0.6)
        np.testing.assert_allclose(tracer.bread.leverage_blocks, leverage_blocks, rtol=1e-8, atol=1e-10)
    if isinstance(structure, whence.EKFAC | whence.Diagonal):
        # Their eigenvalues are a diagonal of the truth in some orthonormal basis.
        total = np.trace(curvature_matrices.curvature_of(tracer.bread))
        assert total == pytest.approx(float((tangents**2).sum()), rel=1e-9)


# --- Diagnostics -----------------------------------------------------------------------------------------------------


def notes(tracer: whence.Tracer) -> str:
    return "\n".join(str(finding.value) for finding in tracer.diagnostics if finding.name == "note")


@every_structure
def test_every_structure_tells_what_it_did(structure: whence.Structure) -> None:
    case = networks.build("norms")
    tracer = fit(case, structure)
    told = notes(tracer)
    expected = {
        whence.Exact: "exact algebra",
        whence.EKFAC: "Kronecker: 46 weights in 3 blocks",
        whence.KFAC: "Kronecker: 46 weights in 3 blocks",
        whence.Diagonal: "diagonal in the weights",
        whence.Core: "degrees of freedom EKFAC counts",
        whence.Sketch: "random sketch of",
    }
    assert expected[type(structure)] in told
    for word in ("parameters", "ridge", "degrees of freedom", "Newton step", "leverage policy", "guarded leverages"):
        assert tracer.diagnostics[word] is not None
    assert str(tracer.diagnostics).count("\n") >= 7


@pytest.mark.parametrize("kind", [whence.EKFAC, whence.KFAC, whence.Core])
def test_blocks_without_a_kronecker_form_are_told(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = networks.build("norms")
    exact = notes(fit(case, kind()))
    monkeypatch.setattr("whence.curvature.accumulate.LARGEST_EXACT", 7)
    diagonal = notes(fit(case, kind()))
    assert "exact block: 24 weights in 3 blocks" in exact
    assert "diagonal:" not in exact
    assert "diagonal: 24 weights in 3 blocks" in diagonal


@every_spectral
def test_more_degrees_of_freedom_than_numbers_are_told(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    few = replace(case, inputs=case.inputs[:4], targets=case.targets[:4])
    tracer = fit(few, structure, ridge=1e-6)
    assert tracer.degrees_of_freedom > 8
    [finding] = [each for each in tracer.diagnostics if each.name == "degrees of freedom"]
    assert "more than there are" in finding.words
    calm = fit(case, structure, ridge=10.0)
    assert "more than there are" not in str(calm.diagnostics)


# --- What is refused -------------------------------------------------------------------------------------------------


@every_spectral
def test_the_ridge_cannot_be_left_to_leverages_that_are_not_true(structure: whence.Structure) -> None:
    with pytest.raises(whence.InputError, match=r'"loo".*structure="core"'):
        fit(networks.build("mlp"), structure, ridge="loo")


@every_spectral
def test_directions_without_information_need_a_ridge(structure: whence.Structure) -> None:
    with pytest.raises(whence.SingularCurvatureError, match="Raise `ridge`"):
        fit(networks.build("unused"), structure, ridge=0.0)
