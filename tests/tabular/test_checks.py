"""Copies of the target and of other columns, leaks, ids that repeat, and rows that are held out in groups."""

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


def test_a_copy_of_the_target_and_a_duplicate_are_left_out() -> None:
    given = columns()
    given |= {"answer": [f"{value:.7f}" for value in given["y"]], "again": given["a"], "colour": given["b"]}
    found = prepared(given).model
    assert [column.name for column in found.columns] == ["a", "b"]
    reasons = {one.name: one.reason for one in found.excluded}
    assert reasons == {
        "answer": "the same values as the target 'y'",
        "again": "the same values as 'a'",
        "colour": "the same values as 'b'",
    }


def test_a_copy_of_classes_is_left_out() -> None:
    found = prepared(columns() | {"y": ["yes", "no"] * 100, "again": ["yes", "no"] * 100, "other": ["n", "y"] * 100})
    assert [one.reason for one in found.model.excluded] == ["the same values as the target 'y'"]
    assert ["'other' alone predicts 'y'" in note for note in found.notes] == [True]


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


@pytest.mark.parametrize("name", ["patient_id", "Patient", "patientid"])
def test_an_id_that_repeats_is_noted_and_its_groups_can_be_kept_together(name: str) -> None:
    given = columns() | {name: np.repeat(np.arange(40), 5) + 1000}
    assert [note for note in prepared(given).notes if f"--groups {name!r}" in note]
    grouped = prepared(given, groups=name)
    assert not [note for note in grouped.notes if "looks like an id" in note]
    assert name in [one.name for one in grouped.model.excluded]
    ids, split = np.asarray(given[name]), grouped.split
    parts = [ids[split.test], *(ids[rows] for rows in split.validation)]
    for number, part in enumerate(parts):
        for other in parts[number + 1 :]:
            assert not set(part) & set(other)
    assert 0.1 < len(split.test) / 200 < 0.3
    assert sorted(np.concatenate(split.validation)) == sorted(split.train)


@pytest.mark.parametrize("options", [{}, {"ignore": ["patient_id"]}])
def test_an_id_in_two_rows_each_is_noted_though_the_column_is_left_out(options: dict[str, Any]) -> None:
    found = prepared(columns() | {"patient_id": [f"P{at // 2:04}" for at in range(200)]}, **options)
    assert "patient_id" in [one.name for one in found.model.excluded]
    assert [note for note in found.notes if "--groups 'patient_id'" in note]


def test_an_amount_that_is_called_an_index_is_no_id() -> None:
    given = columns() | {"price_index": np.random.default_rng(0).choice(np.arange(20) + 0.5, 200)}
    assert not [note for note in prepared(given).notes if "looks like an id" in note]


@pytest.mark.parametrize(("delimiter", "style"), [(",", "thousands separator"), (";", "decimal comma")])
def test_amounts_and_inputs_that_can_be_read_either_way_follow_the_file(delimiter: str, style: str) -> None:
    draw = np.random.default_rng(0)
    either = {name: [f"{value:.3f}".replace(".", ",") for value in draw.uniform(1, 9, 100)] for name in ("a", "y")}
    found = prepared(either, delimiter=delimiter)
    assert found.model.target.style == style
    assert f"read with a {style}: 'a'" in found.notes
    assert f"'y' was read with a {style}" in found.notes
    told = prepared(either | {"b": [f"{value:.2f}".replace(".", ",") for value in draw.normal(size=100)]})
    assert "read with a decimal comma: 'a', 'b'" in told.notes
    assert np.nanmax(told.values) < 9


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
