"""What the README shows is what its commands give."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_code_prints_what_is_shown() -> None:
    code = re.search(r"```python\n(.*?)```\n\n((?: {4}[^\n]*\n)+)", TEXT, re.DOTALL)
    assert code is not None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code[1], "README.md", "exec"), {})
    found, shown = ([line.split() for line in text.splitlines()] for text in (printed.getvalue(), code[2]))
    assert found[0] == shown[0]
    for got, expected in zip(found[1:], shown[1:], strict=True):
        assert [float(value) for value in got] == pytest.approx([float(value) for value in expected], rel=0.1, abs=2e-4)


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)]+)\)", TEXT)
    assert len(links) >= 5
    assert [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.slow
def test_table_is_the_mean_of_five_draws() -> None:
    from whence_paper.demo_trial import QUESTIONS, SCORES, mean_auroc, run_trial  # scikit-learn, for this test alone

    mean = mean_auroc([run_trial(seed) for seed in range(5)])
    rows = re.findall(r"^\| [^|]+ \|((?: [\d.*]+ \|){4})$", TEXT, re.MULTILINE)
    shown = [[float(cell.strip(" *")) for cell in row.split("|")[:4]] for row in rows]
    assert len(shown) == len(QUESTIONS)
    for question, cells in zip(QUESTIONS, shown, strict=True):
        assert cells == pytest.approx([mean[question][name] for name in SCORES], abs=0.015)
