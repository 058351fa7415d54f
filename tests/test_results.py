"""What a prediction answers, and how it shows itself."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import whence
from doubles import batches, fit, inputs_and_targets, mlp
from whence.estimators import ESTIMATORS
from whence.results import Finding

NAMES = ("ho", "hec0", "hec1", "hec2", "hec3", "jackknife", "laplace")


def made(m: int = 4, k: int = 2) -> whence.Uncertainty:
    """Covariances that are easy to tell apart."""
    eye = torch.eye(k, dtype=torch.float64).expand(m, k, k)
    scale = torch.arange(1.0, m + 1, dtype=torch.float64).reshape(m, 1, 1)
    covariances = {name: (at + 1) * scale * (eye + 0.5) for at, name in enumerate(NAMES)}
    return whence.Uncertainty(torch.zeros(m, k, dtype=torch.float64), covariances)


def test_every_estimator_has_a_variance_and_a_covariance(device: torch.device) -> None:
    x, _ = inputs_and_targets(device)
    found = fit(mlp(device), batches(device)).predict(x)
    assert set(found.covariances) == set(ESTIMATORS) == set(NAMES)
    for name in NAMES:
        variance: Tensor = getattr(found, name)
        assert variance.shape == found.mean.shape == (8, 2)
        assert found.covariance(name).shape == (8, 2, 2)
        assert variance.device.type == device.type
        torch.testing.assert_close(variance, torch.stack([m.diagonal() for m in found.covariance(name)]))
        torch.testing.assert_close(found.covariance(name), found.covariance(name).mT)
        assert (torch.linalg.eigvalsh(found.covariance(name)) > -1e-12).all()
    torch.testing.assert_close(found.ratio, found.hec3.sum(1) / found.ho.sum(1))
    assert found.covariance() is found.covariance("hec3")
    assert len(found) == 8


def test_results_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().mean = torch.zeros(1)  # type: ignore[misc]


def test_no_variance_at_all_is_a_ratio_of_one() -> None:
    nothing = {name: torch.zeros(3, 2, 2) for name in NAMES}
    assert whence.Uncertainty(torch.zeros(3, 2), nothing).ratio.tolist() == [1, 1, 1]


def test_rounding_below_zero_is_no_variance() -> None:
    slightly = {name: -1e-20 * torch.eye(2).expand(3, 2, 2) for name in NAMES}
    assert (whence.Uncertainty(torch.zeros(3, 2), slightly).hec3 == 0).all()


@pytest.mark.parametrize("name", ["HC3", "", None, 3])
def test_unknown_estimators(name: Any) -> None:
    with pytest.raises(whence.InputError, match="expected one of hec0, hec1, hec2, hec3, ho, jackknife, laplace, got"):
        made().covariance(name)
    with pytest.raises(whence.InputError, match="expected one of hec0"):
        made().interval(0.9, name)


def test_intervals_are_normal_quantiles() -> None:
    found = made()
    low, high = found.interval(0.95, "ho")
    torch.testing.assert_close(high, 1.959963984540054 * found.ho.sqrt())
    torch.testing.assert_close(low, -high)
    assert (found.interval(0.5)[1] < found.interval(0.9)[1]).all()


@pytest.mark.parametrize("level", [0.0, 1.0, 95, -0.5, float("nan"), "hec3", None])
def test_levels_out_of_range(level: Any) -> None:
    with pytest.raises(whence.InputError, match=r"a level between 0 and 1, got .*\. For 95 % pass 0\.95"):
        made().interval(level)


def test_tables() -> None:
    table = made(3, 2).to_frame()
    assert len(table) == 3
    assert list(table.columns[:2]) == ["mean_0", "mean_1"]
    for name in NAMES:
        assert table[name].tolist() == pytest.approx((table[f"{name}_0"] + table[f"{name}_1"]).tolist())
    assert table["ratio"].tolist() == pytest.approx([5.0, 5.0, 5.0])
    single = made(3, 1).to_frame()
    assert list(single.columns) == ["mean", *sorted(NAMES), "ratio"]


def test_tables_from_any_device(device: torch.device) -> None:
    x, _ = inputs_and_targets(device)
    table = fit(mlp(device), batches(device)).predict(x).to_frame()
    assert len(table) == 8
    assert not table.isna().any().any()


def test_tables_without_pandas_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match=r"pandas for a table\. Install it: pip install 'whence\[report\]'"):
        made().to_frame()


def test_results_show_themselves() -> None:
    assert repr(made()) == "Uncertainty(4 predictions, 2 outputs; median variance Ho 6, HeC3 30, median ratio 5)"
    nothing = whence.Uncertainty(torch.zeros(0, 2), {name: torch.zeros(0, 2, 2) for name in NAMES})
    assert repr(nothing) == "Uncertainty(no predictions, 2 outputs)"


def test_diagnostics() -> None:
    told = whence.Diagnostics((Finding("ridge", 0.1234567891, "a number"), Finding("note", "a word", "")))
    assert told["ridge"] == 0.1234567891
    assert told["note"] == "a word"
    assert str(told) == "ridge: 0.123457 (a number)\nnote: a word"
    assert [finding.name for finding in told] == ["ridge", "note"]
    with pytest.raises(KeyError, match="nothing"):
        told["nothing"]
