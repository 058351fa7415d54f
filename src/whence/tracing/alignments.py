"""Alignments of predictions with training examples, in the precision of the algebra."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from whence.curvature.base import Alignments
from whence.tangents.batches import Inputs

from .fitted import Fitted


def alignments(fitted: Fitted, inputs: Inputs) -> Alignments:
    """As `Bread.alignments` yields them, which is in the precision they were computed in."""
    for where, chunks in fitted.bread.alignments(inputs):
        yield where, _precise(fitted, chunks)


def _precise(fitted: Fitted, chunks: Iterator[tuple[slice, Tensor]]) -> Iterator[tuple[slice, Tensor]]:
    return ((there, aligned.to(fitted.problem.dtype)) for there, aligned in chunks)
