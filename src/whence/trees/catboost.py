"""Trees of CatBoost: `CatBoostRegressor`, `CatBoostClassifier` and `CatBoost` itself."""

from __future__ import annotations

from typing import Any

import numpy

from whence.jacobian.leaves import Loss, TreeEnsemble
from whence.trees.ensemble import LeafNumbers, loss_not_taken, not_fitted, noted

LIKELIHOODS: dict[str, Loss] = {
    "RMSE": "gaussian",
    "MultiRMSE": "gaussian",
    "Logloss": "bernoulli",
    "MultiClass": "categorical",
}


def read(model: Any) -> TreeEnsemble | None:
    """The trees of a fitted model of CatBoost; `None` for another object of the library."""
    import catboost  # already loaded: the model is one of its objects

    if not isinstance(model, catboost.CatBoost):
        return None
    if not model.is_fitted() or not model.tree_count_:
        raise not_fitted(model)
    settings = model.get_all_params()
    loss = settings["loss_function"]
    if loss not in LIKELIHOODS:
        raise loss_not_taken(model, loss, f"one of the losses {', '.join(LIKELIHOODS)}")
    numbers = LeafNumbers([numpy.ones(count, bool) for count in model.get_tree_leaf_counts()])
    scale, bias = model.get_scale_and_bias()
    base = numpy.array(bias, numpy.float64).reshape(-1)
    return TreeEnsemble(
        leaves=lambda x: numbers(model.calc_leaf_indexes(x)),
        own_raw=lambda x: model.predict(x, prediction_type="RawFormulaVal"),
        values=scale * numpy.asarray(model.get_leaf_values(), numpy.float64).reshape(-1, len(base)),
        outputs=None,
        base=base,
        likelihood=LIKELIHOODS[loss],
        shrinkage=float(settings["learning_rate"]),
        l2=float(settings["l2_leaf_reg"]),
        l2_by_weight=True,
        notes=_notes(model, settings),
    )


def _notes(model: Any, settings: dict[str, Any]) -> tuple[str, ...]:
    bootstrap = settings.get("bootstrap_type", "No")
    share = settings.get("subsample", 1.0)
    bayesian = bootstrap == "Bayesian" and settings.get("bagging_temperature", 1)
    by_class = settings.get("class_weights") or settings.get("auto_class_weights", "None") != "None"
    return noted(
        (bayesian, "Each tree saw the training rows with random weights (a Bayesian bootstrap)."),
        (share < 1, f"Each tree saw a random {share:.0%} of the training rows ({bootstrap})."),
        (
            settings.get("boosting_type") == "Ordered",
            "Ordered boosting: trees grew on residuals of models that had not seen the row.",
        ),
        (
            model.get_cat_feature_indices(),
            "While trees grew, target statistics of categories counted earlier rows only, so a training row may be in "
            "another leaf now than during training.",
        ),
        (settings.get("monotone_constraints"), "Monotone constraints bound the leaf values."),
        (by_class, "The loss weights rows by their class."),
    )
