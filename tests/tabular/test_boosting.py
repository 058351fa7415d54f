"""Trees for tables: as scikit-learn has them, in arrays; settings and held-out outputs; the better model is taken."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.metrics import brier_score_loss

from whence.jacobian.leaves import LeafSum
from whence.runtime.execution import Progress
from whence.tabular.boosting import grow, read_trees
from whence.tabular.files import as_text
from whence.tabular.fitted import fit_table, load_table, prepare, save_table, squared_errors
from whence.tabular.network import mean_loss
from whence.tabular.predictions import predict_rows
from whence.tabular.target import Target

QUIET = Progress(enabled=False)


def table(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of categories and three of numbers; and amounts."""
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(n, 5))
    x[:, 0], x[:, 1] = draw.integers(0, 6, n), draw.integers(0, 3, n)
    y = x[:, 2] + 2 * (x[:, 0] == 3) + (x[:, 3] > 1) + 0.3 * draw.normal(size=n)
    return x, y


@pytest.mark.parametrize("classes", [0, 2, 3])
def test_arrays_predict_as_scikit_learn_does(classes: int) -> None:
    x, y = table(400)
    new, _ = table(100, seed=1)
    mask = np.arange(5) < 2
    if classes:
        labels = np.digitize(y, [0.0, 1.5][: classes - 1])
        model: Any = HistGradientBoostingClassifier(max_iter=12, categorical_features=mask).fit(x, labels)
        expected = model.decision_function(new)
        target = Target("y", "classification", ("a", "b", "c")[:classes])
    else:
        model = HistGradientBoostingRegressor(max_iter=12, categorical_features=mask).fit(x, y)
        expected, target = model.predict(new), Target("y", "regression")
    trees = read_trees(model)
    found = LeafSum(trees.ensemble(target)).raw(new)
    np.testing.assert_allclose(found, np.asarray(expected).reshape(100, -1), rtol=0, atol=1e-10)
    leaves = trees.leaves(new)
    assert leaves.shape == (100, 12 * (3 if classes == 3 else 1))
    assert leaves.max() < trees.is_leaf.sum()


def test_held_out_outputs_come_from_trees_that_did_not_see_the_row() -> None:
    """The same settings on the other rows, by scikit-learn; rows in no fold have none."""
    x, y = table(300)
    target = Target("y", "regression", shift=float(y.mean()), scale=float(y.std()))
    folds = [torch.arange(300) % 7 == fold for fold in range(6)]
    grown = grow(target, torch.from_numpy(x), 2, y, folds, QUIET)
    assert torch.equal(~torch.isfinite(grown.held_out).all(1), torch.arange(300) % 7 == 6)
    options = {"max_iter": grown.settings["trees"], "max_leaf_nodes": grown.settings["max_leaf_nodes"]}
    for fold in (folds[0].numpy(), folds[5].numpy()):
        model = HistGradientBoostingRegressor(categorical_features=[0, 1], early_stopping=False, **options)
        model.fit(x[~fold], y[~fold])
        np.testing.assert_allclose(grown.held_out[fold, 0].numpy(), model.predict(x[fold]), rtol=0, atol=1e-10)
    assert float(mean_loss(target, grown.held_out[folds[0]], torch.from_numpy(y)[folds[0]])) < 0.5


def numbered(columns: dict[str, Any]) -> pd.DataFrame:
    """As read from a file."""
    frame = as_text(pd.DataFrame(columns))
    return frame.set_index(np.arange(len(frame)) + 1)


def steps(n: int, seed: int) -> tuple[pd.DataFrame, np.ndarray]:
    """A target that jumps between many levels of two columns, which trees find and a small network does not."""
    draw = np.random.default_rng(seed)
    x = draw.uniform(0, 8, (n, 2))
    y = (np.floor(x[:, 0]) * 37 % 11) + (np.floor(x[:, 1]) * 23 % 7) + 0.1 * draw.normal(size=n)
    return numbered({"a": x[:, 0], "b": x[:, 1], "y": y}), y


def test_the_better_model_is_taken() -> None:
    jumps, _ = steps(300, 0)
    found = fit_table(prepare(jumps, "y", width=4))
    assert found.model.learner == "trees"
    assert found.validation["trees"] < 0.7 * found.validation["network"]
    fresh, y = steps(300, 1)
    frame = predict_rows(found, fresh).frame
    error = frame["prediction"].to_numpy() - y
    assert np.sqrt(np.mean(error**2)) == pytest.approx(found.validation["trees"], rel=0.3)
    covered = np.mean((frame["lower"] <= y) & (y <= frame["upper"]))
    assert 0.9 < covered <= 1.0

    draw = np.random.default_rng(0)
    x = draw.normal(size=(150, 3))
    line = {f"x{at}": x[:, at] for at in range(3)} | {"y": x @ [1.0, 2.0, 3.0] + 0.1 * draw.normal(size=150)}
    found = fit_table(prepare(numbered(line), "y", width=4))
    assert found.model.learner == "network"


@pytest.mark.parametrize("learner", ["network", "trees"])
def test_rows_that_were_trained_on_do_not_vote_about_themselves(learner: Any) -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(160, 2))
    x[::9, 0] = np.nan
    labels = np.where(draw.random(160) < 0.2, "yes", np.where(x[:, 1] > 0, "yes", "no"))
    ready = prepare(numbered({"a": x[:, 0], "b": x[:, 1], "y": labels}), "y", width=4)
    fitted = fit_table(ready, learner=learner)
    inputs = fitted.batches(ready.frame)
    examples = torch.full((160,), -1)
    examples[torch.from_numpy(ready.split.train)] = torch.arange(len(ready.split.train))
    wanted = fitted.tracer.explain(inputs, examples=examples).noise
    torch.testing.assert_close(fitted.explain(ready.frame).noise, wanted)
    np.testing.assert_allclose(predict_rows(fitted, ready.frame, np.arange(160)).frame["noise"], wanted.numpy())
    plain = fitted.tracer.explain(inputs).noise
    assert not torch.allclose(plain, wanted)
    other = ready.frame.set_index(ready.frame.index[::-1])  # other rows of the same numbers
    torch.testing.assert_close(fitted.explain(other).noise, plain)


def test_coins_for_labels_are_noise_though_splits_have_learned_them(tmp_path: Path) -> None:
    """Leave-one-out residuals keep the splits, and so are too small; trees grown without a row contradict its label."""
    draw = np.random.default_rng(0)
    place = np.arange(900) % 6  # six groups; the labels of the last two are coins
    x = 4 * np.eye(6)[place] + 0.8 * draw.normal(size=(900, 6))
    labels = np.where(place < 4, place, draw.integers(4, 6, 900))
    cells = {f"x{at}": x[:, at] for at in range(6)} | {"y": [f"class {label}" for label in labels]}
    ready = prepare(numbered(cells), "y", width=4)
    fitted = fit_table(ready, learner="trees")
    assert fitted.tracer.held_out is not None
    coins = place[ready.split.train] > 3
    left_out = fitted.tracer.loo_residuals.square().sum(1).numpy()
    assert left_out[coins].mean() < 0.42
    assert 0.45 < float(fitted.tracer.held_out.nanmean()) / coins.mean() < 0.75
    found = fitted.explain(ready.frame)
    noisy = found.noisy.numpy()
    assert noisy[place > 3].mean() > 0.8
    assert noisy[place < 4].mean() < 0.05
    assert 0.4 < float(found.noise[torch.from_numpy(place > 3)].mean()) < 0.7
    save_table(fitted, tmp_path / "saved")
    again = load_table(tmp_path / "saved", progress=False).explain(ready.frame)
    torch.testing.assert_close(again.noise, found.noise)
    assert again.verdicts == found.verdicts


def test_squared_errors_are_brier_scores() -> None:
    outputs = torch.randn(50, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = np.arange(50) % 3
    found = squared_errors(Target("y", "classification", ("a", "b", "c")), outputs, values)
    assert found is not None
    wanted = brier_score_loss(values, outputs.softmax(1).numpy(), scale_by_half=False)
    assert float(found.mean()) == pytest.approx(wanted)
    yes = squared_errors(Target("y", "classification", ("a", "b")), outputs[:, :1], values % 2)
    assert yes is not None
    wanted = brier_score_loss(values % 2, outputs[:, 0].sigmoid().numpy())
    assert float(yes.mean()) == pytest.approx(2 * wanted)
    assert squared_errors(Target("y", "regression"), outputs[:, :1], values) is None
