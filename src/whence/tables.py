"""Predictions as the columns of a table."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .likelihoods import Likelihood
from .outputs import Chosen


class Predictions(Protocol):
    """What a table needs to know of predictions."""

    @property
    def mean(self) -> Tensor:
        """(m, ..., k)."""

    @property
    def likelihood(self) -> Likelihood | None:
        """Of the network."""

    @property
    def chosen(self) -> Chosen | None:
        """Which outputs were looked at, unless all."""

    @property
    def estimators(self) -> tuple[str, ...]:
        """Names of the estimators."""

    @property
    def probabilities(self) -> Tensor:
        """(m, ..., k)."""

    @property
    def margin(self) -> Tensor:
        """(m, ...) or (m, ..., k)."""

    @property
    def ratio(self) -> Tensor:
        """(m, ...)."""

    def variance(self, estimator: str) -> Tensor:
        """(m, ..., k)."""

    def trace(self, estimator: str) -> Tensor:
        """(m, ...)."""

    def trace_error(self, estimator: str) -> Tensor:
        """(m, ...)."""


def columns_of(found: Predictions) -> dict[str, Tensor]:
    """One row a prediction: means, variances of each output, traces and the ratio.

    With positions, one row for each of them, and its place in front. Where only some outputs were looked at, columns
    "output" say which; of random sketches there are traces and their standard errors.
    """
    columns: dict[str, Tensor] = {}
    shape = found.mean.shape[:-1]
    if len(shape) > 1:
        axes = [torch.arange(size, device=found.mean.device) for size in (shape[0], shape[1:].numel())]
        columns["prediction"], columns["position"] = torch.meshgrid(*axes, indexing="ij")
    chosen = found.chosen
    sketches = chosen is not None and chosen.sketches
    if chosen is not None and chosen.index is not None:
        columns.update(_each("output", chosen.index, shape))
    if not sketches:
        columns.update(_each("mean", found.mean, shape))
    if found.likelihood is not None and found.likelihood.has_classes and not sketches:
        columns.update(_each("probability", found.probabilities, shape))
        if chosen is None:
            columns.update(_each("margin", found.margin, shape))
    for name in found.estimators:
        columns[name] = found.trace(name)
        if sketches:
            columns[f"{name}_error"] = found.trace_error(name)
        elif found.mean.shape[-1] > 1:
            columns.update({f"{name}_{at}": one for at, one in enumerate(found.variance(name).unbind(-1))})
    columns["ratio"] = found.ratio
    return columns


def _each(name: str, values: Tensor, shape: torch.Size) -> dict[str, Tensor]:
    """(m, ...) or (m, ..., k) values as columns."""
    if values.shape == shape or values.shape[-1] == 1:
        return {name: values.reshape(shape)}
    return {f"{name}_{output}": column for output, column in enumerate(values.unbind(-1))}
