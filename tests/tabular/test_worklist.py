"""Rows to label first, and answers put in the place of labels."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from whence.tabular import labels
from whence.tabular.files import as_text
from whence.tabular.fitted import FittedTable, Prepared, fit_table, prepare


@pytest.fixture(scope="module")
def fitted() -> tuple[Prepared, FittedTable]:
    generator = np.random.default_rng(0)
    x = generator.normal(size=60)
    x[:6] = [0.0, 0.0, 9.0, 9.0, -4.0, 1.0]
    y = x + 0.3 * generator.normal(size=60)
    y[:6] = np.nan
    ready = prepare(as_text(pd.DataFrame({"x": x, "y": y}, index=np.arange(60) + 1)), "y", width=2)
    return ready, fit_table(ready, learner="network")


def test_rows_to_label_are_those_that_suggest_names(fitted: tuple[Prepared, FittedTable]) -> None:
    ready, fit = fitted
    pool = ready.model.encode(ready.frame.iloc[ready.split.unlabelled])
    wanted = ready.split.unlabelled[fit.tracer.suggest(4, pool=pool).index.numpy()]
    found = labels.rows_to_label(ready, fit, 4).tolist()
    assert found == wanted.tolist()
    assert {2, 4} <= set(found) or {3, 4} <= set(found)


def test_of_many_rows_those_with_the_largest_variance_are_considered(
    fitted: tuple[Prepared, FittedTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labels, "POOL", 2)
    assert set(labels.rows_to_label(*fitted, 6).tolist()) == {2, 3}


def test_answers_change_labels_and_nothing_else(fitted: tuple[Prepared, FittedTable]) -> None:
    ready, _ = fitted
    held_out, same = int(ready.split.test[0]), int(ready.split.train[0])
    given = {2: "7.5", held_out: "-3", same: str(float(ready.frame["y"].iloc[same]))}
    after = labels.apply_answers(ready, pd.Series(given).set_axis([at + 1 for at in given]))
    others = [at for at in range(60) if at not in given]
    assert after.values[[2, held_out]].tolist() == [7.5, -3.0]
    np.testing.assert_array_equal(after.values[[same, *others]], ready.values[[same, *others]])
    np.testing.assert_array_equal(after.frame["x"], ready.frame["x"])
    np.testing.assert_array_equal(after.split.test, ready.split.test)
    assert set(after.split.train) == {*ready.split.train, 2}
    assert set(after.split.unlabelled) == {0, 1, 3, 4, 5}
    assert ready.frame["y"].isna().iloc[2]


def test_answers_name_classes_as_the_table_spells_them() -> None:
    frame = pd.DataFrame({"x": np.arange(40) % 7, "y": ["00501", "10001"] * 20}, index=np.arange(40) + 1)
    after = labels.apply_answers(prepare(as_text(frame), "y", "classification"), pd.Series({2: "501", 4: "00501"}))
    assert after.frame["y"].iloc[:5].tolist() == ["00501"] * 5
    assert set(after.frame["y"]) == {"00501", "10001"}
