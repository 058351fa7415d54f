"""Per-layer tangents of any model: one forward pass, and backward passes down to layer outputs only.

A function mode watches the model's calls. Calls that use a selected parameter in a way a rule understands are recorded
with their inputs and their place in the graph; gradients in their outputs are then all that a backward pass has to
compute, never a gradient in a weight. What no rule understands is differentiated example by example. A few examples
prove that nothing is missing, counted twice or mixed, and what they could not prove is watched from then on; see
`whence.jacobian.verify`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from whence.data.batches import Batch, Inputs, batch_size, take, to_device
from whence.errors import InputError, ShapeError, UncapturedParameterError
from whence.jacobian.functional import Call, OneByOne, Run, Vectorized
from whence.jacobian.gradients import Block, Dense, Kronecker, Layout, Rows, Tangent, Whole, candidates
from whence.jacobian.graph import walk
from whence.jacobian.record import Record, Sizes, Watch, claims, differentiable, fits, pull_back, tangents_of
from whence.jacobian.verify import (
    compare,
    evidence_of,
    has_gradient,
    keeps_rows,
    layouts_here,
    strange_uses,
    tolerance,
    used,
    verify_uses,
)
from whence.runtime.processes import Processes


class Captured:
    """One batch, run under capture.

    Attributes:
        outputs: (n, k), without a graph.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        outputs: Tensor,
        records: Sequence[Record],
        layouts: Sequence[Layout],
        generic: Run | None,
        vectorized: bool = False,
    ) -> None:
        """Hold the graph until `tangents(..., last=True)`, or until this object goes away."""
        self.outputs = outputs.detach()
        self._blocks = blocks
        self._graph = outputs
        self._records = records
        self._layouts = layouts
        self._generic = generic
        self._vectorized = vectorized

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """Pull cotangents back to every block.

        Args:
            cotangents: (c, n, k); c backward passes are made.
            last: Whether the graph may be freed, since nothing more will be asked.
            batched: Whether all cotangents go through one vectorised backward pass (`is_grads_batched`) instead of
                one after the other; where it was proved to give the same if `None`. Measured, this is up to 1.7
                times as fast on a GPU, no faster on a CPU, and some kernels have no such form.

        Returns:
            Tangents in the order of the capture's blocks.
        """
        n, k = self.outputs.shape
        if cotangents.dim() != 3 or cotangents.shape[1:] != (n, k):
            raise ShapeError(f"expected cotangents of shape (c, {n}, {k}), got {tuple(cotangents.shape)}.")
        cotangents = cotangents.to(self.outputs)
        batched = (self._vectorized if batched is None else batched) and len(cotangents) > 1
        pulled = pull_back(self._graph, self._records, self._layouts, cotangents, last=last, batched=batched)
        found = tangents_of(self._blocks, pulled, Sizes(n, len(cotangents), self.outputs))
        if self._generic is None:
            return found
        grads = self._generic.gradients(cotangents, last)
        return [
            Dense(one.block, (grads[name].reshape(n, len(cotangents), -1),))
            if (name := one.block.name) in grads
            else one
            for one in found
        ]


class Apart:
    """One batch whose examples were run one at a time, each under capture.

    Attributes:
        outputs: (n, k), without a graph.
    """

    def __init__(self, each: Sequence[Captured]) -> None:
        """Put the outputs together."""
        self.outputs = torch.cat([one.outputs for one in each])
        self._each = each

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """As of `Captured`."""
        n, k = self.outputs.shape
        if cotangents.dim() != 3 or cotangents.shape[1:] != (n, k):
            raise ShapeError(f"expected cotangents of shape (c, {n}, {k}), got {tuple(cotangents.shape)}.")
        found = [one.tangents(cotangents[:, at : at + 1], last=last) for at, one in enumerate(self._each)]
        return [together(tangents) for tangents in zip(*found, strict=True)]


class Capture:
    """Everything needed to get the tangents of a model, batch by batch.

    The proof is made on a few examples. On every batch that follows, the graph tells whether parameters are used in a
    way that was not recorded; uses that had no gradient in the proof, or did not occur, are proved on the first batch
    where they have one; and where the model may have reordered the rows of its batch, they are proved on that batch.
    Where examples cannot be told apart, they are run one at a time; what cannot be captured at all is refused.

    Args:
        call: Runs the model on a batch of inputs; outputs (n, k).
        parameters: The selected parameters by name; all of them require gradients.
        example_inputs: The first batch; a few of its examples are used for the proof.
        more: Other batches of a few examples, that use parameters which the first one does not.
        blocks: Those of an earlier capture of the same model, for parameters that these examples do not use.
        told: A list for notes on batches that come later.

    Attributes:
        blocks: The selected parameters, in blocks, in their order.
        notes: What went another way than usual, for diagnostics.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> x = torch.ones(5, 3)
        >>> capture = Capture(net, dict(net.named_parameters()), example_inputs=x)
        >>> [(block.name, block.matrix_shape) for block in capture.blocks]
        [('0.weight', (1, 4, 4)), ('2.weight', (1, 2, 5))]
        >>> captured = capture.run(x)
        >>> first, second = captured.tangents(torch.eye(2)[:, None].expand(2, 5, 2), last=True)
        >>> tuple(first.inputs().shape), tuple(first.grads().shape)
        ((5, 1, 1, 4), (5, 2, 1, 1, 4))
    """

    def __init__(
        self,
        call: Call,
        parameters: Mapping[str, Tensor],
        *,
        example_inputs: Inputs,
        more: Sequence[Inputs] = (),
        blocks: Sequence[Block] | None = None,
        told: list[str] | None = None,
    ) -> None:
        """Run the proof."""
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        if frozen or not parameters:
            got = f"frozen ones: {', '.join(frozen)}" if frozen else "none"
            raise InputError(f"expected selected parameters that require gradients, got {got}.")
        self._call = call
        self._vectorized = False
        self._told = [] if told is None else told
        self._alone = False
        self._parameters = dict(parameters)
        self._settled = verify_uses(call, parameters, [example_inputs, *more], blocks)
        self.blocks = self._settled.blocks
        self.notes = tuple(self._settled.notes)
        first = next(iter(parameters.values()))
        self._vectorized = first.is_cuda and self.vectorizes(take(example_inputs, slice(0, 2)))

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters the outputs do not depend on, as far as the examples of the proof show."""
        return self._settled.unused

    @property
    def unseen(self) -> set[str]:
        """Parameters of which the examples of the proof do not tell how they are used."""
        return self._parameters.keys() - self._settled.seen - self._settled.generic.keys()

    @property
    def generic(self) -> dict[str, str]:
        """Parameters differentiated example by example, and why."""
        return dict(self._settled.generic)

    def vectorizes(self, inputs: Inputs) -> bool:
        """Whether all cotangents together bring back what they bring one after the other, on these inputs."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of kernels that have no vectorised form, and would run in a slow loop
                run = self.run(inputs)
                draw = torch.Generator("cpu").manual_seed(0)
                cotangents = torch.randn(2, *run.outputs.shape, generator=draw, dtype=torch.float64, device="cpu")
                pairs = zip(*(run.tangents(cotangents, batched=way) for way in (False, True)), strict=True)
                return all(_alike(_pulled(one), _pulled(other)) for one, other in pairs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # whatever vmap cannot follow: one cotangent after the other works always
            return False

    def uses(self, inputs: Inputs) -> set[str]:
        """The parameters that the outputs of a batch depend on, by its graph."""
        outputs, watch = self._watched(inputs, batch_size(inputs, "this batch"))
        way = walk(outputs, watch.records, self._settled.followed)
        return way.unrecorded.union(*(record.parameters for record in used(watch.records, way)))

    def run(self, inputs: Inputs) -> Captured | Apart:
        """Run the model on a batch and keep what its tangents need."""
        n = batch_size(inputs, "this batch")
        if n > 1 and self._alone:
            return self._apart(inputs)
        outputs, watch = self._watched(inputs, n)
        way = walk(outputs, watch.records, self._settled.followed)
        if way.unrecorded:
            for name in sorted(way.unrecorded):
                self._differentiate(name, strange_uses(self._call, self._parameters[name], inputs))
            return self.run(inputs)
        batch = _Batch(inputs, outputs, used(watch.records, way))
        unproved = self._place(batch)
        for at in unproved:
            self._check_form(batch.records[at])
        if n > 1 and unproved:
            if not self._find(batch, unproved):
                return self._apart(inputs, "no axis of a layer's output holds the examples of some batches")
            if self._gave_up(batch):
                return self.run(inputs)
        records, layouts = batch.placed()
        if way.moves and records and not keeps_rows(outputs, records, layouts):
            return self._apart(inputs, "the model reorders the examples of a batch")
        return Captured(self.blocks, outputs, records, layouts, self._generic(batch), self._vectorized)

    def _watched(self, inputs: Inputs, n: int) -> tuple[Tensor, Watch]:
        settled = self._settled
        with differentiable(), Watch(settled.followed, n, settled.choices) as watch:
            outputs = self._call(inputs)
        if outputs.dim() != 2 or len(outputs) != n:
            raise ShapeError(f"expected outputs of shape ({n}, k), got {tuple(outputs.shape)}.")
        return outputs, watch

    def _apart(self, inputs: Inputs, why: str = "") -> Apart:
        """Run the examples of this batch, and of all that follow, one at a time."""
        if why:
            self._alone = True
            self._told.append(f"examples were run one at a time, since {why}")
        n = batch_size(inputs, "this batch")
        each = [self.run(take(inputs, slice(at, at + 1))) for at in range(n)]
        return Apart([one for one in each if isinstance(one, Captured)])

    def _place(self, batch: _Batch) -> list[int]:
        """Give the records the layouts found before, as far as they fit; the places of those that were not proved."""
        seen: Counter[tuple[Any, ...]] = Counter()
        unproved: list[int] = []
        n = len(batch.outputs)
        for record in batch.records:
            key = record.key
            known = self._settled.layouts.get(key, ())
            at = seen[key]
            seen[key] += 1
            # One layout for all uses of a kind holds for any number of them (a cell called once for every token).
            layout = known[0] if len(known) == 1 else known[at] if at < len(known) else None
            if layout is None or not layout.fits(record.shape, n):
                layout = any_layout(record) if n == 1 else None  # all that is there is of the one example
            if layout is None or record.guessed or at >= self._settled.proved.get(key, 0):
                unproved.append(len(batch.layouts))
            batch.layouts.append(layout)
        return unproved

    def _check_form(self, record: Record) -> None:
        """Refuse a use whose gradient does not have the form that was settled for its parameter."""
        if record.key in self._settled.layouts:
            return
        of = {name: block for block in self.blocks for name in block.parameters}
        for name, claim in claims(record):
            if not fits(claim, name, of[name]):
                raise UncapturedParameterError(
                    f"expected {name} to be used as on the first batch, got a use of another form "
                    f"({type(record.use).__name__}, output of shape {tuple(record.shape)}). The forward pass takes "
                    f"another path for these data: let the first batch have examples of every kind, or leave {name} "
                    "out of the selection."
                )

    def _find(self, batch: _Batch, unproved: Sequence[int]) -> bool:
        """Find the layouts of uses that have a gradient here; False if there is none for some of them."""
        asked = [batch.records[at] for at in unproved]
        batch.proved = [at for at, yes in zip(unproved, has_gradient(batch.outputs, asked), strict=True) if yes]
        if batch.proved:
            found = layouts_here(batch.outputs, [batch.records[at] for at in batch.proved])
            for at, layout in zip(batch.proved, found, strict=True):
                batch.layouts[at] = layout
        return all(batch.layouts[at] is not None for at in batch.proved)

    def _gave_up(self, batch: _Batch) -> bool:
        """Compare parameters whose uses have their first gradient here with autograd; differentiate those that differ.

        The kinds of uses that agree are proved from now on.
        """
        if not batch.proved:
            return False
        settled = self._settled
        names = {name for at in batch.proved for name in batch.records[at].parameters}
        blocks = [block for block in self.blocks if names.intersection(block.parameters)]
        wanted = {name: self._parameters[name] for block in blocks for name in block.parameters}
        evidence = evidence_of(batch.outputs, batch.inputs, wanted, settled.precision)
        pulled = pull_back(batch.outputs, *batch.placed(), evidence.cotangent[None], last=False)
        tangents = tangents_of(blocks, pulled, Sizes(len(batch.outputs), 1, batch.outputs.detach()))
        wrong = compare(evidence, [one for one in tangents if one.block.name not in settled.generic])
        for name in wrong:
            self._differentiate(name, strange_uses(self._call, self._parameters[name], batch.inputs))
        if not wrong:
            self._learn(batch)
        return bool(wrong)

    def _learn(self, batch: _Batch) -> None:
        """The layouts that were found on a batch, for the batches that follow."""
        settled = self._settled
        of: dict[tuple[Any, ...], set[Layout | None]] = {}
        for at in batch.proved:
            of.setdefault(batch.records[at].key, set()).add(batch.layouts[at])
            if (event := batch.records[at].event) is not None:
                settled.choices.learnt.add(event)
        for key, layouts in of.items():
            if key in settled.proved:
                layouts |= set(settled.layouts[key])
            only = layouts.pop()
            if layouts or only is None:  # they differ: to be found on every batch
                settled.layouts[key] = ()
                settled.proved.pop(key, None)
            else:
                settled.layouts[key] = (only,)
                settled.proved[key] = max(sum(one.key == key for one in batch.records), settled.proved.get(key, 0))

    def _differentiate(self, name: str, why: str) -> None:
        """Differentiate a parameter example by example from now on; so far it had no gradient in this way."""
        block = next(block for block in self.blocks if name in block.parameters)
        if block.kind != "dense" or len(block.parameters) > 1:
            raise UncapturedParameterError(
                f"expected {name} to be used as on the first batch, got another use on a later one: {why}. Let the "
                f"first batch have examples of every kind, or leave {name} out of the selection."
            )
        settled = self._settled
        settled.followed.pop(name, None)
        settled.generic[name] = why
        settled.doubtful.add(name)
        settled.runner = settled.runner or OneByOne
        self._told.append(f"{name}: gradients example by example, since {why}")

    def _generic(self, batch: _Batch) -> Run | None:
        """Gradients of single examples, of parameters that no rule covers."""
        settled = self._settled
        if settled.runner is None:
            return None
        parameters = {name: self._parameters[name] for name in settled.generic}
        if settled.runner is not Vectorized:
            return settled.runner(self._call, parameters, batch.inputs)
        try:
            run = Vectorized(self._call, parameters, batch.inputs)
            if not settled.doubtful or self._agrees(run, batch):
                return run
            why = "it does not give the gradient autograd gives"
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a path that vmap cannot follow, and that other batches did not take
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        settled.runner = OneByOne
        self._told.append(f"torch.vmap cannot run this model ({why}); {', '.join(parameters)}: one example at a time")
        return OneByOne(self._call, parameters, batch.inputs)

    def _agrees(self, run: Run, batch: _Batch) -> bool:
        """Whether generic gradients that were zero so far, and are not here, add up to autograd's."""
        settled = self._settled
        wanted = {name: self._parameters[name] for name in settled.doubtful}
        evidence = evidence_of(batch.outputs, batch.inputs, wanted, settled.precision)
        alive = {name for name, grad in evidence.gradients.items() if grad is not None and bool(grad.any())}
        if not alive:
            return True
        grads = run.gradients(evidence.cotangent[None], last=False)
        tangents = [
            Dense(Block(name, (name,), (tuple(one.shape),), "dense"), (grads[name].reshape(len(batch.outputs), 1, -1),))
            for name, one in wanted.items()
        ]
        if compare(evidence, tangents):
            return False
        settled.doubtful -= alive
        return True


@dataclass
class _Batch:
    """A batch in the making: the uses that its outputs depend on, and where their examples are.

    Attributes:
        layouts: `None` for uses without a gradient whose layout is not known.
        proved: places of the records whose layout was found on this batch.
    """

    inputs: Inputs
    outputs: Tensor
    records: list[Record]
    layouts: list[Layout | None] = field(default_factory=list)
    proved: list[int] = field(default_factory=list)

    def placed(self) -> tuple[list[Record], list[Layout]]:
        """Records and their layouts, without those that have neither layout nor gradient."""
        pairs = [(one, layout) for one, layout in zip(self.records, self.layouts, strict=True) if layout is not None]
        return [one for one, _ in pairs], [layout for _, layout in pairs]


def any_layout(record: Record) -> Layout:
    """A layout for a batch of one example, to which everything belongs."""
    axes = tuple(record.use.axes(record.shape))
    possible = [*candidates(axes, record.shape, 1), *(Layout(axis, "outer") for axis in axes)]
    return next((one for one in possible if record.use.accepts(one, record.shape, 1)), Layout())


def together(tangents: Sequence[Tangent]) -> Tangent:
    """The tangents of single examples as those of one batch; fewer positions are filled up with zeros."""
    first = tangents[0]
    if isinstance(first, Dense):
        return Dense(first.block, (torch.cat([one.values for one in tangents if isinstance(one, Dense)]),))
    if isinstance(first, Kronecker):
        own = [one for one in tangents if isinstance(one, Kronecker)]
        most = max(one.positions for one in own)
        a = torch.cat([pad(one.inputs(), (0, 0, 0, most - one.positions)) for one in own])
        g = torch.cat([pad(one.grads(), (0, 0, 0, most - one.positions)) for one in own])
        return Kronecker(first.block, Whole(a), Whole(g))
    rows = [one for one in tangents if isinstance(one, Rows)]
    sizes = [one.index.shape[1] for one in rows]
    missing = [max(sizes) - size for size in sizes]
    index = torch.cat([pad(one.index, (0, more)) for one, more in zip(rows, missing, strict=True)])
    grads = torch.cat([pad(one.grads, (0, 0, 0, more)) for one, more in zip(rows, missing, strict=True)])
    weighted = any(missing) or any(one.weights is not None for one in rows)
    weights = [torch.ones_like(one.index) if one.weights is None else one.weights for one in rows]
    filled = [pad(one, (0, more)) for one, more in zip(weights, missing, strict=True)]
    return Rows(first.block, index, grads, torch.cat(filled) if weighted else None)


def _pulled(tangent: Tangent) -> Tensor:
    """What came back, in the smallest form that tells."""
    if isinstance(tangent, Dense):
        return tangent.values
    return tangent.grads() if isinstance(tangent, Kronecker) else tangent.grads


def _alike(one: Tensor, other: Tensor) -> bool:
    near = tolerance(one.dtype, one.device)
    return one.shape == other.shape and bool(
        (one - other).norm() <= near * one.norm() + torch.finfo(torch.float32).tiny
    )


AT_ONCE = 64
"""Examples that are run at once."""

FEW = 7
"""Examples that a proof is made on."""


def examples_using(
    wanted: set[str], capture: Capture, batches: Iterable[Batch], process_group: Processes, device: torch.device
) -> list[Inputs]:
    """A few examples for each of these parameters that any of the data use, the same in every process.

    Costs a forward pass for each batch until all are found.

    Args:
        wanted: names of parameters.
        capture: of the model.
        batches: the data of this process.
        process_group: the processes that share the data.
        device: of the model.
    """
    mine = list(_found(set(wanted), capture, batches))
    told = process_group.tell(
        "parameters not used so far", to_device(mine, torch.device("cpu")) if not process_group.alone else mine
    )
    missing, chosen = set(wanted), []
    for names, few in (one for each in told for one in each):
        if missing.intersection(names):
            missing -= names
            chosen.append(to_device(few, device))
    return chosen


def _found(wanted: set[str], capture: Capture, batches: Iterable[Batch]) -> Iterator[tuple[set[str], Inputs]]:
    for batch in batches:
        for low in range(0, batch.size, AT_ONCE):
            some = take(batch.inputs, slice(low, low + AT_ONCE))
            here = wanted & capture.uses(some)
            while here:
                few = _narrowed(capture, some, here)
                names = wanted & capture.uses(few)
                if not here & names:  # by no few of them
                    break
                yield names, few
                here -= names
                wanted -= names
        if not wanted:
            return


def _narrowed(capture: Capture, inputs: Inputs, wanted: set[str]) -> Inputs:
    """Few of the examples, that still use one of the parameters."""
    while (n := batch_size(inputs, "this batch")) > FEW:
        first, second = take(inputs, slice(0, n // 2)), take(inputs, slice(n // 2, n))
        inputs = first if wanted & capture.uses(first) else second
    return inputs
