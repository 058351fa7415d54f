"""Variances of trees against dense algebra on their leaves, statsmodels, and real refits of the leaf values."""

from __future__ import annotations

import catboost
import lightgbm
import numpy as np
import pytest
import sklearn.base
import statsmodels.api
import torch
import xgboost
from scipy.stats import spearmanr
from sklearn.ensemble import (
    GradientBoostingClassifier,
    GradientBoostingRegressor,
    HistGradientBoostingRegressor,
    RandomForestRegressor,
)
from sklearn.tree import DecisionTreeRegressor

import whence
from tree_models import MODELS, dense_leaves, dense_variances, one_hot, table, task
from whence.curvature.leaves import LeafCore
from whence.trees import read


def fitted(name: str, **options):
    x, y = task(name)
    model = sklearn.base.clone(MODELS[name]).fit(x, y)
    return model, x, y, whence.fit(model, (x, y), progress=False, **options)


@pytest.mark.parametrize("name", MODELS)
def test_variances_are_those_of_dense_algebra_on_the_leaf_matrix(name):
    model, x, y, tracer = fitted(name)
    fresh, _ = task(name, 30, seed=1)
    squared_error = tracer.problem.likelihood.squared_error
    wanted = dense_variances(dense_leaves(model, x, y), one_hot(read(model), fresh), squared_error)
    found = tracer.predict(fresh, covariance=True)
    for estimator, covariances in wanted.items():
        scale = np.abs(covariances).max()
        np.testing.assert_allclose(found.covariance(estimator).numpy(), covariances, rtol=1e-7, atol=1e-10 * scale)


@pytest.mark.parametrize("name", MODELS)
def test_predictions_are_the_model_s_own(name):
    model, _, _, tracer = fitted(name)
    fresh, _ = task(name, 30, seed=1)
    found = tracer.predict(fresh)
    if not hasattr(model, "predict_proba"):
        np.testing.assert_allclose(found.mean[:, 0].numpy(), model.predict(fresh), rtol=0, atol=1e-9)
        return
    shares = found.probabilities if tracer.problem.likelihood.has_classes else found.mean
    np.testing.assert_allclose(shares.numpy()[:, -1], model.predict_proba(fresh)[:, -1], rtol=0, atol=1e-9)


def test_one_tree_is_a_regression_on_dummies():
    x, y = table(300)
    model = DecisionTreeRegressor(min_samples_leaf=10, random_state=0).fit(x, y)
    tracer = whence.fit(model, (x, y), progress=False)
    assert tracer.ridge == 0
    design, fresh = (one_hot(read(model), rows)[:, 0] for rows in (x, table(40, seed=1)[0]))
    found = tracer.predict(table(40, seed=1)[0])
    for power in range(4):
        fit = statsmodels.api.OLS(y, design).fit(cov_type=f"HC{power}")
        wanted = np.einsum("md,de,me->m", fresh, fit.cov_params(), fresh)
        np.testing.assert_allclose(getattr(found, f"hec{power}")[:, 0].numpy(), wanted, rtol=1e-10)


GROWN = {
    "boosting": GradientBoostingRegressor(n_estimators=12, max_depth=4, random_state=0),
    "boosting of classes": GradientBoostingClassifier(n_estimators=6, max_depth=3, random_state=0),
    "forest": RandomForestRegressor(8, random_state=0),
    "histograms": HistGradientBoostingRegressor(max_iter=10, min_samples_leaf=3, random_state=0),
    "histograms with L2": HistGradientBoostingRegressor(max_iter=10, min_samples_leaf=3, l2_regularization=2.0),
}


@pytest.mark.parametrize("name", GROWN)
def test_leaves_without_training_rows_add_no_variance(name):
    """Trees grown on more rows than are passed: the other leaves keep their penalty."""
    x, y = task("two classes" if "classes" in name else "regression")
    model = sklearn.base.clone(GROWN[name]).fit(x, y)
    x, y, fresh = x[:120], y[:120], np.concatenate([x, task("regression", 30, seed=1)[0]])
    tracer = whence.fit(model, (x, y), progress=False, structure="exact")
    assert tracer.ridge == 1
    leaves, rows = dense_leaves(model, x, y), one_hot(read(model), fresh)
    empty = leaves.rows.sum((0, 1)) == 0
    said = [str(one.value) for one in tracer.diagnostics if "no row of the training data" in str(one.value)]
    if "L2" in name:
        assert said == []
    else:
        assert said[0].startswith(f"{empty.sum()} of {len(empty)} leaves")
    wanted = dense_variances(leaves._replace(penalty=leaves.penalty + 7.0 * empty), rows, "classes" not in name)
    found = tracer.predict(fresh, covariance=True)
    for estimator, covariances in wanted.items():
        scale = np.abs(covariances).max()
        np.testing.assert_allclose(found.covariance(estimator).numpy(), covariances, rtol=1e-7, atol=1e-10 * scale)
    core = whence.fit(model, (x, y), progress=False, structure=LeafCore(size=100_000)).predict(fresh)
    for estimator in ("ho", "hec3", "laplace"):
        wanted = getattr(found, estimator)
        torch.testing.assert_close(getattr(core, estimator), wanted, rtol=1e-3, atol=1e-6 * float(wanted.max()))


def test_a_row_in_empty_leaves_only_has_no_variance_except_laplace():
    x = np.arange(40.0)[:, None]
    y = np.where(x[:, 0] < 20, 0.0, 5.0) + 0.1 * np.sin(np.arange(40))
    model = GradientBoostingRegressor(n_estimators=5, max_depth=1).fit(x, y)
    for structure in ("exact", "core"):
        tracer = whence.fit(model, (x[:20], y[:20]), progress=False, structure=structure)
        found = tracer.predict(x[[5, 35]])
        assert (found.hec3[0] > 0).all()
        assert float(found.hec3[1] + found.ho[1]) < 1e-12
        assert (found.laplace[1] > 0).all()


def refit(design, y, weights, penalty):
    return np.linalg.solve(design.T * weights @ design + np.diag(penalty), design.T @ (weights * y))


@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_residuals_are_those_of_real_refits_with_the_trees_kept(weighted):
    x, y = table(120)
    weights = np.random.default_rng(2).uniform(0.5, 2.0, len(y)) if weighted else np.ones(len(y))
    model = GradientBoostingRegressor(n_estimators=15, max_depth=3, random_state=0).fit(x, y, weights)
    data = (x, y, weights) if weighted else (x, y)
    tracer = whence.fit(model, data, recenter=True, progress=False)
    ensemble = read(model)
    design = one_hot(ensemble, x)[:, 0]
    eta = ensemble.shrinkage
    penalty = (weights @ design) * (1 - eta) / eta
    targets = y - ensemble.base[0]
    fresh, _ = table(10, seed=1)
    rows = one_hot(ensemble, fresh)[:, 0]
    whole = rows @ refit(design, targets, weights, penalty)
    moved, wanted = [], []
    for left_out in range(len(y)):
        without = weights * (np.arange(len(y)) != left_out)
        leaf_values = refit(design, targets, without, penalty)
        wanted.append(targets[left_out] - design[left_out] @ leaf_values)
        moved.append(rows @ leaf_values - whole)
    np.testing.assert_allclose(tracer.loo_residuals[:, 0].numpy(), wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(tracer.predict(fresh).mean[:, 0].numpy(), ensemble.base[0] + whole, rtol=0, atol=1e-9)
    found = tracer.what_if(fresh, remove=[7]).change[:, 0]
    np.testing.assert_allclose(found.numpy(), moved[7], rtol=1e-7, atol=1e-9)


ETA, L2 = 0.3, 5.0
ALONE = {
    "DecisionTree": DecisionTreeRegressor(max_depth=3),
    "GradientBoosting": GradientBoostingRegressor(n_estimators=1, learning_rate=ETA),
    "HistGradientBoosting": HistGradientBoostingRegressor(max_iter=1, learning_rate=ETA, l2_regularization=L2),
    "XGBoost": xgboost.XGBRegressor(n_estimators=1, learning_rate=ETA, reg_lambda=L2, max_depth=3, n_jobs=1),
    "LightGBM": lightgbm.LGBMRegressor(n_estimators=1, learning_rate=ETA, reg_lambda=L2, verbose=-1, n_jobs=1),
    "CatBoost": catboost.CatBoostRegressor(
        iterations=1,
        depth=3,
        learning_rate=ETA,
        l2_leaf_reg=L2,
        bootstrap_type="No",
        thread_count=1,
        verbose=False,
        allow_writing_files=False,
    ),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("library", ALONE)
def test_one_tree_of_every_library_is_at_the_optimum_of_its_own_ridge(library, weighted):
    """Shrinkage, L2 and sample weights are read as the library meant them: the optimum is the model itself."""
    x, y = table(300)
    weights = np.random.default_rng(2).uniform(0.3, 3.0, len(y)) if weighted else None
    model = sklearn.base.clone(ALONE[library]).fit(x, y, sample_weight=weights)
    data = (x, y, weights) if weighted else (x, y)
    found = whence.fit(model, data, recenter=True, progress=False).predict(x).mean[:, 0].numpy()
    np.testing.assert_allclose(found, model.predict(x), rtol=0, atol=1e-6)  # single precision inside the libraries


@pytest.mark.parametrize("name", MODELS)
def test_all_directions_of_the_leaves_are_the_exact_answer(name):
    _, _, _, tracer = fitted(name)
    _, _, _, core = fitted(name, structure=LeafCore(size=100_000))
    fresh, _ = task(name, 30, seed=1)
    exact, found = tracer.predict(fresh), core.predict(fresh)
    for estimator in ("ho", "hec0", "hec2", "hec3", "laplace"):
        torch.testing.assert_close(getattr(found, estimator), getattr(exact, estimator), rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(core.leverage, tracer.leverage, rtol=1e-3, atol=1e-6)
    assert core.explain(fresh).verdicts == tracer.explain(fresh).verdicts


def test_leading_directions_of_a_forest_keep_the_size_of_variances():
    """Its leaves are many more than its rows, and new rows share few of them."""
    x, y = table(300)
    fresh, _ = table(200, seed=1)
    model = RandomForestRegressor(30, random_state=0).fit(x, y)
    exact = whence.fit(model, (x, y), structure=whence.Exact(road="dual"), progress=False).predict(fresh)
    core = whence.fit(model, (x, y), structure=LeafCore(size=150), progress=False).predict(fresh)
    for estimator in ("ho", "hec3", "laplace"):
        assert 0.8 < float((getattr(core, estimator) / getattr(exact, estimator)).median()) < 1.25


def test_forests_of_large_trees_have_fewer_directions():
    x, y = table(400)
    model = RandomForestRegressor(30, random_state=0).fit(x, y)
    execution = whence.Execution(max_memory=80 * 2**20)
    tracer = whence.fit(model, (x, y), structure="core", execution=execution, progress=False)
    assert 1 < tracer.bread.features.size < 150
    assert whence.estimate(model, (x, y), structure="core", execution=execution).fits


def test_leading_directions_keep_variances_and_leverages():
    x, y = table(600)
    fresh, _ = table(200, seed=1)
    model = GradientBoostingRegressor(n_estimators=60, max_depth=4, random_state=0).fit(x, y)
    exact = whence.fit(model, (x, y), structure="exact", progress=False)
    core = whence.fit(model, (x, y), structure=LeafCore(size=150), progress=False)
    one, other = exact.predict(fresh), core.predict(fresh)
    for estimator in ("ho", "hec3", "laplace"):
        assert spearmanr(getattr(one, estimator)[:, 0], getattr(other, estimator)[:, 0])[0] > 0.98
        assert 0.95 < float((getattr(other, estimator) / getattr(one, estimator)).median()) < 1.1
    torch.testing.assert_close(core.leverage, exact.leverage, rtol=0.1, atol=0.0)
    together = [a == b for a, b in zip(exact.explain(fresh).verdicts, core.explain(fresh).verdicts, strict=True)]
    assert np.mean(together) > 0.9


def test_variances_of_a_forest_go_with_the_infinitesimal_jackknife():
    """Both ask how a prediction answers to the training rows; forestci also sees trees that change shape.

    So the order is not the same (0.52 with 300 and with 2,000 trees), and the size is another one.
    """
    forestci = pytest.importorskip("forestci")
    x, y = table(150)
    fresh, _ = table(200, seed=1)
    y = y + 0.8 * (x[:, 3] > 0.3) * np.random.default_rng(5).standard_normal(len(y))  # labels are noisier there
    model = RandomForestRegressor(300, min_samples_leaf=8, random_state=0).fit(x, y)
    jackknife = forestci.random_forest_error(model, x.shape, fresh, calibrate=False)
    found = whence.fit(model, (x, y), progress=False).predict(fresh)
    assert spearmanr(found.hec3[:, 0].numpy(), jackknife)[0] > 0.4
    assert spearmanr(found.ho[:, 0].numpy(), jackknife)[0] < 0.2  # which knows nothing of the noise
