"""The documentation's likelihood of one's own runs as printed, and is Poisson regression."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import statsmodels.api as sm
import torch

import loss_oracles
import oracles
import whence
from classification import M, inputs, network
from networks import batches_of, linear

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "extending-likelihood.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines, after running all of it, with what it printed."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(code, "extending-likelihood.md", "exec"), names)
    return {**names, "printed": printed.getvalue()}


def test_code_prints_what_is_shown(page: dict[str, Any]) -> None:
    shown = re.search(r"```\n\n((?: {4}[^\n]*\n)+)", TEXT)
    assert shown is not None
    found, expected = (
        [line.split() for line in text.splitlines() if line.strip()] for text in (page["printed"], shown[1])
    )
    assert found[0] == expected[0]
    for got, wanted in zip(found[1:], expected[1:], strict=True):
        assert [float(value) for value in got] == pytest.approx([float(value) for value in wanted], rel=0.01, abs=2e-5)


def test_poisson_regression_is_that_of_statsmodels(page: dict[str, Any]) -> None:
    rng = np.random.default_rng(1)
    design = np.concatenate([np.ones((80, 1)), rng.normal(size=(80, 3))], axis=1)
    y = rng.poisson(np.exp(design @ np.array([0.3, 0.5, -0.2, 0.1])))
    family = sm.families.Poisson()
    plain = sm.GLM(y, design, family=family).fit(tol=1e-14)
    robust = sm.GLM(y, design, family=family).fit(tol=1e-14, cov_type="HC0")
    loader = batches_of(torch.as_tensor(design), torch.as_tensor(y), 32)
    tracer = whence.fit(linear(plain.params.reshape(1, -1)), loader, page["Poisson"](), ridge=0.0, progress=False)
    points = rng.normal(size=(5, 4))
    found = tracer.predict(torch.as_tensor(points))
    for name, reference in (("ho", plain), ("hec0", robust)):
        wanted = np.einsum("mp,pq,mq->m", points, reference.cov_params(), points)
        np.testing.assert_allclose(found.variance(name)[:, 0], wanted, rtol=1e-9)
    hat = plain.get_hat_matrix_diag()
    np.testing.assert_allclose(tracer.leverage[:, 0], hat, rtol=1e-9)
    np.testing.assert_allclose(tracer.residuals[:, 0], plain.resid_response, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(tracer.loo_residuals[:, 0], plain.resid_response / (1 - hat), rtol=1e-8, atol=1e-9)
    assert tracer.diagnostics["Newton step"] < 1e-10


@pytest.mark.parametrize("structure", ["exact", "core", "sketch", "ekfac", "kfac", "diagonal"])
def test_every_structure_takes_it(page: dict[str, Any], structure: str) -> None:
    model, x = network(2), inputs()
    y = torch.poisson(torch.ones(len(x), 2), generator=torch.Generator().manual_seed(3)).double()
    tracer = whence.fit(model, [(x, y)], page["Poisson"](), structure, ridge=0.4, progress=False)
    test = inputs(M, seed=9)
    found = tracer.predict(test)
    assert bool((found.hec3 > 0).all())
    assert repr(tracer).startswith("Tracer(14 training examples, 2 outputs, 26 parameters; poisson")
    if structure == "exact":
        outputs, tangents, _ = oracles.tangents_of(model, x)
        _, test_tangents, _ = oracles.tangents_of(model, test)
        rates = np.exp(outputs)
        hessians = np.stack([np.diag(row) for row in rates])
        wanted = loss_oracles.covariances(
            test_tangents, tangents, y.numpy() - rates, hessians, 0.4, noise=hessians, numbers=2 * len(x)
        )
        for name, value in wanted.items():
            np.testing.assert_allclose(found.covariance(name), value, rtol=1e-8, atol=1e-9 * abs(value).max())


def test_its_errors_come_through(page: dict[str, Any]) -> None:
    model, x = network(1), inputs()
    with pytest.raises(whence.TargetError, match=r"counts, not below zero, got -1\.0 in batch 0"):
        whence.fit(model, [(x, -torch.ones(14))], page["Poisson"](), progress=False)
    with pytest.raises(whence.ShapeError, match=r"counts of shape \(14, 1\), got \(14, 2\) in batch 0"):
        whence.fit(model, [(x, torch.ones(14, 2))], page["Poisson"](), progress=False)


def test_a_loss_that_overflows_is_told(page: dict[str, Any]) -> None:
    model = linear([[1e4, 1e4, 1e4]])
    with pytest.raises(
        whence.InputError, match="finite derivatives of the poisson loss, got NaN or infinity in batch 0"
    ):
        whence.fit(model, [(inputs().abs() + 1, torch.ones(14))], page["Poisson"](), progress=False)


def test_no_probabilities(page: dict[str, Any]) -> None:
    found = whence.fit(network(1), [(inputs(), torch.ones(14))], page["Poisson"](), progress=False).predict(inputs(M))
    with pytest.raises(whence.InputError, match="a likelihood with classes for probabilities, got 'poisson'"):
        _ = found.probabilities
