"""One run of a model under watch: every call that uses a followed parameter is recorded with its place in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from whence.jacobian.gradients import (
    Block,
    Dense,
    Factor,
    Joined,
    Kind,
    Kronecker,
    Layout,
    Padded,
    Rows,
    Stacked,
    Tangent,
    Whole,
    candidates,
)
from whence.jacobian.rules import READERS
from whence.jacobian.rules.base import Followed, Root, Use, View
from whence.jacobian.rules.embeddings import scatter


@contextmanager
def differentiable() -> Iterator[None]:
    """Build graphs, whatever the caller has switched off."""
    with torch.inference_mode(False), torch.enable_grad():
        yield


Event = tuple[str, tuple[str, ...], int]
"""A choice met on the way: its kind, the parameters behind it, and how many like it came before."""


@dataclass(frozen=True)
class Record:
    """A use of parameters, and where its output stands in the graph.

    Attributes:
        feeds: where the other tensors that went in stand.
        guessed: whether nothing is known of uses like it from the proof.
    """

    use: Use
    roles: Mapping[str, Followed]
    edge: GradientEdge
    output: tuple[torch.Size, torch.dtype, torch.device]
    event: Event | None
    feeds: tuple[tuple[Any, int], ...] = ()
    guessed: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of the output."""
        return self.output[0]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What this use has in common with those of the same line of code in other batches."""
        names = tuple(
            (role, root.parameter, source.view is None or (source.view.transposed, source.view.rows is None))
            for role, source in self.roles.items()
            for root in source.roots
        )
        return (type(self.use).__name__, self.use.groups, self.use.transposed, names, len(self.shape))

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are used."""
        return tuple(root.parameter for source in self.roles.values() for root in source.roots)


@dataclass
class Choices:
    """Whether an output has the examples on one of its axes: guessed from its shape and proved, once, then kept.

    Args:
        refuted: Events for which "yes" has been proved wrong.
        made: The answers of the last run, in order.
        settled: Whether the answers of another run are repeated, and only what did not come up in it is guessed.
        learnt: Events of later runs for which "yes" has been proved right.
    """

    refuted: set[Event] = field(default_factory=set)
    made: dict[tuple[str, tuple[str, ...]], list[bool]] = field(default_factory=dict)
    settled: bool = False
    learnt: set[Event] = field(default_factory=set)

    def answer(self, event: Event, guess: Callable[[], bool]) -> bool:
        """Yes or no for one event."""
        if not self.settled:
            yes = guess() and event not in self.refuted
            self.made.setdefault(event[:2], []).append(yes)
            return yes
        known = self.known(event)
        if known is not None:
            return known
        made = set(self.made.get(event[:2], []))  # all alike, as of a cell that is called once for every token
        return made.pop() if len(made) == 1 else guess()

    def known(self, event: Event) -> bool | None:
        """The answer of the proof, `None` if the event did not come up then."""
        made = self.made.get(event[:2], [])
        if event[2] < len(made):
            return made[event[2]]
        return True if event in self.learnt else None


class Watch(TorchFunctionMode):
    """Reads the calls of one forward pass. Nothing is hung on the model; leaving the mode ends it.

    Args:
        parameters: The parameters to follow.
        examples: n.
        choices: The answers of the first run, or where to put them.
    """

    def __init__(self, parameters: Mapping[str, Tensor], examples: int, choices: Choices) -> None:
        """Start with the parameters themselves."""
        super().__init__()
        self.examples = examples
        self.choices = choices
        self.records: list[Record] = []
        self._event: Event | None = None
        self._arguments: tuple[Any, ...] = ()
        self._seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
        self._followed = {
            id(parameter): Followed(parameter, (Root(name, parameter),), View())
            for name, parameter in parameters.items()
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass the call on, read by its rule if it has one."""
        reader = READERS.get(func)
        if reader is None:
            return func(*args, **(kwargs or {}))
        self._arguments = (*args, *kwargs.values()) if kwargs else args
        return reader(self, func, args, kwargs or {})

    def follows(self, *tensors: Any) -> bool:
        """Whether any of these is a followed tensor."""
        followed = self._followed
        return any(id(tensor) in followed for tensor in tensors)

    def source(self, tensor: Any) -> Followed | None:
        """What is known of a followed tensor."""
        return self._followed.get(id(tensor))

    def record(self, use: Use, output: Tensor, **roles: Tensor | None) -> None:
        """Note that `output` used the followed ones among the tensors in `roles`."""
        event, self._event = self._event, None
        if not output.requires_grad:  # run without gradients by the model itself
            return
        sources = {role: self._followed[id(tensor)] for role, tensor in roles.items() if id(tensor) in self._followed}
        place = (output.shape, output.dtype, output.device)
        guessed = event is not None and self.choices.settled and self.choices.known(event) is None
        feeds = self._feeds(sources) if use.fed else ()
        self.records.append(Record(use, sources, get_gradient_edge(output), place, event, feeds, guessed))

    def _feeds(self, sources: Mapping[str, Followed]) -> tuple[tuple[Any, int], ...]:
        """Where the tensors that went into the call stand, but for those in roles."""
        own = {id(source.tensor) for source in sources.values()}
        found = []
        for value in self._arguments:
            for one in value if isinstance(value, (list, tuple)) else (value,):
                if isinstance(one, Tensor) and one.requires_grad and id(one) not in own:
                    edge = get_gradient_edge(one)
                    found.append((edge.node, edge.output_nr))
        return tuple(found)

    def derive(self, output: Any, *sources: Followed, view: View | None = None, index: Tensor | None = None) -> None:
        """Follow `output`, which is made of followed tensors only."""
        self._event = None
        if not isinstance(output, Tensor) or not output.requires_grad or id(output) in self._followed:
            return
        if index is not None:
            roots: tuple[Root, ...] = (Root(sources[0].roots[0].parameter, output, index),)
        else:
            roots = tuple({id(root.tensor): root for source in sources for root in source.roots}.values())
        self._followed[id(output)] = Followed(output, roots, view)

    def carries_examples(self, kind: str, sources: Sequence[Followed], shape: Sequence[int]) -> bool:
        """Whether an output of this shape has the examples on one of its axes; what it is not, it is derived."""
        names = tuple(root.parameter for source in sources for root in source.roots)
        event = (kind, names, self._seen[kind, names])
        self._seen[kind, names] += 1
        axes = range(len(shape))
        yes = self.choices.answer(event, lambda: next(candidates(axes, shape, self.examples), None) is not None)
        self._event = event if yes else None
        return yes

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Read calls made inside a reader, too."""
        with self:
            yield


@dataclass(frozen=True)
class Claim:
    """The form in which one use could give the gradient of one parameter."""

    kind: Kind
    role: str = "weight"
    groups: int = 1
    transposed: bool = False
    partner: str | None = None  # the bias of a weight, the weight of a bias


def claims(record: Record) -> Iterable[tuple[str, Claim]]:
    """Every parameter behind a record, with the form its gradient could take."""
    partners = _partners(record)
    use = record.use
    for role, source in record.roles.items():
        name = source.parameter
        if name is None:
            yield from ((root.parameter, Claim("rows" if root.index is not None else "dense")) for root in source.roots)
        elif role == "weight" and is_factored(use, source):
            flipped = use.transposed != bool(source.view and source.view.transposed)
            yield name, Claim("kronecker", role, use.groups, flipped, partners.get(role))
        elif role == "weight" and use.kind == "rows" and source.whole:
            yield name, Claim("rows")
        else:
            yield name, Claim("dense", role, partner=partners.get(role))


def fits(claim: Claim, name: str, block: Block) -> bool:
    """Whether a gradient of this form is one that the block of its parameter can hold."""
    if block.kind == "dense":
        return True
    if name != block.parameters[0]:  # the bias of a weight
        return claim.role == "bias" and claim.partner == block.parameters[0]
    if claim.kind != block.kind:
        return False
    if block.kind == "rows":
        return True
    together = not block.has_bias or claim.partner == block.parameters[1]
    return together and (claim.groups, claim.transposed) == (block.groups, block.transposed)


def is_factored(use: Use, source: Followed) -> bool:
    """Whether a weight's gradient stays in factors. Some of its rows do where they are outputs: the rest is zero."""
    if use.kind != "kronecker" or source.view is None:
        return False
    return source.view.rows is None or not use.transposed


def _partners(record: Record) -> dict[str, str]:
    weight, bias = record.roles.get("weight"), record.roles.get("bias")
    if not record.use.joint or weight is None or bias is None or weight.view is None or bias.view is None:
        return {}
    if weight.view.rows != bias.view.rows or weight.parameter == bias.parameter:
        return {}
    return {"weight": bias.roots[0].parameter, "bias": weight.roots[0].parameter}


def make_blocks(records: Iterable[Record], parameters: Mapping[str, Tensor]) -> tuple[Block, ...]:
    """Group parameters into blocks, in their order. A parameter used in several forms, or not at all, is dense."""
    found: dict[str, set[Claim]] = {name: set() for name in parameters}
    for record in records:
        for name, claim in claims(record):
            found[name].add(claim)
    made: list[Block] = []
    taken: set[str] = set()
    for name in found:
        if name not in taken:
            names = _together(name, found)
            forms = {(claim.kind, claim.groups, claim.transposed) for claim in found[names[0]]}
            kind, groups, transposed = forms.pop() if len(forms) == 1 else ("dense", 1, False)
            shapes = tuple(tuple(parameters[each].shape) for each in names)
            made.append(Block(names[0], names, shapes, kind, groups, transposed))
            taken.update(names)
    return tuple(made)


def _together(name: str, found: Mapping[str, set[Claim]]) -> tuple[str, ...]:
    """The weight and the bias, if every use of either is a use of both."""
    if len(found[name]) != 1:
        return (name,)
    claim = next(iter(found[name]))
    if claim.partner is None or {other.partner for other in found[claim.partner]} != {name}:
        return (name,)
    if len(found[claim.partner]) != 1:
        return (name,)
    return (name, claim.partner) if claim.role == "weight" else (claim.partner, name)


LEAST_APART = 2**18
"""On a CPU, gradients of several parameters of a block stay apart if they have more numbers: no cache holds a copy."""


@dataclass(frozen=True)
class Pulled:
    """A record with what came back to its output.

    Args:
        record: The use.
        layout: Where its examples are.
        grads: Gradients (n, c, ...) in the output, examples in front, a few of all cotangents each.
        reduced: Gradients (n, c, *shape) in the tensors of the roles, where those of the output were not kept.
    """

    record: Record
    layout: Layout
    grads: tuple[Tensor, ...]
    reduced: Mapping[str, Tensor]

    def dense(self, role: str) -> Tensor:
        """Gradients (n, c, *shape) in the tensor of a role."""
        if role in self.reduced:
            return self.reduced[role]
        parts = [self.record.use.dense(role, self.layout, grads) for grads in self.grads]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)  # of one part, cat is a copy


@dataclass(frozen=True)
class Sizes:
    """What a tangent without a single use is made of."""

    examples: int
    cotangents: int
    like: Tensor


def tangents_of(blocks: Sequence[Block], pulled: Sequence[Pulled], sizes: Sizes) -> list[Tangent]:
    """The tangents of all blocks."""
    uses: dict[str, dict[int, Pulled]] = {}
    for at, one in enumerate(pulled):
        for source in one.record.roles.values():
            for root in source.roots:
                uses.setdefault(root.parameter, {})[at] = one
    found = []
    for block in blocks:
        own = {at: one for name in block.parameters for at, one in uses.get(name, {}).items()}
        found.append(_tangent(block, [own[at] for at in sorted(own)], sizes))
    return found


def _tangent(block: Block, pulled: Sequence[Pulled], sizes: Sizes) -> Tangent:
    """The tangent of one block, from all uses of its parameters."""
    if block.kind == "kronecker":
        return _kronecker(block, pulled, sizes)
    if block.kind == "rows":
        return _rows(block, pulled, sizes)
    parts = tuple(_dense(block, at, pulled, sizes) for at in range(len(block.parameters)))
    apart = len(parts) == 1 or (not parts[0].is_cuda and sum(part.numel() for part in parts) > LEAST_APART)
    return Dense(block, parts if apart else (torch.cat(parts, -1),))


def _kronecker(block: Block, pulled: Sequence[Pulled], sizes: Sizes) -> Kronecker:
    e, o, i = block.matrix_shape
    sides: list[tuple[Factor, Factor]] = []
    for one in pulled:
        source = one.record.roles.get("weight")
        if source is None or source.parameter != block.parameters[0]:
            continue
        pairs = [one.record.use.factors(one.layout, grads, block.has_bias) for grads in one.grads]
        a, g = pairs[0]
        if len(pairs) > 1:
            g = Stacked(tuple(g for _, g in pairs))
        if source.view is not None and source.view.rows is not None:
            g = Padded(g, source.view.rows[0], o)
        sides.append((a, g))
    if not sides:
        empty = sizes.like.new_zeros(sizes.examples, sizes.cotangents, e, 0, o)
        return Kronecker(block, Whole(empty.new_zeros(sizes.examples, e, 0, i)), Whole(empty))
    if len(sides) == 1:
        return Kronecker(block, *sides[0])
    return Kronecker(block, Joined(tuple(a for a, _ in sides)), Joined(tuple(g for _, g in sides)))


def _rows(block: Block, pulled: Sequence[Pulled], sizes: Sizes) -> Rows:
    found: list[tuple[Tensor, Tensor, Tensor | None]] = []
    for one in pulled:
        source = one.record.roles.get("weight")
        if source is not None and source.parameter == block.parameters[0]:
            found.append(one.record.use.rows(one.layout, torch.cat(one.grads, 1)))
            continue
        for root, grads in _roots(one, block.parameters[0]):
            if root.index is not None:
                index, values = _taken(root, grads)
                found.append((index, values, None))
    if not found:
        grads = sizes.like.new_zeros(sizes.examples, sizes.cotangents, 0, block.matrix_shape[1])
        return Rows(block, torch.zeros(sizes.examples, 0, dtype=torch.long, device=grads.device), grads)
    if len(found) == 1:
        return Rows(block, *found[0])
    weighted = any(weights is not None for _, _, weights in found)
    every = [torch.ones_like(index) if weights is None else weights for index, _, weights in found]
    index, grads = torch.cat([f[0] for f in found], 1), torch.cat([f[1] for f in found], 2)
    return Rows(block, index, grads, torch.cat(every, 1) if weighted else None)


def _dense(block: Block, at: int, pulled: Sequence[Pulled], sizes: Sizes) -> Tensor:
    """The sum of all uses of one parameter, (n, c, p)."""
    name, shape = block.parameters[at], block.shapes[at]
    total: Tensor | None = None
    for one in pulled:
        for root, grads in _roots(one, name):
            if root.index is not None:
                grads = scatter(*_taken(root, grads), shape)
            flat = grads.flatten(2) if grads.dim() > 2 else grads.unsqueeze(2)
            total = flat if total is None else total + flat
    if total is None:
        return sizes.like.new_zeros(()).expand(sizes.examples, sizes.cotangents, torch.Size(shape).numel())
    return total


def _taken(root: Root, grads: Tensor) -> tuple[Tensor, Tensor]:
    """Index (n, t) and gradients (n, c, t, d) of rows that were taken from a table for all examples alike."""
    assert root.index is not None
    n, c = grads.shape[:2]
    index = root.index.flatten()
    return index.expand(n, -1), grads.reshape(n, c, len(index), -1)


def _roots(one: Pulled, name: str) -> Iterator[tuple[Root, Tensor]]:
    """Gradients (n, c, *shape) in a parameter behind a record, or in rows taken from it."""
    for role, source in one.record.roles.items():
        if any(root.parameter == name for root in source.roots):
            yield from ((root, grads) for root, grads in _pull(source, one.dense(role)) if root.parameter == name)


def _pull(source: Followed, grads: Tensor) -> Iterator[tuple[Root, Tensor]]:
    """Pull gradients (n, c, *shape) in a followed tensor back to where it comes from."""
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


def pull(outputs: Tensor, records: Sequence[Record], cotangents: Tensor, last: bool) -> list[list[Tensor | None]]:
    """Gradients in the outputs of the records, for one cotangent after the other: nothing else is computed."""
    edges = [record.edge for record in records]
    ends = [last and at + 1 == len(cotangents) for at in range(len(cotangents))]
    return [list(_backward(outputs, edges, one, end)) for one, end in zip(cotangents, ends, strict=True)]


def pull_back(
    outputs: Tensor,
    records: Sequence[Record],
    layouts: Sequence[Layout],
    cotangents: Tensor,
    *,
    last: bool,
    batched: bool = False,
) -> list[Pulled]:
    """What c backward passes bring to every record, for cotangents (c, n, k)."""
    if not records:
        return []
    n = len(outputs)
    gathered = [_Gathered(record, layout) for record, layout in zip(records, layouts, strict=True)]
    edges = [record.edge for record in records]
    if batched:
        for one, grads in zip(gathered, _backward(outputs, edges, cotangents, last, batched=True), strict=True):
            one.add(grads, len(cotangents), n)
        return [one.done() for one in gathered]
    for number, cotangent in enumerate(cotangents):
        end = last and number + 1 == len(cotangents)
        for one, grads in zip(gathered, _backward(outputs, edges, cotangent, end), strict=True):
            one.add(None if grads is None else grads.unsqueeze(0), 1, n)
    return [one.done() for one in gathered]


def gradients(
    outputs: Tensor, leaves: Sequence[Tensor], cotangents: Tensor, *, keep: bool = True, batched: bool = False
) -> list[Tensor]:
    """What a backward pass brings to leaves; zeros to those that the outputs do not depend on.

    Torch can fill these in itself, but 2.4 takes zeros that want gradients, and none has one for each of a batch.

    Args:
        outputs: of the model.
        leaves: tensors that they are differentiated by.
        cotangents: shaped as the outputs; with one more axis in front where they are a batch.
        keep: whether there will be more backward passes.
        batched: pull several cotangents back at once.
    """
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, leaves, cotangents, retain_graph=keep, allow_unused=True, is_grads_batched=batched
    )
    lead = (len(cotangents),) if batched else ()
    pairs = zip(found, leaves, strict=True)
    return [leaf.new_zeros(*lead, *leaf.shape) if grad is None else grad for grad, leaf in pairs]


def _backward(
    outputs: Tensor, edges: Sequence[GradientEdge], cotangents: Tensor, last: bool, batched: bool = False
) -> Sequence[Tensor | None]:
    return torch.autograd.grad(
        outputs, edges, cotangents, retain_graph=not last, allow_unused=True, is_grads_batched=batched
    )


class _Gathered:
    """The gradients of one record while the backward passes are made.

    Where the gradient in the output is larger than what is wanted of it (norms, biases alone, bare parameters), it is
    reduced at once, so that not all cotangents' are held.
    """

    def __init__(self, record: Record, layout: Layout) -> None:
        self.record, self.layout = record, layout
        self.grads: list[Tensor] = []
        self.reduced: dict[str, list[Tensor]] = {role: [] for role in record.roles}
        self.reduces = record.use.kind == "dense" or "weight" not in record.roles
        self.use = record.use.ready() if self.reduces else record.use

    def add(self, grads: Tensor | None, cotangents: int, n: int) -> None:
        """Take gradients (c, *shape) in the output."""
        if grads is None:
            shape, dtype, device = self.record.output
            grads = torch.zeros((), dtype=dtype, device=device).expand(cotangents, *shape)
        grads = self.layout.canonical(grads, n, lead=1)  # (n, c, ...)
        if not self.reduces:
            self.grads.append(grads)
            return
        for role, values in self.reduced.items():
            values.append(self.use.dense(role, self.layout, grads))

    def done(self) -> Pulled:
        reduced = {role: _joined(values) for role, values in self.reduced.items() if values}
        return Pulled(self.record, self.layout, tuple(self.grads), reduced)


def _joined(values: Sequence[Tensor]) -> Tensor:
    return values[0] if len(values) == 1 else torch.cat(tuple(values), 1)
