"""Columns that leak the target, and rows that are held out in groups."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from whence.errors import InputError
from whence.tabular.files import as_text
from whence.tabular.fitted import Prepared, prepare
from whence.tabular.target import Target, split_rows


def prepared(columns: dict[str, Any], **options: Any) -> Prepared:
    frame = as_text(pd.DataFrame(columns))
    return prepare(frame.set_index(np.arange(len(frame)) + 1), "y", **options)


def columns(n: int = 200) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    a, b = draw.normal(size=n), draw.choice(["red", "green"], n)
    return {"a": a.round(6), "b": b, "y": (a + (b == "red") + draw.normal(size=n)).round(6)}


def test_a_leak_is_noted() -> None:
    given = columns()
    clean = prepared(given)
    leaking = prepared(given | {"in_cents": 100 * given["y"] + np.random.default_rng(1).normal(size=200)})
    assert not any("leak" in note for note in clean.notes)
    assert [note for note in leaking.notes if "leak" in note and "--ignore 'in_cents'" in note]
    assert "in_cents" in [column.name for column in leaking.model.columns]  # said, not dropped


def test_a_leak_of_classes_is_noted() -> None:
    draw = np.random.default_rng(0)
    label = draw.choice(["yes", "no"], 300, p=[0.3, 0.7])
    given = {"a": draw.normal(size=300), "code": np.where(label == "yes", "Y1", "N0"), "y": label}
    assert [note for note in prepared(given).notes if "'code' alone predicts 'y'" in note]
    assert not [note for note in prepared(given | {"code": draw.permutation(given["code"])}).notes if "leak" in note]


def test_groups_are_kept_together() -> None:
    name = "patient"
    given = columns() | {name: np.repeat(np.arange(40), 5) + 1000}
    grouped = prepared(given, groups=name)
    assert name in [one.name for one in grouped.model.excluded]
    ids, split = np.asarray(given[name]), grouped.split
    parts = [ids[split.test], *(ids[rows] for rows in split.validation)]
    for number, part in enumerate(parts):
        for other in parts[number + 1 :]:
            assert not set(part) & set(other)
    assert 0.1 < len(split.test) / 200 < 0.3
    assert sorted(np.concatenate(split.validation)) == sorted(split.train)


def test_too_few_groups_are_refused() -> None:
    with pytest.raises(InputError, match=r"at least 8 groups .* got 3"):
        split_rows(np.arange(60.0), Target("y", "regression"), 0.2, 0, pd.Series(np.arange(60) % 3))


def test_large_groups_do_not_fill_the_held_out_rows() -> None:
    """One group with most of the rows, wherever it is drawn."""
    groups = pd.Series(np.where(np.arange(300) < 200, 0, np.arange(300) % 20 + 1))
    shares = [
        len(split_rows(np.arange(300.0), Target("y", "regression"), 0.2, s, groups).test) / 300 for s in range(20)
    ]
    assert min(shares) > 0
    assert np.median(shares) < 0.5
