"""Tables of inputs from whatever holds them, and what is unusual in a row."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from whence import InputError, ShapeError
from whence.report.inputs import text_pieces
from whence.report.page import jinja_environment
from whence.report.traced import Action
from whence.report.usual import UsualValues, frame_of, rows_as_text


def unusual(usual: UsualValues, frame: pd.DataFrame, row: int) -> list[tuple[int, str]]:
    return usual.standing_out(frame)[row][0]


def test_frames_dicts_and_arrays_read_the_same() -> None:
    values = torch.tensor([[1.5, 2.0], [3.0, float("nan")]], dtype=torch.float64)
    frame = pd.DataFrame({"x0": [1.5, 3.0], "x1": [2.0, np.nan]})
    for given in (values, values.numpy(), frame, {"x0": values[:, 0], "x1": values[:, 1].tolist()}):
        table = frame_of(given)
        assert list(table.columns) == ["x0", "x1"]
        assert rows_as_text(table) == [("1.5", "2"), ("3", "missing")]


def test_words_and_answers_are_shown_as_such() -> None:
    frame = pd.DataFrame({"town": ["Ulm", None], "paid": [True, False], "count": [3, 4]})
    assert rows_as_text(frame_of(frame)) == [("Ulm", "yes", "3"), ("missing", "no", "4")]
    nullable = frame.convert_dtypes().astype({"town": "category"})
    assert rows_as_text(frame_of(nullable)) == [("Ulm", "yes", "3"), ("missing", "no", "4")]


def test_rows_count_from_zero_whatever_the_index_and_the_names() -> None:
    frame = pd.DataFrame([[1, 2], [3, 4]], index=[7, 7], columns=["a", "a"])
    assert rows_as_text(frame_of(frame))[1] == ("3", "4")
    assert rows_as_text(frame_of({"a": frame.iloc[:, 0], 5: [8, 9]}))[1] == ("3", "9")
    assert unusual(UsualValues.of(frame_of(frame)), frame_of(frame), 0) == []


def test_amounts_are_written_in_full_and_years_as_years() -> None:
    table = frame_of(pd.DataFrame({"price": [512_345.5, 5e5], "built": [1978.0, 2024.0], "rate": [1e-6, 1e12]}))
    assert rows_as_text(table) == [("512,346", "1978", "1e-06"), ("500,000", "2024", "1e+12")]


def test_unusual_values_are_named_rarest_first() -> None:
    train = frame_of({"age": np.arange(100.0), "town": ["Ulm"] * 99 + ["Bonn"], "flag": [0, 1] * 50})
    test = frame_of({"age": [98.0, 50.0], "town": ["Rome", "Bonn"], "flag": [7, 1]})
    usual = UsualValues.of(train)
    assert unusual(usual, test, 0) == [(1, "never seen in training"), (0, "among the highest 2.0\xa0%")]
    assert unusual(usual, test, 1) == [(1, "in 1.0\xa0% of the training rows")]


def test_dates_are_shown_as_such_and_none_stands_out() -> None:
    days = np.datetime64("2020-01-01") + np.arange(100)
    usual = UsualValues.of(frame_of({"built": days}))
    given = {"built": pd.to_datetime(["2020-02-01 00:00", "2031-05-30 18:45", None])}
    for table in (frame_of(given), frame_of(pd.DataFrame(given))):
        assert rows_as_text(table) == [("2020-02-01",), ("2031-05-30 18:45:00",), ("missing",)]
        assert [unusual(usual, table, row) for row in range(3)] == [[], [], []]


def test_small_sums_are_told_once() -> None:
    few = [Action("region", 0, 0.0001), Action("region", 1, 0.0002), Action("label", 2, 0.1), Action("label", 3, 0.1)]
    total_benefit = jinja_environment().get_template("cards.html.j2").module.total_benefit
    assert total_benefit(few) == "The 2 labels together: up to 20\xa0%, the 2 regions together: less than 0.1\xa0%."


def test_says_what_is_no_table() -> None:
    with pytest.raises(ShapeError, match="expected a table as a data frame, a dict of columns or an array"):
        frame_of(torch.zeros(3))
    with pytest.raises(InputError, match="expected columns of one length, got 2, 3"):
        frame_of({"a": [1, 2], "b": [1, 2, 3]})


def test_long_texts_are_cut() -> None:
    assert text_pieces("x" * 5000) == [("x" * 600, 0.0), (" …", 0.0)]
    assert text_pieces("x" * 600) == [("x" * 600, 0.0)]
    assert text_pieces("") == [(" ", 0.0)]
    assert text_pieces([("y" * 400, 1.0), ("z" * 400, 0.5)]) == [("y" * 400, 1.0), ("z" * 200, 0.5), (" …", 0.0)]
    for wrong in (3, ["so"]):
        with pytest.raises(InputError, match="expected texts as strings, or as lists of"):
            text_pieces(wrong)


def test_inputs_that_cannot_be_are_told_from_rare_ones() -> None:
    draws = np.random.default_rng(0)
    sizes = draws.uniform(4.0, 10.0, (3, 400))
    sizes[2, :5] = np.nan  # some training rows have no z
    train = frame_of({"x": sizes[0], "y": sizes[1], "z": sizes[2], "price": draws.lognormal(7.0, 0.5, 400)})
    usual = UsualValues.of(train)
    cases = {
        (0.0, 5.0, 6.0, 1000.0): "x is 0",  # zero where all sizes are positive
        (-3.0, 5.0, 6.0, 1000.0): "x is -3",
        (5.0, 600.0, 6.0, 1000.0): "y is 600",  # a decimal point that was lost
        (11.0, 5.0, 6.0, 1000.0): "",  # larger than every training value, and possible
        (3.5, 5.0, 6.0, 1000.0): "",
        (5.0, 6.0, 7.0, float(train["price"].max()) * 1.5): "",  # a long tail
        (np.nan, np.nan, np.nan, np.nan): "no value in any column",
        (np.nan, 5.0, 6.0, 1000.0): "x has no value that can be read; every training row has one",
        (5.0, 6.0, np.nan, 1000.0): "",
    }
    found = usual.impossible(frame_of(np.array(list(cases))).set_axis([*"xyz", "price"], axis=1))
    for reason, wanted in zip(found, cases.values(), strict=True):
        assert reason.startswith(wanted)
        assert bool(reason) == bool(wanted)
    assert sum(map(bool, usual.impossible(train))) == 0


def test_zeros_that_training_knows_are_no_mistake() -> None:
    draws = np.random.default_rng(0)
    rooms = np.where(draws.random(400) < 0.1, 0.0, draws.uniform(4.0, 10.0, 400))
    usual = UsualValues.of(frame_of({"rooms": rooms}))
    assert usual.impossible(frame_of({"rooms": [0.0, 5.0]})) == ["", ""]


def test_the_cells_furthest_from_the_ordinary_come_first() -> None:
    train = frame_of({"a": np.arange(100.0), "b": np.arange(100.0), "town": ["Ulm"] * 99 + ["Bonn"]})
    asked = frame_of({"a": [50.0], "b": [97.0], "town": ["Ulm"]})
    assert UsualValues.of(train).standing_out(asked) == [([], [1, 0, 2])]
