"""Rows to label first, and answers put in the place of labels."""

from __future__ import annotations

import numpy as np
import pytest

from whence.tabular import worklist
from whence.tabular.files import TextTable
from whence.tabular.fitted import FittedTable, Prepared, fit_table, prepare
from whence.tabular.worklist import Answer, apply_answers


@pytest.fixture(scope="module")
def fitted() -> tuple[Prepared, FittedTable]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=60)
    x[:6] = [0.0, 0.0, 9.0, 9.0, -4.0, 1.0]
    y = np.array([f"{value:.3f}" for value in x + 0.3 * generator.normal(size=60)], dtype=object)
    y[:6] = ""
    table = TextTable({"x": np.array([f"{value:.3f}" for value in x], dtype=object), "y": y}, np.arange(1, 61), 60)
    ready = prepare(table, "y", width=2)
    return ready, fit_table(ready, learner="network")


def test_rows_to_label_are_those_that_suggest_names(fitted: tuple[Prepared, FittedTable]) -> None:
    ready, fit = fitted
    pool = ready.model.encode(ready.table.take(ready.split.unlabelled))
    wanted = ready.split.unlabelled[fit.tracer.suggest(4, pool=pool).index.numpy()]
    found = worklist.rows_to_label(ready, fit, 4)
    assert found == wanted.tolist()
    assert {2, 4} <= set(found) or {3, 4} <= set(found)


def test_of_many_rows_those_with_the_largest_variance_are_considered(
    fitted: tuple[Prepared, FittedTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worklist, "POOL", 2)
    assert set(worklist.rows_to_label(*fitted, 6)) == {2, 3}


def test_answers_change_labels_and_nothing_else(fitted: tuple[Prepared, FittedTable]) -> None:
    ready, _ = fitted
    held_out = int(ready.split.test[0])
    same = next(int(at) for at in ready.split.train)
    given = {2: "7.5", held_out: "-3", same: f"{float(ready.table.columns['y'][same])}"}
    answers = [Answer(str(at + 1), worklist.row_key(ready.table, "y", at), value) for at, value in given.items()]
    found = apply_answers(ready, answers, "answers.csv")
    assert found.changed.tolist() == [held_out]
    assert found.confirmed.tolist() == [same]
    assert found.labelled.tolist() == [2]
    after, others = found.prepared, [at for at in range(60) if at not in given]
    assert after.values[[2, held_out]].tolist() == [7.5, -3.0]
    np.testing.assert_array_equal(after.values[others], ready.values[others])
    np.testing.assert_array_equal(after.table.columns["x"], ready.table.columns["x"])
    np.testing.assert_array_equal(after.split.test, ready.split.test)
    assert set(after.split.train) == {*ready.split.train, 2}
    assert set(after.split.unlabelled) == {0, 1, 3, 4, 5}
    assert ready.table.columns["y"][2] == ""
