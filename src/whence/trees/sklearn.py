"""Trees of scikit-learn: single ones, forests, and gradient boosting with and without histograms."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import numpy
from numpy.typing import NDArray

from whence.jacobian.leaves import Loss, TreeEnsemble
from whence.trees.ensemble import LeafNumbers, loss_not_taken, not_fitted, not_taken, noted


def read(model: Any) -> TreeEnsemble | None:
    """The trees of a fitted model of scikit-learn; `None` for a model of another kind."""
    # scikit-learn is already loaded: the model is one of its objects.
    from sklearn import ensemble, tree
    from sklearn.exceptions import NotFittedError
    from sklearn.utils.validation import check_is_fitted

    kinds = {
        (tree.DecisionTreeRegressor, tree.DecisionTreeClassifier): _averaged,
        (ensemble.RandomForestRegressor, ensemble.RandomForestClassifier): _averaged,
        (ensemble.ExtraTreesRegressor, ensemble.ExtraTreesClassifier): _averaged,
        (ensemble.GradientBoostingRegressor, ensemble.GradientBoostingClassifier): _boosting,
        (ensemble.HistGradientBoostingRegressor, ensemble.HistGradientBoostingClassifier): _histogram_boosting,
    }
    reader = next((reader for kind, reader in kinds.items() if isinstance(model, kind)), None)
    if reader is None:
        return None
    try:
        check_is_fitted(model)
    except NotFittedError:
        raise not_fitted(model) from None
    found = reader(model)
    notes = noted(
        (getattr(model, "class_weight", None), "The loss weights rows by their class (class_weight)."),
        (getattr(model, "monotonic_cst", None) is not None, "Monotone constraints bound the leaf values."),
    )
    return replace(found, notes=found.notes + notes)


def _averaged(model: Any) -> TreeEnsemble:
    """Means of targets, or shares of classes, averaged over trees: squared error on numbers, or on zeros and ones."""
    trees, share = getattr(model, "estimators_", [model]), 1.0
    if getattr(model, "bootstrap", False):  # the root counts only the rows that were drawn
        share = float(numpy.mean([tree.tree_.n_node_samples[0] for tree in trees]) / model._n_samples)
    classes = getattr(model, "classes_", None)
    if classes is None and model.criterion not in ("squared_error", "friedman_mse"):
        raise loss_not_taken(model, model.criterion, "criterion 'squared_error' or 'friedman_mse'")
    if classes is not None and model.n_outputs_ > 1:
        got = f"with {model.n_outputs_} outputs"
        raise not_taken(model, "a classifier of one output", got, "Fit one classifier for each output.")
    numbers = LeafNumbers([tree.tree_.children_left < 0 for tree in trees])
    # (nodes, outputs, 1) for numbers and (nodes, 1, classes) for classes.
    nodes = numpy.concatenate([tree.tree_.value.reshape(tree.tree_.node_count, -1) for tree in trees])
    values = nodes[numbers.is_leaf] / len(trees)
    return TreeEnsemble(
        leaves=lambda x: numbers(model.apply(x)),
        own_raw=model.predict if classes is None else model.predict_proba,
        values=values,
        outputs=None,
        base=numpy.zeros(values.shape[1]),
        likelihood="gaussian",
        shrinkage=1 / len(trees),
        notes=noted((share < 1, f"Each tree saw a bootstrap sample, {share:.0%} of the training rows on average.")),
    )


def _boosting(model: Any) -> TreeEnsemble:
    # The initial constant comes from an estimator, which is fitted with the rest.
    from sklearn.dummy import DummyClassifier, DummyRegressor
    from sklearn.utils.validation import validate_data

    if not isinstance(model.init_, DummyClassifier | DummyRegressor | str):
        got = f"with init={type(model.init_).__name__}"
        raise not_taken(model, "init=None or init='zero'", got, "whence supports boosting that starts with a constant.")
    trees = model.estimators_.ravel()  # an iteration has one tree for each output
    numbers = LeafNumbers([tree.tree_.children_left < 0 for tree in trees])
    values = numpy.concatenate([tree.tree_.value[:, 0, 0] for tree in trees])[numbers.is_leaf] * model.learning_rate
    base = model._raw_predict_init(numpy.zeros((1, model.n_features_in_)))[0]

    def leaves(x: Any) -> NDArray[numpy.int64]:
        # `apply` alone does not check the names of columns, and warns about them.
        checked = validate_data(model, x, dtype=numpy.float32, accept_sparse="csr", reset=False)
        return numbers(model.apply(checked))

    sampled = (model.subsample < 1, f"Each tree saw a random {model.subsample:.0%} of the training rows.")
    found = _boosted(model, len(trees), leaves, values, base, early=model.n_iter_no_change is not None)
    return replace(found, notes=noted(sampled) + found.notes)


def _histogram_boosting(model: Any) -> TreeEnsemble:
    predictors = [predictor for iteration in model._predictors for predictor in iteration]
    is_leaf = [predictor.nodes["is_leaf"].astype(bool) for predictor in predictors]
    values = numpy.concatenate([p.nodes["value"][leaf] for p, leaf in zip(predictors, is_leaf, strict=True)])
    base = model._baseline_prediction.ravel().astype(numpy.float64)
    finders = []
    first = 0
    for predictor, leaf in zip(predictors, is_leaf, strict=True):
        finder = copy(predictor)  # the same tree, with leaf numbers as values
        finder.nodes = predictor.nodes.copy()
        finder.nodes["value"][leaf] = first + numpy.arange(leaf.sum())
        finders.append(finder)
        first += int(leaf.sum())

    def leaves(x: Any) -> NDArray[numpy.int64]:
        # The number of threads that scikit-learn itself would use.
        from sklearn.utils._openmp_helpers import _openmp_effective_n_threads

        rows = model._preprocess_X(x, reset=False)
        known = model._bin_mapper.make_known_categories_bitsets()
        threads = _openmp_effective_n_threads()
        found = numpy.empty((len(rows), len(finders)), numpy.int64)
        for number, finder in enumerate(finders):
            found[:, number] = finder.predict(rows, *known, threads)
        return found

    early = model.do_early_stopping_ and model.validation_fraction is not None
    found = _boosted(model, len(predictors), leaves, values.astype(numpy.float64), base, early)
    return replace(found, l2=float(model.l2_regularization))


def _boosted(model: Any, trees: int, leaves: Any, values: Any, base: Any, early: bool) -> TreeEnsemble:
    """Shared by both kinds of boosting; `early` says whether rows were held out to stop early."""
    classes = getattr(model, "classes_", None)
    taken = "squared_error" if classes is None else "log_loss"
    likelihood: Loss = "gaussian" if classes is None else "bernoulli" if len(classes) == 2 else "categorical"
    if model.loss != taken:
        raise loss_not_taken(model, model.loss, f"loss {taken!r}")
    share = model.validation_fraction
    rows = f"{share:.0%}" if isinstance(share, float) else f"{share}"
    held_out = f"Early stopping held out {rows} of the rows that the model was fitted on: no tree saw them."
    return TreeEnsemble(
        leaves=leaves,
        own_raw=model.predict if classes is None else model.decision_function,
        values=values[:, None],
        outputs=None if len(base) == 1 else numpy.arange(trees) % len(base),
        base=base,
        likelihood=likelihood,
        shrinkage=float(model.learning_rate),
        notes=noted((early, held_out)),
    )
