"""What the README shows is what its commands give."""

from __future__ import annotations

import contextlib
import io
import re

import pytest
import torch

from pages import ROOT, blocks, same_words

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_code_prints_what_is_shown() -> None:
    [(code, shown)] = [(found["code"], found["shown"]) for found in blocks(README)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        exec(compile(code, "README.md", "exec"), {})
    same_words(printed.getvalue(), shown)


def test_it_fits_on_two_screens() -> None:
    assert len(TEXT.splitlines()) <= 100


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
