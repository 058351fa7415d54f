"""What tracing needs to know of a fit."""

from __future__ import annotations

from numbers import Integral
from typing import Any, Protocol

from torch import Tensor

from whence.curvature import Bread, Meats, Sandwich
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
    def left_out(self) -> LeftOut:
        """Leave-one-out residuals and leverages."""

    @property
    def weighing(self) -> Weighing:
        """How leave-one-out residuals came from leverages."""

    @property
    def residuals(self) -> Tensor:
        """(n, k) residuals of the training examples."""

    @property
    def sigma(self) -> Tensor:
        """(k, k) noise covariance."""


def check_count(given: Any, name: str) -> None:
    """Raise unless a number of examples is a whole number above zero."""
    if isinstance(given, bool) or not isinstance(given, Integral) or int(given) < 1:
        raise InputError(f"expected {name} to be a whole number of examples, at least 1, got {given!r}.")
