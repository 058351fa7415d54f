"""Rows to label first."""

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
