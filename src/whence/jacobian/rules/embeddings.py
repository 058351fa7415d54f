"""Tables looked up by index: `F.embedding`, `F.embedding_bag`, `table[index]`, `index_select`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from whence.errors import UnsupportedLayerError
from whence.jacobian.gradients import Kind, Layout
from whence.jacobian.rules.base import Arguments, Function, Keywords, Reader, Recorder, Use, bind, positions


@dataclass(frozen=True)
class RowsUse(Use):
    """Row index[t] of a table (V, *width) at every position t."""

    index: Tensor  # the rows, (...)
    table: tuple[int, ...]  # shape of the table
    padding: int | None = None  # a row whose gradient is zero
    kind: ClassVar[Kind] = "rows"

    def axes(self, shape: Sequence[int]) -> Iterable[int]:
        """All but the axes of the rows."""
        return range(len(shape) - len(self.table) + 1)

    def rows(self, layout: Layout, grads: Tensor) -> tuple[Tensor, Tensor]:
        """Index (n, t) and gradients (n, c, t, d)."""
        n, width = grads.shape[0], len(self.table) - 1
        index = positions(layout.canonical(self.index, n), 0)
        grads = positions(grads, width, lead=2)
        grads = grads.flatten(3) if width else grads.unsqueeze(3)
        if self.padding is not None:
            grads = grads * (index != self.padding % self.table[0])[:, None, :, None]
        return index, grads

    def dense(self, role: str, layout: Layout, grads: Tensor) -> Tensor:
        """Add the rows into a table of zeros."""
        return scatter(*self.rows(layout, grads), self.table)


def scatter(index: Tensor, values: Tensor, table: Sequence[int]) -> Tensor:
    """Add values (n, c, t, d) at rows index (n, t) of tables: (n, c, *table)."""
    n, c, _, d = values.shape
    out = values.new_zeros(n, c, table[0], d)
    return out.scatter_add_(2, index[:, None, :, None].expand_as(values), values).reshape(n, c, *table)


def refuse_rescaling(given: Mapping[str, Any], options: Sequence[str] = ("max_norm", "scale_grad_by_freq")) -> None:
    """Raise for options where autograd's gradient is not the derivative, or the forward pass changes the weight."""
    for option in options:
        value = given.get(option)
        if value is not None and value is not False:  # a max_norm of zero too
            raise UnsupportedLayerError(
                f"expected an embedding without {option}, got {option}={value}: it changes the weight or its "
                f"gradient by the batch at hand. Set {option} to its default before the fit."
            )


def look_up(recorder: Recorder, out: Tensor, weight: Tensor, index: Tensor, padding: int | None) -> Any:
    """Record rows of a table, or track them if all examples share the index (positions)."""
    source = recorder.source(weight)
    if source is None:
        return out
    if recorder.has_batch_axis("rows", [source], index.shape):
        recorder.record(RowsUse(index, tuple(weight.shape), padding), out, weight=weight)
    else:
        recorder.track(out, source, index=index if source.transposed is False and padding is None else None)
    return out


def embedding(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`F.embedding(index, weight)`."""
    given = bind(TABLE, args, kwargs)
    if not recorder.tracks(given["weight"]):
        return function(*args, **kwargs)
    refuse_rescaling(given)
    out = function(*args, **kwargs)
    return look_up(recorder, out, given["weight"], given["input"], given.get("padding_idx"))


def index_select(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`torch.index_select(table, 0, index)`."""
    out = function(*args, **kwargs)
    given = bind(("input", "dim", "index"), args, kwargs)
    return look_up(recorder, out, given["input"], given["index"], None) if given["dim"] == 0 else out


def embedding_bag(recorder: Recorder, function: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`F.embedding_bag(index, weight)` of bags of one length, sums and means, as sums over an embedding."""
    given = bind(BAG, args, kwargs)
    index, weight, mode = given["input"], given["weight"], given.get("mode", "mean")
    if not recorder.tracks(weight) or mode == "max" or index.dim() == 1:
        return function(*args, **kwargs)
    refuse_rescaling(given)
    factors = given.get("per_sample_weights")
    factors = torch.ones_like(index, dtype=weight.dtype) if factors is None else factors
    if given.get("padding_idx") is not None:
        factors = factors * (index != given["padding_idx"] % weight.shape[0])
    if mode == "mean":
        factors = factors / factors.sum(1, keepdim=True).clamp(min=1)
    with recorder:
        return (F.embedding(index, weight) * factors.unsqueeze(2)).sum(1)


TABLE = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
BAG = (
    *("input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse"),
    *("per_sample_weights", "include_last_offset", "padding_idx"),
)

READERS: dict[Function, Reader] = {
    F.embedding: embedding,
    F.embedding_bag: embedding_bag,
    torch.index_select: index_select,
    Tensor.index_select: index_select,
}
