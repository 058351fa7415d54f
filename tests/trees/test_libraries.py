"""`whence.fit` on a model of every library: predictions are the model's own, and questions take its rows."""

from __future__ import annotations

from typing import Any

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import OrdinalEncoder

import whence

XGB: dict[str, Any] = {"n_estimators": 8, "max_depth": 3, "n_jobs": 1, "enable_categorical": True}
LGB: dict[str, Any] = {"n_estimators": 8, "num_leaves": 6, "n_jobs": 1, "verbose": -1}
CAT: dict[str, Any] = {
    "iterations": 8,
    "depth": 3,
    "thread_count": 1,
    "verbose": False,
    "allow_writing_files": False,
    "cat_features": ["colour"],
}


def frame(rows: int = 200) -> tuple[pd.DataFrame, Any]:
    """A number with gaps, another one, and a category."""
    draw = np.random.default_rng(0)
    x = pd.DataFrame(draw.normal(size=(rows, 2)), columns=["a", "b"])
    y = x["a"].to_numpy() + 0.3 * draw.normal(size=rows)
    x.loc[::8, "a"] = np.nan
    x["colour"] = pd.Categorical(draw.choice(["red", "green", "blue"], rows))
    return x, y + (x["colour"] == "red").to_numpy()


@pytest.mark.parametrize(
    ("model", "task"),
    [
        (HistGradientBoostingRegressor(max_iter=8), "numbers"),
        (HistGradientBoostingClassifier(max_iter=8), "three"),
        (xgboost.XGBRegressor(**XGB), "numbers"),
        (xgboost.XGBClassifier(**XGB), "two"),
        (xgboost.XGBClassifier(**XGB), "three"),
        (lightgbm.LGBMRegressor(**LGB), "numbers"),
        (lightgbm.LGBMClassifier(**LGB), "two"),
        (lightgbm.LGBMClassifier(**LGB), "three"),
        (catboost.CatBoostRegressor(**CAT), "numbers"),
        (catboost.CatBoostClassifier(**CAT), "two"),
        (catboost.CatBoostClassifier(**CAT), "three"),
        (make_pipeline(OrdinalEncoder(), RandomForestClassifier(8, max_depth=3)), "three"),
    ],
    ids=lambda found: found if isinstance(found, str) else type(found).__name__,
)
def test_predictions_are_the_model_s_own(model: Any, task: str) -> None:
    x, numbers = frame()
    y = {"numbers": numbers, "two": (numbers > 0).astype(int), "three": np.digitize(numbers, [-0.3, 0.8])}[task]
    model.fit(x, y)
    tracer = whence.fit(model, (x, y), progress=False)
    rows = x.iloc[:20]
    found = tracer.predict(rows)
    if task == "numbers":
        np.testing.assert_allclose(found.mean[:, 0], model.predict(rows), rtol=1e-6, atol=1e-6)
    else:
        own = model.predict_proba(rows)
        probabilities = found.mean if isinstance(model, Pipeline) else found.probabilities
        shown = own[:, 1:] if probabilities.shape[1] == 1 else own
        np.testing.assert_allclose(probabilities, shown, rtol=1e-6, atol=1e-6)
    assert bool((found.hec3 > 0).all())
    assert len(tracer.explain(rows).verdicts) == 20
    assert set(tracer.training_frame()["suspect_rank"]) == set(range(1, 201))
