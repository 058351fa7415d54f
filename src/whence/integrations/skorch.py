"""Fit `whence` to a trained skorch net."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from skorch import NeuralNet
from torch import Tensor, nn

from whence import api
from whence.curvature import Structure
from whence.errors import InputError
from whence.integrations import decay_of, ridge_of
from whence.likelihoods import Likelihood
from whence.runtime.execution import by_one_process
from whence.tracer import Tracer

EPSILON = 1e-7  # skorch adds this to probabilities before the logarithm, in single precision


class LogProbabilities(nn.Module):
    """Logarithms of a module's probabilities: logits for which softmax returns the same probabilities."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """(n, k) logarithms of the probabilities."""
        probabilities: Tensor = self.module(*args, **kwargs)
        return (probabilities + EPSILON).log()


def fit(
    net: NeuralNet,
    X: Any,
    y: Any = None,
    likelihood: str | Likelihood | None = None,
    structure: str | Structure = "exact",
    *,
    ridge: float | Literal["auto", "loo"] | None = None,
    **options: Any,
) -> Tracer:
    """Fit `whence` to a net and the data it was trained on.

    The module is left in evaluation mode, which predictions need; `net.fit` changes it back itself. Predict with
    `tracer.predict(loader(net, X))`.

    Args:
        net: after `net.fit(X, y)`.
        X: as for `net.fit`.
        y: as for `net.fit`.
        likelihood: as for `whence.fit`; by default derived from the net's criterion. With `NLLLoss`, for which a skorch
            module returns probabilities, the fit uses their logarithms.
        structure: as for `whence.fit`.
        ridge: lambda, "auto" or "loo", as for `whence.fit`. By default it corresponds to the optimiser's weight decay,
            for a criterion that is a mean (`reduction="mean"`) over all that count; "auto" without a decay.
        options: other options of `whence.fit`.
    """
    if not getattr(net, "initialized_", False):
        raise InputError("expected a trained net, got one that was not initialised. Call net.fit(X, y) first.")
    criterion = net.criterion_
    loss = likelihood_of(criterion) if likelihood is None else likelihood
    data = loader(net, X, y)
    net.module_.eval()
    model = (LogProbabilities(net.module_) if isinstance(criterion, nn.NLLLoss) else net.module_).eval()
    lam = ridge_of(decay_of([net.optimizer_]), data, loss, model) if ridge is None else ridge
    options["execution"] = by_one_process(options.get("execution"))  # a process that trains alone fits alone
    return api.fit(model, data, loss, structure, ridge=lam, **options)


def loader(net: NeuralNet, X: Any, y: Any = None) -> Iterable[Any]:
    """Batches of a net's inputs and targets, in order, as the net makes them for predictions."""
    found: Iterable[Any] = net.get_iterator(net.get_dataset(X, y), training=False)
    return found


def likelihood_of(criterion: nn.Module) -> str:
    """The likelihood of a criterion.

    Examples:
        >>> likelihood_of(nn.CrossEntropyLoss())
        'categorical'
    """
    if isinstance(criterion, nn.MSELoss):
        return "gaussian"
    if isinstance(criterion, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return "categorical"
    if isinstance(criterion, nn.BCEWithLogitsLoss):
        return "bernoulli"
    raise InputError(
        f"expected MSELoss, CrossEntropyLoss, NLLLoss or BCEWithLogitsLoss as criterion, got "
        f"{type(criterion).__name__}. Pass likelihood=..., if the module's outputs are what it is for."
    )
