"""The scikit-learn estimators: its own checks, and numbers against what they must be."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from sklearn.utils.estimator_checks import parametrize_with_checks

from whence import InputError
from whence.sklearn import WhenceClassifier, WhenceRegressor


@parametrize_with_checks([WhenceRegressor((4,), max_iter=30), WhenceClassifier((4,), max_iter=30)])
def test_scikit_learn_accepts_them(estimator: Any, check: Callable[[Any], None]) -> None:
    check(estimator)


def line(rows: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Noise grows to the right; on the left there are few examples."""
    drawn = np.random.default_rng(0)
    X = np.sort(drawn.uniform(-3, 3, (rows, 1)), axis=0)
    X = np.concatenate([X[X[:, 0] > -1], X[X[:, 0] <= -1][::6]])
    return X, np.sin(X[:, 0]) + np.where(X[:, 0] > 1, 0.4, 0.05) * drawn.standard_normal(len(X))


def test_without_hidden_layers_it_is_ridge_regression() -> None:
    X, y = line()
    X = np.c_[X, X**2]
    model = WhenceRegressor(hidden_layer_sizes=(), ridge=2.0).fit(X, y)
    spread = y.std()
    scaled = (X - X.mean(0)) / X.std(0)
    oracle = Ridge(alpha=2.0, fit_intercept=False).fit(scaled, (y - y.mean()) / spread)
    expected = y.mean() + spread * oracle.predict(scaled)
    mean, std = model.predict(X, return_std=True)
    assert mean == pytest.approx(expected, abs=1e-6)
    assert mean == pytest.approx(model.predict(X))
    # White's sandwich with leave-one-out residuals, by hand; the bias, at zero, is a weight too
    design = np.c_[scaled, np.ones(len(X))] * spread
    bread = np.linalg.inv(design.T @ design + 2.0 * spread**2 * np.eye(3))
    aligned = design @ bread @ design.T
    left_out = (y - expected) / (1 - np.diag(aligned))
    assert std == pytest.approx(np.sqrt((aligned**2) @ left_out**2), rel=1e-4)


def test_without_hidden_layers_it_is_logistic_regression() -> None:
    X, y = line()
    X = np.c_[X, X**2]
    labels = np.where(y > 0.3, "b", np.where(y > -0.3, "c", "a"))
    model = WhenceClassifier(hidden_layer_sizes=(), ridge=1.0).fit(X, labels)
    scaled = np.c_[(X - X.mean(0)) / X.std(0), np.ones(len(X))]  # the bias is penalised too
    oracle = LogisticRegression(C=1.0, fit_intercept=False, tol=1e-10, max_iter=5000).fit(scaled, labels)
    assert list(model.classes_) == ["a", "b", "c"]
    chance, std = model.predict_proba(X, return_std=True)
    assert chance == pytest.approx(oracle.predict_proba(scaled), abs=1e-5)
    assert chance == pytest.approx(model.predict_proba(X))
    assert (model.predict(X) == oracle.predict(scaled)).all()
    assert std.shape == chance.shape
    assert (std > 0).all()


def test_training_ends_at_the_optimum() -> None:
    X, y = line()
    model = WhenceRegressor(ridge=0.1, random_state=0).fit(X, y)
    assert float(model.tracer_.diagnostics["Newton change"]) < 0.1
    assert model.n_iter_ > 10
    assert model.score(X, y) > 0.8


def test_doubt_comes_from_where_it_was_put() -> None:
    X, y = line(160)
    model = WhenceRegressor((12,), ridge=0.1, random_state=0).fit(X, y)
    quiet, noisy, far = (model.uncertainty([[at]]).ratio.item() for at in (0.0, 2.5, -9.0))
    assert noisy > 2 * quiet
    found = model.explain([[0.0], [2.5], [-20.0]])
    assert found.verdicts[0] == "confident"
    assert "noisy" in found.verdicts[1]
    assert found.verdicts[2] in ("scarce data", "both")
    assert (X[found.check[1].numpy()] > 0.5).all(), "rows of the training table"
    assert np.isfinite(far)


def test_units_are_those_of_the_data() -> None:
    X, y = line()
    one = WhenceRegressor(random_state=1).fit(X, y).predict(X[:5], return_std=True)
    other = WhenceRegressor(random_state=1).fit(1000 * X + 5, 60 * y - 7).predict(1000 * X[:5] + 5, return_std=True)
    assert other[0] == pytest.approx(60 * one[0] - 7, rel=1e-3, abs=1e-2)
    assert other[1] == pytest.approx(60 * one[1], rel=1e-2)


@pytest.mark.parametrize(("inputs", "targets"), [(1e-14, 1.0), (1.0, 1e-14), (1e-100, 1e-100), (1e100, 1e14)])
def test_any_unit_will_do(inputs: float, targets: float) -> None:
    X, y = line()
    model = WhenceRegressor((4,), ridge=0.1, random_state=1).fit(X, y)
    other = clone(model).fit(inputs * X, targets * y)
    assert other.score(inputs * X, targets * y) == pytest.approx(model.score(X, y), abs=1e-3)
    expected = model.predict(X, return_std=True)[1]
    assert other.predict(inputs * X, return_std=True)[1] / targets == pytest.approx(expected, rel=1e-2)
    labels = y > 0
    sure = WhenceClassifier((4,), random_state=1).fit(X, labels)
    expected = sure.predict_proba(X)
    assert clone(sure).fit(inputs * X, labels).predict_proba(inputs * X) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e6 / 3, 1e100])
def test_constants_are_not_scaled(constant: float) -> None:
    X, y = line(81)
    model = WhenceRegressor((4,), random_state=1).fit(np.c_[X, np.full(len(X), constant)], y)
    assert model.network_[0].scale[1] == 1.0
    model = WhenceRegressor((4,), random_state=1).fit(X, np.full(len(X), constant))
    assert model.network_[-1].scale == 1.0
    assert model.predict(X) == pytest.approx(constant, abs=1e-6)


def test_several_outputs() -> None:
    X, y = line()
    model = WhenceRegressor(random_state=0).fit(X, np.c_[y, -2 * y])
    mean, std = model.predict(X[:4], return_std=True)
    assert mean.shape == std.shape == (4, 2)
    assert (std > 0).all()


def test_life_in_scikit_learn() -> None:
    X, y = line()
    pipeline = make_pipeline(PolynomialFeatures(2, include_bias=False), WhenceRegressor((4,), random_state=0))
    assert cross_val_score(pipeline, X, y, cv=3).shape == (3,)
    model = WhenceRegressor((4,), random_state=0).fit(X, y)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(X, return_std=True)[1], model.predict(X, return_std=True)[1])
    assert np.array_equal(clone(model).fit(X, y).predict(X), model.predict(X)), "the seed decides"
    assert not np.array_equal(clone(model).set_params(random_state=3).fit(X, y).predict(X), model.predict(X))


def test_what_cannot_be_learned_is_refused() -> None:
    with pytest.raises(InputError, match="expected labels of two classes or more, got one class"):
        WhenceClassifier().fit([[0.0], [1.0]], ["a", "a"])
    with pytest.raises(InputError, match="expected max_iter to be at least 1, got 0"):
        WhenceRegressor(max_iter=0).fit([[0.0], [1.0]], [0.0, 1.0])
    with pytest.raises(InputError, match="expected one of"):
        WhenceRegressor((2,)).fit([[0.0], [1.0]], [0.0, 1.0]).predict([[0.0]], return_std=True, estimator="x")


def test_a_pool_of_inputs_in_use_says_what_is_rare_in_training() -> None:
    X, y = line(160)
    model = WhenceRegressor((12,), ridge=0.1, random_state=0).fit(X, y)
    in_use = np.linspace(X.min(), 3 * X.max(), 200).reshape(-1, 1)
    found = model.explain(in_use, pool=in_use)
    beyond = in_use[:, 0] > 1.5 * X.max()
    assert float(found.frequency[beyond].median()) > 3 * float(found.frequency[~beyond].median())
    assert model.explain(in_use).frequency.isnan().all()
