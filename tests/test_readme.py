"""What the README shows is what its commands give."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

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


STYLE = """
body {font: 16px/1.5 sans-serif; width: 860px; margin: auto; padding: 32px} img {max-width: 100%}
h1, h2 {line-height: 1.25; margin: 24px 0 16px; padding-bottom: 0.3em} h1 {margin-top: 0}
p, ul, table, pre {margin: 0 0 16px} li + li {margin-top: 4px} td, th {padding: 6px 13px; border: 1px solid}
table {border-collapse: collapse} code {font-size: 85%} pre {padding: 16px; font-size: 13.6px; line-height: 1.45}
pre code {font-size: 100%}
"""  # sizes as on a code host


def test_it_fits_on_two_screens(browser: Any, tmp_path: Path) -> None:
    markdown = pytest.importorskip("markdown", reason="comes with mkdocs: pip install -e '.[dev]'")
    text = TEXT.replace('src="', f'src="{ROOT.as_uri()}/')
    html = markdown.markdown(text, extensions=["tables", "fenced_code", "md_in_html"])
    (tmp_path / "readme.html").write_text(f"<!doctype html><style>{STYLE}</style>{html}", encoding="utf-8")
    page = browser.new_page(viewport={"width": 1280, "height": 1000})
    page.goto((tmp_path / "readme.html").as_uri())
    assert page.evaluate("[...document.images].every(image => image.naturalWidth > 0)")
    assert page.locator("img").count() >= 2
    assert page.evaluate("document.documentElement.scrollHeight") <= 2 * 1000 * 1.05  # fonts differ


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
