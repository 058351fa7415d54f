"""What the page on classifiers prints is what its code gives."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "classification.md").read_text(encoding="utf-8")
NUMBER = r"-?\d+\.\d+"


def test_code_prints_what_is_shown() -> None:
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(code, "classification.md", "exec"), names)
    shown = re.search(r"```\n\n((?: {4}[^\n]*\n)+)", TEXT)
    assert shown is not None
    found, wanted = (
        [[float(number) for number in re.findall(NUMBER, line)] for line in text.splitlines()]
        for text in (printed.getvalue(), shown[1])
    )
    assert len(found) == len(wanted) == 4
    for got, expected in zip(found, wanted, strict=True):
        assert got == pytest.approx(expected, rel=0.2, abs=0.06)
