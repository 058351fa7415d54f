"""Scikit-learn estimators whose predictions come with uncertainties and reasons.

A small network is trained to the optimum of its penalised loss, and `whence` is fitted to it. Meant for tables of
numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from whence import api
from whence.curvature import Structure
from whence.errors import InputError
from whence.influence import Explanation
from whence.results import Uncertainty
from whence.runtime.execution import Execution
from whence.tabular.network import Units, initialize, minimize

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    words = "expected scikit-learn for whence.sklearn. Install it: pip install 'scikit-learn>=1.6'."
    raise ModuleNotFoundError(words, name=error.name) from error

Array = NDArray[Any]

TOLERANCE = 1e-7  # training ends when the largest gradient over the number of examples is this small
ROUNDING = 1e-14  # a column that varies by no more than this share of its largest number is a constant


class _Network(BaseEstimator):  # type: ignore[misc]  # scikit-learn carries no annotations
    """Shared by regressor and classifier."""

    def __init__(
        self,
        hidden_layer_sizes: Sequence[int] = (32,),
        ridge: float = 1.0,
        structure: str | Structure = "exact",
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        self.hidden_layer_sizes = hidden_layer_sizes
        self.ridge = ridge
        self.structure = structure
        self.max_iter = max_iter
        self.random_state = random_state

    def uncertainty(self, X: Any) -> Uncertainty:
        """Predictions with all variances, as in `Tracer.predict`."""
        check_is_fitted(self)
        return self.tracer_.predict(self._inputs(X))

    def explain(self, X: Any, level: float = 0.95, top: int = 5, pool: Any = None) -> Explanation:
        """Verdicts as in `Tracer.explain`; training examples are given by their row in the `X` of `fit`."""
        check_is_fitted(self)
        return self.tracer_.explain(self._inputs(X), level, top, pool=None if pool is None else self._inputs(pool))

    def _inputs(self, X: Any) -> Tensor:
        return torch.from_numpy(np.array(validate_data(self, X, dtype=np.float64, reset=False)))

    def _outputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        with torch.no_grad():
            outputs: Tensor = self.network_(self._inputs(X))
        return outputs

    def _train(self, x: Tensor, y: Tensor, outputs: int, classes: bool) -> None:
        if self.max_iter < 1:
            raise InputError(f"expected max_iter to be at least 1, got {self.max_iter!r}.")
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        sizes = pairwise((x.shape[1], *self.hidden_layer_sizes, outputs))
        layers = [(nn.Linear(*size, dtype=torch.float64, device="cpu"), nn.Tanh()) for size in sizes]
        spread = _spread(x - x.mean(0), x.abs().amax(0))
        # All outputs share one scale, so that squared errors in their own units equal the network's up to that scale.
        scale = 1.0 if classes else float(_spread((y - y.mean(0)).reshape(-1, 1), y.abs().amax()))
        units = [] if classes else [Units(y.mean(0), scale)]
        network = nn.Sequential(Units(-x.mean(0) / spread, 1 / spread), *chain(*layers[:-1]), layers[-1][0], *units)
        initialize(network, torch.Generator("cpu").manual_seed(seed))

        def loss() -> Tensor:
            if classes:
                return nn.functional.cross_entropy(network(x), y)
            return nn.functional.mse_loss(network(x) / scale, y / scale) * outputs / 2

        options: dict[str, Any] = {"max_iter": self.max_iter, "max_eval": 2 * self.max_iter + 20}
        options |= {"tolerance_grad": TOLERANCE, "tolerance_change": 1e-14}
        optimizer = minimize(network, loss, self.ridge / len(x), **options)
        self.n_iter_ = int(optimizer.state[next(network.parameters())]["n_iter"])
        self.network_ = network.eval()
        self.tracer_ = api.fit(
            network,
            [(x, y)],
            "categorical" if classes else "gaussian",
            self.structure,
            ridge=self.ridge * scale**2,  # squared errors are in squared units of the targets
            progress=False,
            execution=Execution(distributed=False),
        )


class WhenceRegressor(RegressorMixin, _Network):  # type: ignore[misc]  # no annotations there
    """A network for regression whose predictions come with standard deviations and reasons.

    Inputs and targets are scaled internally. The network is trained by L-BFGS on the sum of squared errors (in units of
    the targets' variance) plus `ridge` ||w||^2, and `whence` uses the same ridge.

    Args:
        hidden_layer_sizes: widths of the hidden layers, with tanh.
        ridge: lambda; the larger, the smoother.
        structure: as for `whence.fit`; "exact" while examples times outputs, or weights, are some thousands.
        max_iter: most iterations of L-BFGS. `tracer_.diagnostics` says how far from the optimum training ended ("Newton
            change").
        random_state: seed of the initial weights.

    Attributes:
        tracer_: a `whence.Tracer`, for everything else: attributions, what-if, suggestions, diagnostics. It holds
            the training set. Its methods take tensors with the columns of `X`, in the units of `fit`.
        network_: the trained network, in the units of inputs and targets.
        n_iter_: iterations of L-BFGS.

    Examples:
        >>> import numpy as np
        >>> X = np.linspace(-3, 3, 60).reshape(-1, 1)
        >>> model = WhenceRegressor(random_state=0).fit(X, np.sin(X[:, 0]) + 0.1 * np.cos(77 * X[:, 0]))
        >>> mean, std = model.predict([[0.0], [30.0]], return_std=True)
        >>> mean.shape, bool(std[1] > std[0])
        ((2,), True)
        >>> model.explain([[0.0]]).verdicts
        ('confident',)
    """

    def fit(self, X: Any, y: Any) -> WhenceRegressor:
        """Train on (n, i) inputs and (n,) or (n, k) targets."""
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True, ensure_min_samples=2)
        self._shape = y.shape[1:]  # of each prediction
        targets = torch.from_numpy(np.array(y, dtype=np.float64).reshape(len(y), -1))
        self._train(torch.from_numpy(np.array(X)), targets, targets.shape[1], classes=False)
        return self

    def predict(self, X: Any, return_std: bool = False, estimator: str = "hec3") -> Array | tuple[Array, Array]:
        """Predict (m, i) inputs; if `return_std`, also the standard deviations over other training sets.

        They are those of the regression function by `estimator` ("hec3", "ho" or another one of `whence.Uncertainty`).
        The noise of a new observation comes in addition.
        """
        if not return_std:
            return self._outputs(X).reshape(-1, *self._shape).numpy()
        found = self.uncertainty(X)
        mean, std = (one.reshape(-1, *self._shape).numpy() for one in (found.mean, found.variance(estimator).sqrt()))
        return mean, std

    def __sklearn_tags__(self) -> Any:
        """Allow several outputs."""
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags


class WhenceClassifier(ClassifierMixin, _Network):  # type: ignore[misc]  # no annotations there
    """A network for classification whose probabilities come with standard deviations and reasons.

    Inputs are scaled internally. The network is trained by L-BFGS on the sum of cross-entropies plus
    `ridge` / 2 ||w||^2, and `whence` uses the same ridge. Arguments and attributes are those of `WhenceRegressor`.

    Attributes:
        classes_: labels, in the order of the columns of `predict_proba`.

    Examples:
        >>> import numpy as np
        >>> X = np.linspace(-3, 3, 60).reshape(-1, 1)
        >>> model = WhenceClassifier(random_state=0).fit(X, np.where(X[:, 0] > 0, "high", "low"))
        >>> model.predict([[2.0]]).tolist()
        ['high']
        >>> chance, std = model.predict_proba([[0.0], [2.0]], return_std=True)
        >>> bool(std[0, 0] > std[1, 0])
        True
    """

    classes_: Array

    def fit(self, X: Any, y: Any) -> WhenceClassifier:
        """Train on (n, i) inputs and (n,) labels of any kind."""
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"expected labels of two classes or more, got one class, {self.classes_[0]!r}.")
        labels = torch.from_numpy(codes.astype(np.int64))
        self._train(torch.from_numpy(np.array(X)), labels, len(self.classes_), classes=True)
        return self

    def predict(self, X: Any) -> Array:
        """(m,) the most probable label of each row."""
        best = self._outputs(X).argmax(1).numpy()
        return self.classes_[best]  # type: ignore[no-any-return]  # an array of labels

    def predict_proba(self, X: Any, return_std: bool = False, estimator: str = "hec3") -> Array | tuple[Array, Array]:
        """(m, k) probabilities; if `return_std`, also their standard deviations by `estimator` and the delta method."""
        if not return_std:
            return self._outputs(X).softmax(1).numpy()
        found = self.uncertainty(X)
        return found.probabilities.numpy(), found.probability_std(estimator).numpy()


def _spread(deviations: Tensor, size: Tensor) -> Tensor:
    """Root mean squares of deviations, or one where they are rounding errors of numbers of this size: no scale."""
    spread = deviations.square().mean(0).sqrt()
    return torch.where(spread > ROUNDING * size, spread, torch.ones_like(spread))
