"""The libraries whose trees whence reads: one line for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from whence.trees import catboost, lightgbm, sklearn, xgboost
from whence.trees.ensemble import TreeEnsemble

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
            return adapter(model)
    return None


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
