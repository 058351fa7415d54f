"""A report from end to end: what it says is what the fit says, and nothing it is given can run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import whence


def fitted(generator: torch.Generator, n: int = 40, **options: object) -> tuple[whence.Tracer, Tensor, Tensor]:
    """A line through noisy points."""
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    model = nn.Linear(2, 1).double()
    return whence.fit(model, [(x, y)], ridge=0.1, recenter=True, progress=False), x, y


def data_of(path: Path) -> dict:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    return json.loads(found.group(1))


def test_holds_every_prediction_and_the_verdicts_of_the_fit(tmp_path: Path, generator: torch.Generator) -> None:
    tracer, x, y = fitted(generator)
    path = tracer.report(tmp_path / "report.html", (3 * x, 3 * y))
    data = data_of(path)
    assert data["m"] == len(x)
    assert data["kind"] == "numbers"
    counts = {verdict: tracer.explain(3 * x).verdicts.count(verdict) for verdict in ("scarce data", "confident")}
    text = path.read_text(encoding="utf-8")
    for verdict, count in counts.items():
        assert re.search(rf"</svg>{count}</b> <span>{verdict}", text)


def test_says_where_the_folder_is_missing(tmp_path: Path, generator: torch.Generator) -> None:
    tracer, x, _ = fitted(generator)
    with pytest.raises(whence.InputError, match=r"expected a folder that exists, got .*nowhere"):
        tracer.report(tmp_path / "nowhere" / "page.html", x)
