"""Numbers or classes, and everything that can be wrong with a target; and which rows go where."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from whence.errors import InputError, TargetError
from whence.tabular.files import as_text
from whence.tabular.target import Target, Task, detect_target, find_column, split_rows


def cells(*values: Any) -> Any:
    return as_text(pd.DataFrame({"y": [str(value) for value in values]}))["y"]


def detected(values: Any, task: Task | None = None) -> tuple[Target, list[str]]:
    notes: list[str] = []
    return detect_target(values, task, notes), notes


def test_numbers_are_amounts() -> None:
    target, notes = detected(cells(*np.linspace(0, 1, 50)))
    assert target.task == "regression"
    assert (target.likelihood, target.outputs) == ("gaussian", 1)
    assert notes == []


@pytest.mark.parametrize("pair", [("no", "yes"), (0, 1), (1, 2), (-1, 1), ("true", "false"), (0.5, 1.5)])
def test_two_values_are_classes(pair: tuple[Any, Any]) -> None:
    target, _ = detected(cells(*pair * 10))
    assert target.task == "classification"
    assert (target.likelihood, target.outputs) == ("bernoulli", 1)


def test_text_is_classes() -> None:
    target, _ = detected(cells(*["a", "b", "c"] * 10))
    assert target.classes == ("a", "b", "c")
    assert (target.likelihood, target.outputs) == ("categorical", 3)
    assert target.parse(cells("c", "a", "", "d"))[:2].tolist() == [2.0, 0.0]
    assert np.isnan(target.parse(cells("", "d"))).all()


def test_whole_numbers_from_zero_or_one_are_classes_and_noted() -> None:
    target, notes = detected(cells(*list(range(10)) * 5))
    assert target.classes == tuple("0123456789")
    assert "pass --task regression" in notes[0]
    assert detected(cells(*list(range(10)) * 5), "regression")[0].task == "regression"


def test_few_whole_numbers_from_elsewhere_are_amounts_and_noted() -> None:
    target, notes = detected(cells(*[3, 4, 5, 6, 7, 8] * 20))
    assert target.task == "regression"
    assert "pass --task classification" in notes[0]
    assert detected(cells(*[3, 4, 5, 6, 7, 8] * 20), "classification")[0].classes == tuple("345678")


def test_equal_numbers_are_one_class() -> None:
    assert detected(cells(*["1", "1.0", "0", "0.0"] * 5))[0].classes == ("0", "1")


def test_classes_are_spelled_as_in_the_file() -> None:
    target, _ = detected(cells(*["00501", "10001", "02134"] * 10, "501", "2134.0"), "classification")
    assert target.classes == ("00501", "02134", "10001")
    assert target.parse(cells("00501", "501", "501.0", "2134", "10001", "")).tolist()[:5] == [0, 0, 0, 1, 2]
    assert target.spelled(cells("501", "02134", "10001.0")).tolist() == ["00501", "02134", "10001"]
    assert detected(cells(*["-1.0", "1.0"] * 10))[0].classes == ("-1.0", "1.0")
    assert detected(cells(*["1.0", "1", "1", "0"] * 10))[0].classes == ("0", "1")


def test_whole_numbers_that_double_precision_merges_are_different_classes() -> None:
    large = ["100000000000000001", "100000000000000002"]
    target, _ = detected(cells(*large * 10, *["x"] * 10), "classification")
    assert target.classes == (*large, "x")
    assert target.parse(cells(*large)).tolist() == [0, 1]
    with pytest.raises(TargetError, match="codes, pass --task classification"):
        detected(cells(*large * 10))


@pytest.mark.parametrize(
    ("values", "task", "message"),
    [
        ([*range(50), "abc", "12 kg"], None, r"got text in 2 of 52 rows, such as 'abc', '12 kg'"),
        (["a", "b"] * 15, "regression", "expected numbers"),
        ([""] * 5, None, "at least 20 rows with a value of 'y', to train and test a model, got 0"),
        ([1.0] * 19, None, "at least 20 rows .* got 19"),
        ([3.5] * 30, None, "expected a target that varies by at least 1e-15"),
        (np.linspace(0, 1e16, 30), None, "Multiply it by a power of ten"),
        (["a"] * 30, None, "2 to 50 classes .* got 1 different values in 30 rows"),
        ([f"text {number}" for number in range(60)], None, r"60 different values.*Is it the right column"),
        (np.linspace(0, 1, 200), "classification", "the right --task"),
        (["a"] * 20 + ["b"] * 20 + ["c"], None, "at least 3 rows each.* of which 1 have fewer rows .such as 'c'"),
    ],
)
def test_targets_that_cannot_be_used(values: Any, task: Task | None, message: str) -> None:
    with pytest.raises(TargetError, match=message):
        detected(cells(*values), task)


def test_name_that_is_none_gets_the_nearest() -> None:
    with pytest.raises(InputError, match=r"got 'Prize', which does not exist. Did you mean 'price'\? Columns: price"):
        find_column("Prize", ["price", "area"])
    with pytest.raises(InputError, match=r"which does not exist\. Columns: a, b"):
        find_column("zzzzzz", ["a", "b"])


def test_split_do_not_overlap_and_hold_all_classes() -> None:
    target = Target("y", "classification", ("a", "b"))
    values = np.array([0.0] * 90 + [1.0] * 10 + [np.nan] * 5)
    split = split_rows(values, target, 0.2, 0)
    assert sorted([*split.train, *split.test, *split.unlabelled]) == list(range(105))
    assert len(split.validation) == 7
    assert len(set(np.concatenate(split.validation).tolist())) == sum(map(len, split.validation))
    assert set(np.concatenate(split.validation).tolist()) == set(split.train)
    assert split.unlabelled.tolist() == [100, 101, 102, 103, 104]
    assert (values[split.test] == 1).sum() == 2
    assert all((values[rows] == 1).sum() in (1, 2) for rows in split.validation)
    assert split_rows(values, target, 0.2, 1).test.tolist() != split.test.tolist()
    assert (split.names() == "held out").sum() == 20
