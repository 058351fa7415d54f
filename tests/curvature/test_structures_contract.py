"""What every structure promises, exact or not: written once, run by all of them."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import curvature_matrices
import networks
import oracles
import whence
from whence.api import STRUCTURES as KNOWN

ESTIMATORS = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")

EXACT: dict[str, whence.Structure] = {
    "exact, primal": whence.Exact(road="primal"),
    "exact, dual": whence.Exact(road="dual"),
}
DENSE: dict[str, whence.Structure] = {
    "core": whence.Core(size=12),
    "sketch": whence.Sketch(size=20),
}
SPECTRAL: dict[str, whence.Structure] = {
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
STRUCTURES = EXACT | DENSE | SPECTRAL

every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
every_spectral = pytest.mark.parametrize("structure", SPECTRAL.values(), ids=SPECTRAL.keys())
every_dense = pytest.mark.parametrize("structure", (EXACT | DENSE).values(), ids=(EXACT | DENSE).keys())


def test_every_structure_runs_the_contract() -> None:
    assert {type(structure) for structure in STRUCTURES.values()} == set(KNOWN.values())


def fit(
    case: networks.Case, structure: whence.Structure, ridge: float = 0.6, batch: int = 4, **options: Any
) -> whence.Tracer:
    return whence.fit(case.model, case.batches(batch), structure=structure, ridge=ridge, progress=False, **options)


def covariances(tracer: whence.Tracer, inputs: Any) -> dict[str, np.ndarray]:
    uncertainty = tracer.predict(inputs)
    return {name: np.asarray(uncertainty.covariance(name)) for name in ESTIMATORS}


def assert_same(got: dict[str, np.ndarray], wanted: dict[str, np.ndarray], rtol: float = 1e-8) -> None:
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=rtol * abs(value).max(), err_msg=name)


def assert_alike(one: whence.Tracer, two: whence.Tracer, inputs: Any, rtol: float = 1e-8) -> None:
    """The same predictions and the same training set."""
    assert_same(covariances(two, inputs), covariances(one, inputs), rtol)
    for name in ("residuals", "leverage", "loo_residuals", "sigma"):
        np.testing.assert_allclose(getattr(two, name), getattr(one, name), rtol=rtol, atol=rtol, err_msg=name)
    assert two.degrees_of_freedom == pytest.approx(one.degrees_of_freedom, rel=rtol)


# --- Shapes and signs ------------------------------------------------------------------------------------------------


@every_structure
@pytest.mark.parametrize("name", networks.NAMES)
def test_everything_has_its_shape_and_sign(structure: whence.Structure, name: str) -> None:
    case = networks.build(name)
    n, k = case.targets.shape
    tracer = fit(case, structure)
    for each in (tracer.residuals, tracer.leverage, tracer.loo_residuals):
        assert each.shape == (n, k)
        assert bool(torch.isfinite(each).all())
    assert tracer.sigma.shape == (k, k)
    assert tracer.degrees_of_freedom > 0
    found = tracer.predict(case.test_inputs)
    m = networks.TEST_POINTS
    assert found.mean.shape == (m, k)
    assert found.ratio.shape == (m,)
    for estimator in ESTIMATORS:
        covariance = found.covariance(estimator)
        assert covariance.shape == (m, k, k)
        assert getattr(found, estimator).shape == (m, k)
        if estimator == "hec1" and tracer.degrees_of_freedom >= n * k:
            assert bool(torch.isinf(found.hec1).all())  # there is no correction for more freedom than numbers
            continue
        torch.testing.assert_close(covariance, covariance.transpose(1, 2), rtol=1e-10, atol=1e-12)
        size = float(covariance.abs().max())
        assert float(torch.linalg.eigvalsh(covariance).min()) >= -1e-10 * size, estimator
        assert size > 0, estimator


@every_structure
def test_the_model_is_left_as_it_was(structure: whence.Structure) -> None:
    case = networks.build("norms")
    before = {name: value.clone() for name, value in case.model.state_dict().items()}
    fit(case, structure).predict(case.test_inputs)
    assert all(torch.equal(value, before[name]) for name, value in case.model.state_dict().items())
    assert all(parameter.grad is None for parameter in case.model.parameters())
    assert not any(module._forward_hooks or module._backward_hooks for module in case.model.modules())


# --- What must not matter --------------------------------------------------------------------------------------------


@every_structure
def test_batches_and_chunks_do_not_matter(structure: whence.Structure) -> None:
    cases = {name: networks.build(name) for name in ("mlp", "convolution", "embedding")}
    whole = {name: fit(case, structure, batch=networks.EXAMPLES) for name, case in cases.items()}

    @settings(max_examples=4)
    @given(st.sampled_from(list(cases)), st.integers(1, 11), st.integers(1, 4), st.one_of(st.none(), st.integers(1, 5)))
    def holds(name: str, batch: int, test_batch: int, chunk: int | None) -> None:
        case = cases[name]
        split = fit(case, structure, batch=batch, chunk_size=chunk)
        parts = case.test_inputs.split(test_batch)
        assert_alike(whole[name], split, list(parts))

    holds()


@every_structure
def test_a_loader_may_give_batches_of_any_sizes(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    ragged = list(zip(case.inputs.split([1, 6, 2]), case.targets.split([1, 6, 2]), strict=True))
    set_of_rows = torch.utils.data.TensorDataset(case.inputs, case.targets)
    for loader in (ragged, torch.utils.data.DataLoader(set_of_rows, batch_size=5)):
        other = whence.fit(case.model, loader, structure=structure, ridge=0.6, progress=False)
        assert_alike(fit(case, structure), other, case.test_inputs)


@every_structure
def test_order_does_not_matter(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    order = torch.randperm(networks.EXAMPLES, generator=torch.Generator().manual_seed(3))
    one, two = (
        fit(case, structure),
        fit(replace(case, inputs=case.inputs[order], targets=case.targets[order]), structure),
    )
    assert_same(covariances(two, case.test_inputs), covariances(one, case.test_inputs))
    for name in ("residuals", "leverage", "loo_residuals"):
        np.testing.assert_allclose(getattr(two, name), np.asarray(getattr(one, name))[order], rtol=1e-8, atol=1e-10)


@every_structure
def test_the_same_fit_twice_is_the_same_to_the_bit(structure: whence.Structure) -> None:
    case = networks.build("convolution")
    one, two = (covariances(fit(case, structure), case.test_inputs) for _ in range(2))
    for name in ESTIMATORS:
        np.testing.assert_array_equal(two[name], one[name])


# --- What must matter in a known way ---------------------------------------------------------------------------------


class Scaled(nn.Module):
    def __init__(self, network: nn.Module, size: float) -> None:
        super().__init__()
        self.network, self.size = network, size

    def forward(self, x: Tensor) -> Tensor:
        return self.size * self.network(x)


@every_structure
def test_scaled_outputs_scale_variances_by_the_square(structure: whence.Structure) -> None:
    # J -> s J and e -> s e: with the ridge times s^2 alignments stay, and every variance is multiplied by s^2.
    case, s = networks.build("convolution"), 7.0
    other = replace(case, model=Scaled(case.model, s).eval(), targets=s * case.targets)
    one, two = fit(case, structure), fit(other, structure, ridge=0.6 * s**2)
    wanted = {name: s**2 * value for name, value in covariances(one, case.test_inputs).items()}
    assert_same(covariances(two, case.test_inputs), wanted)
    np.testing.assert_allclose(two.leverage, one.leverage, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(two.loo_residuals, s * one.loo_residuals, rtol=1e-8, atol=1e-12)
    ratios = (tracer.predict(case.test_inputs).ratio for tracer in (two, one))
    np.testing.assert_allclose(*ratios, rtol=1e-8)


@every_structure
def test_duplicated_data_halve_variances(structure: whence.Structure) -> None:
    # Twice the data and twice the ridge: F_lam doubles, alignments and leverages halve, and there are twice as many.
    case = networks.build("mlp")
    twice = replace(case, inputs=case.inputs.repeat(2, 1), targets=case.targets.repeat(2, 1))
    one, two = fit(case, structure), fit(twice, structure, ridge=1.2)
    before, after = covariances(one, case.test_inputs), covariances(two, case.test_inputs)
    linear = ("ho", "hec0", "laplace")
    assert_same({n: after[n] for n in linear}, {n: before[n] / 2 for n in linear})
    hats = np.asarray(one.bread.hats)
    np.testing.assert_allclose(two.bread.hats, np.concatenate([hats, hats]) / 2, rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(two.sigma, one.sigma, rtol=1e-9)
    assert two.degrees_of_freedom == pytest.approx(one.degrees_of_freedom)


@every_structure
def test_more_ridge_means_less_variance(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracers = [fit(case, structure, ridge=ridge) for ridge in (0.1, 1.0, 10.0)]
    for estimator in ("ho", "hec0", "laplace"):
        traces = np.stack([tracer.predict(case.test_inputs).variance(estimator).sum(1) for tracer in tracers])
        assert (np.diff(traces, axis=0) < 0).all(), estimator
    freedom = [tracer.degrees_of_freedom for tracer in tracers]
    assert freedom == sorted(freedom, reverse=True)


# --- Leverage --------------------------------------------------------------------------------------------------------


@every_dense
@pytest.mark.parametrize("ridge", [1e-6, 0.6])
def test_dense_algebra_has_true_leverages(structure: whence.Structure, ridge: float) -> None:
    case = networks.build("mlp")
    tracer = fit(case, structure, ridge=ridge)
    assert tracer.diagnostics["leverage policy"] == "exact"
    assert float(tracer.leverage.min()) >= 0
    assert float(tracer.leverage.max()) < 1
    blocks = torch.linalg.eigvalsh(tracer.bread.hats)
    assert float(blocks.max()) < 1
    assert tracer.degrees_of_freedom == pytest.approx(float(tracer.leverage.sum()))
    assert tracer.degrees_of_freedom < case.targets.numel()
    eye = torch.eye(2, dtype=torch.float64)
    left_out = torch.linalg.solve(eye - tracer.bread.hats, tracer.residuals)
    torch.testing.assert_close(tracer.loo_residuals, left_out, rtol=1e-6, atol=1e-9)


@every_spectral
def test_diagonal_algebra_adds_one_to_q(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracer = fit(case, structure, ridge=1e-3)
    assert tracer.diagnostics["leverage policy"] == "one_plus_q"
    hats = tracer.bread.hats
    q = torch.diagonal(hats, dim1=1, dim2=2)
    torch.testing.assert_close(tracer.leverage, q / (1 + q))
    assert float(tracer.leverage.min()) >= 0
    assert float(tracer.leverage.max()) < 1
    left_out = tracer.residuals + (hats @ tracer.residuals.unsqueeze(2)).squeeze(2)
    torch.testing.assert_close(tracer.loo_residuals, left_out, rtol=1e-9, atol=1e-12)
    apart = fit(case, structure, ridge=1e-3, loo="output")
    torch.testing.assert_close(apart.loo_residuals, (1 + q) * tracer.residuals, rtol=1e-9, atol=1e-12)
    above = int((torch.linalg.eigvalsh(hats) >= 1).any(1).sum())
    assert tracer.diagnostics["guarded leverages"] == above
    assert apart.diagnostics["guarded leverages"] == int((q >= 1).any(1).sum())
    assert above > 0  # at this ridge an approximate curvature is short of some example's own part


@every_spectral
def test_clipping_as_in_the_paper(structure: whence.Structure) -> None:
    case = networks.build("mlp")
    tracer = fit(case, structure, ridge=1e-3, leverage="clip", loo="output")
    q = torch.diagonal(tracer.bread.hats, dim1=1, dim2=2)
    clipped = q.clamp_max(1 - 1e-4)
    torch.testing.assert_close(tracer.leverage, clipped)
    torch.testing.assert_close(tracer.loo_residuals, tracer.residuals / (1 - clipped), rtol=1e-8, atol=1e-10)
    assert tracer.diagnostics["leverage policy"] == "clip"
    assert tracer.diagnostics["guarded leverages"] == int((q >= 1 - 1e-4).any(1).sum())
    assert float(tracer.leverage.max()) == pytest.approx(1 - 1e-4)
    blocks = fit(case, structure, ridge=1e-3, leverage="clip")
    values, vectors = torch.linalg.eigh(blocks.bread.hats)
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
        q = torch.diagonal(tracer.bread.hats, dim1=1, dim2=2)
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
    torch.testing.assert_close(moved.bread.hats, plain.bread.hats)


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
        hats = oracles.leverage_blocks(tangents, 0.6)
        np.testing.assert_allclose(tracer.bread.hats, hats, rtol=1e-8, atol=1e-10)
    if isinstance(structure, whence.EKFAC | whence.Diagonal):
        # Their eigenvalues are a diagonal of the truth in some orthonormal basis.
        total = np.trace(curvature_matrices.curvature_of(tracer.bread))
        assert total == pytest.approx(float((tangents**2).sum()), rel=1e-9)


# --- What is told ----------------------------------------------------------------------------------------------------


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
def test_blocks_without_a_kronecker_form_are_told(kind: Any) -> None:
    case = networks.build("norms")
    exact, diagonal = notes(fit(case, kind())), notes(fit(case, kind(largest_exact=7)))
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
