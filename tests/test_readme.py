"""What the README shows is what its commands give."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pages import ROOT, blocks

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def users_own() -> dict[str, Any]:
    """What a reader of the README has: a trained network, a table, a language model, and their data."""
    import numpy as np
    from sklearn.datasets import load_diabetes, load_digits
    from transformers import GPT2Config, GPT2LMHeadModel  # not needed by the other tests here

    inputs, labels = (torch.from_numpy(one) for one in load_digits(n_class=3, return_X_y=True))
    inputs = inputs[:200].float() / 16
    model = torch.nn.Sequential(torch.nn.Linear(64, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs[:150]), labels[:150]).backward()
        optimizer.step()
    rows, targets = load_diabetes(return_X_y=True)
    sizes = {"vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (12, 8)))
    return {
        "model": model,
        "train_loader": [(inputs[:150], labels[:150])],
        "x": inputs[150:],
        "X": rows[:300],
        "y": targets[:300],
        "X_new": rows[300:305],
        "language_model": GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)),
        "text_batches": [{"input_ids": tokens[:10], "labels": tokens[:10]}],
        "query": {"input_ids": tokens[10:]},
    }


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a report is written
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        names = users_own()
        for found in blocks(README):
            *lines, last = found["code"].strip().splitlines()
            exec(compile("\n".join(lines), "README.md", "exec"), names)
            names["answer"] = eval(compile(last, "README.md", "eval"), names)
            if "X_new" in last:
                assert len(names["answer"]) == 5
    assert names["answer"].shape == (2, 3)
    assert printed.getvalue().startswith(("confident", "noisy", "scarce", "both"))
    assert (tmp_path / "report.html").stat().st_size > 10_000


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
    from whence_paper.demo_classes import mean_classes, run_classes  # scikit-learn, for this test alone
    from whence_paper.demo_trial import QUESTIONS

    mean = mean_classes([run_classes(seed) for seed in range(5)])
    head = re.search(r"^\| digits \|(.*)\|$", TEXT, re.MULTILINE)[1]
    scores = [cell.strip().replace("kNN labels", "kNN label entropy") for cell in head.split("|")]
    rows = re.findall(r"^\| [^|]+ \|((?: [\d.*]+ \|){10})$", TEXT, re.MULTILINE)
    assert len(rows) == 2
    for question, row in zip(QUESTIONS, rows, strict=False):
        shown = [float(cell.strip(" *")) for cell in row.split("|")[:10]]
        assert shown == pytest.approx([mean.auroc[question][name] for name in scores], abs=0.015)
    said = [int(share) for share in re.findall(r"(\d+) % ", TEXT[: TEXT.index("## ")])]
    noisy, missing, others = (mean.verdicts[group] for group in ("noisy", "missing", "others"))
    shares = (noisy["noisy labels nearby"], missing["scarce data"], others["confident"])
    assert said == pytest.approx([100 * share for share in shares], abs=1.5)
