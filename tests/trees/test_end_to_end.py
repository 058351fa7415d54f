"""Fit, predict, explain and all other questions on gradient boosting, with rows of a table in the place of tensors."""

from __future__ import annotations

import numpy
import pytest
from sklearn.ensemble import GradientBoostingRegressor

import whence
from tree_models import boosting_ensemble, table


@pytest.fixture(scope="module")
def fitted():
    x, y = table(300)
    model = GradientBoostingRegressor(n_estimators=20, random_state=0).fit(x, y)
    return model, whence.fit(boosting_ensemble(model), (x, y), progress=False)


def test_means_are_the_model_s_own_predictions(fitted):
    model, tracer = fitted
    x, _ = table(50, seed=1)
    found = tracer.predict(x)
    numpy.testing.assert_allclose(found.mean[:, 0].numpy(), model.predict(x), rtol=0, atol=1e-12)
    assert bool((found.hec3 > 0).all())


def test_every_question_takes_rows(fitted):
    _, tracer = fitted
    x, _ = table(8, seed=1)
    assert len(tracer.explain(x).verdicts) == 8
    assert tracer.attribute(x, top=3).hec3.index.shape == (8, 3)
    assert tracer.what_if(x, remove=[0], relabel={1: 2.0}).change.shape == (8, 1)
    assert len(tracer.suggest(2, pool=x).index) == 2
    assert tracer.training_frame(x).shape[0] == 300
    assert tracer.trust(sample=2)["linearization"].level == "fine"
    assert len(tracer.split(x, anchors=50)) == 8
