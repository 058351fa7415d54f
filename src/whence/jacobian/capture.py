"""Per-example gradients of any model, layer by layer: one forward pass, and backward passes down to layer outputs only.

A torch function mode records the model's calls. Calls that use a selected parameter in a way a rule understands are
recorded with their inputs and their place in the graph; gradients in their outputs are then all that a backward pass
has to compute, never a gradient in a weight. What no rule understands is differentiated by the functional fallback. On
a few examples the capture is verified: nothing is missing, counted twice or mixed. What these could not show is
verified on later batches; see `whence.jacobian.verify`.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.data.batches import Batch, Inputs, batch_size, take, to_device
from whence.errors import InputError, ShapeError, UncapturedParameterError
from whence.jacobian.functional import OneByOne, Run, Vectorized
from whence.jacobian.gradients import Block, Dense, Layout, Tangent
from whence.jacobian.record import Call, gradient_forms, pull_back, record_forward, tangents_of, walk
from whence.jacobian.rules.base import Record
from whence.jacobian.verify import (
    fallback_mismatches,
    find_layouts,
    have_gradient,
    mismatches,
    possible_layouts_of,
    reference_on_graph,
    rows_are_in_place,
    tolerance,
    uncovered_calls,
    verify_uses,
)
from whence.runtime.processes import Processes


@dataclass(frozen=True)
class Captured:
    """One batch, run under capture; holds the graph until `tangents(..., last=True)`, or until it goes away.

    Attributes:
        blocks: The selected parameters, in blocks.
        graph: The outputs (n, k), with their graph.
        records: The uses that they depend on.
        layouts: Where the examples are in the output of each use.
        fallback: A run for the parameters that no rule covers, if there are any.
        vectorized: Whether one vectorised backward pass was verified to give the same as several.
    """

    blocks: Sequence[Block]
    graph: Tensor
    records: Sequence[Record]
    layouts: Sequence[Layout]
    fallback: Run | None
    vectorized: bool = False

    @property
    def outputs(self) -> Tensor:
        """(n, k), without a graph."""
        return self.graph.detach()

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """Pull cotangents back to every block.

        Args:
            cotangents: (c, n, k); c backward passes are made.
            last: Whether the graph may be freed, since no further cotangents will be pulled back.
            batched: Whether all cotangents go through one vectorised backward pass (`is_grads_batched`) instead of
                one after the other; where it was verified to give the same if `None`. Measured, this is up to 1.7
                times as fast on a GPU, no faster on a CPU, and some kernels have no such form.

        Returns:
            Tangents in the order of the capture's blocks.
        """
        _check_cotangents(cotangents, self.outputs)
        cotangents = cotangents.to(self.outputs)
        batched = (self.vectorized if batched is None else batched) and len(cotangents) > 1
        grads = pull_back(self.graph, self.records, self.layouts, cotangents, last=last, batched=batched)
        tangents = tangents_of(self.blocks, grads, self.graph, len(cotangents))
        if self.fallback is None:
            return tangents
        values = self.fallback.gradients(cotangents, last)
        return [
            Dense(one.block, (values[one.block.name].reshape(len(self.outputs), len(cotangents), -1),))
            if one.block.name in values
            else one
            for one in tangents
        ]


@dataclass(frozen=True)
class CapturedOneByOne:
    """One batch whose examples were run one at a time, each under capture."""

    examples: Sequence[Captured]

    @property
    def outputs(self) -> Tensor:
        """(n, k), without a graph."""
        return torch.cat([one.outputs for one in self.examples])

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """As of `Captured`."""
        _check_cotangents(cotangents, self.outputs)
        each = [one.tangents(cotangents[:, at : at + 1], last=last) for at, one in enumerate(self.examples)]
        return [concatenate(tangents) for tangents in zip(*each, strict=True)]


def concatenate(tangents: Sequence[Any]) -> Tangent:
    """Tangents of one block, of several batches, as those of one batch."""
    joined: Tangent = type(tangents[0]).concatenate(tangents)
    return joined


def _check_cotangents(cotangents: Tensor, outputs: Tensor) -> None:
    n, k = outputs.shape
    if cotangents.dim() != 3 or cotangents.shape[1:] != (n, k):
        raise ShapeError(f"expected cotangents of shape (c, {n}, {k}), got {tuple(cotangents.shape)}.")


class Capture:
    """Everything needed to get the tangents of a model, batch by batch.

    It is verified on a few examples. On every batch that follows, the graph shows whether parameters are used in a way
    that was not recorded; uses that had no gradient before, or did not occur, are verified on the first batch where
    they have one; and where the model may have reordered the rows of its batch, they are verified on that batch. Where
    the examples of a batch cannot be separated, they are run one at a time; what cannot be captured at all is refused.

    Args:
        call: Runs the model on a batch of inputs; outputs (n, k).
        parameters: The selected parameters by name; all of them require gradients.
        example_inputs: The first batch; it is verified on a few of its examples.
        more: Other batches of a few examples, that use parameters which the first one does not.
        blocks: Those of an earlier capture of the same model, for parameters that these examples do not use.
        later_notes: A list for notes on batches that come later.

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
        later_notes: list[str] | None = None,
    ) -> None:
        """Verify the capture."""
        frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
        if frozen or not parameters:
            got = f"frozen ones: {', '.join(frozen)}" if frozen else "none"
            raise InputError(f"expected selected parameters that require gradients, got {got}.")
        self._call = call
        self._vectorized = False
        self._later_notes = [] if later_notes is None else later_notes
        self._one_by_one = False
        self._parameters = dict(parameters)
        self._uses = verify_uses(call, parameters, [example_inputs, *more], blocks)
        self.blocks = self._uses.blocks
        self.notes = tuple(self._uses.notes)
        first = next(iter(parameters.values()))
        self._vectorized = first.is_cuda and self.vectorizes(take(example_inputs, slice(0, 2)))

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters the outputs do not depend on, as far as the examples show."""
        return self._uses.unused

    @property
    def without_uses(self) -> set[str]:
        """Parameters that none of the examples used."""
        return self._parameters.keys() - self._uses.used - self._uses.fallback.keys()

    @property
    def fallback(self) -> dict[str, str]:
        """Parameters differentiated by the functional fallback, and why."""
        return dict(self._uses.fallback)

    def vectorizes(self, inputs: Inputs) -> bool:
        """Whether one vectorised backward pass gives what one pass for each cotangent gives, on these inputs."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # of kernels that have no vectorised form, and would run in a slow loop
                run = self.run(inputs)
                draw = torch.Generator("cpu").manual_seed(0)
                cotangents = torch.randn(2, *run.outputs.shape, generator=draw, dtype=torch.float64, device="cpu")
                pairs = zip(*(run.tangents(cotangents, batched=way) for way in (False, True)), strict=True)
                return all(_close(one.pulled_back(), other.pulled_back()) for one, other in pairs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # whatever vmap cannot follow: one cotangent after the other works always
            return False

    def uses(self, inputs: Inputs) -> set[str]:
        """The parameters that the outputs of a batch depend on, by its graph."""
        outputs, records = self._record(inputs, batch_size(inputs, "this batch"))
        found = walk(outputs, records, self._uses.recorded)
        return found.unrecorded.union(*(record.parameters for record in found.reached))

    def run(self, inputs: Inputs) -> Captured | CapturedOneByOne:
        """Run the model on a batch and keep what its tangents need."""
        n = batch_size(inputs, "this batch")
        if n > 1 and self._one_by_one:
            return self._run_one_by_one(inputs)
        outputs, records = self._record(inputs, n)
        found = walk(outputs, records, self._uses.recorded)
        if found.unrecorded:
            for name in sorted(found.unrecorded):
                self._fall_back(name, uncovered_calls(self._call, self._parameters[name], inputs))
            return self.run(inputs)
        batch = _Batch(inputs, outputs, found.reached)
        unverified = self._reuse_layouts(batch)
        for at in unverified:
            self._check_form(batch.records[at])
        if n > 1 and unverified:
            if not self._find_layouts(batch, unverified):
                return self._run_one_by_one(inputs, "no axis of a layer's output holds the examples of some batches")
            if not self._verify_first_gradients(batch):
                return self.run(inputs)
        placed, layouts = batch.with_layout()
        if found.may_reorder and placed and not rows_are_in_place(outputs, placed, layouts):
            return self._run_one_by_one(inputs, "the model reorders the examples of a batch")
        return Captured(self.blocks, outputs, placed, layouts, self._run_fallback(batch), self._vectorized)

    def _record(self, inputs: Inputs, n: int) -> tuple[Tensor, list[Record]]:
        outputs, records = record_forward(self._call, inputs, self._uses.recorded, n, self._uses.batch_axes)
        if outputs.dim() != 2 or len(outputs) != n:
            raise ShapeError(f"expected outputs of shape ({n}, k), got {tuple(outputs.shape)}.")
        return outputs, records

    def _run_one_by_one(self, inputs: Inputs, why: str = "") -> CapturedOneByOne:
        """Run the examples of this batch, and of all that follow, one at a time."""
        if why:
            self._one_by_one = True
            self._later_notes.append(f"examples were run one at a time, since {why}")
        n = batch_size(inputs, "this batch")
        each = [self.run(take(inputs, slice(at, at + 1))) for at in range(n)]
        return CapturedOneByOne([one for one in each if isinstance(one, Captured)])

    def _reuse_layouts(self, batch: _Batch) -> list[int]:
        """Give the records the layouts found before, as far as they fit; the positions of those not yet verified."""
        count: Counter[tuple[Any, ...]] = Counter()
        unverified: list[int] = []
        n = len(batch.outputs)
        for record in batch.records:
            key = record.key
            known = self._uses.layouts.get(key, ())
            at = count[key]
            count[key] += 1
            # One layout for all uses of a kind holds for any number of them (a cell called once for every token).
            layout = known[0] if len(known) == 1 else known[at] if at < len(known) else None
            if layout is None or not layout.fits(record.shape, n):
                layout = _single_layout(record) if n == 1 else None
            if layout is None or record.guessed or at >= self._uses.verified_counts.get(key, 0):
                unverified.append(len(batch.layouts))
            batch.layouts.append(layout)
        return unverified

    def _check_form(self, record: Record) -> None:
        """Refuse a use whose gradient does not have the form of its parameter's block."""
        if record.key in self._uses.layouts:
            return
        of = {name: block for block in self.blocks for name in block.parameters}
        for name, form in gradient_forms(record):
            if not form.fits(name, of[name]):
                raise UncapturedParameterError(
                    f"expected {name} to be used as on the first batch, got a use of another form "
                    f"({type(record.use).__name__}, output of shape {tuple(record.shape)}). The forward pass takes "
                    f"another path for these data: let the first batch have examples of every kind, or leave {name} "
                    "out of the selection."
                )

    def _find_layouts(self, batch: _Batch, unverified: Sequence[int]) -> bool:
        """Find the layouts of uses that have a gradient here; False if there is none for some of them."""
        have = have_gradient(batch.outputs, [batch.records[at] for at in unverified])
        batch.verified = [at for at, yes in zip(unverified, have, strict=True) if yes]
        if batch.verified:
            found = find_layouts(batch.outputs, [batch.records[at] for at in batch.verified])
            for at, (layouts, _) in zip(batch.verified, found, strict=True):
                batch.layouts[at] = layouts[0] if layouts else None
        return all(batch.layouts[at] is not None for at in batch.verified)

    def _verify_first_gradients(self, batch: _Batch) -> bool:
        """Compare parameters whose uses have their first gradient here with autograd; True if all agree.

        The layouts of uses that agree are reused from now on; parameters that do not agree fall back.
        """
        if not batch.verified:
            return True
        names = {name for at in batch.verified for name in batch.records[at].parameters}
        blocks = [block for block in self.blocks if names.intersection(block.parameters)]
        wanted = {name: self._parameters[name] for block in blocks for name in block.parameters}
        reference = reference_on_graph(batch.outputs, batch.inputs, wanted, self._uses.precision)
        grads = pull_back(batch.outputs, *batch.with_layout(), reference.cotangent[None], last=False)
        tangents = tangents_of(blocks, grads, batch.outputs, 1)
        wrong = mismatches(reference, [one for one in tangents if one.block.name not in self._uses.fallback])
        for name in wrong:
            self._fall_back(name, uncovered_calls(self._call, self._parameters[name], batch.inputs))
        if not wrong:
            self._remember_layouts(batch)
        return not wrong

    def _remember_layouts(self, batch: _Batch) -> None:
        """Keep the layouts that were verified on a batch for the batches that follow."""
        uses = self._uses
        of_kind: dict[tuple[Any, ...], set[Layout | None]] = {}
        for at in batch.verified:
            of_kind.setdefault(batch.records[at].key, set()).add(batch.layouts[at])
            if (site := batch.records[at].site) is not None:
                uses.batch_axes.confirmed.add(site)
        for key, layouts in of_kind.items():
            if key in uses.verified_counts:
                layouts |= set(uses.layouts[key])
            only = layouts.pop()
            if layouts or only is None:  # they differ: to be found on every batch
                uses.layouts[key] = ()
                uses.verified_counts.pop(key, None)
            else:
                uses.layouts[key] = (only,)
                uses.verified_counts[key] = max(
                    sum(one.key == key for one in batch.records), uses.verified_counts.get(key, 0)
                )

    def _fall_back(self, name: str, why: str) -> None:
        """Leave a parameter, which had no gradient of this kind so far, to the functional fallback from now on."""
        block = next(block for block in self.blocks if name in block.parameters)
        if block.kind != "dense" or len(block.parameters) > 1:
            raise UncapturedParameterError(
                f"expected {name} to be used as on the first batch, got another use on a later one: {why}. Let the "
                f"first batch have examples of every kind, or leave {name} out of the selection."
            )
        self._uses.recorded.pop(name, None)
        self._uses.fallback[name] = why
        self._uses.unverified_fallback.add(name)
        self._uses.runner = self._uses.runner or OneByOne
        self._later_notes.append(f"{name}: gradients example by example, since {why}")

    def _run_fallback(self, batch: _Batch) -> Run | None:
        """Run the model for the parameters that no rule covers, if there are any."""
        uses = self._uses
        if uses.runner is None:
            return None
        parameters = {name: self._parameters[name] for name in uses.fallback}
        if uses.runner is not Vectorized:
            return uses.runner(self._call, parameters, batch.inputs)
        try:
            run = Vectorized(self._call, parameters, batch.inputs)
            if not uses.unverified_fallback or self._verify_fallback(run, batch):
                return run
            why = "it does not give the gradient autograd gives"
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # a path that vmap cannot follow, and that other batches did not take
            why = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
        uses.runner = OneByOne
        self._later_notes.append(
            f"torch.vmap cannot run this model ({why}); {', '.join(parameters)}: one example at a time"
        )
        return OneByOne(self._call, parameters, batch.inputs)

    def _verify_fallback(self, run: Run, batch: _Batch) -> bool:
        """Whether gradients of the fallback that were zero so far, and are not here, add up to autograd's."""
        unverified = self._uses.unverified_fallback
        wanted = {name: self._parameters[name] for name in unverified}
        reference = reference_on_graph(batch.outputs, batch.inputs, wanted, self._uses.precision)
        nonzero = {name for name, grad in reference.gradients.items() if grad is not None and bool(grad.any())}
        if nonzero and fallback_mismatches(reference, run, wanted):
            return False
        unverified -= nonzero
        return True


@dataclass
class _Batch:
    """A recorded batch: the uses that its outputs depend on, and where their examples are.

    Attributes:
        layouts: `None` for uses without a gradient whose layout is not known.
        verified: positions of the records whose layout was found on this batch.
    """

    inputs: Inputs
    outputs: Tensor
    records: list[Record]
    layouts: list[Layout | None] = field(default_factory=list)
    verified: list[int] = field(default_factory=list)

    def with_layout(self) -> tuple[list[Record], list[Layout]]:
        """Records and their layouts, without those that have neither layout nor gradient."""
        pairs = [(one, layout) for one, layout in zip(self.records, self.layouts, strict=True) if layout is not None]
        return [one for one, _ in pairs], [layout for _, layout in pairs]


def _single_layout(record: Record) -> Layout:
    """A layout for a batch of one example, to which everything belongs."""
    folded = [Layout(axis, "outer") for axis in record.use.axes(record.shape)]
    accepted = [one for one in folded if record.use.accepts(one, record.shape, 1)]
    return next(iter([*possible_layouts_of(record, 1), *accepted]), Layout())


def _close(one: Tensor, other: Tensor) -> bool:
    floor = torch.finfo(torch.float32).tiny
    gap = tolerance(one.dtype, one.device) * one.norm() + floor
    return one.shape == other.shape and bool((one - other).norm() <= gap)


SEARCHED_AT_ONCE = 64
"""Examples that are run at once in a search for those that use a parameter."""

VERIFIED_ON = 7
"""Examples that a capture is verified on."""


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
    local = list(_search(set(wanted), capture, batches))
    found = process_group.tell(
        "parameters not used so far", to_device(local, torch.device("cpu")) if not process_group.alone else local
    )
    missing, chosen = set(wanted), []
    for names, few in (one for each in found for one in each):
        if missing.intersection(names):
            missing -= names
            chosen.append(to_device(few, device))
    return chosen


def _search(wanted: set[str], capture: Capture, batches: Iterable[Batch]) -> Iterator[tuple[set[str], Inputs]]:
    for batch in batches:
        for low in range(0, batch.size, SEARCHED_AT_ONCE):
            some = take(batch.inputs, slice(low, low + SEARCHED_AT_ONCE))
            here = wanted & capture.uses(some)
            while here:
                few = _bisect(capture, some, here)
                names = wanted & capture.uses(few)
                if not here & names:  # by no few of them
                    break
                yield names, few
                here -= names
                wanted -= names
        if not wanted:
            return


def _bisect(capture: Capture, inputs: Inputs, wanted: set[str]) -> Inputs:
    """Few of the examples, that still use one of the parameters."""
    while (n := batch_size(inputs, "this batch")) > VERIFIED_ON:
        first, second = take(inputs, slice(0, n // 2)), take(inputs, slice(n // 2, n))
        inputs = first if wanted & capture.uses(first) else second
    return inputs
