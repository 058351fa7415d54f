"""Adapters: the sum of leaf values is the library's own prediction, on rows that the model has not seen."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import catboost
import lightgbm
import numpy as np
import pandas as pd
import pytest
import sklearn.base
import torch
import xgboost
from sklearn.compose import make_column_transformer
from sklearn.dummy import DummyRegressor
from sklearn.ensemble import (
    ExtraTreesClassifier,
    ExtraTreesRegressor,
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingClassifier,
    HistGradientBoostingRegressor,
    RandomForestClassifier,
    RandomForestRegressor,
)
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder
from sklearn.tree import DecisionTreeClassifier, DecisionTreeRegressor, ExtraTreeRegressor

import whence
from whence.errors import InputError
from whence.jacobian.leaves import LeafSum
from whence.trees import TreeEnsemble, read

SEED = {"random_state": 0}
XGB: dict[str, Any] = {"n_estimators": 20, "max_depth": 3, "n_jobs": 1, "random_state": 0}
LGB: dict[str, Any] = {"n_estimators": 20, "num_leaves": 6, "n_jobs": 1, "verbose": -1, "random_state": 0}
CAT: dict[str, Any] = {"iterations": 20, "depth": 3, "thread_count": 1, "verbose": False, "allow_writing_files": False}
TASKS = ("regression", "binary", "classes")


# XGBoost 3.4 warns of dart, of linear boosters and of its forests.
pytestmark = [pytest.mark.filterwarnings(f"ignore:.*deprecated:{kind}") for kind in ("FutureWarning", "UserWarning")]


class Data(NamedTuple):
    x: Any
    y: Any
    fresh: Any


def table(task: str, kind: str = "frame", rows: int = 300) -> Data:
    """Numbers with missing values, and a category; the fresh rows miss others and have a category that is missing."""
    rng = np.random.default_rng(3)
    numbers = rng.normal(size=(2 * rows, 4))
    group = rng.integers(0, 5, size=2 * rows)
    score = 10 + numbers[:, 0] - numbers[:, 1] * (group % 2) + 0.5 * rng.normal(size=2 * rows)
    y = {
        "regression": score,
        "outputs": np.stack([score, -2 * score + numbers[:, 2]], 1),
        "binary": np.where(score > 10, "yes", "no"),
        "classes": np.array(["low", "middle", "top"])[np.digitize(score, [9.3, 10.7])],
        "codes": np.digitize(score, [9.3, 10.7]),
        "bits": (score > 10).astype(int),
    }[task]
    if kind != "complete":
        numbers[rng.random(numbers.shape) < 0.1] = np.nan
    x: Any = numbers
    if kind in ("frame", "strings"):
        x = pd.DataFrame(numbers, columns=["a", "b", "c", "d"])
        names = np.array(["red", "green", "blue", "grey", "pink"], dtype=object)[group]
        x["colour"] = names if kind == "strings" else pd.Categorical(names)
        if kind == "frame":
            x.loc[rows::9, "colour"] = None
    return Data(x[:rows], y[:rows], x[rows:])


def own_raw(model: Any, x: Any) -> Any:
    """What the library itself says, in the space where trees are added."""
    last = model[-1] if hasattr(model, "steps") else model
    library = type(last).__module__.split(".")[0]
    if library == "catboost":
        return last.predict(x, prediction_type="RawFormulaVal")
    if library == "xgboost":
        return last.predict(x, output_margin=True)
    if library == "lightgbm":
        raw = last.predict(x, raw_score=True)  # a sum, also where predict takes the mean
        return raw / last.n_estimators if last.boosting_type == "rf" else raw
    for name in ("decision_function", "predict_proba", "predict"):
        if hasattr(model, name):
            return getattr(model, name)(x)
    raise AssertionError(f"no raw prediction of {model}")


def outputs(ensemble: TreeEnsemble, x: Any) -> Any:
    """The sums of leaf values."""
    return LeafSum(ensemble).raw(x).numpy()


def probabilities(ensemble: TreeEnsemble, raw: Any) -> Any:
    if ensemble.likelihood == "gaussian":
        return raw
    scores = np.concatenate([np.zeros_like(raw), raw], 1) if ensemble.likelihood == "bernoulli" else raw
    return torch.tensor(scores).softmax(1).numpy()


def same(found: Any, expected: Any) -> None:
    """To 1e-5 of the larger of one and the number itself: XGBoost adds in single precision."""
    expected = np.asarray(expected, float).reshape(found.shape)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def check(model: Any, data: Data) -> TreeEnsemble:
    """The ensemble of a model, after all that must hold for each."""
    ensemble = read(model)
    assert ensemble is not None
    leaves = ensemble.leaves(data.fresh)
    assert leaves.dtype == np.int64
    assert len(leaves) == len(data.fresh)
    # Each tree has leaves of its own, one behind the other.
    every = np.concatenate([leaves, ensemble.leaves(data.x)])
    assert every.min() >= 0
    assert every.max() < len(ensemble.values)
    assert (every.max(0)[:-1] < every.min(0)[1:]).all()
    assert ensemble.values.dtype == ensemble.base.dtype == np.float64
    if ensemble.outputs is None:
        assert ensemble.values.shape[1] == len(ensemble.base)
    else:
        assert len(ensemble.outputs) == leaves.shape[1]
        assert set(ensemble.outputs) == set(range(len(ensemble.base)))
    raw = outputs(ensemble, data.fresh)
    same(raw, own_raw(model, data.fresh))
    assert np.std(raw, 0).min() > 0
    if ensemble.classes is None:
        assert ensemble.likelihood == "gaussian"
        same(raw, model.predict(data.fresh))
    else:
        assert list(ensemble.classes) == sorted(set(data.y.tolist()))
        if hasattr(model, "predict_proba"):
            same(probabilities(ensemble, raw), model.predict_proba(data.fresh))
    return ensemble


def kind(regressor: Any, classifier: Any, task: str, **options: Any) -> Any:
    return (regressor if task in ("regression", "outputs") else classifier)(**options)


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ((DecisionTreeRegressor, DecisionTreeClassifier), {"max_depth": 4}),
        ((RandomForestRegressor, RandomForestClassifier), {"n_estimators": 20, "max_depth": 4}),
        ((ExtraTreesRegressor, ExtraTreesClassifier), {"n_estimators": 20, "max_depth": 4}),
    ],
)
def test_trees_and_forests_of_scikit_learn(pair: Any, options: Any, task: str) -> None:
    data = table(task, "missing")
    model = kind(*pair, task, **options, **SEED).fit(data.x, data.y)
    ensemble = check(model, data)
    assert ensemble.likelihood == "gaussian"  # shares of classes are means of zeros and ones
    trees = options.get("n_estimators", 1)
    assert ensemble.leaves(data.x).shape == (300, trees)
    assert ensemble.shrinkage == 1 / trees
    if isinstance(model, RandomForestRegressor | RandomForestClassifier):
        said = re.fullmatch(r"Each tree saw a bootstrap sample, (\d+)% of the .*", ensemble.notes[0])
        assert said is not None
        assert int(said[1]) == pytest.approx(100 * (1 - np.exp(-1)), abs=2)
    else:
        assert ensemble.notes == ()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("init", [None, "zero"])
def test_gradient_boosting_of_scikit_learn(task: str, init: str | None) -> None:
    data = table(task, "complete")
    options = {"n_estimators": 20, "max_depth": 3, "subsample": 0.5, "learning_rate": 0.3, "init": init}
    model = kind(GradientBoostingRegressor, GradientBoostingClassifier, task, **options, **SEED).fit(data.x, data.y)
    ensemble = check(model, data)
    assert (ensemble.shrinkage, ensemble.l2) == (0.3, 0)
    assert any("50%" in note for note in ensemble.notes)


@pytest.mark.parametrize("task", TASKS)
def test_histogram_gradient_boosting_takes_frames_with_categories_and_missing_values(task: str) -> None:
    data = table(task)
    options = {"max_iter": 20, "max_leaf_nodes": 8, "l2_regularization": 0.7}
    pair = (HistGradientBoostingRegressor, HistGradientBoostingClassifier)
    model = kind(*pair, task, **options, **SEED).fit(data.x, data.y)
    ensemble = check(model, data)
    assert any(predictor.nodes["is_categorical"].any() for iteration in model._predictors for predictor in iteration)
    assert (ensemble.shrinkage, ensemble.l2) == (0.1, 0.7)


@pytest.mark.parametrize("task", ["regression", "bits", "codes"])
@pytest.mark.parametrize(
    ("pair", "options"),
    [
        ((xgboost.XGBRegressor, xgboost.XGBClassifier), {"reg_lambda": 2.5}),
        ((xgboost.XGBRFRegressor, xgboost.XGBRFClassifier), {}),
        ((xgboost.XGBRegressor, xgboost.XGBClassifier), {"num_parallel_tree": 3, "base_score": 0.3}),
        ((xgboost.XGBRegressor, xgboost.XGBClassifier), {"booster": "dart", "rate_drop": 0.5, "one_drop": 1}),
    ],
)
def test_xgboost(pair: Any, options: Any, task: str) -> None:
    data = table(task)
    model = kind(*pair, task, enable_categorical=True, **XGB, **options).fit(data.x, data.y)
    ensemble = check(model, data)
    expected = 1e-5 if "RF" in type(model).__name__ else 1
    assert ensemble.l2 == pytest.approx(options.get("reg_lambda", expected))


@pytest.mark.parametrize("task", ["regression", "bits", "codes"])
def test_native_boosters_of_xgboost_take_frames_and_their_own_matrices(task: str) -> None:
    data = table(task)
    objective = {"regression": "reg:squarederror", "bits": "binary:logistic", "codes": "multi:softmax"}[task]
    parameters = {"objective": objective, "max_depth": 3, "nthread": 1, "eta": 0.2, "subsample": 0.5}
    parameters |= {"num_class": 3} if task == "codes" else {}
    matrix = xgboost.DMatrix(data.x, data.y, enable_categorical=True)
    booster = xgboost.train(parameters, matrix, 20)
    ensemble = read(booster)
    assert ensemble is not None
    expected = booster.predict(xgboost.DMatrix(data.fresh, enable_categorical=True), output_margin=True)
    same(outputs(ensemble, data.fresh), expected)
    same(outputs(ensemble, matrix), booster.predict(matrix, output_margin=True))
    assert ensemble.shrinkage == pytest.approx(0.2)
    assert any("50%" in note for note in ensemble.notes)
    assert ensemble.classes == {"regression": None, "bits": (0, 1), "codes": (0, 1, 2)}[task]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    "options",
    [
        {"reg_lambda": 0.7},
        {"boost_from_average": False},
        {"boosting_type": "rf", "subsample": 0.5, "subsample_freq": 1},
        {"boosting_type": "dart", "drop_rate": 0.5, "skip_drop": 0.0},
        {"data_sample_strategy": "goss"},
    ],
)
def test_lightgbm(options: Any, task: str) -> None:
    data = table(task)
    model = kind(lightgbm.LGBMRegressor, lightgbm.LGBMClassifier, task, **LGB, **options).fit(data.x, data.y)
    ensemble = check(model, data)
    assert ensemble.l2 == options.get("reg_lambda", 0)
    if options.get("boosting_type") == "rf":
        assert ensemble.shrinkage == 1 / 20
        assert any("50%" in note for note in ensemble.notes)
    if "reg_lambda" in options and task == "regression":
        np.testing.assert_allclose(ensemble.base, data.y.mean(), rtol=1e-6)  # not left in the first tree's leaves


@pytest.mark.parametrize("task", ["regression", "bits", "codes"])
def test_native_boosters_of_lightgbm(task: str) -> None:
    data = table(task)
    objective = {"regression": "regression", "bits": "binary", "codes": "multiclass"}[task]
    parameters = {"objective": objective, "num_threads": 1, "verbose": -1, "num_class": 3 if task == "codes" else 1}
    booster = lightgbm.train(parameters, lightgbm.Dataset(data.x, data.y), 20)
    loaded = lightgbm.Booster(model_str=booster.model_to_string())
    for model in (booster, loaded):
        ensemble = read(model)
        assert ensemble is not None
        same(outputs(ensemble, data.fresh), booster.predict(data.fresh, raw_score=True))
        assert ensemble.classes == {"regression": None, "bits": (0, 1), "codes": (0, 1, 2)}[task]
        assert ensemble.shrinkage == 0.1


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("policy", ["SymmetricTree", "Lossguide"])
def test_catboost(task: str, policy: str) -> None:
    data = table(task, "strings")
    options = {**CAT, "cat_features": ["colour"], "grow_policy": policy, "l2_leaf_reg": 5}
    model = kind(catboost.CatBoostRegressor, catboost.CatBoostClassifier, task, **options).fit(data.x, data.y)
    ensemble = check(model, data)
    assert ensemble.l2 == 5
    assert any("target statistics" in note for note in ensemble.notes)
    pool = catboost.Pool(data.fresh, cat_features=["colour"])
    np.testing.assert_array_equal(ensemble.leaves(pool), ensemble.leaves(data.fresh))


def test_catboost_itself() -> None:
    data = table("bits", "missing")
    ensemble = read(catboost.CatBoost({**CAT, "loss_function": "Logloss"}).fit(data.x, data.y))
    assert ensemble is not None
    assert ensemble.likelihood == "bernoulli"
    assert ensemble.classes == (0, 1)


@pytest.mark.parametrize(
    "model",
    [
        DecisionTreeRegressor(max_depth=4),
        ExtraTreeRegressor(max_depth=4),
        RandomForestRegressor(20, max_depth=4),
        xgboost.XGBRegressor(**XGB),
        xgboost.XGBRegressor(**XGB, multi_strategy="multi_output_tree"),
        catboost.CatBoostRegressor(**CAT, loss_function="MultiRMSE"),
    ],
    ids=lambda model: f"{type(model).__name__}",
)
def test_regression_with_several_outputs(model: Any) -> None:
    data = table("outputs", "missing")
    assert check(model.fit(data.x, data.y), data).base.shape == (2,)


def stopped_early(name: str) -> tuple[Any, Data]:
    """A model that stopped early, with trees behind its best iteration where the library keeps them."""
    data = table("bits", "complete")
    noise = np.random.default_rng(0).integers(0, 2, len(data.fresh))  # so that the best iteration is an early one
    test = [(data.fresh, noise)]
    if name == "xgboost":
        options = {**XGB, "n_estimators": 50}
        model: Any = xgboost.XGBClassifier(**options, early_stopping_rounds=5)
        return model.fit(data.x, data.y, eval_set=test, verbose=False), data
    if name == "lightgbm":
        stop = [lightgbm.early_stopping(5, verbose=False)]
        model = lightgbm.LGBMClassifier(**LGB)
        return model.fit(data.x, data.y, eval_X=data.fresh, eval_y=noise, callbacks=stop), data
    if name == "catboost":
        return catboost.CatBoostClassifier(**CAT, early_stopping_rounds=5).fit(data.x, data.y, eval_set=test), data
    if name == "boosting":
        return GradientBoostingClassifier(n_iter_no_change=2, n_estimators=50, **SEED).fit(data.x, data.y), data
    return HistGradientBoostingClassifier(early_stopping=True, **SEED).fit(data.x, data.y), data


@pytest.mark.parametrize("name", ["xgboost", "lightgbm", "catboost", "boosting", "histogram"])
def test_models_that_stopped_early_have_the_trees_that_they_predict_with(name: str) -> None:
    model, data = stopped_early(name)
    ensemble = check(model, data)
    if name == "xgboost":
        assert ensemble.leaves(data.x).shape[1] == model.best_iteration + 1 < model.get_booster().num_boosted_rounds()
    if name == "lightgbm":
        assert ensemble.leaves(data.x).shape[1] == model.best_iteration_ < 20
    if name in ("boosting", "histogram"):
        assert any("held out 10%" in note for note in ensemble.notes)


@pytest.mark.parametrize(
    "last",
    [
        RandomForestRegressor(20, max_depth=4),
        xgboost.XGBRegressor(**XGB),
        lightgbm.LGBMRegressor(**LGB),
        catboost.CatBoostRegressor(**CAT),
    ],
    ids=lambda model: type(model).__name__,
)
def test_pipelines_take_what_their_first_step_takes(last: Any) -> None:
    data = table("regression", "strings")
    steps = make_column_transformer((OneHotEncoder(sparse_output=False), ["colour"]), remainder="passthrough")
    model = make_pipeline(steps.set_output(transform="pandas"), last).fit(data.x, data.y)
    ensemble = read(model)
    assert ensemble is not None
    same(outputs(ensemble, data.fresh), model.predict(data.fresh))
    alone = read(make_pipeline(last))
    assert alone is not None
    same(outputs(alone, model[:-1].transform(data.fresh)), model.predict(data.fresh))


def test_pools_of_catboost_are_data() -> None:
    """They have a shape, but cannot be sliced."""
    data = table("regression", "frame")
    pool = catboost.Pool(data.x.assign(colour=data.x["colour"].astype(str)), data.y, cat_features=["colour"])
    model = catboost.CatBoostRegressor(**CAT).fit(pool)
    tracer = whence.fit(model, (pool, data.y), progress=False)
    same(tracer.predict(pool).mean, model.predict(pool))


def test_what_users_should_know_is_noted() -> None:
    data = table("bits", "missing")
    forest = RandomForestClassifier(5, class_weight="balanced", bootstrap=False, monotonic_cst=[1, 0, 0, 0])
    xgb = xgboost.XGBClassifier(**XGB, scale_pos_weight=2, reg_alpha=0.1, monotone_constraints=(1, 0, 0, 0))
    lgb = lightgbm.LGBMClassifier(**LGB, is_unbalance=True, reg_alpha=0.1, monotone_constraints=[1, 0, 0, 0])
    cat = catboost.CatBoostClassifier(**CAT, class_weights=[1, 2], monotone_constraints=[1, 0, 0, 0])
    balanced = lightgbm.LGBMClassifier(**LGB, class_weight="balanced", reg_alpha=0.1, monotone_constraints=[1, 0, 0, 0])
    for model in (forest, xgb, lgb, balanced, cat):
        ensemble = check(model.fit(data.x, data.y), data)
        assert sum("Monotone" in note for note in ensemble.notes) == 1
        assert sum("The loss weights" in note for note in ensemble.notes) == 1
        if model is not forest and model is not cat:
            assert sum("L1" in note for note in ensemble.notes) == 1


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (RandomForestRegressor(5, max_depth=3), "bootstrap sample"),
        (ExtraTreesRegressor(5, max_depth=3, bootstrap=True), "bootstrap sample"),
        (GradientBoostingRegressor(n_estimators=5, subsample=0.5), "random 50%"),
        (xgboost.XGBRegressor(**XGB, subsample=0.5), "random 50%"),
        (lightgbm.LGBMRegressor(**LGB, subsample=0.5, subsample_freq=1), "random 50%"),
        (lightgbm.LGBMRegressor(**LGB, data_sample_strategy="goss"), "large gradients first"),
        (catboost.CatBoostRegressor(**CAT, bootstrap_type="Bernoulli", subsample=0.5), "random 50%"),
        (catboost.CatBoostRegressor(**CAT, bootstrap_type="Bayesian"), "Bayesian bootstrap"),
    ],
    ids=lambda found: found if isinstance(found, str) else type(found).__name__,
)
def test_diagnostics_say_that_trees_saw_some_of_the_rows(model: Any, words: str) -> None:
    data = table("regression", "complete")
    tracer = whence.fit(model.fit(data.x, data.y), (data.x, data.y), progress=False)
    assert sum(words in str(finding.value) for finding in tracer.diagnostics if finding.name == "note") == 1


def halved_squares(y: Any, prediction: Any) -> tuple[Any, Any]:
    """A custom objective: gradient and Hessian."""
    return prediction - y, np.ones_like(y)


@pytest.mark.parametrize(
    ("model", "task", "words"),
    [
        (DecisionTreeRegressor(criterion="absolute_error"), "regression", "squared_error.*absolute_error"),
        (RandomForestRegressor(5, criterion="poisson"), "regression", "squared_error.*poisson"),
        (RandomForestClassifier(5), "labels", "one output.*2 outputs"),
        (GradientBoostingRegressor(n_estimators=5, loss="huber"), "regression", "squared_error.*huber"),
        (GradientBoostingClassifier(n_estimators=5, loss="exponential"), "bits", "log_loss.*exponential"),
        (GradientBoostingRegressor(n_estimators=5, init=LinearRegression()), "regression", "init.*LinearRegression"),
        (
            HistGradientBoostingRegressor(max_iter=5, loss="quantile", quantile=0.5),
            "regression",
            "squared_error.*quant",
        ),
        (xgboost.XGBRegressor(n_estimators=5, objective="count:poisson"), "regression", "squarederror.*count:poisson"),
        (xgboost.XGBRegressor(n_estimators=5, objective=halved_squares), "regression", "squarederror.*a function"),
        (lightgbm.LGBMRegressor(objective=halved_squares, **LGB), "regression", "'regression'.*a custom objective"),
        (xgboost.XGBRegressor(n_estimators=5, booster="gblinear"), "regression", "trees.*gblinear"),
        (xgboost.XGBClassifier(n_estimators=5), "labels", "one label.*2 labels"),
        (
            lightgbm.LGBMRegressor(objective="mae", **LGB),
            "regression",
            "'regression'.*regression_l1",
        ),
        (lightgbm.LGBMRegressor(reg_sqrt=True, **LGB), "regression", "'regression'.*sqrt"),
        (
            lightgbm.LGBMRegressor(linear_tree=True, **LGB),
            "regression",
            "constant leaves.*linear_tree",
        ),
        (lightgbm.LGBMClassifier(sigmoid=2.0, **LGB), "bits", "sigmoid=1.*sigmoid:2"),
        (lightgbm.LGBMClassifier(objective="multiclassova", **LGB), "codes", "multiclass.*ova"),
        (catboost.CatBoostRegressor(**CAT, loss_function="MAE"), "regression", "RMSE.*MAE"),
        (catboost.CatBoostClassifier(**CAT, loss_function="MultiClassOneVsAll"), "codes", "MultiClass.*OneVsAll"),
    ],
    ids=lambda found: type(found).__name__ if hasattr(found, "fit") else "",
)
def test_other_losses_are_refused_by_name(model: Any, task: str, words: str) -> None:
    data = table("bits" if task == "labels" else task, "complete")
    model.fit(data.x, np.stack([data.y, 1 - data.y], 1) if task == "labels" else data.y)
    with pytest.raises(InputError, match=f"expected .*{words}"):
        read(model)


@pytest.mark.parametrize(
    "model",
    [
        DecisionTreeRegressor(),
        RandomForestClassifier(),
        GradientBoostingRegressor(),
        HistGradientBoostingClassifier(),
        xgboost.XGBRegressor(),
        xgboost.Booster(),
        lightgbm.LGBMClassifier(),
        catboost.CatBoostRegressor(),
        catboost.CatBoost(),
        make_pipeline(OneHotEncoder(), RandomForestRegressor()),
    ],
    ids=lambda model: type(model).__name__,
)
def test_models_without_trees_are_refused(model: Any) -> None:
    with pytest.raises(InputError, match=r"expected a fitted \w+, got one without trees. Fit the model first"):
        read(model)


@pytest.mark.parametrize(
    "make",
    [
        LinearRegression,
        DummyRegressor,
        lambda: make_pipeline(OneHotEncoder(), LogisticRegression()),
        lambda: make_pipeline(OneHotEncoder(), "passthrough"),
        lambda: xgboost.DMatrix(np.zeros((2, 1))),
        lambda: lightgbm.Dataset(np.zeros((2, 1))),
        lambda: catboost.Pool(np.zeros((2, 1))),
        lambda: torch.nn.Linear(1, 1),
        lambda: "a model",
    ],
)
def test_what_no_adapter_takes(make: Callable[[], Any]) -> None:
    assert read(make()) is None


def test_a_class_of_ones_own_is_read_as_the_one_it_extends() -> None:
    class Mine(RandomForestRegressor):  # type: ignore[misc]
        pass

    class NotATree(sklearn.base.RegressorMixin, sklearn.base.BaseEstimator):  # type: ignore[misc]
        pass

    data = table("regression", "missing")
    check(Mine(20, max_depth=4).fit(data.x, data.y), data)
    assert read(NotATree()) is None


@pytest.mark.parametrize("library", ["xgboost", "catboost"])
def test_models_from_files(library: str, tmp_path: Path) -> None:
    data = table("codes", "missing")
    fitted, empty = {
        "xgboost": (xgboost.XGBClassifier(**XGB, learning_rate=0.07, reg_lambda=3.3), xgboost.XGBClassifier()),
        "catboost": (catboost.CatBoostClassifier(**CAT), catboost.CatBoostClassifier()),
    }[library]
    fitted.fit(data.x, data.y).save_model(tmp_path / "model.json")
    empty.load_model(tmp_path / "model.json")
    ensemble = check(empty, data)
    same(outputs(ensemble, data.fresh), own_raw(fitted, data.fresh))
    first = read(fitted)
    assert first is not None
    if library == "xgboost":  # its files lose settings of the training
        assert any("booster.set_param" in note for note in ensemble.notes)
        empty.get_booster().set_param({"eta": first.shrinkage, "lambda": first.l2})
        again = read(empty)
        assert again is not None
        assert not any("booster.set_param" in note for note in again.notes)
        ensemble = again
    assert (ensemble.shrinkage, ensemble.l2) == pytest.approx((first.shrinkage, first.l2), rel=1e-3)


def test_trees_of_lightgbm_behind_the_best_iteration_are_not_read() -> None:
    data = table("regression", "missing")
    parameters = {"objective": "regression", "num_threads": 1, "verbose": -1}
    booster = lightgbm.train(parameters, lightgbm.Dataset(data.x, data.y), 20, keep_training_booster=True)
    booster.best_iteration = 7
    ensemble = read(booster)
    assert ensemble is not None
    assert ensemble.leaves(data.fresh).shape == (300, 7)
    same(outputs(ensemble, data.fresh), booster.predict(data.fresh))


def test_constants_of_lightgbm_without_a_single_split() -> None:
    y = np.arange(30.0)
    model = lightgbm.LGBMRegressor(**LGB).fit(np.zeros((30, 1)), y)
    ensemble = read(model)
    assert ensemble is not None
    same(outputs(ensemble, np.zeros((3, 1))), model.predict(np.zeros((3, 1))))


def test_no_library_is_loaded_by_reading() -> None:
    code = (
        "import sys, torch, whence.trees\n"
        "assert whence.trees.read(torch.nn.Linear(1, 1)) is None\n"
        "print([name for name in ('sklearn', 'xgboost', 'lightgbm', 'catboost', 'pandas') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("kind", ["array", "frame"])
def test_a_sum_of_leaf_values_that_is_not_the_prediction_is_refused(kind: str) -> None:
    data = table("regression", "complete")
    x = pd.DataFrame(data.x) if kind == "frame" else data.x
    right = read(GradientBoostingRegressor(n_estimators=5).fit(x, data.y))
    assert right is not None
    whence.fit(right, (x, data.y), progress=False)
    with pytest.raises(InputError, match="add up to the model's own predictions, got a difference of"):
        whence.fit(replace(right, values=1.1 * right.values), (x, data.y), progress=False)
