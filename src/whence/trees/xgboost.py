"""Trees of XGBoost: its estimators for scikit-learn, and native boosters."""

from __future__ import annotations

import json
from typing import Any

import numpy
from numpy.typing import NDArray

from whence.jacobian.leaves import Loss, TreeEnsemble
from whence.trees.ensemble import LeafNumbers, loss_not_taken, not_fitted, not_taken, noted

LIKELIHOODS: dict[str, Loss] = {
    "reg:squarederror": "gaussian",
    "binary:logistic": "bernoulli",
    "multi:softprob": "categorical",
    "multi:softmax": "categorical",
}

DEFAULTS = (0.3, 1.0)  # learning rate and L2 penalty that the library reports for a model from a file
MAYBE_LOST = (
    "Learning rate 0.3 and L2 penalty 1 are the library's defaults, which it also reports for a model from a file. If "
    "this one was trained with others, set them: booster.set_param({'eta': ..., 'lambda': ...})."
)


def read(model: Any) -> TreeEnsemble | None:
    """The trees that a fitted model of XGBoost predicts with; `None` for another object of the library.

    An estimator that stopped early predicts with the trees up to its best iteration, a native booster with all.
    """
    import xgboost  # already loaded: the model is one of its objects

    if isinstance(model, xgboost.Booster):
        booster = used = model
    elif isinstance(model, xgboost.XGBModel):
        if not hasattr(model, "_Booster"):
            raise not_fitted(model)
        booster = model.get_booster()
        best = getattr(model, "best_iteration", None)  # only after early stopping
        used = booster if best is None else booster[: best + 1]
    else:
        return None
    try:
        rounds = used.num_boosted_rounds()
    except xgboost.core.XGBoostError:  # a booster that has not seen data
        rounds = 0
    if not rounds:
        raise not_fitted(model)
    learner = json.loads(used.save_raw("json"))["learner"]
    likelihood = _likelihood(model, learner)
    trees, weights, outputs = _trees(learner["gradient_booster"])
    base = _base(learner["learner_model_param"], likelihood)
    if likelihood == "bernoulli" and len(base) > 1:
        got = f"with {len(base)} labels for each row"
        raise not_taken(model, "a classifier of one label", got, "Fit one classifier for each label.")
    numbers = LeafNumbers([numpy.array(tree["left_children"]) == -1 for tree in trees])
    vectors = int(trees[0]["tree_param"]["size_leaf_vector"]) > 1
    name = "base_weights" if vectors else "split_conditions"  # of each node, in single precision
    nodes = [
        weight * numpy.array(tree[name], numpy.float32).astype(numpy.float64).reshape(len(tree["left_children"]), -1)
        for tree, weight in zip(trees, weights, strict=True)
    ]

    def rows(x: Any) -> Any:
        native = model is booster and not isinstance(x, xgboost.DMatrix)
        return xgboost.DMatrix(x, enable_categorical=True) if native else x

    def leaves(x: Any) -> NDArray[numpy.int64]:
        return numbers(model.predict(rows(x), pred_leaf=True) if model is booster else model.apply(x))

    config = json.loads(booster.save_config())["learner"]
    return TreeEnsemble(
        leaves=leaves,
        own_raw=lambda x: model.predict(rows(x), output_margin=True),
        values=numpy.concatenate(nodes)[numbers.is_leaf],
        outputs=None if vectors or len(base) == 1 else outputs,
        base=base,
        likelihood=likelihood,
        **_settings(config, dart=any(weight != 1 for weight in weights)),
    )


def _likelihood(model: Any, learner: Any) -> Loss:
    if learner["gradient_booster"]["name"] == "gblinear":
        raise not_taken(model, "boosted trees", "with booster='gblinear'", "Train it with booster='gbtree'.")
    # If the objective is a function, the library stores the name of its default instead.
    loss = "a function" if callable(getattr(model, "objective", None)) else learner["objective"]["name"]
    if loss not in LIKELIHOODS:
        raise loss_not_taken(model, loss, f"one of the objectives {', '.join(LIKELIHOODS)}")
    return LIKELIHOODS[loss]


def _trees(booster: Any) -> tuple[list[Any], list[float], NDArray[numpy.int64]]:
    """Trees, the weight of each in the sum, and the output that each adds to."""
    content = booster["gbtree"]["model"] if booster["name"] == "dart" else booster["model"]
    trees = content["trees"]
    # Weights that dropout (dart) gave to the trees: stored beside the trees, from version 3.4 on among them.
    weights = booster.get("weight_drop") or content.get("weight_drop") or [1.0] * len(trees)
    return trees, weights, numpy.array(content["tree_info"], "int64")


def _base(parameters: Any, likelihood: Loss) -> NDArray[numpy.float64]:
    """The constant that trees add to: log-odds if the library stores a probability."""
    score = numpy.array([float(part) for part in parameters["base_score"].strip("[]").split(",")])
    if likelihood == "bernoulli":
        score = numpy.log(score / (1 - score))
    outputs = max(int(parameters["num_class"]), int(parameters.get("num_target", 1)), 1)
    return numpy.broadcast_to(score, outputs).astype(numpy.float64)


def _settings(config: Any, dart: bool) -> dict[str, Any]:
    """Shrinkage, penalty and notes, from the configuration of a booster."""
    booster = config["gradient_booster"]
    booster = booster.get("gbtree", booster)
    train = booster["tree_train_param"]
    parallel = int(booster["gbtree_model_param"]["num_parallel_tree"])
    eta, l2, share = (float(train[name]) for name in ("eta", "lambda", "subsample"))
    weight = float(config["objective"].get("reg_loss_param", {}).get("scale_pos_weight", 1))
    return {
        "shrinkage": eta / parallel,
        "l2": l2,
        "notes": noted(
            (numpy.allclose((eta, l2), DEFAULTS), MAYBE_LOST),
            (share < 1, f"Each tree saw a random {share:.0%} of the training rows."),
            (parallel > 1, f"Each iteration averages {parallel} trees."),
            (dart, "Trees were dropped while others grew (dart), so shrinkage differs between trees."),
            (float(train["alpha"]), f"An L1 penalty (alpha={train['alpha']}) shrank the leaf values."),
            (float(train["max_delta_step"]), "max_delta_step bounds the leaf values."),
            ("1" in train["monotone_constraints"], "Monotone constraints bound the leaf values."),
            (weight != 1, f"The loss weights positive rows by {weight:g} (scale_pos_weight)."),
        ),
    }
