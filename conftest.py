"""Examples in docstrings: those of the plots go on from that of `whence.plots`, which is written once."""

from __future__ import annotations

import doctest
from importlib.util import find_spec
from typing import Any

import pytest

collect_ignore = [] if find_spec("triton") else ["src/whence/jacobian/fused.py"]  # it comes with torch for GPUs


@pytest.fixture(autouse=True)
def _goes_on(request: pytest.FixtureRequest, doctest_namespace: dict[str, Any]) -> None:
    """Run the example of the package before those of its functions."""
    if isinstance(request.node, pytest.DoctestItem) and request.node.name.startswith("whence.plots."):
        from whence import plots  # matplotlib, for these alone

        for example in doctest.DocTestParser().get_examples(plots.__doc__ or ""):
            exec(example.source, doctest_namespace)
