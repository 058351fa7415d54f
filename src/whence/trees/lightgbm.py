"""Trees of LightGBM: its estimators for scikit-learn, and native boosters."""

from __future__ import annotations

import re
from typing import Any

import numpy
from numpy.typing import NDArray

from whence.jacobian.leaves import Loss, TreeEnsemble
from whence.trees.ensemble import LeafNumbers, loss_not_taken, not_fitted, not_taken, noted

LIKELIHOODS: dict[str, Loss] = {"regression": "gaussian", "binary sigmoid:1": "bernoulli", "multiclass": "categorical"}
TAKEN = "objective 'regression', 'binary' (with sigmoid=1) or 'multiclass'"


def read(model: Any) -> TreeEnsemble | None:
    """The trees that a fitted model of LightGBM predicts with, up to the best iteration if it stopped early.

    Returns `None` for another object of the library.
    """
    import lightgbm  # already loaded: the model is one of its objects

    if isinstance(model, lightgbm.LGBMModel):
        if not hasattr(model, "booster_"):
            raise not_fitted(model)
        booster = model.booster_
    elif isinstance(model, lightgbm.Booster):
        booster = model
    else:
        return None
    head, *trees, settings = _sections(booster.model_to_string())  # up to the best iteration, as in predict
    if not trees:
        raise not_fitted(model)
    loss = head.get("objective", "a custom objective")
    likelihood = LIKELIHOODS.get(loss.split()[0] if loss.startswith("multiclass ") else loss)
    if likelihood is None:
        raise loss_not_taken(model, loss, TAKEN)
    if settings["linear_tree"] == "1":
        raise not_taken(model, "constant leaves", "with linear_tree=True", "Train it with linear_tree=False.")
    values = [_numbers(tree["leaf_value"]) for tree in trees]
    numbers = LeafNumbers([numpy.ones(len(found), bool) for found in values])
    outputs = numpy.arange(len(trees)) % int(head["num_tree_per_iteration"])
    average = "average_output" in head
    base = numpy.zeros(outputs.max() + 1)
    if settings["boost_from_average"] == "1":
        # The library adds the constant to the leaves of the first iteration, or of all if they are averaged. It is
        # found from the fact that the gradients sum to zero there.
        l2 = float(settings["lambda_l2"])
        for tree, found, output in zip(trees, values, outputs, strict=True):
            if average or tree["Tree"] == str(output):
                weights = _numbers(tree["leaf_weight"]) + l2 if len(found) > 1 else None
                constant = numpy.average(found, weights=weights)
                base[output] += constant
                found -= constant
    trees_each = len(trees) // len(base) if average else 1
    return TreeEnsemble(
        leaves=lambda x: numbers(model.predict(x, pred_leaf=True)),
        own_raw=lambda x: model.predict(x, raw_score=True) / trees_each,  # raw scores are sums even if averaged
        values=numpy.concatenate(values)[:, None] / trees_each,
        outputs=None if len(base) == 1 else outputs,
        base=base / trees_each,
        likelihood=likelihood,
        shrinkage=1 / trees_each if average else float(settings["learning_rate"]),
        **_settings(settings, by_class=bool(getattr(model, "class_weight", None))),  # which the booster does not know
    )


def _sections(text: str) -> list[dict[str, str]]:
    """The head, each tree, and the training parameters of a model in LightGBM's own text format."""
    trees, _, rest = text.partition("end of trees")
    parts = [
        dict(line.partition("=")[::2] for line in part.splitlines())
        for part in re.split(r"^(?=Tree=)", trees, flags=re.M)
    ]
    return [*parts, dict(re.findall(r"^\[(\w+): (.*)\]$", rest, flags=re.M))]


def _numbers(line: str) -> NDArray[numpy.float64]:
    return numpy.array(line.split(), numpy.float64)


def _settings(settings: dict[str, str], by_class: bool) -> dict[str, Any]:
    """Penalty and notes, from the training parameters."""
    goss = "goss" in (settings["boosting"], settings.get("data_sample_strategy"))
    bagging = int(settings["bagging_freq"]) > 0
    share = float(settings["bagging_fraction"]) if bagging else 1.0
    if goss:
        share = float(settings["top_rate"]) + float(settings["other_rate"])
    by_class |= float(settings["scale_pos_weight"]) != 1 or settings["is_unbalance"] == "1"
    l1, smooth = float(settings["lambda_l1"]), float(settings["path_smooth"])
    return {
        "l2": float(settings["lambda_l2"]),
        "notes": noted(
            (share < 1 and not goss, f"Each tree saw a random {share:.0%} of the training rows."),
            (goss, f"Each tree saw {share:.0%} of the training rows, those of large gradients first (goss)."),
            (settings["boosting"] == "rf", "The trees are averaged (boosting='rf')."),
            (settings["boosting"] == "dart", "Trees were dropped while others grew (dart): shrinkage differs."),
            (l1, f"An L1 penalty (lambda_l1={l1:g}) shrank the leaf values."),
            (smooth, f"Leaf values were smoothed towards those of their parents (path_smooth={smooth:g})."),
            (float(settings["max_delta_step"]), "max_delta_step bounds the leaf values."),
            (settings["monotone_constraints"], "Monotone constraints bound the leaf values."),
            (by_class, "The loss weights rows by their class (class_weight, scale_pos_weight or is_unbalance)."),
        ),
    }
