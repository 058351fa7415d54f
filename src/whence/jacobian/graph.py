"""The autograd graph between a model's outputs and the recorded uses of its parameters, walked once for every batch.

Whatever a model does, its outputs depend on a parameter through this graph alone. A walk that stops at recorded uses
and still arrives at a parameter has found a use that nobody recorded, whether or not its gradient happens to be zero on
this batch. And a function on the way that may carry one row of a batch to another says that where the examples are has
to be proved on this batch, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from whence.jacobian.rules.base import Record

Edge = tuple[Any, int]
"""A node of the graph, and which of its outputs."""


@dataclass(frozen=True)
class Walk:
    """What lies between the outputs and the parameters.

    Attributes:
        reached: places of the records that the outputs depend on.
        unrecorded: parameters that the outputs depend on in a way that was not recorded.
        may_reorder: whether some function may carry rows of the batch to other rows, as sorting does.
    """

    reached: list[int]
    unrecorded: set[str]
    may_reorder: bool


def walk(outputs: Tensor, records: Sequence[Record], parameters: Mapping[str, Tensor]) -> Walk:
    """Go from the outputs (n, k) back to parameters and recorded uses, and no further."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    stops: dict[Edge, list[int]] = {}
    for at, record in enumerate(records):
        stops.setdefault((record.edge.node, record.edge.output_nr), []).append(at)
    reached: set[int] = set()
    unrecorded: set[str] = set()
    may_reorder, n = False, len(outputs)
    if not outputs.requires_grad:
        return Walk([], set(), False)
    first = get_gradient_edge(outputs)
    edges: list[Edge] = [(first.node, first.output_nr)]
    seen = set()
    while edges:
        edge = edges.pop()
        if edge in stops:
            new = [at for at in stops[edge] if at not in reached]
            reached.update(new)
            edges.extend(edge for at in new for edge in records[at].input_edges)
            continue
        node = edge[0]
        if node is None or node in seen:
            continue
        seen.add(node)
        following = node.next_functions
        if not following:
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                unrecorded.add(name)
            continue
        if not may_reorder and n > 1:
            may_reorder = _may_reorder(node, n, last=node is first.node)
        edges.extend(following)
    return Walk(sorted(reached), unrecorded, may_reorder)


_CHECKS: dict[type, Callable[[Any, int, bool], bool] | None] = {}
"""How to tell whether nodes of a type move rows; `None` for those that never do."""


def _may_reorder(node: Any, n: int, last: bool) -> bool:
    kind = type(node)
    if kind not in _CHECKS:
        _CHECKS[kind] = _always if issubclass(kind, BackwardCFunction) else REORDERING.get(kind.__name__)
    way = _CHECKS[kind]
    return way is not None and way(node, n, last)


def _always(node: Any, n: int, last: bool) -> bool:
    return True


def _along(node: Any, n: int, last: bool) -> bool:
    """Along one axis (`gather`, `scatter`, `sort`) that may hold the examples; of the outputs only the first does."""
    axis = _signed(getattr(node, "_saved_dim", 0))
    if last and axis == 1:
        return False
    size = _size(node, axis)
    return size is None or size % n == 0


def _along_all(node: Any, n: int, last: bool) -> bool:
    """Along several axes (`flip`, `roll`); all of them if none is named."""
    axes = tuple(getattr(node, "_saved_dims", ())) or (0,)
    return any((size := _size(node, _signed(axis))) is None or size % n == 0 for axis in axes)


def _by_index(node: Any, n: int, last: bool) -> bool:
    """`x[index]`: every indexed axis may hold the examples, but for `x[arange(n), index]`, which keeps the rows."""
    found = getattr(node, "_saved_indices", None)
    if found is None:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)  # of the tensor that is read; one written to keeps its shape
    first = True
    for axis, index in enumerate(found):
        if index is None:
            continue
        in_order = first and axis == 0 and len(index) == n and _counts_up(index)
        first = False
        if in_order:
            return False
        size = _size(node, axis) if sizes is None else sizes[axis]
        if size is None or size % n == 0:
            return True
    return False


def _counts_up(index: Tensor) -> bool:
    """0, 1, 2, ... along the first axis, whatever the others."""
    if index.dtype == torch.bool:
        return False
    steps = torch.arange(len(index), device=index.device).reshape(-1, *(1,) * (index.dim() - 1))
    return bool((index == steps).all())


def _joined_rows(node: Any, n: int, last: bool) -> bool:
    """`cat` of pieces of a batch."""
    return _signed(getattr(node, "_saved_dim", 0)) == 0


def _stacked_rows(node: Any, n: int, last: bool) -> bool:
    """`stack` of as many tensors as there are examples."""
    return _signed(getattr(node, "_saved_dim", 0)) == 0 and len(node.next_functions) == n


def _looked_up(node: Any, n: int, last: bool) -> bool:
    """Rows of a tensor that is no parameter, taken by an index."""
    source = node.next_functions[0][0]
    return source is not None and bool(source.next_functions)


def _mixed(node: Any, n: int, last: bool) -> bool:
    """A product with a matrix that has as many rows and columns as there are examples: a permutation, perhaps."""
    sizes = tuple(getattr(node, "_saved_self_sym_sizes", None) or getattr(node, "_saved_self", torch.empty(0)).shape)
    return sizes[-2:] == (n, n) and sizes[:-2] in ((), (1,))


def _product(node: Any, n: int, last: bool) -> bool:
    """The same of `bmm`, which keeps its factors only where they are needed."""
    left = getattr(node, "_saved_self", None)
    return _size(node, 0) == 1 and _size(node, 1) == n and (left is None or left.shape[-1] == n)


def _signed(axis: int) -> int:
    return axis - 2**64 if axis >= 2**63 else axis


def _size(node: Any, axis: int) -> int | None:
    """Of an axis of the node's output; `None` if this torch does not tell."""
    known = getattr(node, "_input_metadata", None)
    if not known or not -len(known[0].shape) <= axis < len(known[0].shape):
        return None
    return int(known[0].shape[axis])


REORDERING: dict[str, Callable[[Any, int, bool], bool]] = {
    **dict.fromkeys(
        ("GatherBackward0", "SortBackward0", "SortBackward1", "TopkBackward0", "IndexSelectBackward0"), _along
    ),
    **dict.fromkeys((f"ScatterBackward{number}" for number in range(4)), _along),
    **dict.fromkeys(("ScatterAddBackward0", "ScatterReduceBackward0", "IndexReduceBackward0"), _along),
    **dict.fromkeys(("IndexAddBackward0", "IndexCopyBackward0"), _along),
    **dict.fromkeys(("FlipBackward0", "RollBackward0"), _along_all),
    **dict.fromkeys(("IndexBackward0", "IndexPutBackward0", "IndexPutImplBackward0"), _by_index),
    **dict.fromkeys(("TakeBackward0", "MaskedSelectBackward0", "MaskedScatterBackward0", "PutBackward0"), _always),
    **dict.fromkeys(("PackPaddedSequenceBackward0", "CopySlices", "RepeatInterleaveBackward0"), _always),
    "CatBackward0": _joined_rows,
    "StackBackward0": _stacked_rows,
    "EmbeddingBackward0": _looked_up,
    "MmBackward0": _mixed,
    "BmmBackward0": _product,
}
"""Functions that may carry one row of a batch to another, by the names of their nodes."""
