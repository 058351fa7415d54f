"""Every question with rows of a table in the place of tensors, fits in files, and what is refused."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import sklearn.base
import torch
from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor, RandomForestClassifier
from sklearn.linear_model import LinearRegression

import whence
from tree_models import MODELS, table, task
from whence.curvature.leaves import LeafCore
from whence.errors import InputError, LoaderError, ShapeError, StaleModelError, TargetError


def boosting(n: int = 200):
    x, y = table(n)
    return GradientBoostingRegressor(n_estimators=15, random_state=0).fit(x, y), x, y


@pytest.fixture(scope="module")
def tracer():
    model, x, y = boosting()
    return whence.fit(model, (x, y), progress=False)


def test_every_question_takes_rows(tracer):
    x, _ = table(8, seed=1)
    assert len(tracer.explain(x).verdicts) == 8
    assert tracer.attribute(x, top=3).hec3.index.shape == (8, 3)
    assert len(tracer.suggest(2, pool=x).index) == 2
    assert tracer.training_frame(x).shape[0] == 200
    trust = tracer.trust(x, sample=2)
    assert trust["distance"].level == "fine"
    assert trust.level == "careful"
    assert "if the splits are fixed" in trust["stationarity"].words


def test_data_frames_and_pairs_with_targets_are_rows_too():
    x, y = table(200)
    frame = pd.DataFrame(x, columns=list("abcd"))
    model = GradientBoostingRegressor(n_estimators=15, random_state=0).fit(frame, y)
    tracer = whence.fit(model, (frame, pd.Series(y)), progress=False)
    alone, pair = tracer.predict(frame[:5]), tracer.predict((frame[:5], y[:5]))
    torch.testing.assert_close(alone.hec3, pair.hec3, rtol=0, atol=0)
    np.testing.assert_allclose(alone.mean[:, 0].numpy(), model.predict(frame[:5]), rtol=0, atol=1e-12)


def test_the_label_of_a_class_is_changed_by_its_name():
    x, y = task("two classes")
    model = GradientBoostingClassifier(n_estimators=8, random_state=0).fit(x, y)
    tracer = whence.fit(model, (x, y), progress=False)
    at = int(np.flatnonzero(y == "low")[0])
    change = tracer.what_if(x[at : at + 1], relabel={at: "some"}).change
    assert float(change) > 0  # towards the second class
    assert float(tracer.what_if(x[at : at + 1], relabel={at: "low"}).change) == 0
    with pytest.raises(TargetError, match="classes"):
        tracer.what_if(x[:1], relabel={at: "unheard of"})


@pytest.mark.parametrize("name", ["two classes", "three classes", "forest of classes"])
def test_suspects_have_the_names_of_classes(name):
    """One label is changed, and the other rows suggest the old one."""
    x, y = task(name)
    model = sklearn.base.clone(MODELS[name]).fit(x, y)
    sure = model.predict_proba(x)[:, 0].argmax()
    assert y[sure] == "low"
    changed = np.where(np.arange(len(y)) == sure, "some", y)
    frame = whence.fit(model, (x, changed), progress=False).training_frame()
    assert set(frame["label"]) == set(y)
    assert tuple(frame.loc[sure, ["label", "suggested"]]) == ("some", "low")
    assert bool(frame["suggested_probability"].between(0.0, 1.0).all())


def test_a_report_shows_the_rows_and_the_names_of_the_classes(tmp_path):
    x, y = task("forest of classes", 120)
    frame = pd.DataFrame(x, columns=["age", "height", "weight", "dose"])
    model = RandomForestClassifier(5, max_leaf_nodes=8, random_state=0).fit(frame, y)
    tracer = whence.fit(model, (frame, y), progress=False)
    text = tracer.report(tmp_path / "report.html", (frame[:30], y[:30])).read_text(encoding="utf-8")
    assert all(word in text for word in ("dose", "height", "top", "some"))


@pytest.mark.parametrize("kind", ["numbers", "two classes", "three classes", "forest of classes"])
def test_a_report_takes_rows_without_a_label(kind, tmp_path):
    x, y = task(kind, 120)
    family = GradientBoostingRegressor if kind == "numbers" else GradientBoostingClassifier
    trees = RandomForestClassifier if kind.startswith("forest") else family
    tracer = whence.fit(trees(n_estimators=5, random_state=0).fit(x, y), (x, y), progress=False)
    labels = np.array(y[:30], dtype=float if kind == "numbers" else object)
    labels[:4] = np.nan
    text = tracer.report(tmp_path / "report.html", (x[:30], labels)).read_text(encoding="utf-8")
    assert "26 predictions with a label, 4 without" in text


def test_the_diagnostics_say_where_the_ridge_came_from(tracer):
    words = {finding.name: finding.words for finding in tracer.diagnostics}
    assert "shrinkage 0.1 and L2 0" in words["ridge"]
    model, x, y = boosting()
    plain = whence.fit(model, (x, y), ridge=2.0, progress=False)
    assert plain.ridge == 2.0
    assert bool((plain.problem.network.model.scale == 1).all())  # on the leaf values themselves
    assert whence.fit(model, (x, y), ridge="loo", progress=False).ridge_path is not None


@pytest.mark.parametrize("structure", ["auto", LeafCore(size=40)])
def test_a_fit_comes_back_from_a_file(tmp_path, structure):
    model, x, y = boosting(80)  # fewer rows than leaves
    tracer = whence.fit(model, (x, y), structure=structure, progress=False)
    tracer.save(tmp_path / "trees.whence")
    alone = whence.load(tmp_path / "trees.whence", model, progress=False)
    fresh, _ = table(20, seed=1)
    torch.testing.assert_close(alone.predict(fresh).hec3, tracer.predict(fresh).hec3, rtol=1e-12, atol=0)
    with pytest.raises(LoaderError, match="training data"):
        alone.explain(fresh)
    again = whence.load(tmp_path / "trees.whence", model, (x, y), progress=False)
    assert again.explain(fresh).verdicts == tracer.explain(fresh).verdicts
    with pytest.raises(LoaderError, match="training data"):
        whence.load(tmp_path / "trees.whence", model, (x, y + 1), progress=False)
    other = GradientBoostingRegressor(n_estimators=15, random_state=0).fit(x, -y)
    with pytest.raises(StaleModelError):
        whence.load(tmp_path / "trees.whence", other, progress=False)
    with pytest.raises(StaleModelError):
        whence.load(tmp_path / "trees.whence", torch.nn.Linear(2, 1).eval(), progress=False)


@pytest.mark.parametrize("structure", ["auto", "core", whence.Exact(road="dual")])
def test_what_a_fit_takes_is_said_before(structure):
    model, x, y = boosting()
    found = whence.estimate(model, (x, y), structure=structure)
    tracer = whence.fit(model, (x, y), structure=structure, progress=False)
    assert found.structure.split()[0] == tracer.diagnostics["structure"]
    assert (found.examples, found.outputs, found.parameters) == (200, 1, tracer.problem.selection.size)
    assert found.fits
    assert 0 < found.seconds < 10
    names = {"exact (primal road)", "exact (dual road)", "core"}
    assert {one.structure for one in found.alternatives} == names - {found.structure}


def test_a_core_of_many_leaves_is_said_to_take_more():
    model, x, y = boosting()
    larger = GradientBoostingRegressor(n_estimators=150, max_depth=5, random_state=0).fit(x, y)
    small, large = (whence.estimate(one, (x, y), structure="core") for one in (model, larger))
    assert small.memory < large.memory
    assert not whence.estimate(larger, (x, y), structure="core", execution=whence.Execution(max_memory=2**18)).fits


def test_trees_do_not_take_the_file_of_a_network(tmp_path):
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
    net = torch.nn.Linear(1, 1, dtype=torch.float64).eval()
    whence.fit(net, [(x, 2 * x)], ridge=0.1, progress=False).save(tmp_path / "line.whence")
    with pytest.raises(StaleModelError, match="trees where a network was"):
        whence.load(tmp_path / "line.whence", boosting()[0], progress=False)


def test_a_model_that_was_trained_again_is_refused():
    model, x, y = boosting()
    tracer = whence.fit(model, (x, y), progress=False)
    model.fit(x, -y)
    with pytest.raises(StaleModelError, match="trained again"):
        tracer.predict(x[:3])


def test_refusals(tracer):
    model, x, y = boosting()
    with pytest.raises(InputError, match="LinearRegression"):
        whence.fit(LinearRegression().fit(x, y), (x, y))
    with pytest.raises(InputError, match="fitted"):
        whence.fit(GradientBoostingRegressor(), (x, y))
    with pytest.raises(InputError, match="likelihood 'gaussian'"):
        whence.fit(model, (x, y), "categorical")
    with pytest.raises(InputError, match=r"\(X, y\)"):
        whence.fit(model, [(x, y)])
    with pytest.raises(InputError, match="structure"):
        whence.fit(model, (x, y), structure="ekfac")
    with pytest.raises(InputError, match="parameters"):
        whence.fit(model, (x, y), parameters="last_layer")
    with pytest.raises(ShapeError, match="200 rows"):
        whence.fit(model, (x, y[:-1]))
    with pytest.raises(TargetError, match="row 3"):
        whence.fit(model, (x, np.where(np.arange(200) == 3, np.nan, y)))
    with pytest.raises(InputError, match="rows that the model accepts"):
        tracer.predict(x[:, :2])
    with pytest.raises(InputError, match="rows that the model accepts"):
        tracer.predict(x[:0])


def test_labels_that_the_model_does_not_know_are_refused():
    x, y = task("two classes")
    model = GradientBoostingClassifier(n_estimators=4, random_state=0).fit(x, y)
    with pytest.raises(TargetError, match="row 5"):
        whence.fit(model, (x, np.where(np.arange(200) == 5, "else", y)))
