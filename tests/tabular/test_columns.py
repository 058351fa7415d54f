"""What kind a column is, and how its cells become numbers."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import pytest

from whence.tabular.columns import (
    Category,
    Column,
    ExcludedColumn,
    Numeric,
    column_from_json,
    detect_column,
    guess_comma,
    guess_style,
)
from whence.tabular.files import as_text


def cells(*values: Any) -> Any:
    return as_text(pd.DataFrame({"": [str(value) for value in values]}))[""]


def detected(name: str, values: Any) -> tuple[Column | ExcludedColumn, list[str]]:
    notes: list[str] = []
    return detect_column(values.rename(name), notes), notes


def test_numbers_get_mean_zero_and_variance_one() -> None:
    column, notes = detected("age", cells(*range(10, 60)))
    assert isinstance(column, ExcludedColumn), "consecutive numbers only number the rows"
    column, notes = detected("age", cells(*[20, 30, 40, 20] * 10))
    assert isinstance(column, Numeric)
    values = column.encode(cells(*[20, 30, 40, 20] * 10))
    assert values.shape == (40, 1)
    assert values.mean() == pytest.approx(0)
    assert values.std() == pytest.approx(1)
    assert notes == []


def test_heavy_tails_are_compressed_and_keep_their_order() -> None:
    column, _ = detected("income", cells(*[*range(100), 10**9]))
    assert isinstance(column, Numeric)
    assert column.scale.compressed
    values = column.encode(cells(0, 50, 10**9, 10**12))[:, 0]
    assert (np.diff(values) > 0).all()
    assert values.max() < 50


def test_missing_numbers_take_the_middle_and_are_told() -> None:
    column, _ = detected("age", cells(*["1", "2", "2", "3", "", "NA", "?"] * 5))
    assert isinstance(column, Numeric)
    assert column.gaps
    values = column.encode(cells("2", "n/a"))
    assert values[:, 1].tolist() == [0.0, 1.0]
    assert values[1, 0] == 0.0


def test_missing_values_where_training_had_none_are_filled() -> None:
    column, _ = detected("age", cells(*[1, 2, 2, 3] * 5))
    assert column.encode(cells("")).tolist() == [[0.0]]


@pytest.mark.parametrize(
    ("spelling", "values"),
    [
        (["1,234", "12,345", "7"], [1234, 12345, 7]),
        (["1,5", "-2,25", "1.000,5"], [1.5, -2.25, 1000.5]),
        (["$5", "7%"], [5, 7]),
        (["5,50 €", "7,00 €"], [5.5, 7]),
        (["0,123", "1234,567"], [0.123, 1234.567]),
        (["1,5e-05", "-2,25E+3", "1,234e2", "0,5"], [1.5e-5, -2250, 123.4, 0.5]),
        (["12 34", "1_000", "inf", "1e200"], [math.nan] * 4),
    ],
)
def test_numbers_in_other_spellings(spelling: list[str], values: list[float]) -> None:
    np.testing.assert_array_equal(guess_style(cells(*spelling))[1], values)


@pytest.mark.parametrize(
    ("other", "delimiter", "found"),
    [
        (["1,5", "2,25"], ",", "decimal comma"),
        (["1,234.5", "1,234,567"], ";", "thousands separator"),
        (["7", "a, b"], ",", "thousands separator"),
        (["7", "a, b"], ";", "decimal comma"),
    ],
)
def test_numbers_that_can_be_read_either_way_follow_the_other_columns(
    other: list[str], delimiter: str, found: str
) -> None:
    either = cells("4,812", "3,907")
    comma = guess_comma(pd.DataFrame({"either": either, "other": cells(*other)}), delimiter)
    assert comma == found
    style, values = guess_style(either, comma)
    assert style == found
    assert values.tolist() == ([4.812, 3.907] if found == "decimal comma" else [4812, 3907])
    assert guess_style(cells("1,5", "2,25"), comma)[0] == "decimal comma"
    assert guess_style(cells("1", "2.5"), comma)[0] == "decimal point"


def test_mostly_numbers_with_some_text_are_numbers_with_gaps() -> None:
    column, notes = detected("size", cells(*[1, 2, 3, 5, 8] * 10, "big", "huge"))
    assert isinstance(column, Numeric)
    assert column.gaps
    assert "text in 2 of 52 cells (such as 'big', 'huge')" in notes[0]
    assert column.unrecognized(cells("1", "", "odd")).tolist() == [False, False, True]


def test_half_numbers_half_text_are_categories_and_noted() -> None:
    column, notes = detected("size", cells(*[1, 2, 3, "S", "M"] * 10))
    assert isinstance(column, Category)
    assert "mixes numbers (60%) and text" in notes[0]


def test_categories_rare_ones_together() -> None:
    column, _ = detected("town", cells(*["Ulm"] * 60, *["Bonn"] * 50, "Kiel", ""))
    assert isinstance(column, Category)
    assert column.levels == ("Bonn", "Ulm")
    assert column.other
    assert column.encode(cells("Bonn", "Ulm", "Kiel", "never seen")).tolist() == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
        [0, 0, 1],
    ]


def test_category_never_seen_is_told_where_none_was_rare() -> None:
    column, _ = detected("town", cells(*["Ulm", "Bonn"] * 10))
    assert column.encode(cells("Kiel")).tolist() == [[0.0, 0.0]]
    assert column.unrecognized(cells("Ulm", "Kiel")).tolist() == [False, True]


@pytest.mark.parametrize(
    ("texts", "format_"),
    [
        (["2020-01-31", "2021-12-01", "2023-05-05"], "ISO8601"),
        (["31.01.2020", "01.12.2021", "05.05.2023"], "%d.%m.%Y"),
        (["31/01/2020", "01/12/2021", "05/05/2023"], "%d/%m/%Y"),
        (["2020-01-31T08:30:00Z", "2021-12-01T18:00:00Z", "2023-05-05T23:59:59Z"], "ISO8601"),
        (["Jan 31, 2020 08:30", "Dec 01, 2021 18:00", "May 05, 2023 23:59"], "%b %d, %Y %H:%M"),
    ],
)
def test_dates(texts: list[str], format_: str) -> None:
    column, _ = detected("when", cells(*texts * 5))
    assert isinstance(column, Numeric)
    assert column.format == format_
    values = column.encode(cells(*texts, ""))
    assert values[:3, 0].tolist() == sorted(values[:3, 0])
    assert values.shape == (4, len(column.inputs))
    assert np.isfinite(values).all()


def test_place_in_the_year_is_a_circle() -> None:
    column, _ = detected(
        "when", cells(*[f"20{year}-{month:02d}-15" for year in (20, 21, 22) for month in range(1, 13)])
    )
    assert isinstance(column, Numeric)
    wave = dict(zip(column.inputs, column.encode(cells("2021-07-02")).tolist()[0], strict=True))
    turn = 2 * math.pi * (18_810 / 365.2425)  # days from 1970-01-01 to 2021-07-02
    assert wave["when sin 365.243 days"] == pytest.approx(math.sin(turn))
    assert wave["when cos 365.243 days"] == pytest.approx(math.cos(turn))


@pytest.mark.parametrize("far", ["9999-12-31", "4711-10"])
def test_dates_that_nanoseconds_cannot_hold(far: str) -> None:
    column, _ = detected("until", cells(*["2020-01-31", "2021-12-01", "2023-05-05"] * 5, far))
    assert isinstance(column, Numeric)
    assert column.kind == "date"
    days = column.parse(cells(far, "2020-01-31"))
    since = (np.datetime64(far, "D") - np.datetime64("1970-01-01")).astype(float)
    assert days[0] == since or np.isnan(days[0])  # pandas 2 reads no dates after 2262
    assert days[1] == 18_292
    assert np.isfinite(column.encode(cells(far))).all()
    assert column.display(cells("2020-01-31", far))[1] == np.datetime64(far, "s") or np.isnan(days[0])


def test_day_or_month_first_is_noted_where_both_would_do() -> None:
    _, notes = detected("when", cells(*["01/02/2020", "03/04/2021", "05/06/2022"] * 3))
    assert "month/day was used" in notes[0]


@pytest.mark.parametrize(
    ("name", "values", "reason", "identifier"),
    [
        ("a", ["7"] * 30, "the same value in all rows ('7')", False),
        ("a", ["same"] * 30, "the same value in all rows ('same')", False),
        ("a", [""] * 30, "no value in 100\xa0% of the rows", False),
        ("a", [""] * 99 + ["1"], "no value in 99\xa0% of the rows", False),
        ("a", list(range(1, 31)), "numbers the rows", True),
        ("customer_id", [number * 37 % 1009 for number in range(1, 31)], "numbers the rows", True),
        ("userId", [number * 37 % 1009 for number in range(1, 31)], "numbers the rows", True),
        ("name", [f"person {number}" for number in range(30)], "a different text in nearly every row (30)", True),
    ],
)
def test_columns_that_are_left_out(name: str, values: list[Any], reason: str, identifier: bool) -> None:
    left, _ = detected(name, cells(*values))
    assert left == ExcludedColumn(name, reason, identifier)


def test_the_index_of_a_file_is_left_out_though_rows_of_it_are_held_out() -> None:
    rows = np.sort(np.random.default_rng(0).permutation(200)[:150]) + 1
    assert detect_column(cells(*(rows - 1)).set_axis(rows), []) == ExcludedColumn("", "numbers the rows", True)
    assert isinstance(detect_column(cells(*(2 * rows)).set_axis(rows), []), Numeric)


def test_measurements_that_all_differ_are_not_left_out() -> None:
    generator = np.random.default_rng(0)
    assert isinstance(detected("paid", cells(*generator.normal(size=50)))[0], Numeric)
    assert isinstance(detected("paid", cells(*generator.permutation(1000)[:50]))[0], Numeric)


def test_columns_survive_json() -> None:
    values = {
        "n": cells(*[1, 2, 3, 10**6, ""] * 6),
        "c": cells(*["a", "b", "c", "b", "a"] * 6),
        "d": cells(*["2020-01-01 10:00", "2021-06-01 11:30", "2022-03-04 23:00", "", "2020-02-02 02:02"] * 6),
    }
    columns = [
        column for name, one in values.items() if not isinstance(column := detected(name, one)[0], ExcludedColumn)
    ]
    assert [column.kind for column in columns] == ["number", "category", "date"]
    again = [column_from_json(json.loads(json.dumps(asdict(column)))) for column in columns]
    assert again == columns
    for old, new in zip(columns, again, strict=True):
        assert (old.encode(values[old.name]) == new.encode(values[old.name])).all()
