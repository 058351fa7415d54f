"""Texts and plain scores of the study of language models, on input small enough to check by hand."""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import whence

pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_five_per_cent_are_corrupted() -> None:
    from benchmarks.language_texts import CLEAN, continuations, sentiments

    from whence_paper.texts.reviews import made_up

    reviews = made_up(200, 0, 0)[0]
    clean, wrong = (sentiments(reviews, 50, share, random.Random(0)) for share in (0.0, 0.05))
    changed = [one.kind for one, other in zip(wrong, clean, strict=True) if one.answer != other.answer]
    assert changed == ["wrong label"] * 10
    assert all(
        one.answer.split()[0] == ("positive" if r.label else "negative") for one, r in zip(clean, reviews, strict=True)
    )
    clean, bad = (continuations(reviews, 50, share, random.Random(0)) for share in (0.0, 0.05))
    assert Counter(one.kind for one in bad) == {CLEAN: 190, "answer of another": 5, "shuffled words": 5}
    assert [one.prompt for one in bad] == [one.prompt for one in clean]
    for one, other in zip(bad, clean, strict=True):
        words = [Counter(text.answer.split()) for text in (one, other)]
        assert one.kind == "answer of another" or words[0] == words[1]
        assert one.kind != CLEAN or one.answer == other.answer
    swapped = [at for at, one in enumerate(bad) if one.kind == "answer of another"]
    assert Counter(bad[at].answer for at in swapped) == Counter(clean[at].answer for at in swapped)


def test_one_document_states_what_is_asked() -> None:
    from benchmarks.language import states
    from benchmarks.language_texts import planted

    documents, questions = planted(5, 3, random.Random(1))
    assert (len(documents), len(questions)) == (8 * 4 * 2, 3 * 4)
    for question in questions:
        about = [one for one in documents if one.about == question.about]
        assert sorted(one.kind for one in about) == ["mentions", "states"]
        assert documents[states(documents, question)].kind == "states"
        assert all(question.about[0] in one.whole and question.answer in one.whole for one in about)
        assert not any(question.prompt in one.whole for one in documents)


def test_bm25_by_hand() -> None:
    from benchmarks.language_texts import bm25

    found = bm25(["A cat sat.", "a dog ran a mile"], ["the dog", "a a"])
    length = 4 / 4 * 0.75  # b; mean length 4
    rare, often = math.log(1 + 1.5 / 1.5), math.log(1 + 0.5 / 2.5)
    second = rare * 2.5 / (1 + 1.5 * (0.25 + 0.75 * 5 / 4))
    assert found[0].tolist() == pytest.approx([0.0, second])
    once, twice = (count * 2.5 / (count + 1.5 * (0.25 + length * size / 4)) for count, size in ((1, 3), (2, 5)))
    assert found[1].tolist() == pytest.approx([2 * often * once, 2 * often * twice])


def small_model() -> tuple[Any, list[dict[str, torch.Tensor]]]:
    from benchmarks.language import learner
    from benchmarks.language_texts import Text, Words, batches

    encode = Words()
    texts = [Text("a b", " c d e"), Text("", "b c"), Text("e", " a d")]
    for text in texts:
        encode(text.whole)
    model, read = learner(encode, "cpu", 0)
    return model.double(), batches(texts, read, 2, "cpu")


def test_prompts_are_no_labels() -> None:
    _, (first, second) = small_model()
    assert first["labels"].tolist() == [[-100, -100, 2, 3, 4], [1, 2, -100, -100, -100]]
    assert first["attention_mask"].sum(1).tolist() == [5, 2]
    assert second["labels"].tolist() == [[-100, 0, 3]]


def test_gradients_of_single_texts() -> None:
    from benchmarks.language import gradient_norms, gradient_products, linear_layers, mean_losses

    model, data = small_model()
    weights = [layer.weight for _, layer in linear_layers(model)]
    rows, losses = [], []
    for batch in data:
        for at in range(len(batch["input_ids"])):
            one = {name: value[at : at + 1] for name, value in batch.items()}
            loss = model(**one).loss  # of the words of the answer, their mean
            labels = int((one["labels"][:, 1:] >= 0).sum())
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss * labels, weights)]))
            losses.append(loss.detach())
    wanted = torch.stack(rows)
    torch.testing.assert_close(mean_losses(model, data), torch.stack(losses).double(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient_norms(model, data), wanted.norm(dim=1), rtol=1e-5, atol=1e-8)
    found = gradient_products(model, data, [data[1]])
    torch.testing.assert_close(found, wanted[2:] @ wanted.T, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(gradient_products(model, data, data), wanted @ wanted.T, rtol=1e-5, atol=1e-8)


def test_the_study_in_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.language_tables import language as shown

    from benchmarks import language

    out = tmp_path / "language.json"
    small = ("--tiny", "--texts", "60", "--people", "6", "2", "--epochs", "2", "--size", "16", "--columns", "2")
    monkeypatch.setattr(sys, "argv", ["language.py", "--out", str(out), "--seeds", "0", *small])
    language.main()
    record = json.loads(out.read_text())
    assert [row["task"] for row in record["rows"]] == list(language.TASKS)
    for row in record["rows"]:
        assert "loss" in row["scores"] or "gradients, cosine" in row["scores"]
        assert row["learned"] == 2 * (4 * 24 * 24 + 3 * 24 * 32)
    sentiment = record["rows"][0]["scores"]
    assert all(0 <= value <= 1 for scores in sentiment.values() for value in scores.values())
    page = shown(record)
    assert "| sketch:size=16, decay 0.01, pull on the loss |" in page
    assert "| sketch:size=16, decay 0.01, suspicion |" in page


def test_a_fact_known_by_heart_leans_on_its_document() -> None:
    """Of 48 documents, two about each of 24 facts, it is the one that states it."""
    from benchmarks.language import (
        behind,
        fitted,
        leaned,
        learner,
        one_word,
        padded,
        ranks_of,
        token_losses,
        tune,
    )
    from benchmarks.language_texts import Words, batches, planted

    texts, _ = planted(0, 6, random.Random(0))
    encode = Words()
    for text in texts:
        encode(text.whole)
    model, read = learner(encode, "cpu", 0)
    tune(model, batches(texts, read, 12, "cpu"), 60, 1e-2, 0, everything=True)
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 2 * (4 * 24 * 24 + 3 * 24 * 32)
    stating = [at for at, text in enumerate(texts) if text.kind == "states"]
    words = [read(texts[at].whole) for at in stating]  # the last two are the answer and a full stop
    (questions,) = padded([one_word(one[:-2], one[-2], "cpu") for one in words], len(words))
    with torch.no_grad():
        assert float(token_losses(model, questions).sum(1).median()) < 0.5
    _, tracer = fitted(model, batches(texts, read, 48, "cpu"), "core:size=256", 1e-2, 16)
    found = behind(tracer, questions, len(texts))
    for name, least in (("share of Ho", 0.75), ("pull over the root of cook", 0.85)):
        ranks = ranks_of(found[name], torch.tensor(stating))
        assert leaned(ranks, torch.zeros(len(ranks), dtype=torch.bool))["all"]["first"] > least


@pytest.mark.parametrize("shape", ["small", "llama-tiny"])
def test_sizes_by_name(shape: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.language_tables import tokens_large

    from benchmarks import tokens

    out = tmp_path / "tokens.json"
    small = ("--layers", "1", "--width", "16", "--words", "50", "--tokens", "8", "--size", "16", "--sequences", "8")
    more = ("--columns", "1", "--structures", "sketch", "--queries", "2", "--query-tokens", "12", "--ridge", "10")
    monkeypatch.setattr(sys, "argv", ["tokens.py", "--shape", shape, "--out", str(out), *small, *more])
    tokens.main()
    record = json.loads(out.read_text())
    found = record["found"]
    blocks = 12 * 16 * 16 if shape == "small" else 4 * 16 * 16 + 3 * 16 * 160
    assert found["selected"] == blocks
    assert found["sketch, 1 columns"]["variance of the last word and its sequences, seconds"] > 0
    record["surroundings"]["gpu"] = "none"
    assert f"| {shape} | 0.00 |" in tokens_large({"runs": [record]})


def test_where_a_fit_is_refused_as_many_blocks_are_fitted_as_the_error_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In bfloat16, with fewer heads of keys than of queries: core and EKFAC, of all blocks and of the last."""
    from benchmarks.language_tables import tokens_large

    from benchmarks import tokens

    out = tmp_path / "tokens.json"
    sizes = ("--shape", "llama-tiny", "--layers", "6", "--keys", "2", "--dtype", "bfloat16", "--sequences", "16")
    more = ("--columns", "1", "--ridge", "100", "--cold", "--parts", "--follow", "--out", str(out))
    monkeypatch.setattr(sys, "argv", ["tokens.py", *sizes, *more, "--structures", "core", "ekfac@2"])
    tokens.main()
    found = json.loads(out.read_text())["found"]
    assert found["core, 1 columns"]["stages"]["eigenvectors"] > 0
    assert 3 * found["ekfac, 1 columns, the last 2 of 6 blocks"]["selected"] == found["selected"]

    monkeypatch.setattr(sys, "argv", ["tokens.py", *sizes, *more, "--structures", "core", "--memory", "0.006"])
    tokens.main()
    record = json.loads(out.read_text())
    found = record["found"]
    assert "What would fit: the last 1 of 6 layers" in found["core, 1 columns"]["refused"]
    assert found["core, 1 columns, the last 1 of 6 blocks"]["tokens a second"] > 0
    record["surroundings"]["gpu"] = "none"
    shown = tokens_large({"runs": [record]})
    assert "- llama-tiny, core, 1 column: expected a fit by core of" in shown
    assert "| core, 1 column, the last 1 of 6 blocks |" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_features_on_a_disk_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import storage

    out = tmp_path / "storage.json"
    sizes = ("--sequences", "600", "--size", "256", "--batch", "50", "--memory", "0.006", "--every", "0")
    monkeypatch.setattr(sys, "argv", ["storage.py", *sizes, "--folder", str(tmp_path), "--out", str(out)])
    storage.main()
    found = json.loads(out.read_text())["found"]
    assert found["estimate"]["disk, GiB"] == found["features, GiB"]
    assert "on disk" in found["fit"]["notes"][0]
    assert found["attribution"]["batches read"] == 0
    assert found["stopped"]["passes over the loader"] > found["fit"]["passes over the loader"]
    assert found["resumed"]["largest difference of a share"] == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("peer", ["kronfluence", "bergson"])
def test_peers_see_the_same_layers_and_sequences(peer: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip(peer)
    from benchmarks.language_tables import tokens_large

    from benchmarks import tokens_peers

    out = tmp_path / "peers.json"
    sizes = ("--shape", "llama-tiny", "--keys", "2", "--sequences", "12", "--batch", "4", "--queries", "3")
    monkeypatch.setattr(sys, "argv", ["tokens_peers.py", *sizes, "--peers", peer, f"{peer}@1", "--out", str(out)])
    tokens_peers.main()
    record = json.loads(out.read_text())
    found = record["found"]
    assert 2 * found[f"{peer}, the last 1 of 2 blocks"]["selected"] == found["selected"]
    assert found[peer]["queries, seconds"] > 0
    record["surroundings"]["gpu"] = "none"
    assert f"| {peer} {found[peer]['version']} |" in tokens_large({"runs": [record]})


def test_the_loss_without_a_text_is_that_of_a_newton_step() -> None:
    """At a stationary point of softmax regression: leave an example out, take one Newton step, read its loss."""
    from benchmarks.language import added_loss

    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 4, 3, generator=draw, dtype=torch.float64)
    y = torch.randint(0, 5, (12, 4), generator=draw)
    layer, ridge = torch.nn.Linear(3, 5, bias=False).double(), 20.0

    def loss(w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy((x[rows] @ w.T).flatten(0, 1), y[rows].flatten(), reduction="sum")

    everything = torch.arange(12)
    w = torch.zeros(5, 3, dtype=torch.float64)

    def step(w: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        penalised = lambda flat: loss(flat.reshape(5, 3), rows) + 0.5 * ridge * flat.square().sum()  # noqa: E731
        flat = w.flatten()
        return w - torch.linalg.solve(torch.func.hessian(penalised)(flat), torch.func.grad(penalised)(flat)).reshape(
            5, 3
        )

    for _ in range(20):
        w = step(w, everything)
    with torch.no_grad():
        layer.weight.copy_(w)
    tracer = whence.fit(
        layer, [(x, y)], "categorical", whence.Exact("primal"), ridge=ridge, hessian_columns=19, progress=False
    )
    own = [everything[at : at + 1] for at in range(12)]
    without = [loss(step(w, everything[everything != at]), one) for at, one in enumerate(own)]
    wanted = torch.stack(without) - torch.stack([loss(w, one) for one in own])
    torch.testing.assert_close(added_loss(tracer), wanted, rtol=0.1, atol=0.01)
