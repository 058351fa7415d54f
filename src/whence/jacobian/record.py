"""From recorded calls to tangents.

A walk through the autograd graph finds the recorded uses that the outputs depend on, and any use that was not recorded.
The forms of the gradients decide which parameters make one block. Backward passes stop at the outputs of the recorded
calls, and the rules turn the gradients there into the tangents of the blocks.
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
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_map

from whence.data.batches import Call, Inputs, batch_size
from whence.jacobian.functionals import Columns
from whence.jacobian.gradients import Block, Dense, Kind, Kronecker, Layout, Rows, Tangent, Whole
from whence.jacobian.rules.base import CallSite, Record, Recorder, Root, Tracked, Use, substituted
from whence.jacobian.rules.channels_last import ConvolutionBackward, Relu, ScaleBackward
from whence.jacobian.rules.embeddings import scatter
from whence.runtime.model_state import plain_kernels, signed


@contextmanager
def differentiable() -> Iterator[None]:
    """Build graphs, even in the caller's `no_grad` or inference mode."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


# --- The autograd graph between the outputs and the recorded uses -----------------------------------------------------
#
# A walk that stops at recorded uses and still arrives at a parameter has found a use that was not recorded, even if its
# gradient is zero on this batch. If a function on the way may move rows of the batch, the places of the examples are
# verified on this batch.

Edge = tuple[Any, int]  # a node of the graph, and which of its outputs


class GraphUses(NamedTuple):
    """Result of a walk from the outputs to the parameters."""

    outputs: Tensor  # (n, k), with their graph
    records: list[Record]  # uses the outputs depend on, except those with no rows (an expert without examples)
    unrecorded: set[str]  # parameters that the outputs depend on in a way that was not recorded
    may_reorder: bool  # whether some function may move rows of the batch to other rows, as sorting does
    sites: Mapping[CallSite, bool]  # whether outputs of calls were taken to have a batch axis


def uses_in_graph(outputs: Tensor, recorder: Recorder, parameters: Mapping[str, Tensor]) -> GraphUses:
    """Go back from the outputs (n, k) to parameters and recorded uses, and stop there."""
    records = recorder.records
    if not outputs.requires_grad:
        return GraphUses(outputs, [], set(), False, recorder.sites)
    names = {id(parameter): (name,) for name, parameter in parameters.items()}
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
        node = edge[0]
        if edge in stops:
            new = [at for at in stops[edge] if at not in reached]
            reached.update(new)
            edges.extend(edge for at in new for edge in records[at].input_edges)
        elif node is not None and node not in visited:
            visited.add(node)
            edges.extend(node.next_functions)
            if not node.next_functions:
                unrecorded.update(names.get(id(getattr(node, "variable", None)), ()))
            elif not may_reorder and n > 1:
                may_reorder = _may_reorder(node, n, last=node is first.node)
    used = [records[at] for at in sorted(reached) if 0 not in records[at].shape]
    return GraphUses(outputs, used, unrecorded, may_reorder, recorder.sites)


OWN_FUNCTIONS: tuple[Any, ...] = (Columns, ConvolutionBackward, ScaleBackward, Relu)  # these keep rows in place


def _may_reorder(node: Any, n: int, last: bool) -> bool:
    """Whether a function may move one row of a batch of n examples to another; `last` if it computes the outputs."""
    if isinstance(node, BackwardCFunction):  # a user's autograd function, unless it is ours
        return not isinstance(node, tuple(one._backward_cls for one in OWN_FUNCTIONS))
    kind = type(node).__name__.partition("Backward")[0]
    if kind in ALONG_AXES:
        axes = getattr(node, "_saved_dims", None) or (getattr(node, "_saved_dim", 0),)
        # Of the outputs, only the first axis holds examples.
        return any(_size(node, axis) % n == 0 for axis in map(signed, axes) if not (last and axis == 1))
    check = REORDERING.get(kind)
    return check is not None and check(node, n)


def _by_index(node: Any, n: int) -> bool:
    """`x[index]`: any indexed axis may hold the examples, except in `x[arange(n), index]`, which keeps rows."""
    found = getattr(node, "_saved_indices", None)
    if found is None:
        return True
    sizes = getattr(node, "_saved_self_sym_sizes", None)  # of a tensor being read; one being written keeps its shape
    indexed = [(axis, index) for axis, index in enumerate(found) if index is not None]
    first: Any = indexed[0][1] if indexed and indexed[0][0] == 0 else ()
    numbers = len(first) == n and first.dtype != torch.bool
    if numbers and bool((first.movedim(0, -1) == torch.arange(n, device=first.device)).all()):
        return False
    return any((_size(node, axis) if sizes is None else sizes[axis]) % n == 0 for axis, _ in indexed)


def _by_matrix(node: Any, n: int) -> bool:
    """A product with an n x n matrix, which may be a permutation of the examples."""
    sizes = getattr(node, "_saved_self_sym_sizes", None) or getattr(getattr(node, "_saved_self", None), "shape", None)
    sizes = sizes or (_size(node, 0), _size(node, 1), n)  # `bmm` keeps its factors only if they are needed
    return tuple(sizes[-2:]) == (n, n) and tuple(sizes[:-2]) in ((), (1,))


def _size(node: Any, axis: int) -> int:
    """Size of an axis of the node's output; 0, a multiple of any n, if this version of torch does not store it."""
    known = getattr(node, "_input_metadata", None)
    there = known and -len(known[0].shape) <= axis < len(known[0].shape)
    return int(known[0].shape[axis]) if known and there else 0


ALONG_AXES = {
    *("Gather", "Sort", "Topk", "Flip", "Roll", "IndexSelect", "IndexAdd", "IndexCopy", "IndexReduce"),
    *("Scatter", "ScatterAdd", "ScatterReduce"),
}
REORDERING: dict[str, Callable[[Any, int], bool]] = {
    **dict.fromkeys(("Take", "Put", "MaskedSelect", "MaskedScatter", "CopySlices"), lambda node, n: True),
    **dict.fromkeys(("PackPaddedSequence", "RepeatInterleave"), lambda node, n: True),
    **dict.fromkeys(("Index", "IndexPut", "IndexPutImpl"), _by_index),
    **dict.fromkeys(("Mm", "Bmm"), _by_matrix),
    "Embedding": lambda node, n: bool(getattr(node.next_functions[0][0], "next_functions", ())),  # not of a parameter
    "Cat": lambda node, n: signed(getattr(node, "_saved_dim", 0)) == 0,
    "Stack": lambda node, n: signed(getattr(node, "_saved_dim", 0)) == 0 and len(node.next_functions) == n,
}
"""Functions that may move one row of a batch to another, by the name of their node: along axes that may hold the
examples, or according to a check of their own."""


# --- Blocks: which gradients are kept together, and in which form -----------------------------------------------------


Forms = dict[str, set[Block]]  # for every parameter, the blocks that suit its uses best


def forms_of(records: Iterable[Record], parameters: Mapping[str, Tensor]) -> Forms:
    """The blocks that suit the uses of each parameter best; none if it is not used."""
    forms: Forms = {name: set() for name in parameters}
    for record in records:
        for name, block in wanted_blocks(record, parameters):
            forms[name].add(block)
    return forms


def wanted_blocks(record: Record, parameters: Mapping[str, Tensor]) -> Iterator[tuple[str, Block]]:
    """Every parameter behind a record, and the block that suits its gradient best."""
    weight, bias = (record.roles.get(role) for role in ("weight", "bias"))
    pair = tuple(dict.fromkeys(source.parameter for source in (weight, bias) if source and source.parameter))
    joint = record.use.joint and len(pair) == 2

    def block(names: tuple[str, ...], kind: Kind, groups: int = 1, transposed: bool = False) -> Block:
        shapes = tuple(tuple(parameters[name].shape) for name in names)
        return Block(names[0], names, shapes, kind, groups, transposed)

    for source in record.roles.values():
        for root in source.roots:
            if source.parameter is None:
                yield root.parameter, block((root.parameter,), "dense" if root.index is None else "rows")
            elif weight is not None and (joint or source is weight):
                yield root.parameter, block(pair if joint else (root.parameter,), *_form(record.use, weight))
            else:
                yield root.parameter, block((root.parameter,), "dense")


def _form(use: Use, weight: Tracked) -> tuple[Kind, int, bool]:
    """Kind, groups and order of the gradient in a weight."""
    if use.kind == "kronecker":
        return "kronecker", use.groups, use.transposed != bool(weight.transposed)
    return "rows" if use.kind == "rows" and weight.transposed is False else "dense", 1, False


def make_blocks(forms: Forms, parameters: Mapping[str, Tensor]) -> tuple[Block, ...]:
    """Group parameters into blocks, in order. A parameter used in several forms, or not at all, is dense."""
    found = []
    for name, blocks in forms.items():
        shared = [block for block in blocks if all(forms[other] == {block} for other in block.parameters)]
        single = {block.restricted_to(name) for block in blocks}
        dense = Block(name, (name,), (tuple(parameters[name].shape),), "dense")
        found.append(shared[0] if shared else single.pop() if len(single) == 1 else dense)
    return tuple(dict.fromkeys(found))


# --- Backward passes --------------------------------------------------------------------------------------------------


def pull(
    outputs: Tensor, wanted: Sequence[Any], cotangents: Tensor, *, batched: bool = False, keep: bool = True
) -> list[Tensor | None]:
    """Gradients in leaves or edges of the graph for a cotangent (n, k), `None` where there is none.

    If `batched`, gradients (c, *shape) for cotangents (c, n, k) in one vectorised pass; torch's `is_grads_batched`
    would loop over them for convolutions. The graph is freed unless `keep`.
    """
    reached: list[bool] = [False] * len(wanted)

    def run(cotangent: Tensor) -> tuple[Tensor, ...]:
        found: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, wanted, cotangent, retain_graph=keep, allow_unused=True
        )
        reached[:] = [one is not None for one in found]
        return tuple(one for one in found if one is not None)

    grads: Sequence[Tensor] = ()
    if wanted and outputs.requires_grad and not batched:
        grads = run(cotangents)
    elif wanted and outputs.requires_grad:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about kernels that still run in a loop
            grads = torch.func.vmap(run)(cotangents)
    each = iter(grads)
    return [next(each) if one else None for one in reached]


def gradients(outputs: Tensor, leaves: Sequence[Tensor], cotangents: Tensor) -> list[Tensor]:
    """Dense gradients (c, *shape) in the leaves for cotangents (c, n, k); zeros if unused. The graph is kept."""

    def filled(found: Sequence[Tensor | None], *lead: int) -> list[Tensor]:
        whole = [leaf.new_zeros(*lead, *leaf.shape) if g is None else g for g, leaf in zip(found, leaves, strict=True)]
        return [one.to_dense() if one.is_sparse else one for one in whole]

    if len(cotangents) > 1 and outputs.requires_grad:
        options: Any = {"retain_graph": True, "allow_unused": True, "is_grads_batched": True}  # faster than vmap here
        try:
            return filled(torch.autograd.grad(outputs, leaves, cotangents, **options), len(cotangents))
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # a function without a vectorised form: one cotangent at a time always works
            pass
    each = [filled(pull(outputs, leaves, one)) for one in cotangents]
    return [torch.stack(grads) for grads in zip(*each, strict=True)]


class UseGradients:
    """Gradients in the output of one use; in its parameters, after each backward pass, if these are smaller."""

    def __init__(self, record: Record, layout: Layout) -> None:
        self.record, self.layout = record, layout
        self._reduces = record.use.kind == "dense" or "weight" not in record.roles
        self._parts: dict[str, list[Tensor]] = {role: [] for role in (record.roles if self._reduces else ("output",))}

    def add(self, grads: Tensor | None, cotangents: int, examples: int) -> None:
        """Add gradients (c, *shape) in the output; `None` for zeros."""
        if grads is None:
            shape, dtype, device = self.record.output
            grads = torch.zeros((), dtype=dtype, device=device).expand(cotangents, *shape)
        grads = self.layout.canonical(grads, examples, lead=1)  # (n, c, ...)
        for role, parts in self._parts.items():
            parts.append(self._dense(role, grads) if self._reduces else grads)

    def _dense(self, role: str, grads: Tensor) -> Tensor:
        values = self.record.use.dense(role, self.layout, grads)
        return values.reshape(*grads.shape[:2], *self.record.roles[role].tensor.shape)

    def joined(self, key: str = "output") -> Tensor:
        """Gradients (n, c, ...) of all cotangents, in the output or in the tensor of a role if `add` reduced them."""
        parts = self._parts[key]
        if len(parts) > 1:  # in their memory order, as for images with channels last: changing it costs a slow copy
            axes = range(parts[0].dim())
            order = [0, 1, *sorted(axes[2:], key=parts[0].stride, reverse=True)]
            found = torch.cat([part.permute(order) for part in parts], 1)
            parts[:] = [found.permute([order.index(axis) for axis in axes])]
        return parts[0]

    def of_parameter(self, name: str) -> Iterator[tuple[Root, Tensor]]:
        """Yield gradients (n, c, *shape) in a parameter, or in rows taken from it."""
        for role, source in self.record.roles.items():
            if any(root.parameter == name for root in source.roots):
                grads = self.joined(role) if self._reduces else self._dense(role, self.joined())
                yield from ((root, each) for root, each in _to_roots(source, grads) if root.parameter == name)


def _to_roots(source: Tracked, grads: Tensor) -> Iterator[tuple[Root, Tensor]]:
    """Pull gradients (n, c, *shape) in a tracked tensor back to the parameters it was computed from."""
    roots = source.roots
    if roots[0].tensor is source.tensor:
        yield roots[0], grads
    elif source.parameter is not None:
        yield roots[0], grads.transpose(-1, -2) if source.transposed else grads
    else:
        flat = grads.flatten(0, 1).to(source.tensor.dtype)
        found = gradients(source.tensor, [root.tensor for root in roots], flat)
        for root, values in zip(roots, found, strict=True):
            yield root, values.unflatten(0, grads.shape[:2])


# --- Tangents ---------------------------------------------------------------------------------------------------------


def tangents_of(
    blocks: Sequence[Block],
    outputs: Tensor,
    records: Sequence[Record],
    cotangents: Tensor,
    *,
    last: bool,
    batched: bool = False,
) -> list[Tangent]:
    """Pull cotangents (c, n, k) back to every use, in one vectorised pass if `batched`, and on to the blocks.

    A block without recorded uses is zero, and so are uses without a layout; `last` frees the graph.
    """
    uses = [UseGradients(record, record.layout) for record in records if record.layout is not None]
    n, passes = len(outputs), [cotangents] if batched else [*cotangents]
    for number, cotangent in enumerate(passes if uses else ()):
        keep = not last or number + 1 < len(passes)
        found = pull(outputs, [use.record.edge for use in uses], cotangent, batched=batched, keep=keep)
        for use, grads in zip(uses, found, strict=True):
            use.add(grads if batched or grads is None else grads.unsqueeze(0), len(cotangents) if batched else 1, n)
    place = {name: at for at, block in enumerate(blocks) for name in block.parameters}
    own: list[list[UseGradients]] = [[] for _ in blocks]
    for use in uses:
        for at in {place[name] for name in use.record.parameters if name in place}:
            own[at].append(use)
    empty = outputs.detach().new_zeros(n, len(cotangents), 0)
    return [_tangent(block, each, empty) for block, each in zip(blocks, own, strict=True)]


def _tangent(block: Block, uses: Sequence[UseGradients], empty: Tensor) -> Tangent:
    if block.kind == "kronecker":
        return _kronecker(block, uses, empty)
    if block.kind == "rows":
        return _rows(block, uses, empty)
    parts = [_dense(name, shape, uses, empty) for name, shape in zip(block.parameters, block.shapes, strict=True)]
    return Dense(block, parts[0] if len(parts) == 1 else torch.cat(parts, -1))


def _kronecker(block: Block, uses: Sequence[UseGradients], empty: Tensor) -> Kronecker:
    e, o, i = block.matrix_shape
    factors = [use.record.use.factors(use.layout, use.joined(), block.has_bias) for use in uses]
    if not factors:
        n, c, _ = empty.shape
        return Kronecker(block, Whole(empty.new_zeros(n, e, 0, i)), Whole(empty.new_zeros(n, c, e, 0, o)))
    if len(factors) == 1:
        return Kronecker(block, *factors[0])
    a, g = (Whole(torch.cat([one.tensor() for one in side], -2)) for side in zip(*factors, strict=True))
    return Kronecker(block, a, g)


def _rows(block: Block, uses: Sequence[UseGradients], empty: Tensor) -> Rows:
    n, c, _ = empty.shape
    index = [torch.zeros(n, 0, dtype=torch.long, device=empty.device)]
    values = [empty.new_zeros(n, c, 0, block.matrix_shape[1])]
    for use in uses:
        source = use.record.roles.get("weight")
        if source is not None and source.parameter == block.parameters[0]:
            found = [use.record.use.rows(use.layout, use.joined())]
        else:
            roots = use.of_parameter(block.parameters[0])
            found = [_common_rows(root.index, grads) for root, grads in roots if root.index is not None]
        index += [one for one, _ in found]
        values += [one for _, one in found]
    if len(index) == 2:
        return Rows(block, index[1], values[1])
    return Rows(block, torch.cat(index, 1), torch.cat(values, 2))


def _dense(name: str, shape: tuple[int, ...], uses: Sequence[UseGradients], empty: Tensor) -> Tensor:
    """The sum of all uses of one parameter, (n, c, p)."""
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
    """Index (n, t) and gradients (n, c, t, d) of table rows that all examples share."""
    n, c = grads.shape[:2]
    return index.flatten().expand(n, -1), grads.reshape(n, c, index.numel(), -1)


# --- What no rule covers ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PerExample:
    """Gradients of single examples in any parameter, whatever the model does with it.

    From outputs (n, k) and a copy of each parameter for every example; for one example the parameters themselves.
    """

    outputs: Tensor
    parameters: Mapping[str, Tensor]
    copies: Mapping[str, Tensor]

    @classmethod
    def vectorized(cls, call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> PerExample:
        """Run the model on all examples by `torch.vmap`, with a copy wherever a torch function takes a parameter."""
        n = batch_size(inputs, "this batch")
        copies = {name: p.detach().expand(n, *p.shape).requires_grad_() for name, p in parameters.items()}

        def single(values: dict[str, Tensor], example: Inputs) -> Tensor:
            own = {id(parameter): values[name] for name, parameter in parameters.items()}
            one = tree_map(lambda leaf: leaf.unsqueeze(0) if isinstance(leaf, Tensor) else leaf, example)
            with substituted(own):
                return call(one).squeeze(0)

        axes = tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, inputs)
        with differentiable(), plain_kernels():  # the fused attention kernels have no rule under vmap
            outputs = torch.vmap(single, in_dims=(0, axes))(copies, inputs)
        return cls(outputs, parameters, copies)

    def gradients(self, cotangents: Tensor) -> dict[str, Tensor]:
        """Gradients (n, c, *shape) for cotangents (c, n, k), by one backward pass for each; the graph is kept."""
        each = [gradients(self.outputs, list(self.copies.values()), one[None]) for one in cotangents]
        n, pairs = len(self.outputs), zip(self.parameters.items(), zip(*each, strict=True), strict=True)
        return {name: torch.stack([one.reshape(n, *p.shape) for one in grads], 1) for (name, p), grads in pairs}
