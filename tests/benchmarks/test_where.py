"""The profile of a fit names functions that exist."""

from __future__ import annotations

import pytest

from benchmarks import where


@pytest.mark.parametrize(("owner", "name", "part"), where.PARTS)
def test_parts_exist(owner: object, name: str, part: str) -> None:
    assert callable(getattr(owner, name)), part
