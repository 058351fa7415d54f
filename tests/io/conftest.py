"""A fit that was saved, and files forged from it."""

from __future__ import annotations

from pathlib import Path

import pytest

from fits_to_save import Fit, regression
from forging import Forged


@pytest.fixture(scope="module")
def fit() -> Fit:
    return regression("primal")


@pytest.fixture
def path(fit: Fit, tmp_path: Path) -> Path:
    fit.tracer.save(tmp_path / "fit.whence")
    return tmp_path / "fit.whence"


@pytest.fixture
def forged(path: Path) -> Forged:
    return Forged(path.read_bytes())
