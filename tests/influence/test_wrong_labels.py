"""The estimated share of wrong labels, where it is known how many were planted."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_predict
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from whence.influence.wrong_labels import WrongLabels, wrong_labels


def estimate(x: np.ndarray, y: np.ndarray, share: float, seed: int) -> tuple[float, WrongLabels | None]:
    """The share of labels that are wrong, and its estimate from predictions of models that did not see them."""
    generator = np.random.default_rng(seed)
    classes = int(y.max()) + 1
    wrong = generator.random(len(y)) < share
    labels = np.where(wrong, (y + generator.integers(1, classes, len(y))) % classes, y)
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.03, max_iter=200))
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        p = cross_val_predict(model, x, labels, cv=folds, method="predict_proba")
    return float(wrong.mean()), wrong_labels(labels, p.argmax(1), p.max(1), classes)


@pytest.mark.parametrize("data", [load_breast_cancer, load_digits])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1])
def test_planted_wrong_labels_are_counted(data: object, share: float) -> None:
    bunch = data()  # type: ignore[operator]
    truths, found = zip(*(estimate(bunch.data, bunch.target, share, seed) for seed in range(2)), strict=True)
    for truth, one in zip(truths, found, strict=True):
        assert one.lower - 0.005 <= truth <= one.upper + 0.005
        assert one.upper - one.lower < 0.07
    assert np.mean([one.share - truth for truth, one in zip(truths, found, strict=True)]) == pytest.approx(0, abs=0.02)
    if share >= 0.05:
        assert all(one.lower > 0 for one in found)


def test_nothing_is_said_where_classes_overlap() -> None:
    diabetes = load_diabetes()
    for share in (0.0, 0.1):
        assert estimate(diabetes.data, (diabetes.target > 140).astype(int), share, 0)[1] is None


def test_nothing_is_said_of_coins_and_of_few_labels() -> None:
    generator = np.random.default_rng(0)
    labels, p = generator.integers(2, size=1000), generator.uniform(0.5, 1, 1000)
    assert wrong_labels(labels, np.zeros(1000), p, 2) is None
    assert wrong_labels(np.zeros(100), np.zeros(100), p[:100], 2) is None
    assert wrong_labels(np.zeros(300), np.zeros(300), p[:300], 2) is not None


def test_intervals_hold_the_share_that_labels_were_drawn_with() -> None:
    generator = np.random.default_rng(1)
    q = (np.arange(2000) + 0.5) / 2000
    covered, off = 0, []
    for _ in range(40):
        hard = generator.random(2000) < 1 / (1 + np.exp(-(-6 + 2 * np.log(q / (1 - q)))))
        wrong = generator.random(2000) < 0.05
        found = wrong_labels(hard ^ wrong, np.zeros(2000), 1 - q / 2, 2)
        assert found is not None
        covered += found.lower <= 0.05 <= found.upper
        off.append(found.share - 0.05)
    assert covered >= 35
    assert abs(np.mean(off)) < 0.005
