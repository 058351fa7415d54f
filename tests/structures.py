"""Every structure, by name, and small fits with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import networks
import whence

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
