"""Global switches of torch that a program may have set: none of them changes a number."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import whence
from doubles import batches, fit, inputs_and_targets, mlp


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def anomalies() -> Iterator[None]:
    with torch.autograd.detect_anomaly(check_nan=True):
        yield


SETTINGS: dict[str, Any] = {
    "another default device": lambda: torch.device("meta"),  # a tensor that forgets its device has no values
    "float64 by default": lambda: default_dtype(torch.float64),
    "float16 by default": lambda: default_dtype(torch.float16),
    "deterministic algorithms": deterministic,
    "anomaly detection": anomalies,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize(
    ("setting", "road"),
    [(setting, road) for setting in SETTINGS for road in ("primal", "dual")]
    + [("another default device", "matrix_free"), ("float16 by default", "matrix_free")],
)
def test_settings_change_no_number(setting: str, road: Any) -> None:
    x, _ = inputs_and_targets()
    model, data = mlp(), batches()
    options: dict[str, Any] = {"structure": whence.Exact(road=road), "recenter": True, "ridge": 10.0}
    expected = fit(model, data, **options).predict(x)
    with SETTINGS[setting]():
        tracer = fit(model, data, **options)
        found = tracer.predict(x)
    for name in expected.covariances:
        torch.testing.assert_close(found.covariance(name), expected.covariance(name), rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.mean, expected.mean)


def test_autocast_is_off(device: torch.device) -> None:
    """Else a fit inside and a prediction outside would be about two different functions."""
    x, y = inputs_and_targets(device)
    model = mlp(device, torch.float32)
    expected = fit(model, [(x.float(), y)], execution=whence.Execution(dtype=torch.float32)).predict(x.float())
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = fit(model, [(x.float(), y)], execution=whence.Execution(dtype=torch.float32)).predict(x.float())
        assert torch.is_autocast_enabled(device.type)
    torch.testing.assert_close(found.hec3, expected.hec3)
    torch.testing.assert_close(found.mean, expected.mean)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_choosing_the_ridge_and_labels(setting: str) -> None:
    model, data = mlp(), batches()
    labels = torch.tensor([0, 2])
    expected = fit(model, data, ridge="loo").ridge
    with SETTINGS[setting]():
        assert fit(model, data, ridge="loo").ridge == pytest.approx(expected)
        assert whence.one_hot(labels, 3).tolist() == [[1, -1, -1], [-1, -1, 1]]
