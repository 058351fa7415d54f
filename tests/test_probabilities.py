"""From logits to probabilities and margins, with their variances."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import whence
from classification import PROBLEMS, M, inputs
from doubles import batches, inputs_and_targets, mlp
from doubles import fit as fit_quantities

TEST = inputs(M, seed=9)
NAMES = ("ho", "hec0", "hec3", "laplace")


def made(mean: Any, covariance: Any, likelihood: whence.Likelihood) -> whence.Uncertainty:
    f = torch.tensor(mean, dtype=torch.float64)
    cov = torch.as_tensor(covariance, dtype=torch.float64).expand(len(f), f.shape[1], f.shape[1])
    return whence.Uncertainty(f, {"hec3": cov}, likelihood=likelihood)


def test_probabilities_are_those_of_the_network() -> None:
    found = PROBLEMS["three classes"].fit().predict(TEST)
    torch.testing.assert_close(found.probabilities, PROBLEMS["three classes"].model(TEST).softmax(1).detach())
    torch.testing.assert_close(found.probabilities.sum(1), torch.ones(M, dtype=torch.float64))
    for name in ("one logit", "three logits"):
        found = PROBLEMS[name].fit().predict(TEST)
        torch.testing.assert_close(found.probabilities, PROBLEMS[name].model(TEST).sigmoid().detach())


@pytest.mark.parametrize("structure", ["exact", "ekfac"])
@pytest.mark.parametrize("name", NAMES)
def test_delta_method_for_classes(name: str, structure: str) -> None:
    found = PROBLEMS["three classes"].fit(structure=structure).predict(TEST)
    for at, p in enumerate(found.probabilities.numpy()):
        slope = np.diag(p) - np.outer(p, p)
        wanted = slope @ np.asarray(found.covariance(name))[at] @ slope
        np.testing.assert_allclose(found.probability_covariance(name)[at], wanted, rtol=1e-10, atol=1e-16)
        np.testing.assert_allclose(found.probability_covariance(name)[at].sum(0), 0, atol=1e-12)  # they sum to one


def test_delta_method_for_yes_or_no() -> None:
    found = PROBLEMS["three logits"].fit().predict(TEST)
    slope = found.probabilities * (1 - found.probabilities)
    wanted = slope.unsqueeze(2) * found.covariance("hec3") * slope.unsqueeze(1)
    torch.testing.assert_close(found.probability_covariance(), wanted)


def test_delta_method_is_right_for_small_variances(generator: torch.Generator) -> None:
    root = 1e-3 * torch.randn(3, 3, dtype=torch.float64, generator=generator)
    found = made([[0.3, -0.2, 0.7]], root @ root.T, whence.Categorical())
    draws = found.mean + torch.randn(200_000, 3, dtype=torch.float64, generator=generator) @ root.T
    sampled = torch.cov(draws.softmax(1).T)
    torch.testing.assert_close(found.probability_covariance()[0], sampled, rtol=0.02, atol=1e-9)


def test_margin_is_the_lead_over_the_runner_up() -> None:
    covariance = torch.tensor([[4.0, 1.0, 0.5], [1.0, 3.0, 0.2], [0.5, 0.2, 2.0]])
    found = made([[1.0, 5.0, 2.0], [9.0, 5.0, 2.0]], covariance, whence.Categorical())
    assert found.margin.tolist() == [3.0, 4.0]
    assert found.margin_variance().tolist() == pytest.approx([3.0 + 2.0 - 2 * 0.2, 4.0 + 3.0 - 2 * 1.0])


def test_margin_of_logits_apart() -> None:
    found = made([[1.0, -5.0]], [[4.0, 1.0], [1.0, 3.0]], whence.Bernoulli())
    assert found.margin.tolist() == [[1.0, 5.0]]
    assert found.margin_variance().tolist() == [[4.0, 3.0]]
    single = made([[-2.0], [3.0]], [[0.25]], whence.Bernoulli())
    assert single.margin.tolist() == [2.0, 3.0]
    assert single.margin_variance().tolist() == [0.25, 0.25]


def test_margin_does_not_see_a_common_shift() -> None:
    found = PROBLEMS["three classes"].fit(structure="exact").predict(TEST)
    shifted = whence.Uncertainty(
        found.mean + 7.0, {"hec3": found.covariance("hec3") + 3.0}, likelihood=found.likelihood
    )
    torch.testing.assert_close(shifted.margin, found.margin)
    torch.testing.assert_close(shifted.margin_variance(), found.margin_variance())
    torch.testing.assert_close(shifted.probability_covariance(), found.probability_covariance())


@pytest.mark.parametrize(
    "ask",
    [
        lambda u: u.probabilities,
        lambda u: u.probability_covariance(),
        lambda u: u.margin,
        lambda u: u.margin_variance(),
    ],
    ids=["probabilities", "probability_covariance", "margin", "margin_variance"],
)
def test_quantities_have_no_probabilities(ask: Any) -> None:
    x, _ = inputs_and_targets()
    found = fit_quantities(mlp(), batches()).predict(x)
    message = r"a likelihood with classes for \w+.*, got 'gaussian'\. Fit with likelihood=\"categorical\" or"
    with pytest.raises(whence.InputError, match=message):
        ask(found)
    bare = whence.Uncertainty(found.mean, {name: found.covariance(name) for name in NAMES})
    with pytest.raises(whence.InputError, match=r"with a likelihood for probabilities, got none\. Take them f"):
        ask(bare)


def test_unknown_estimators() -> None:
    found = PROBLEMS["three classes"].fit().predict(TEST)
    for ask in (found.probability_covariance, found.margin_variance):
        with pytest.raises(whence.InputError, match=r"expected one of hec0, .*, got 'HC3'"):
            ask("HC3")


def test_tables_hold_probabilities() -> None:
    found = PROBLEMS["three classes"].fit().predict(TEST)
    table = found.to_frame()
    assert list(table.columns[3:7]) == ["probability_0", "probability_1", "probability_2", "margin"]
    np.testing.assert_allclose(table[["probability_0", "probability_1", "probability_2"]], found.probabilities)
    np.testing.assert_allclose(table["margin"], found.margin)
    assert list(PROBLEMS["one logit"].fit().predict(TEST).to_frame().columns[:3]) == ["logit", "probability", "margin"]
    many = PROBLEMS["three logits"].fit().predict(TEST).to_frame()
    assert [f"margin_{c}" in many for c in range(4)] == [True, True, True, False]


def test_other_devices(device: torch.device) -> None:
    problem = PROBLEMS["three classes"]
    model = deepcopy(problem.model).to(device)
    tracer = whence.fit(model, [(problem.x, problem.y)], "categorical", ridge=0.4, progress=False)
    found = tracer.predict(TEST)
    wanted = problem.fit().predict(TEST)

    def close(one: Tensor, two: Tensor) -> None:
        assert one.device.type == device.type
        torch.testing.assert_close(one.cpu(), two, rtol=1e-8, atol=1e-12)

    close(found.probabilities, wanted.probabilities)
    close(found.probability_covariance(), wanted.probability_covariance())
    close(found.margin_variance(), wanted.margin_variance())
