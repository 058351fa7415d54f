"""Per-example gradients of any model, layer by layer: one forward pass, and backward passes down to layer outputs only.

A torch function mode records the calls that use a selected parameter in a way that a rule understands, with their
inputs and their place in the graph. Other uses are differentiated by the functional fallback.

The capture is verified on a few examples against autograd. On every later batch, the graph shows whether parameters are
used in a way that was not recorded. Uses that had no gradient before, or did not occur, are verified on the first batch
where they have one. If the model may have reordered the rows of a batch, their places are verified on that batch. If
the examples of a batch cannot be separated, they are run one at a time. Whatever cannot be captured at all raises an
error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from whence.data.batches import Batch, Call, Inputs, batch_size, take, to_device
from whence.errors import ShapeError, UncapturedParameterError, first_line
from whence.jacobian import verify
from whence.jacobian.gradients import Block, Dense, Layout, Tangent, concatenate, normal_numbers
from whence.jacobian.record import (
    OneByOne,
    Vectorized,
    Walk,
    differentiable,
    make_blocks,
    tangents_of,
    walk,
    wanted_blocks,
)
from whence.jacobian.rules import READERS
from whence.jacobian.rules.base import BatchAxes, Record, Recorder
from whence.jacobian.views import SoftmaxColumns
from whence.runtime.processes import ProcessGroup


@dataclass(frozen=True)
class Captured:
    """One batch, run under capture; keeps the graph until `tangents(..., last=True)`."""

    blocks: Sequence[Block]
    graph: Tensor  # the outputs (n, k), with their graph
    records: Sequence[Record]  # the recorded uses that the outputs depend on
    fallback: Vectorized | OneByOne | None  # for parameters that no rule covers
    vectorized: bool = False  # whether one vectorised backward pass was verified to equal several

    @property
    def outputs(self) -> Tensor:
        """(n, k), without a graph."""
        return self.graph.detach()

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """Pull cotangents (c, n, k) back to every block; `last` frees the graph.

        With `batched` they go through one vectorised backward pass; the default is to do so if it was verified to give
        the same. It is up to 1.7 times as fast on a GPU, no faster on a CPU, and some kernels have no such form.
        """
        cotangents = cotangents.to(self.outputs)
        batched = (self.vectorized if batched is None else batched) and len(cotangents) > 1
        tangents = tangents_of(self.blocks, self.graph, self.records, cotangents, last=last, batched=batched)
        if self.fallback is None:
            return tangents
        values = self.fallback.gradients(cotangents, last)
        own: dict[str, Tangent] = {name: Dense.of_parameter(name, grads) for name, grads in values.items()}
        return [own.get(one.block.name, one) for one in tangents]


@dataclass(frozen=True)
class CapturedOneByOne:
    """One batch whose examples were run one at a time, each under capture."""

    examples: Sequence[Captured]

    @property
    def outputs(self) -> Tensor:
        """(n, k), without a graph."""
        return torch.cat([one.outputs for one in self.examples])

    def tangents(self, cotangents: Tensor, *, last: bool = False, batched: bool | None = None) -> list[Tangent]:
        """As for `Captured`."""
        each = [one.tangents(cotangents[:, at : at + 1], last=last) for at, one in enumerate(self.examples)]
        return [concatenate(tangents) for tangents in zip(*each, strict=True)]


class Capture:
    """Computes the tangents of a model, batch by batch; the top of this module says what is verified when.

    Args:
        call: Runs the model on a batch of inputs; outputs (n, k).
        parameters: The selected parameters by name; all of them require gradients.
        example_inputs: The first batch; the capture is verified on a few of its examples.
        more: Further batches of a few examples that use parameters not used by the first.
        blocks: Blocks of an earlier capture of the same model, for parameters that these examples do not use.
        later_notes: A list for notes on later batches.
        lowered: A call of the same model in lower precision, and that precision, used once the capture is verified.

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
        lowered: tuple[Call, torch.dtype] | None = None,
    ) -> None:
        self._call = call
        self._parameters = dict(parameters)
        self._recorded = dict(parameters)  # parameters whose uses are recorded
        self._batch_axes = BatchAxes()
        self._known: dict[tuple[Any, ...], Layout | None] = {}  # by kind of use; None if batches differ
        self._verified: Counter[tuple[Any, ...]] = Counter()  # number of uses of each kind compared with autograd
        self._runner: type[Vectorized | OneByOne] = Vectorized  # or `OneByOne` if that fails
        self._unverified_fallback: set[str] = set()  # fallback parameters without a gradient so far
        self._one_by_one = False
        self._settled = False  # whether the first examples are verified
        self._notes: list[str] = []
        self._vectorized = False
        self.blocks: tuple[Block, ...] = ()  # the selected parameters, in their order
        self.fallback: dict[str, str] = {}  # parameters left to the functional fallback, and why
        self.without_uses: set[str] = set()  # parameters that none of the examples used
        references = [verify.autograd_reference(call, parameters, inputs) for inputs in (example_inputs, *more)]
        self._precision = max((one.precision for one in references), key=lambda dtype: torch.finfo(dtype).eps)
        reached = {name for one in references for name, gradient in one.gradients.items() if gradient is not None}
        if unused := [name for name in parameters if name not in reached]:
            self._notes.append(f"the outputs do not depend on {', '.join(unused)}: its gradient is zero")
        try:
            while not self._verify_first(references, blocks):
                pass
        except CheckpointError as error:
            raise UncapturedParameterError(
                "expected a model that keeps what its backward pass needs, got torch.utils.checkpoint in its forward, "
                "which computes it again unlike it was recorded. Switch it off for the fit, for example by "
                "model.gradient_checkpointing_disable(); Hugging Face models do so in eval mode by themselves."
            ) from error
        for reference in references:
            self._run_fallback(reference.inputs, reference)
        self.notes = tuple(dict.fromkeys(self._notes))  # anything unusual, for diagnostics
        self._notes = [] if later_notes is None else later_notes
        self._settled = True
        if lowered is not None:
            self._call, self._precision = lowered
        if next(iter(parameters.values())).is_cuda:
            self._vectorized = self.vectorizes(take(example_inputs, slice(0, 2)))

    def vectorizes(self, inputs: Inputs) -> bool:
        """Whether one vectorised backward pass equals one pass for each cotangent, on these inputs."""
        try:
            run = self.run(inputs)
            cotangents = normal_numbers((2, *run.outputs.shape), 0, run.outputs)
            each = [run.tangents(cotangents, batched=batched) for batched in (False, True)]
            pairs = ((one.materialize(), other.materialize()) for one, other in zip(*each, strict=True))
            return all(verify.close(other, one, verify.tolerance(one.dtype, one.device)) for one, other in pairs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # anything vmap does not support: one cotangent at a time always works
            return False

    def uses(self, inputs: Inputs) -> set[str]:
        """The parameters that the outputs of a batch depend on, by its graph."""
        found = self._record(inputs)
        return found.unrecorded.union(*(record.parameters for record in found.records))

    def run(self, inputs: Inputs) -> Captured | CapturedOneByOne:
        """Run the model on a batch and keep what the tangents need."""
        n = batch_size(inputs, "this batch")
        if n > 1 and self._one_by_one:
            return self._run_one_by_one(inputs)
        found = self._record(inputs)
        if self._leave_to_fallback(found.unrecorded, inputs):
            return self.run(inputs)
        outputs, records = found.outputs, found.records
        unverified = self._reuse_layouts(records, n)
        for record in unverified:
            self._check_form(record)
        if n > 1 and unverified:
            fresh = verify.find_layouts(outputs, unverified)
            if any(record.layout is None for record in fresh):
                return self._run_one_by_one(inputs, "no axis of a layer's output holds the examples of some batches")
            blocks = self._blocks_of(name for record in fresh for name in record.parameters)
            if blocks and not self._agrees(found, fresh, self._reference(outputs, inputs, blocks), blocks):
                return self.run(inputs)
        if found.may_reorder and not verify.rows_are_in_place(outputs, records):
            return self._run_one_by_one(inputs, "the model reorders the examples of a batch")
        blocks = self._blocks_of(self._unverified_fallback)
        fallback = self._run_fallback(inputs, self._reference(outputs, inputs, blocks) if blocks else None)
        together = self._vectorized and not isinstance(inputs, SoftmaxColumns)  # these have many outputs
        return Captured(self.blocks, outputs, records, fallback, together)

    def _record(self, inputs: Inputs) -> Walk:
        """Run the model on a batch: outputs with their graph, and the uses of parameters that they depend on."""
        n = batch_size(inputs, "this batch")
        with differentiable(), Recorder(READERS, self._recorded, n, self._batch_axes) as recorder:
            outputs = self._call(inputs)
        if outputs.dim() != 2 or len(outputs) != n:
            raise ShapeError(f"expected outputs of shape ({n}, k), got {tuple(outputs.shape)}.")
        return walk(outputs, recorder.records, self._recorded)

    def _blocks_of(self, names: Iterable[str]) -> list[Block]:
        wanted = set(names)
        return [block for block in self.blocks if wanted.intersection(block.parameters)]

    def _reference(self, outputs: Tensor, inputs: Inputs, blocks: Iterable[Block]) -> verify.AutogradReference:
        wanted = {name: self._parameters[name] for block in blocks for name in block.parameters}
        return verify.reference_on_graph(outputs, inputs, wanted, self._precision)

    def _run_one_by_one(self, inputs: Inputs, why: str = "") -> CapturedOneByOne:
        """Run the examples of this batch, and of all later ones, one at a time."""
        if why:
            self._one_by_one = True
            self._notes.append(f"examples were run one at a time, since {why}")
        n = batch_size(inputs, "this batch")
        each = [self.run(take(inputs, slice(at, at + 1))) for at in range(n)]
        return CapturedOneByOne([one for one in each if isinstance(one, Captured)])

    # --- Verification -------------------------------------------------------------------------------------------------

    def _verify_first(self, references: Sequence[verify.AutogradReference], blocks: Sequence[Block] | None) -> bool:
        """Record the first examples: true if all agree with autograd; if not, fewer uses are recorded next time."""
        self._batch_axes = BatchAxes(self._batch_axes.refuted)
        self._known, self._verified = {}, Counter()
        runs = []
        for reference in references:
            run = self._record(reference.inputs)
            if not verify.close(run.outputs.detach(), reference.outputs, reference.tolerance):
                gap = float((run.outputs - reference.outputs).abs().max())
                raise UncapturedParameterError(
                    "expected the outputs of the model under capture to be its own, got a difference of "
                    f"{gap:.3g} on the first batch. The model may not be deterministic: call model.eval(), or select "
                    "fewer parameters."
                )
            self._batch_axes.verified = True  # later axes follow from these, or are guessed and then verified
            if self._leave_to_fallback(run.unrecorded, reference.inputs):
                return False
            runs.append(run)
        every = [record for run in runs for record in run.records]
        self.without_uses = self._recorded.keys() - {name for record in every for name in record.parameters}
        self.blocks = make_blocks(every, self._parameters)
        if blocks is not None and self._can_hold(blocks, every):
            self.blocks = tuple(blocks)
        for run, reference in zip(runs, references, strict=True):
            fresh = verify.find_layouts(run.outputs, run.records)
            lost = [record for record in fresh if record.layout is None] or _guess_layouts(run, fresh)
            sites = {record.site for record in lost if record.site is not None}
            self._batch_axes.refuted |= sites
            names = set() if sites else {name for record in lost for name in record.parameters}
            self._leave_to_fallback(names, reference.inputs, "no axis of a layer's output holds the examples")
            if lost or not self._agrees(run, fresh, reference, self.blocks):
                return False
        return True

    def _can_hold(self, blocks: Sequence[Block], records: Sequence[Record]) -> bool:
        """Whether the blocks of an earlier capture can hold the present uses."""
        of = _block_of_each(blocks)
        return all(of[name].alone for name in self.fallback) and not any(self._misfits(one, of) for one in records)

    def _misfits(self, record: Record, blocks: Mapping[str, Block]) -> list[str]:
        """Parameters whose gradient from a use does not have the form of their block."""
        wanted = wanted_blocks(record, self._parameters)
        pairs = ((name, block, blocks[name]) for name, block in wanted)
        return [name for name, block, held in pairs if held.kind != "dense" and held not in (block, block.only(name))]

    def _agrees(
        self, run: Walk, fresh: Sequence[Record], reference: verify.AutogradReference, blocks: Sequence[Block]
    ) -> bool:
        """Whether these gradients add up to autograd's. If so, keep the layouts; if not, parameters fall back."""
        tangents = tangents_of(blocks, run.outputs, run.records, reference.cotangent[None], last=False)
        wrong = reference.mismatches([one for one in tangents if one.block.name not in self.fallback])
        if wrong:
            if not self._leave_to_fallback(wrong, reference.inputs):
                raise _not_autograds(wrong)
            return False
        counts = Counter(record.key for record in run.records)
        compared = {record.key for record in fresh}
        for key in compared:  # replace guesses for uses that had no gradient so far
            if not self._verified[key]:
                self._known.pop(key, None)
        for record in run.records:
            if record.layout is not None and (record.key not in self._known or record.key in compared):
                same = self._known.setdefault(record.key, record.layout) == record.layout
                self._known[record.key] = record.layout if same else None
        self._verified |= Counter({key: counts[key] for key in compared})
        self._batch_axes.answers.update((record.site, True) for record in fresh if record.site is not None)
        return True

    def _reuse_layouts(self, records: Sequence[Record], n: int) -> list[Record]:
        """Give records the layouts verified before if they fit; return those not verified."""
        seen: Counter[tuple[Any, ...]] = Counter()
        unverified: list[Record] = []
        for record in records:
            layout = self._known.get(record.key)
            if layout is None or not layout.fits(record.shape, n):
                layout = next(iter(record.possible_layouts(1)), Layout()) if n == 1 else None
            if layout is None or record.guessed or seen[record.key] >= self._verified[record.key]:
                unverified.append(record)
            seen[record.key] += 1
            record.layout = layout
        return unverified

    def _check_form(self, record: Record) -> None:
        """Raise if the gradient of a use does not have the form of its parameter's block."""
        for name in self._misfits(record, _block_of_each(self.blocks)):
            raise UncapturedParameterError(
                f"expected {name} to be used as on the first batch, got a use of another form "
                f"({type(record.use).__name__}, output of shape {tuple(record.shape)}). The forward pass takes "
                f"another path for these data: let the first batch have examples of every kind, or leave {name} "
                "out of the selection."
            )

    # --- The fallback -------------------------------------------------------------------------------------------------

    def _leave_to_fallback(self, names: Iterable[str], inputs: Inputs, why: str = "") -> bool:
        """Leave parameters to the functional fallback from now on; return whether any of them is new there."""
        new = sorted(name for name in names if name in self._recorded)
        for name in new:
            reason = why or verify.uncovered_calls(self._call, self._parameters[name], inputs)
            if self._settled and not _block_of_each(self.blocks)[name].alone:
                raise UncapturedParameterError(
                    f"expected {name} to be used as on the first batch, got another use on a later one: {reason}. Let "
                    f"the first batch have examples of every kind, or leave {name} out of the selection."
                )
            del self._recorded[name]
            self.fallback[name] = reason
            self._unverified_fallback.add(name)
            self._notes.append(f"{name}: gradients example by example, since {reason}")
        return bool(new)

    def _run_fallback(self, inputs: Inputs, reference: verify.AutogradReference | None) -> Vectorized | OneByOne | None:
        """Run the model for parameters that no rule covers, if any; compare with autograd if a reference is given."""
        parameters = {name: self._parameters[name] for name in self.fallback}
        if not parameters:
            return None
        try:
            run = self._runner(self._call, parameters, inputs)
            if reference is not None:
                grads = run.gradients(reference.cotangent[None], last=False)
                known = reference.gradients
                if wrong := reference.mismatches([Dense.of_parameter(n, g) for n, g in grads.items() if n in known]):
                    raise _not_autograds(wrong)
                self._unverified_fallback -= {n for n, g in known.items() if g is not None and bool(g.any())}
            return run
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:  # anything vmap does not support: one example at a time always works
            if self._runner is OneByOne:
                raise
            why, names = first_line(error), ", ".join(parameters)
        self._runner = OneByOne
        self._notes.append(f"torch.vmap cannot run this model ({why}); {names}: one example at a time")
        return self._run_fallback(inputs, reference)


def _guess_layouts(run: Walk, fresh: Sequence[Record]) -> list[Record]:
    """Give uses without a gradient a likely layout, for the factors of their inputs; return those without any."""
    unknown = [record for record in run.records if record.layout is None]
    for record in unknown:
        same = [other.layout for other in fresh if other.key == record.key]
        record.layout = next(iter([*same, *record.possible_layouts(len(run.outputs))]), None)
    return [record for record in unknown if record.layout is None]


def _block_of_each(blocks: Sequence[Block]) -> dict[str, Block]:
    return {name: block for block in blocks for name in block.parameters}


def _not_autograds(wrong: Mapping[str, str]) -> UncapturedParameterError:
    name, gap = next(iter(wrong.items()))
    return UncapturedParameterError(
        f"expected the gradients of single examples in {name} to add up to autograd's, {gap}. Leave {name} out of the "
        "selection, or check that no example of a batch has an influence on another."
    )


# --- Examples that use a parameter ------------------------------------------------------------------------------------

SEARCHED_AT_ONCE = 64  # examples run at once


def examples_using(
    wanted: set[str], capture: Capture, batches: Iterable[Batch], process_group: ProcessGroup, device: torch.device
) -> list[Inputs]:
    """A few examples that use each of these parameters, the same in every process, found by forward passes."""
    missing = set(wanted)
    local: list[tuple[set[str], Inputs]] = []
    for batch in batches:
        for low in range(0, batch.size, SEARCHED_AT_ONCE):
            local += _search(missing, capture, take(batch.inputs, slice(low, low + SEARCHED_AT_ONCE)))
        if not missing:
            break
    sent = local if process_group.alone else to_device(local, torch.device("cpu"))
    found = process_group.all_gather_object("parameters not used so far", sent)
    missing, chosen = set(wanted), []
    for names, few in (one for each in found for one in each):
        if missing.intersection(names):
            missing -= names
            chosen.append(to_device(few, device))
    return chosen


def _search(missing: set[str], capture: Capture, inputs: Inputs) -> Iterator[tuple[set[str], Inputs]]:
    """Halve the inputs down to a few examples that use `missing` parameters, and remove these from `missing`."""
    names, n = missing & capture.uses(inputs) if missing else set(), batch_size(inputs, "this batch")
    if names and n <= verify.BATCH_SIZES[0]:
        missing -= names
        yield names, inputs
    elif names:
        for half in (slice(0, n // 2), slice(n // 2, n)):
            yield from _search(missing, capture, take(inputs, half))
