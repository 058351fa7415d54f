"""Uncertain tokens and the documents behind them: the quick version whole, and a model's upper part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'whence[integrations]'")

from whence_paper.texts import colouring, corpus, decoder, tokens


def test_the_upper_part_says_what_the_whole_model_says() -> None:
    model = decoder.small(10, seed=0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    sequences = [[1, 2, 3, 4], [5, 6, 7, 8]]
    top = decoder.upper_part(model, layers=1, rank=2, seed=0)
    batch = decoder.batches(decoder.from_below(model, sequences, 1), sequences, 2)[0]
    ids = torch.tensor(sequences)
    torch.testing.assert_close(top(**batch).logits, model(input_ids=ids).logits)
    torch.testing.assert_close(top(**batch).loss, model(input_ids=ids, labels=ids).loss)
    fewer = decoder.upper_part(model, layers=1, rank=2, seed=0, words=[7, 2, 3])
    torch.testing.assert_close(
        fewer(inputs_embeds=batch["inputs_embeds"]).logits, model(input_ids=ids).logits[..., [7, 2, 3]]
    )
    learning = [name for name, parameter in top.named_parameters() if parameter.requires_grad]
    assert len(learning) == 14  # two for each of the seven linear layers of a block
    losses = decoder.tune(top, [batch], epochs=20, rate=2e-2, weight_decay=0.0, seed=0)
    assert losses[-1] < losses[0]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert len(model.model(input_ids=ids, output_hidden_states=True).hidden_states) == 3  # all its layers are there


def test_descriptions_are_cut_into_sequences_of_known_documents() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed: pip install 'whence[paper]'")
    words: dict[str, int] = {}
    found = corpus.descriptions(lambda text: [words.setdefault(one, len(words)) for one in text.split()], str, 20)
    assert {len(one) for one in found.sequences} == {20}
    assert sorted(set(found.source)) == list(range(len(corpus.DOCUMENTS)))
    assert [about for about, _ in found.statements].count(-1) == 1
    assert "Fisher's" in words
    assert ">>>" not in words


def test_lines_break_between_tokens() -> None:
    found = list(colouring.laid_out(["word"] + [" word"] * 20))
    assert {line for _, line, _, _ in found} == {0, 1}
    assert all(column + len(text) <= colouring.WIDTH for _, _, column, text in found)
    assert [text for _, line, column, text in found if line == 1 and column == 0] == ["word"]


def test_colours() -> None:
    paint = colouring.by_uncertainty([None, 0.0, 1.0, 5.0], 0.0, 2.0)
    assert [paint(at)[1] for at in range(4)] == [0.0, 0.0, 0.5, 1.0]
    paint = colouring.by_source([None, [0.4, 0.6], [0.9, 0.1]], [0.2, 0.8])
    assert paint(0)[1] == 0.0
    assert paint(1)[0] == colouring.COLOURS[0]  # twice its part, and the other less than its own
    assert paint(1)[1] == pytest.approx(1 / 3)
    assert paint(2)[1] == 1.0


def test_quick(tmp_path: Path) -> None:
    record = tokens.main(["--quick", "--out", str(tmp_path)])
    results = record.runs()[0].results
    assert results["losses"][-1] < results["losses"][0]
    for one in results["found"]:
        assert one["share"] > one["part"]
        assert one["leading"] > 0.8
        assert one["own"]["ho"]["times"] > 1
    for one in results["statements"]:
        assert len(one["tokens"]) == len(one["hec3"]) == len(one["shares"]) == 12
        assert all(abs(sum(share) - 1) < 1e-3 for share in one["shares"][1:])
    assert (tmp_path / "tokens-quick-0.png").stat().st_size > 5_000
    assert "carries" in (tmp_path / "tokens-quick-0.html").read_text()
