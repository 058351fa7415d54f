"""What the page on saving prints is what its code gives."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import torch

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "saving.md").read_text(encoding="utf-8")


def test_code_prints_what_is_shown() -> None:
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stdout(printed):
        for code in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
            exec(compile(code, "saving.md", "exec"), names)
    shown = re.search(r"```\n\n((?: {4}[^\n]*\n)+)", TEXT)
    assert shown is not None
    assert printed.getvalue().split() == shown[1].split()
