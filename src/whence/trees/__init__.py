"""Fitted ensembles of trees: linear in their leaf values, so that everything in whence applies to them.

`ADAPTERS` has one line for each library whose trees whence can read. `fitted_trees` converts them to the arguments of
`whence.fit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor

from whence.curvature import Exact, Structure
from whence.curvature.leaves import LeafAuto, LeafCore
from whence.errors import InputError
from whence.jacobian.leaves import LeafSum, TreeEnsemble
from whence.likelihoods import LIKELIHOODS, Likelihood
from whence.trees import catboost, lightgbm, sklearn, xgboost

__all__ = ["TreeEnsemble", "fitted_trees", "leaf_sum", "read", "training_batches"]

ADAPTERS: dict[str, Callable[[Any], TreeEnsemble | None]] = {
    "sklearn": sklearn.read,
    "xgboost": xgboost.read,
    "lightgbm": lightgbm.read,
    "catboost": catboost.read,
}
"""From the package of a model's class to the function that reads the model, or returns `None` if it is no tree."""


def read(model: Any) -> TreeEnsemble | None:
    """The trees of a fitted model, or of the last step of a fitted pipeline; `None` if no adapter takes the model.

    No library is imported unless it is loaded already: models are recognised by the module of their class.

    Args:
        model: a fitted model of scikit-learn, XGBoost, LightGBM or CatBoost, or a pipeline of scikit-learn that ends in
            one. The `leaves` of the result take the same rows as the model or the pipeline.

    Raises:
        InputError: the model is not fitted, or is not a sum of leaf values under a likelihood of whence.

    Examples:
        >>> import torch
        >>> read(torch.nn.Linear(1, 1)) is None
        True
    """
    for kind in type(model).__mro__:  # an XGBoost estimator is also a scikit-learn one: its own class comes first
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


def read_ensemble(model: Any) -> TreeEnsemble:
    """The trees of a model of some library; raises if no adapter takes it."""
    found = model if isinstance(model, TreeEnsemble) else read(model)
    if found is None:
        raise InputError(
            "expected a torch.nn.Module, or fitted trees (DecisionTree, RandomForest, ExtraTrees, GradientBoosting or "
            "HistGradientBoosting of scikit-learn, XGBoost, LightGBM, CatBoost, or a Pipeline that ends in one of "
            f"them), got {type(model).__name__}."
        )
    return found


def leaf_sum(model: Any) -> LeafSum:
    """The trees of a model as a network, whose parameters are their leaf values."""
    network = LeafSum(read_ensemble(model))
    network.reread = lambda: read_ensemble(model).values
    return network


def training_batches(model: LeafSum, data: Any) -> list[tuple[Any, ...]]:
    """Batches (leaf numbers, targets) or (leaf numbers, targets, weights) of (X, y) or (X, y, sample_weight)."""
    if not isinstance(data, (tuple, list)) or len(data) not in (2, 3):
        got = type(data).__name__
        raise InputError(f"expected the training data of trees as (X, y) or (X, y, sample_weight), got {got}.")
    model.table = data[0]
    return model.batches(*data)


def check_sum(network: LeafSum, x: Any) -> None:
    """Raise unless the leaf values sum to the library's own predictions, for some rows of X."""
    own_raw = network.ensemble.own_raw
    if own_raw is None:
        return
    sliced = isinstance(x, list) or (hasattr(x, "shape") and hasattr(x, "__getitem__"))  # not a Pool or DMatrix
    some = x[:COMPARED_ROWS] if sliced else x
    ours = network.raw(some).numpy()
    own = numpy.asarray(own_raw(some), numpy.float64).reshape(ours.shape)
    gap = float(numpy.abs(ours - own).max(initial=0.0))
    if gap > SAME_SUM * max(1.0, float(numpy.abs(own).max(initial=0.0))):
        raise InputError(
            f"expected the leaf values of the trees to add up to the model's own predictions, got a difference of "
            f"{gap:.3g} in the first {len(ours)} rows. The library's format of trees may have changed: try an older "
            "version of it, and report this."
        )


def leaf_masses(model: LeafSum, likelihood: Likelihood, batches: Sequence[tuple[Any, ...]]) -> Tensor:
    """(leaves,) sum over the training rows in a leaf of their weight times the Hessian of the loss in its output."""
    masses = torch.zeros_like(model.scale)
    for inputs, targets, *weights in batches:
        leaves = inputs["leaves"].long()
        with torch.no_grad():
            outputs = model(leaves)
        roots = likelihood.hessian_root(outputs, likelihood.check_targets(targets, outputs, "y"))
        each = torch.ones_like(outputs) if roots is None else roots.square().sum(2)  # (n, k) the Hessian's diagonal
        if weights:
            each = each * weights[0].unsqueeze(1)
        by_tree = each.mean(1, keepdim=True).expand(leaves.shape) if model.outputs is None else each[:, model.outputs]
        masses.index_add_(0, leaves.reshape(-1), by_tree.reshape(-1))
    return masses


STRUCTURES: dict[str, type[Structure]] = {"auto": LeafAuto, "exact": Exact, "core": LeafCore}
"""Structures of the curvature of leaf values, by name."""

COMPARED_ROWS = 200  # training rows whose sums of leaf values are compared with the library's predictions
SAME_SUM = 1e-3  # relative difference of the two that single precision may leave
LARGEST_SHRINKAGE = 0.9  # for several trees: without shrinkage they share directions that no penalty could separate


def fitted_trees(
    model: Any, data: Any, likelihood: str | Likelihood | None, structure: str | Structure, parameters: Any, ridge: Any
) -> tuple[LeafSum, list[tuple[Any, ...]], Likelihood, Structure]:
    """Model, batches, likelihood and structure for `whence.fit`, from trees of any library.

    Leaf values are scaled so that by default a ridge of one is the trees' own.
    """
    if not isinstance(parameters, str) or parameters != "all":
        raise InputError(f'expected parameters="all" for trees, all leaf values, got {parameters!r}. Leave it out.')
    network = leaf_sum(model)
    ensemble = network.ensemble
    name = likelihood.name if isinstance(likelihood, Likelihood) else likelihood
    if name not in (None, ensemble.likelihood):
        own = f"{ensemble.likelihood!r}, that of the loss these trees were grown with"
        raise InputError(f"expected likelihood {own}, got {name!r}. Leave it out.")
    likelihood = likelihood if isinstance(likelihood, Likelihood) else LIKELIHOODS[ensemble.likelihood]()
    batches = training_batches(network, data)
    check_sum(network, data[0])
    if ridge == "auto":
        # One tree shrinks the mean of a leaf to r / (n + penalty) with penalty = n (1 - eta) / eta + l2 / eta, for the
        # shrinkage eta, n the mass of the leaf and r the sum of its residuals.
        several = batches[0][0]["leaves"].shape[1] > 1
        l2, eta = ensemble.l2, min(ensemble.shrinkage, LARGEST_SHRINKAGE) if several else ensemble.shrinkage
        if ensemble.l2_by_weight and len(batches[0]) == 3:
            l2 *= float(torch.cat([weights for _, _, weights in batches]).mean())
        penalty = leaf_masses(network, likelihood, batches) * ((1 - eta) / eta) + l2 / eta
        words = f"the trees' own, shrinkage {eta:.4g} and L2 {l2:g}, on each leaf value by the mass of its leaf"
        empty = penalty <= 0  # leaves without training rows, and no L2: any penalty gives them a variance of zero
        exists = not bool(empty.all())
        if exists:
            network.rescale(penalty.where(~empty, penalty[~empty].median()).sqrt())
            network.note_empty(int(empty.sum()))
        network.own_ridge = (1.0 if exists else 0.0, words)
    if not isinstance(structure, Exact | LeafCore | LeafAuto) and structure not in STRUCTURES:
        raise InputError(
            f"expected structure to be one of {', '.join(map(repr, STRUCTURES))}, or whence.Exact, for trees, got "
            f"{structure!r}. Kronecker factors and sketches of layers have no meaning for leaf values."
        )
    return network, batches, likelihood, STRUCTURES[structure]() if isinstance(structure, str) else structure
