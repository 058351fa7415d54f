"""Sample weights: weighted least squares, weighted cross-entropy, and examples that count twice or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch
from torch import Tensor

import loss_oracles
import oracles
import whence
from classification import ESTIMATORS, PROBLEMS, M, N, Problem, assert_covariances, inputs, network
from networks import linear

STRUCTURES: dict[str, whence.Structure] = {
    "primal": whence.Exact(road="primal"),
    "dual": whence.Exact(road="dual"),
    "core": whence.Core(size=12),
    "sketch": whence.Sketch(size=20),
    "ekfac": whence.EKFAC(),
    "kfac": whence.KFAC(),
    "diagonal": whence.Diagonal(),
}
every_structure = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES.keys())
TEST = inputs(M, seed=9)


def drawn(n: int = N) -> Tensor:
    return 0.2 + 2 * torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def gaussian(outputs: int) -> Problem:
    y = torch.randn(N, outputs, dtype=torch.float64, generator=torch.Generator().manual_seed(6))

    def terms(f: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return y.numpy() - f, np.tile(np.eye(outputs), (N, 1, 1))

    return Problem(network(outputs), inputs(), y, "gaussian", terms, N * outputs)


ALL = {**PROBLEMS, "one quantity": gaussian(1), "two quantities": gaussian(2)}
every_problem = pytest.mark.parametrize("problem", ALL.values(), ids=ALL.keys())


def fit(problem: Problem, weights: Tensor, batch: int = 5, **options: Any) -> whence.Tracer:
    loader = list(zip(problem.x.split(batch), problem.y.split(batch), weights.split(batch), strict=True))
    options = {"ridge": 0.4, "progress": False, **options}
    return whence.fit(problem.model, loader, problem.likelihood, **options)


def covariances(tracer: whence.Tracer) -> dict[str, np.ndarray]:
    found = tracer.predict(TEST)
    return {name: np.asarray(found.covariance(name)) for name in ESTIMATORS}


# --- Weighted least squares ------------------------------------------------------------------------------------------


class Weighted:
    """statsmodels' WLS and the tracer of the same model."""

    def __init__(self, n: int = 40, p: int = 4) -> None:
        rng = np.random.default_rng(3)
        self.design = np.concatenate([np.ones((n, 1)), rng.normal(size=(n, p - 1))], axis=1)
        self.weights = rng.uniform(0.2, 3.0, size=n)
        y = self.design @ rng.normal(size=p) + rng.normal(size=n) / np.sqrt(self.weights) * (1 + self.design[:, 1] ** 2)
        self.reference = sm.WLS(y, self.design, weights=self.weights).fit()
        x, w = torch.as_tensor(self.design), torch.as_tensor(self.weights)
        loader = list(zip(x.split(16), torch.as_tensor(y).split(16), w.split(16), strict=True))
        self.model = linear(self.reference.params.reshape(1, -1))
        self.tracer = whence.fit(self.model, loader, ridge=0.0, noise="unbiased", progress=False)
        self.test = rng.normal(size=(5, p))


@pytest.fixture(scope="module")
def wls() -> Weighted:
    return Weighted()


@pytest.mark.parametrize(
    ("name", "kind"), [("ho", None), ("hec0", "HC0"), ("hec1", "HC1"), ("hec2", "HC2"), ("hec3", "HC3")]
)
def test_covariances_are_those_of_wls(wls: Weighted, name: str, kind: str | None) -> None:
    reference = wls.reference
    cov = reference.cov_params() if kind is None else getattr(reference, f"cov_{kind}")
    got = wls.tracer.predict(torch.as_tensor(wls.test)).variance(name)
    np.testing.assert_allclose(got[:, 0], np.einsum("mp,pq,mq->m", wls.test, cov, wls.test), rtol=1e-9)


def test_residuals_noise_and_leverage_are_those_of_wls(wls: Weighted) -> None:
    tracer, reference = wls.tracer, wls.reference
    np.testing.assert_allclose(tracer.residuals[:, 0], reference.resid, rtol=1e-8, atol=1e-10)
    assert float(tracer.sigma) == pytest.approx(reference.scale, rel=1e-10)
    whitened = np.sqrt(wls.weights)[:, None] * wls.design
    hat = np.diag(whitened @ np.linalg.pinv(whitened))
    np.testing.assert_allclose(tracer.leverage[:, 0], hat, rtol=1e-9)
    np.testing.assert_allclose(tracer.loo_residuals[:, 0], reference.resid / (1 - hat), rtol=1e-8, atol=1e-10)
    assert tracer.degrees_of_freedom == pytest.approx(4)
    assert tracer.diagnostics["Newton step"] < 1e-12


# --- Any likelihood --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [STRUCTURES["primal"], STRUCTURES["dual"]], ids=["primal", "dual"])
@every_problem
def test_weights_multiply_the_loss(problem: Problem, structure: whence.Structure) -> None:
    weights = drawn()
    tracer = fit(problem, weights, structure=structure)
    outputs, tangents, _ = oracles.tangents_of(problem.model, problem.x)
    _, test_tangents, _ = oracles.tangents_of(problem.model, TEST)
    plain, _ = problem.terms(outputs)
    residuals, hessians = loss_oracles.weighted(problem.terms, weights.numpy())(outputs)
    noise = hessians
    if problem.likelihood == "gaussian":
        sigma = np.einsum("n,ni,nj->ij", weights.numpy(), plain, plain) / N
        noise = weights.numpy()[:, None, None] * sigma
        np.testing.assert_allclose(tracer.sigma, sigma, rtol=1e-9)
    wanted = loss_oracles.covariances(
        test_tangents, tangents, residuals, hessians, 0.4, noise=noise, numbers=problem.numbers
    )
    if problem.likelihood == "gaussian":
        wanted["laplace"] = wanted["laplace"] * np.diag(sigma).mean()
    assert_covariances(tracer.predict(TEST), wanted)
    np.testing.assert_allclose(tracer.residuals, plain, rtol=1e-9, atol=1e-12)


@every_structure
@pytest.mark.parametrize("name", ["three classes", "two quantities"])
def test_whole_weights_are_repeated_examples(structure: whence.Structure, name: str) -> None:
    # Everything of the bread is that of a data set with repetitions. The meats of HeC differ: repetitions are several
    # independent examples there, and a weighted one is one, left out as a whole.
    problem = ALL[name]
    times = torch.tensor([1, 2, 3, 1, 1, 2, 1, 1, 1, 4, 1, 1, 1, 2])
    again = torch.repeat_interleave(torch.arange(N), times)
    repeated = replace(problem, x=problem.x[again], y=problem.y[again]).fit(structure=structure)
    weighted = fit(problem, times.double(), structure=structure)
    one, two = covariances(weighted), covariances(repeated)
    if name == "two quantities":  # the same squares, over 14 examples or over 22
        assert weighted.noise_scale == pytest.approx(repeated.noise_scale * 22 / 14)
        one["laplace"], one["ho"] = one["laplace"] * 14 / 22, one["ho"] * 14 / 22
    for estimator in ("laplace", "ho"):
        scale = abs(two[estimator]).max()
        np.testing.assert_allclose(one[estimator], two[estimator], rtol=1e-8, atol=1e-8 * scale, err_msg=estimator)
    assert weighted.degrees_of_freedom == pytest.approx(repeated.degrees_of_freedom)
    np.testing.assert_allclose(
        weighted.bread.leverage_blocks[again], repeated.bread.leverage_blocks, rtol=1e-7, atol=1e-10
    )
    assert weighted.diagnostics["Newton step"] == pytest.approx(repeated.diagnostics["Newton step"], rel=1e-7)


@every_structure
@pytest.mark.parametrize("name", ["three classes", "three logits", "two quantities"])
def test_weight_zero_leaves_an_example_out(structure: whence.Structure, name: str) -> None:
    problem, weights = ALL[name], drawn()
    weights[[2, 3, 11]] = 0.0
    kept = weights > 0
    fewer = replace(problem, x=problem.x[kept], y=problem.y[kept])
    one, two = fit(problem, weights, structure=structure), fit(fewer, weights[kept], structure=structure)
    assert_covariances(one.predict(TEST), covariances(two))
    np.testing.assert_allclose(one.loo_residuals[kept], two.loo_residuals, rtol=1e-8, atol=1e-10)
    np.testing.assert_array_equal(one.loo_residuals[~kept], 0)
    np.testing.assert_allclose(one.sigma, two.sigma, rtol=1e-10)


@every_structure
@pytest.mark.parametrize("name", ["one logit", "two quantities"])
def test_weights_of_one_change_nothing(structure: whence.Structure, name: str) -> None:
    problem = ALL[name]
    one, two = fit(problem, torch.ones(N), structure=structure), problem.fit(structure=structure)
    assert_covariances(one.predict(TEST), covariances(two))
    for attribute in ("residuals", "loo_residuals", "leverage", "sigma"):
        np.testing.assert_allclose(getattr(one, attribute), getattr(two, attribute), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [torch.float16, torch.float32, torch.int64])
def test_weights_of_any_number_type(kind: torch.dtype) -> None:
    problem, weights = PROBLEMS["three classes"], drawn().round() + 1
    assert_covariances(fit(problem, weights.to(kind)).predict(TEST), covariances(fit(problem, weights)))


def test_weights_in_dicts_and_at_prediction() -> None:
    problem, weights = PROBLEMS["three classes"], drawn()
    named = [{"input": problem.x, "labels": problem.y, "sample_weight": weights}]
    tracer = whence.fit(problem.model, named, "categorical", ridge=0.4, progress=False)
    wanted = covariances(fit(problem, weights))
    assert_covariances(tracer.predict({"input": TEST}), wanted)
    assert_covariances(tracer.predict({"input": TEST, "labels": problem.y[:M], "sample_weight": weights[:M]}), wanted)
    assert_covariances(fit(problem, weights).predict([(TEST, problem.y[:M], weights[:M])]), wanted)
    assert_covariances(fit(problem, weights).predict((TEST, problem.y[:M], weights[:M])), wanted)


# --- What cannot be a weight -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"), [(-0.5, "-0.5"), (float("nan"), "nan"), (float("inf"), "inf")], ids=["negative", "nan", "inf"]
)
def test_weights_that_are_no_weights(value: float, shown: str) -> None:
    weights = drawn()
    weights[7] = value
    message = rf"finite and not below zero, got {shown} in batch 1 \(example 2 of the batch\)\. A weight of zero"
    with pytest.raises(whence.InputError, match=message):
        fit(PROBLEMS["three classes"], weights)


@pytest.mark.parametrize("weights", [torch.ones(N - 1), torch.ones(N + 1), torch.ones(N, 1), torch.tensor(1.0)])
def test_weights_of_the_wrong_shape(weights: Tensor) -> None:
    problem = PROBLEMS["three classes"]
    with pytest.raises(whence.ShapeError, match=r"sample weights (as numbers )?of shape \(14,\) in batch 0, got \("):
        whence.fit(problem.model, [(problem.x, problem.y, weights)], "categorical", progress=False)


def test_weights_of_the_wrong_kind() -> None:
    problem = PROBLEMS["three classes"]
    for weights, message in (
        ([1.0] * N, r"sample weights as numbers of shape \(14,\) in batch 0, got list"),
        (torch.ones(N, dtype=torch.bool), r"sample weights as numbers of shape \(14,\) in batch 0, got \(14,\) bool"),
    ):
        with pytest.raises(whence.InputError, match=message):
            whence.fit(problem.model, [(problem.x, problem.y, weights)], "categorical", progress=False)


def test_weights_in_some_batches_only() -> None:
    problem = PROBLEMS["three classes"]
    batches = [(problem.x[:5], problem.y[:5]), (problem.x[5:], problem.y[5:], drawn()[5:])]
    with pytest.raises(whence.InputError, match="every batch or in none, got them in batch 1 and none in batch 0"):
        whence.fit(problem.model, batches, "categorical", progress=False)


def test_no_weight_at_all() -> None:
    message = "at least one training example that counts, got 14 that are all ignored or of weight zero"
    with pytest.raises(whence.TargetError, match=message):
        fit(PROBLEMS["three classes"], torch.zeros(N))


def test_weights_that_change_from_pass_to_pass() -> None:
    problem = PROBLEMS["three classes"]

    class Growing:
        passes = 0

        def __iter__(self) -> Any:
            self.passes += 1
            yield problem.x, problem.y, drawn() * (1 if self.passes < 3 else 2)

    with pytest.raises(whence.LoaderError, match="other data in batch 0"):
        whence.fit(problem.model, Growing(), "categorical", "ekfac", progress=False)
