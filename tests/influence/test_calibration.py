"""The curve from averages around training examples to their own noise, against scikit-learn; evenly spaced examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import isotonic

from whence.influence.calibration import IsotonicRegression
from whence.influence.fitted import evenly_spaced


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_regression(seed: int) -> None:
    values = torch.rand(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = values + torch.linspace(0, seed, 60, dtype=torch.float64)
    wanted = isotonic.IsotonicRegression().fit_transform(np.arange(60), values.numpy())
    order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
    found = IsotonicRegression.fit(order.double(), values[order])
    pooled, group = np.unique(wanted, return_inverse=True)
    centers = np.array([np.arange(60)[group == at].mean() for at in range(len(pooled))])
    np.testing.assert_allclose(found.values, pooled, rtol=1e-12)
    np.testing.assert_allclose(found.places, centers, rtol=1e-12)
    np.testing.assert_allclose(found.predict(torch.arange(60).double()), np.interp(np.arange(60), centers, pooled))


def test_isotonic_regression_of_few() -> None:
    def fit(places: list[float], values: list[float]) -> tuple[list[float], list[float]]:
        found = IsotonicRegression.fit(torch.tensor(places), torch.tensor(values))
        return found.places.tolist(), found.values.tolist()

    assert fit([7.0], [3.0]) == ([7.0], [3.0])
    assert fit([0.0, 1.0], [3.0, 1.0]) == ([0.5], [2.0])
    assert fit([0.0, 1.0, 1.0], [4.0, 3.0, 9.0]) == ([0.0, 1.0], [4.0, 6.0])  # equal places have one value
    assert fit([], []) == ([], [])
    assert IsotonicRegression.fit(torch.empty(0), torch.empty(0)).predict(torch.ones(1)).tolist() == [1.0]


def test_evenly_spaced_examples() -> None:
    assert evenly_spaced(torch.tensor([4, 5, 9]), 3).tolist() == [4, 5, 9]
    assert evenly_spaced(torch.arange(0, 100, 2), 3).tolist() == [0, 48, 98]
