"""Attribution position by position, for networks that answer at several: tokens of a text, pixels of an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from whence.errors import InputError
from whence.tangents.batches import Inputs, batch_size
from whence.tangents.views import Picked

from . import attribution
from .asking import each, predicted_outputs
from .attribution import Attribution
from .fitted import Fitted

AT_ONCE = 64
"""Positions of an input that are looked at together, each with a backward pass."""

Positions = Literal["each"] | Sequence[int] | Tensor
"""Every position; or some, counted from 0, or from the end with negative numbers."""


def by_position(fitted: Fitted, x: Any, top: int, matrix: bool, positions: Positions) -> Attribution:
    """Attribute the variances of predicted classes position by position; see `Tracer.attribute`."""
    parts, start = [], 0
    for found, size in each(
        fitted, x, lambda inputs, _: (_batch(fitted, inputs, top, matrix, positions), size_of(inputs)), plain=True
    ):
        assert found.where is not None
        parts.append(replace(found, where=found.where + found.where.new_tensor([start, 0])))
        start += size
    return attribution.join(parts)


def size_of(inputs: Inputs) -> int:
    """Number of inputs of a batch."""
    return batch_size(inputs, "this batch")


def _batch(fitted: Fitted, inputs: Inputs, top: int, matrix: bool, positions: Positions) -> Attribution:
    """One batch: an input's positions in the order in which they were asked for, without padding."""
    m, parts = size_of(inputs), []
    for view, some in views(fitted, inputs, positions):
        found = attribution.attribute(fitted, view, top, matrix, apart=True)
        rows = torch.arange(m, device=some.device).repeat_interleave(len(some))
        parts.append(replace(found, where=torch.stack([rows, some.repeat(m)], 1)))
    joined = attribution.join(parts)
    assert joined.where is not None
    order = joined.where[:, 0].argsort(stable=True)
    return joined.rows(order[shown(inputs, joined.where[order])])


def views(fitted: Fitted, inputs: Inputs, positions: Positions) -> Iterator[tuple[Picked, Tensor]]:
    """Yield views of the predicted class at some positions of each input, and which positions (c,) they are.

    Args:
        fitted: whose network is asked.
        inputs: a batch of m.
        positions: which; all by "each".
    """
    if not fitted.problem.dense:
        raise InputError(
            "expected a network that answers at several positions, (n, positions, k), for positions=..., got one row "
            f"of {fitted.problem.k} outputs an example. Leave positions out."
        )
    with torch.no_grad():
        outputs = fitted.problem.network.shaped(inputs)
    places = predicted_outputs(fitted, outputs)
    if places is None:
        raise InputError(
            "expected a network that predicts one class at each position for positions=..., got "
            f"likelihood {fitted.problem.likelihood.name!r}. Leave positions out."
        )
    wanted = read(positions, places.shape[1]).to(places.device)
    for some in wanted.split(AT_ONCE):
        yield Picked(inputs, places[:, some]), some


def read(positions: Any, count: int) -> Tensor:
    """(c,) positions among `count`, as numbers from 0.

    Examples:
        >>> read("each", 3), read([0, -1], 3)
        (tensor([0, 1, 2]), tensor([0, 2]))
    """
    if isinstance(positions, str) and positions == "each":
        return torch.arange(count, device="cpu")
    listed = positions.tolist() if isinstance(positions, Tensor) and positions.ndim == 1 else positions
    several = isinstance(listed, Sequence) and not isinstance(listed, str) and len(listed) > 0
    if not several or not all(isinstance(one, Integral) and not isinstance(one, bool) for one in listed):
        raise InputError(
            f'expected positions to be "each" or a list of whole numbers such as [0, -1], got {positions!r}.'
        )
    wrong = [one for one in listed if not -count <= one < count]
    if wrong:
        raise InputError(f"expected positions between {-count} and {count - 1}, got {wrong[0]}.")
    return torch.tensor([int(one) % count for one in listed], device="cpu")


def shown(inputs: Inputs, where: Tensor) -> Tensor:
    """(rows,) which of the rows (input, position) are no padding, as far as an "attention_mask" tells."""
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return torch.ones(len(where), dtype=torch.bool, device=where.device)
    return mask[where[:, 0], where[:, 1]] != 0
