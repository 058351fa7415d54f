"""From recorded calls to tangents.

A model runs under a `Recorder`; a walk through its autograd graph finds the recorded uses that the outputs depend on,
and uses that were not recorded; the recorded uses say in which form the gradient of each parameter comes, and so which
parameters are one block; backward passes go down to the outputs of the recorded calls and no further, and the rules
turn what arrives there into the tangents of the blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge

from whence.data.batches import Inputs
from whence.jacobian.gradients import (
    Block,
    Concatenated,
    Dense,
    Factor,
    Kind,
    Kronecker,
    Layout,
    Padded,
    Rows,
    Tangent,
    Whole,
)
from whence.jacobian.rules.base import Record, Root, Tracked
from whence.jacobian.rules.embeddings import scatter
from whence.jacobian.softmax import Columns

Call = Callable[[Inputs], Tensor]
"""Runs the user's model on a batch: outputs (n, k)."""


@contextmanager
def differentiable() -> Iterator[None]:
    """Build graphs, even in the caller's `no_grad` or inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


# --- The autograd graph between the outputs and the recorded uses -----------------------------------------------------
#
# Outputs depend on a parameter through this graph alone. A walk that stops at recorded uses and still arrives at a
# parameter has found a use that was not recorded, even if its gradient is zero on this batch. And where a function in
# between may move one row of a batch to another, the places of the examples are verified on this batch.

Edge = tuple[Any, int]
"""A node of the graph, and which of its outputs."""


class Walk(NamedTuple):
    """What a walk from the outputs to the parameters found."""

    reached: list[Record]  # that the outputs depend on, without those of no rows, as of an expert without examples
    unrecorded: set[str]  # parameters that the outputs depend on in a way that was not recorded
    may_reorder: bool  # whether some function may move rows of the batch to other rows, as sorting does


def walk(outputs: Tensor, records: Sequence[Record], parameters: Mapping[str, Tensor]) -> Walk:
    """Go from the outputs (n, k) back to parameters and recorded uses, and no further."""
    if not outputs.requires_grad:
        return Walk([], set(), False)
    names = {id(parameter): name for name, parameter in parameters.items()}
    stops: dict[Edge, list[int]] = {}
    for at, record in enumerate(records):
        stops.setdefault((record.edge.node, record.edge.output_nr), []).append(at)
    reached: set[int] = set()
    unrecorded: set[str] = set()
    may_reorder, n = False, len(outputs)
    first = get_gradient_edge(outputs)
    edges: list[Edge] = [(first.node, first.output_nr)]
    visited = set()
    while edges:
        edge = edges.pop()
        if edge in stops:
            new = [at for at in stops[edge] if at not in reached]
            reached.update(new)
            edges.extend(edge for at in new for edge in records[at].input_edges)
            continue
        node = edge[0]
        if node is None or node in visited:
            continue
        visited.add(node)
        following = node.next_functions
        if not following:
            name = names.get(id(getattr(node, "variable", None)))
            if name is not None:
                unrecorded.add(name)
            continue
        if not may_reorder and n > 1:
            may_reorder = _may_reorder(node, n, last=node is first.node)
        edges.extend(following)
    used = [records[at] for at in sorted(reached) if 0 not in records[at].shape]
    return Walk(used, unrecorded, may_reorder)


def _may_reorder(node: Any, n: int, last: bool) -> bool:
    if isinstance(node, BackwardCFunction):  # of a user's own autograd function, not of ours
        return not isinstance(node, Columns._backward_cls)
    check = REORDERING.get(type(node).__name__)
    return check is not None and check(node, n, last)


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
    """Rows of a tensor that is no parameter, looked up by an index."""
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
    """Size of an axis of the node's output; `None` if this version of torch does not store it."""
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
"""Functions that may move one row of a batch to another, by the names of their nodes."""


# --- Blocks: which gradients are kept together, and in which form -----------------------------------------------------


@dataclass(frozen=True)
class GradientForm:
    """The form in which one use gives the gradient of one parameter."""

    kind: Kind
    role: str = "weight"
    groups: int = 1
    transposed: bool = False
    partner: str | None = None  # the bias of a weight, the weight of a bias

    def fits(self, name: str, block: Block) -> bool:
        """Whether the block of its parameter can hold a gradient of this form."""
        if block.kind == "dense":
            return True
        if name != block.parameters[0]:  # the bias of a weight
            return self.role == "bias" and self.partner == block.parameters[0]
        if self.kind != block.kind:
            return False
        if block.kind == "rows":
            return True
        joint = not block.has_bias or self.partner == block.parameters[1]
        return joint and (self.groups, self.transposed) == (block.groups, block.transposed)


def gradient_forms(record: Record) -> Iterable[tuple[str, GradientForm]]:
    """Every parameter behind a record, with the form of its gradient."""
    use, partners = record.use, _partners(record)
    for role, source in record.roles.items():
        name, view = source.parameter, source.view
        if name is None or view is None:
            for root in source.roots:
                yield root.parameter, GradientForm("dense" if root.index is None else "rows")
        elif role == "weight" and use.kind == "kronecker" and (view.rows is None or not use.transposed):
            # Some rows of a weight stay in factors where they are outputs: the gradient of the others is zero.
            flipped = use.transposed != view.transposed
            yield name, GradientForm("kronecker", role, use.groups, flipped, partners.get(role))
        elif role == "weight" and use.kind == "rows" and source.whole:
            yield name, GradientForm("rows")
        else:
            yield name, GradientForm("dense", role, partner=partners.get(role))


def _partners(record: Record) -> dict[str, str]:
    """The parameter behind the bias for the role "weight", and the other way round, where both may be one block."""
    weight, bias = record.roles.get("weight"), record.roles.get("bias")
    if not record.use.joint or weight is None or bias is None or weight.view is None or bias.view is None:
        return {}
    if weight.view.rows != bias.view.rows or weight.parameter == bias.parameter:
        return {}
    return {"weight": bias.roots[0].parameter, "bias": weight.roots[0].parameter}


def make_blocks(records: Iterable[Record], parameters: Mapping[str, Tensor]) -> tuple[Block, ...]:
    """Group parameters into blocks, in their order. A parameter used in several forms, or not at all, is dense."""
    forms: dict[str, set[GradientForm]] = {name: set() for name in parameters}
    for record in records:
        for name, form in gradient_forms(record):
            forms[name].add(form)
    blocks: list[Block] = []
    done: set[str] = set()
    for name in parameters:
        if name not in done:
            names = _weight_and_bias(name, forms)
            kinds = {(form.kind, form.groups, form.transposed) for form in forms[names[0]]}
            kind, groups, transposed = kinds.pop() if len(kinds) == 1 else ("dense", 1, False)
            shapes = tuple(tuple(parameters[each].shape) for each in names)
            blocks.append(Block(names[0], names, shapes, kind, groups, transposed))
            done.update(names)
    return tuple(blocks)


def _weight_and_bias(name: str, forms: Mapping[str, set[GradientForm]]) -> tuple[str, ...]:
    """Both names, if every use of either is a use of both; else this one."""
    if len(forms[name]) == 1:
        (form,) = forms[name]
        partner = form.partner
        if partner is not None and len(forms[partner]) == 1 and {one.partner for one in forms[partner]} == {name}:
            return (name, partner) if form.role == "weight" else (partner, name)
    return (name,)


# --- Backward passes --------------------------------------------------------------------------------------------------


def gradients(
    outputs: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, *, keep: bool = True, batched: bool = False
) -> list[Tensor]:
    """Gradients in the leaves, dense; zeros for those that the outputs do not depend on.

    Torch's own `materialize_grads` does not serve: in torch 2.4 its zeros require gradients, and no version has it for
    a batch of cotangents.
    """
    found: Sequence[Tensor | None] = [None] * len(leaves)
    if outputs.requires_grad:
        found = torch.autograd.grad(
            outputs, leaves, cotangents, retain_graph=keep, allow_unused=True, is_grads_batched=batched
        )
    lead = (len(cotangents),) if batched else ()
    filled = [leaf.new_zeros(*lead, *leaf.shape) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
    return [one.to_dense() if one.is_sparse else one for one in filled]


def pull_back(
    outputs: Tensor,
    records: Sequence[Record],
    layouts: Sequence[Layout],
    cotangents: Tensor,
    *,
    last: bool,
    batched: bool = False,
) -> list[UseGradients]:
    """Pull cotangents (c, n, k) back to every use, in one vectorised pass if `batched`; `last` frees the graph."""
    if not records:
        return []
    uses = [UseGradients(record, layout, len(outputs)) for record, layout in zip(records, layouts, strict=True)]
    edges = [record.edge for record in records]
    passes = [cotangents] if batched else [*cotangents]
    for number, cotangent in enumerate(passes):
        keep = not last or number + 1 < len(passes)
        found = _vectorized(outputs, edges, cotangent, keep) if batched else _pulled(outputs, edges, cotangent, keep)
        for use, grads in zip(uses, found, strict=True):
            use.add(grads if batched or grads is None else grads.unsqueeze(0), len(cotangents) if batched else 1)
    return uses


def _pulled(outputs: Tensor, edges: Sequence[GradientEdge], cotangent: Tensor, keep: bool) -> Sequence[Tensor | None]:
    return torch.autograd.grad(outputs, edges, cotangent, retain_graph=keep, allow_unused=True)


def _vectorized(outputs: Tensor, edges: Sequence[GradientEdge], cotangents: Tensor, keep: bool) -> list[Tensor | None]:
    """All cotangents in one pass.

    Torch's own `is_grads_batched` has an older vmap, in which convolutions run in a loop over the cotangents.
    """
    reached: list[bool] = []  # which edges have a gradient

    def pulled(cotangent: Tensor) -> tuple[Tensor, ...]:
        found = _pulled(outputs, edges, cotangent, keep)
        reached[:] = [one is not None for one in found]
        return tuple(one for one in found if one is not None)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the kernels that run in a loop all the same
        grads = iter(torch.func.vmap(pulled)(cotangents))
    return [next(grads) if one else None for one in reached]


class UseGradients:
    """Gradients in the output of one recorded use.

    Where they are larger than the gradients in its parameters (norms, biases alone, bare parameters), they are reduced
    after each backward pass, so that those of all cotangents are never held together.
    """

    def __init__(self, record: Record, layout: Layout, examples: int) -> None:
        self.record, self.layout, self.examples = record, layout, examples
        self.grads: list[Tensor] = []  # (n, c, ...) in the output, a few of all cotangents each; none if reduced
        self._reduced: dict[str, list[Tensor]] = {role: [] for role in record.roles}
        self._reduces = record.use.kind == "dense" or "weight" not in record.roles
        self._use = record.use.precomputed() if self._reduces else record.use

    def add(self, grads: Tensor | None, cotangents: int) -> None:
        """Add gradients (c, *shape) in the output; `None` for zeros."""
        if grads is None:
            shape, dtype, device = self.record.output
            grads = torch.zeros((), dtype=dtype, device=device).expand(cotangents, *shape)
        grads = self.layout.canonical(grads, self.examples, lead=1)  # (n, c, ...)
        if not self._reduces:
            self.grads.append(grads)
            return
        for role, values in self._reduced.items():
            values.append(self._dense(role, grads))

    def _dense(self, role: str, grads: Tensor) -> Tensor:
        values = self._use.dense(role, self.layout, grads)
        return values.reshape(*grads.shape[:2], *self.record.roles[role].tensor.shape)

    def dense(self, role: str) -> Tensor:
        """Gradients (n, c, *shape) in the tensor of a role."""
        if not self._reduces:
            return _concatenate([self._dense(role, grads) for grads in self.grads])
        self._reduced[role] = [_concatenate(self._reduced[role])]
        return self._reduced[role][0]

    def of_parameter(self, name: str) -> Iterator[tuple[Root, Tensor]]:
        """Gradients (n, c, *shape) in a parameter, or in rows taken from it."""
        for role, source in self.record.roles.items():
            if any(root.parameter == name for root in source.roots):
                found = _to_roots(source, self.dense(role))
                yield from ((root, grads) for root, grads in found if root.parameter == name)


def _concatenate(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts], 1)  # of one part, cat would make a copy


def _to_roots(source: Tracked, grads: Tensor) -> Iterator[tuple[Root, Tensor]]:
    """Pull gradients (n, c, *shape) in a tracked tensor back to the parameters that it was computed from."""
    roots, view = source.roots, source.view
    if roots[0].tensor is source.tensor:
        yield roots[0], grads
    elif view is not None and view.rows is None:
        yield roots[0], grads.transpose(-1, -2) if view.transposed else grads
    else:
        flat = grads.flatten(0, 1).to(source.tensor.dtype)
        found = torch.autograd.grad(
            source.tensor, [r.tensor for r in roots], flat, retain_graph=True, allow_unused=True, is_grads_batched=True
        )
        for root, values in zip(roots, found, strict=True):
            if values is not None:
                yield root, values.unflatten(0, grads.shape[:2])


# --- Tangents ---------------------------------------------------------------------------------------------------------

LARGE_PARTS = 2**18
"""On a CPU, gradients of several parameters of a block with more numbers are not copied next to each other."""


def tangents_of(
    blocks: Sequence[Block], uses: Sequence[UseGradients], outputs: Tensor, cotangents: int
) -> list[Tangent]:
    """The tangents of all blocks, each from all uses of its parameters; zero where there are none."""
    by_parameter: dict[str, dict[int, UseGradients]] = {}
    for at, use in enumerate(uses):
        for name in use.record.parameters:
            by_parameter.setdefault(name, {})[at] = use
    empty = outputs.detach().new_zeros(len(outputs), cotangents, 0)
    tangents = []
    for block in blocks:
        own = {at: use for name in block.parameters for at, use in by_parameter.get(name, {}).items()}
        tangents.append(_tangent(block, [own[at] for at in sorted(own)], empty))
    return tangents


def _tangent(block: Block, uses: Sequence[UseGradients], empty: Tensor) -> Tangent:
    if block.kind == "kronecker":
        return _kronecker(block, uses, empty)
    if block.kind == "rows":
        return _rows(block, uses, empty)
    parts = tuple(_dense(block, at, uses, empty) for at in range(len(block.parameters)))
    separate = len(parts) == 1 or (not parts[0].is_cuda and sum(part.numel() for part in parts) > LARGE_PARTS)
    return Dense(block, parts if separate else (torch.cat(parts, -1),))


def _kronecker(block: Block, uses: Sequence[UseGradients], empty: Tensor) -> Kronecker:
    e, o, i = block.matrix_shape
    factors: list[tuple[Factor, Factor]] = []
    for use in uses:
        source = use.record.roles.get("weight")
        if source is None or source.parameter != block.parameters[0]:
            continue
        pairs = [use.record.use.factors(use.layout, grads, block.has_bias) for grads in use.grads]
        a, g = pairs[0]
        if len(pairs) > 1:
            g = Concatenated(tuple(g for _, g in pairs), "cotangents")
        if source.view is not None and source.view.rows is not None:
            g = Padded(g, source.view.rows[0], o)
        factors.append((a, g))
    if not factors:
        n, c, _ = empty.shape
        return Kronecker(block, Whole(empty.new_zeros(n, e, 0, i)), Whole(empty.new_zeros(n, c, e, 0, o)))
    if len(factors) == 1:
        return Kronecker(block, *factors[0])
    a, g = (Concatenated(tuple(side), "positions") for side in zip(*factors, strict=True))
    return Kronecker(block, a, g)


def _rows(block: Block, uses: Sequence[UseGradients], empty: Tensor) -> Rows:
    n, c, _ = empty.shape
    index = [torch.zeros(n, 0, dtype=torch.long, device=empty.device)]
    values = [empty.new_zeros(n, c, 0, block.matrix_shape[1])]
    for use in uses:
        source = use.record.roles.get("weight")
        if source is not None and source.parameter == block.parameters[0]:
            found = [use.record.use.rows(use.layout, torch.cat(use.grads, 1))]
        else:
            roots = use.of_parameter(block.parameters[0])
            found = [_common_rows(root.index, grads) for root, grads in roots if root.index is not None]
        index += [one for one, _ in found]
        values += [one for _, one in found]
    if len(index) == 2:
        return Rows(block, index[1], values[1])
    return Rows(block, torch.cat(index, 1), torch.cat(values, 2))


def _dense(block: Block, at: int, uses: Sequence[UseGradients], empty: Tensor) -> Tensor:
    """The sum of all uses of one parameter, (n, c, p)."""
    name, shape = block.parameters[at], block.shapes[at]
    total: Tensor | None = None
    for use in uses:
        for root, grads in use.of_parameter(name):
            if root.index is not None:
                grads = scatter(*_common_rows(root.index, grads), shape)
            flat = grads.flatten(2) if grads.dim() > 2 else grads.unsqueeze(2)
            total = flat if total is None else total + flat
    if total is None:
        return empty.new_zeros(()).expand(*empty.shape[:2], torch.Size(shape).numel())
    return total


def _common_rows(index: Tensor, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Index (n, t) and gradients (n, c, t, d) of rows that were taken from a table for all examples alike."""
    n, c = grads.shape[:2]
    return index.flatten().expand(n, -1), grads.reshape(n, c, index.numel(), -1)
