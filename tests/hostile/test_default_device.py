"""A default device of torch that is not the CPU: networks and data say where they live, and that is where whence is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import whence
from fits_to_save import STRUCTURES, assert_same_answers, classes, many, regression, tokens


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Tensors that do not say where they live have no numbers."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)  # naming the CPU would leave this thread in a mode that others are not in


def everything(again: whence.Tracer, test: Any, remove: bool) -> dict[str, Any]:
    """Answers to every question, of a fit or of one that was loaded."""
    found = again.predict(test, outputs="all")
    said = {
        "mean": found.mean,
        "hec3": found.hec3,
        "shares": again.attribute(test).hec3.share,
        "verdicts": again.explain(test).verdicts,
        "suspects": again.suggest(2).index,
        "frame": again.training_frame().to_numpy(),
    }
    if again.problem.k == 1:
        said["trust"] = repr(again.trust(test))
    if remove:
        said["what if"] = again.what_if(test, remove=[1]).new_hec3
    return said


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    return bool(np.array_equal(one, two)) if isinstance(one, np.ndarray) else bool(one == two)


FITS = {
    **{f"regression, {structure}": (regression, (structure,)) for structure in ("primal", "dual", "sketch", "ekfac")},
    "classes": (classes, ("core", "categorical")),
    "class weights": (classes, ("dual", whence.Bernoulli(pos_weight=3.0))),
    "mixtures": (many, ("ekfac",)),
    "mixtures, dual": (many, ("dual",)),
    "tokens": (tokens, ("core",)),
}


@pytest.mark.parametrize("name", FITS)
def test_everything_under_another_default_device(name: str, tmp_path: Path, elsewhere: None) -> None:
    make, given = FITS[name]
    with torch.device("cpu"):
        plain = make(*given)
        remove = plain.tracer.loo.policy == "exact"
        wanted = everything(plain.tracer, plain.test, remove)
    options = {"ridge": plain.tracer.ridge, "progress": False, "structure": STRUCTURES[given[0]]}
    if name.startswith("mixtures"):
        options["hessian_columns"] = 2
    likelihood = "gaussian" if make is regression else plain.tracer.problem.likelihood
    tracer = whence.fit(plain.model, plain.batches, likelihood, **options)
    said = everything(tracer, plain.test, remove)
    assert [key for key in wanted if not same(said[key], wanted[key])] == []
    tracer.save(tmp_path / "fit.whence")
    again = whence.load(tmp_path / "fit.whence", plain.model, plain.batches, progress=False)
    assert_same_answers(plain, again)
    said = everything(again, plain.test, remove)
    assert [key for key in wanted if not same(said[key], wanted[key])] == []


def test_networks_that_whence_makes(elsewhere: None) -> None:
    from whence.sklearn import WhenceRegressor  # scikit-learn takes a second

    draw = np.random.default_rng(0)
    x = draw.normal(size=(30, 2))
    model = WhenceRegressor(hidden_layer_sizes=(3,), max_iter=20, random_state=0).fit(x, x[:, 0])
    assert np.isfinite(model.predict(x)).all()
