"""What tracing needs to know of a fit."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Protocol

from torch import Tensor

from whence.curvature import Bread, Meats, NewtonStep, Sandwich
from whence.errors import InputError
from whence.estimators import LeftOut, Weighing
from whence.tangents.linearization import Linearization


class Fitted(Protocol):
    """A fitted network as `Tracer` offers it; tracing sits below the tracer, which offers it as methods."""

    @property
    def problem(self) -> Linearization:
        """The linearized training problem."""

    @property
    def bread(self) -> Bread:
        """The inverse curvature."""

    @property
    def sandwich(self) -> Sandwich:
        """Variances of predictions."""

    @property
    def meats(self) -> Meats:
        """Weights of the training examples in each estimator."""

    @property
    def step(self) -> NewtonStep:
        """The way to the optimum of the linearized model."""

    @property
    def left_out(self) -> LeftOut:
        """Leave-one-out residuals and leverages."""

    @property
    def weighing(self) -> Weighing:
        """How leave-one-out residuals came from leverages."""

    @property
    def residuals(self) -> Tensor:
        """(n, k) residuals of the training examples."""

    @property
    def loo_residuals(self) -> Tensor:
        """(n, k) the same after leaving each out."""

    @property
    def leverage(self) -> Tensor:
        """(n, k) leverages of the training examples."""

    @property
    def sigma(self) -> Tensor:
        """(k, k) noise covariance."""

    @property
    def marks(self) -> Mapping[str, int]:
        """What the model looked like when it was fitted."""

    @property
    def noise_scale(self) -> float:
        """Noise variance, or dispersion."""


def check_count(given: Any, name: str) -> None:
    """Raise unless a number of examples is a whole number above zero."""
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 1:
        raise InputError(f"expected {name} to be a whole number of examples, at least 1, got {given!r}.")


def check_level(given: Any) -> None:
    """Raise unless a level lies between zero and one."""
    if not isinstance(given, Real) or not 0.0 < float(given) < 1.0:
        raise InputError(f"expected a level between 0 and 1, got {given!r}. For 5 % of false alarms pass 0.95.")


def check_ungrouped(fitted: Fitted) -> None:
    """Raise where examples were left out in groups: their leave-one-out residuals are not their own."""
    if fitted.weighing.groups is not None:
        raise InputError(
            "expected a fit without groups to attribute variances to single examples, got one with groups, whose "
            "members count together. Fit again without groups."
        )
