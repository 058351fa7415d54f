"""What a report asks of a fit."""

from __future__ import annotations

from typing import Any, Protocol

from whence.results import Diagnostics, Uncertainty
from whence.tracing.fitted import Fitted


class Reportable(Fitted, Protocol):
    """A fitted network as `Tracer` offers it; reports sit below the tracer, which offers them as a method."""

    @property
    def diagnostics(self) -> Diagnostics:
        """What was approximated, guarded or repaired."""

    @property
    def ridge(self) -> float:
        """Lambda, on the sum scale."""

    @property
    def degrees_of_freedom(self) -> float:
        """The trace of the hat matrix."""

    def predict(self, x: Any, *, covariance: bool | None = None) -> Uncertainty:
        """Predictions with variances."""
