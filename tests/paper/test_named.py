"""`whence reproduce` knows every experiment of the paper by its name."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
NAMES = {
    "sinc",
    "spirals",
    "figure4",
    "table1",
    "table2",
    "table3",
    "beyond",
    "lambda-sweep",
    "label-noise",
    "grids",
    "disentanglement",
}


def test_each_name_leads_to_a_function_with_a_description():
    tomllib = pytest.importorskip("tomllib", reason="came with Python 3.11")
    points = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["entry-points"]["whence.experiments"]
    assert set(points) >= NAMES
    for name in NAMES:
        module, _, function = points[name].partition(":")
        found = import_module(module)
        assert callable(getattr(found, function))
        assert len((found.__doc__ or "").strip().splitlines()[0]) > 20, name
