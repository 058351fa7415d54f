"""The curve from averages around training examples to their own noise, against scikit-learn; evenly spaced examples."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.isotonic import IsotonicRegression

from whence.influence.calibration import isotonic
from whence.influence.fitted import evenly_spaced


@pytest.mark.parametrize("seed", range(5))
def test_isotonic_regression(seed: int) -> None:
    values = torch.rand(60, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = values + torch.linspace(0, seed, 60, dtype=torch.float64)
    wanted = IsotonicRegression().fit_transform(np.arange(60), values.numpy())
    np.testing.assert_allclose(isotonic(values), wanted, rtol=1e-12)


def test_isotonic_regression_of_few() -> None:
    assert isotonic(torch.tensor([3.0])).tolist() == [3.0]
    assert isotonic(torch.tensor([3.0, 1.0])).tolist() == [2.0, 2.0]
    assert len(isotonic(torch.empty(0))) == 0


def test_evenly_spaced_examples() -> None:
    assert evenly_spaced(torch.tensor([4, 5, 9]), 3).tolist() == [4, 5, 9]
    assert evenly_spaced(torch.arange(0, 100, 2), 3).tolist() == [0, 48, 98]
