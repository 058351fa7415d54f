"""Networks that several tests of trust look at."""

from __future__ import annotations

import pytest
from torch import nn

from trusted_fits import RIDGE, trained


@pytest.fixture(scope="module")
def converged() -> nn.Sequential:
    return trained(RIDGE, 500)


@pytest.fixture(scope="module")
def stopped() -> nn.Sequential:
    return trained(RIDGE, 2)
