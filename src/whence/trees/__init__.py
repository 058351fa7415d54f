"""Fitted ensembles of trees: linear in their leaf values, so that all that whence computes applies to them.

`ADAPTERS` has one line for each library whose trees whence reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy

from whence.trees import catboost, lightgbm, sklearn, xgboost
from whence.trees.ensemble import TreeEnsemble

__all__ = ["TreeEnsemble", "read"]

ADAPTERS: dict[str, Callable[[Any], TreeEnsemble | None]] = {
    "sklearn": sklearn.read,
    "xgboost": xgboost.read,
    "lightgbm": lightgbm.read,
    "catboost": catboost.read,
}
"""From the package that a model's class comes from to the function that reads the model, or finds it to be no tree."""


def read(model: Any) -> TreeEnsemble | None:
    """The trees of a fitted model, or of the last step of a fitted pipeline; `None` where no adapter takes the model.

    No library is imported that is not loaded: models are recognised by the module of their class.

    Args:
        model: a fitted model of scikit-learn, XGBoost, LightGBM or CatBoost, or a pipeline of scikit-learn that ends in
            one. The rows that its `leaves` take are those that the model, or the pipeline, takes.

    Raises:
        InputError: the model is not fitted, or is one that is no sum of leaf values under a likelihood of whence.

    Examples:
        >>> import torch
        >>> read(torch.nn.Linear(1, 1)) is None
        True
    """
    for kind in type(model).__mro__:  # an estimator of XGBoost is also one of scikit-learn: its own class comes first
        if kind.__module__ == "sklearn.pipeline" and kind.__name__ == "Pipeline":
            return _last_step(model)
        adapter = ADAPTERS.get(kind.__module__.split(".")[0])
        if adapter is not None:
            found = adapter(model)
            return found and replace(found, classes=_classes(model, found))
    return None


def _classes(model: Any, found: TreeEnsemble) -> tuple[Any, ...] | None:
    """The labels of a classifier; native boosters number theirs."""
    known = tuple(numpy.asarray(getattr(model, "classes_", ())).tolist())
    return known or (None if found.likelihood == "gaussian" else tuple(range(max(len(found.base), 2))))


def _last_step(pipeline: Any) -> TreeEnsemble | None:
    found = read(pipeline[-1])
    if found is None or len(pipeline) == 1:
        return found
    inner, raw, steps = found.leaves, found.own_raw, pipeline[:-1]
    return replace(
        found,
        leaves=lambda x: inner(steps.transform(x)),
        own_raw=None if raw is None else lambda x: raw(steps.transform(x)),
    )
