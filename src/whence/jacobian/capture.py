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

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import CheckpointError

from whence.data.batches import Call, Inputs, batch_size, take
from whence.display import listing
from whence.errors import InputError, ShapeError, UncapturedParameterError, first_line
from whence.jacobian.functionals import SoftmaxColumns
from whence.jacobian.gradients import Block, Dense, Kronecker, Layout, Tangent, concatenate, normal_numbers
from whence.jacobian.record import (
    Forms,
    GraphUses,
    PerExample,
    differentiable,
    forms_of,
    make_blocks,
    pull,
    tangents_of,
    uses_in_graph,
    wanted_blocks,
)
from whence.jacobian.rules import READERS
from whence.jacobian.rules.base import Arguments, CallSite, Function, Intercept, Keywords, Record, Recorder
from whence.linalg import gradients_not_finite

BATCH_SIZES = (7, 5, 3, 2)  # for verification: unlikely to equal a width, head count or sequence length


@dataclass(frozen=True)
class Captured:
    """One batch, run under capture; keeps the graph until `tangents(..., last=True)`."""

    blocks: Sequence[Block]
    graph: Tensor  # the outputs (n, k), with their graph
    records: Sequence[Record]  # the recorded uses that the outputs depend on
    fallback: PerExample | None  # for parameters that no rule covers
    vectorized: bool = False  # whether one vectorised backward pass was verified to equal several

    @property
    def outputs(self) -> Tensor:
        """(n, k), without a graph."""
        return self.graph.detach()

    def tangents(self, cotangents: Tensor, *, last: bool = False) -> list[Tangent]:
        """Pull cotangents (c, n, k) back to every block; `last` frees the graph.

        If `vectorized`, all go through one backward pass. It is up to 1.7 times as fast on a GPU, no faster on a CPU,
        and some kernels have no such form.
        """
        cotangents = cotangents.to(self.outputs)
        batched = self.vectorized and len(cotangents) > 1
        values = {} if self.fallback is None else self.fallback.gradients(cotangents)  # may need the same graph
        tangents = tangents_of(self.blocks, self.graph, self.records, cotangents, last=last, batched=batched)
        own = {name: grads.reshape(*grads.shape[:2], -1) for name, grads in values.items()}  # of scalars too
        return [Dense(one.block, own[one.block.name]) if one.block.name in own else one for one in tangents]


@dataclass(frozen=True)
class CapturedOneByOne:
    """One batch whose examples were run one at a time, each under capture."""

    examples: Sequence[Captured]

    @property
    def outputs(self) -> Tensor:
        """(n, k), without a graph."""
        return torch.cat([one.outputs for one in self.examples])

    def tangents(self, cotangents: Tensor, *, last: bool = False) -> list[Tangent]:
        """As for `Captured`."""
        each = [one.tangents(cotangents[:, at : at + 1], last=last) for at, one in enumerate(self.examples)]
        return [concatenate(tangents) for tangents in zip(*each, strict=True)]


class Capture:
    """Computes the tangents of a model, batch by batch; the top of this module says what is verified when.

    Args:
        call: Runs the model on a batch of inputs; outputs (n, k).
        parameters: The selected parameters by name; all of them require gradients.
        example_inputs: The first batch; the capture is verified on a few of its examples.
        blocks: Blocks to use, as those of an earlier capture of the same model; by default what suits each use best.
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
        blocks: Sequence[Block] | None = None,
        later_notes: list[str] | None = None,
        lowered: tuple[Call, torch.dtype] | None = None,
    ) -> None:
        self._call = call
        self._parameters = dict(parameters)
        self._recorded = dict(parameters)  # parameters whose uses are recorded
        self._batch_axes: dict[CallSite, bool] = {}  # which outputs have a batch axis, once verified
        self._layouts: dict[tuple[Any, ...], list[Layout | None]] = {}  # of verified uses, by kind of use
        self._unverified_fallback: set[str] = set()  # fallback parameters without a gradient so far
        self._one_by_one = False
        self._fixed = blocks is not None  # whether the blocks stay as they are
        self._notes: list[str] = []
        self._vectorized = False
        self.blocks = tuple(blocks or ())  # the selected parameters, in their order
        self.forms: Forms = {}  # of the uses on the first examples
        self.unused: list[str] = []  # parameters that the outputs of the first examples do not depend on
        self.fallback: set[str] = set()  # parameters left to the functional fallback
        try:
            self._precision = self._verify(self._few(example_inputs))
        except CheckpointError as error:
            raise UncapturedParameterError(
                "expected a model that keeps what its backward pass needs, got torch.utils.checkpoint in its forward, "
                "which computes it again unlike it was recorded. Switch it off for the fit, for example by "
                "model.gradient_checkpointing_disable(); Hugging Face models do so in eval mode by themselves."
            ) from error
        self._fixed = True
        self.notes = tuple(dict.fromkeys(self._notes))  # anything unusual, for diagnostics
        self._notes = [] if later_notes is None else later_notes
        if lowered is not None:
            self._call, self._precision = lowered
        if next(iter(parameters.values())).is_cuda:
            self._vectorized = self.vectorizes(take(example_inputs, slice(0, 2)))

    def run(self, inputs: Inputs, reference: AutogradReference | None = None) -> Captured | CapturedOneByOne:
        """Run the model on a batch and keep what the tangents need; verify what was not verified before."""
        n = batch_size(inputs, "this batch")
        if n > 1 and self._one_by_one:
            return self._run_one_by_one(inputs)
        found = self._record(inputs)
        if self._leave_to_fallback(found.unrecorded):
            return self.run(inputs, reference)
        if not self._fixed:
            self.forms = forms_of(found.records, self._parameters)
            self.blocks = make_blocks(self.forms, self._parameters)
        new, lost = self._new_uses(found)
        if lost:  # record fewer uses, and try again
            names = {name for record in lost for name in record.parameters}
            why = "the model reorders the examples of a batch, or a layer's output has no axis for them"
            if guesses := {record.guess: False for record in lost if record.guess is not None}:
                self._batch_axes.update(guesses)
            elif n > 1 and not all(map(self._can_fall_back, names)):
                return self._run_one_by_one(inputs, why)
            else:
                self._leave_to_fallback(names, why)
            return self.run(inputs, reference)
        try:
            captured = self._with_fallback(found, inputs)
            wrong = self._mismatches(captured, found, new, reference)
            if wrong and self.fallback.issuperset(wrong):
                raise _not_autograds(wrong)
        except Exception as error:  # anything vmap does not support: one example at a time always works
            if n == 1 or not self.fallback or isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            return self._run_one_by_one(inputs, f"torch.vmap cannot run this model ({first_line(error)})")
        return self.run(inputs, reference) if self._leave_to_fallback(wrong) else captured

    def forms_on(self, inputs: Inputs) -> Forms:
        """The forms of the uses of parameters on other inputs; none for parameters whose use no rule covers."""
        n = batch_size(inputs, "this batch")
        if n > 1 and self._one_by_one:
            each = [self.forms_on(take(inputs, slice(at, at + 1))) for at in range(n)]
            return {name: set().union(*(forms[name] for forms in each)) for name in self._parameters}
        found = self._record(inputs)
        forms = forms_of(found.records, self._parameters)
        return {**forms, **{name: set() for name in found.unrecorded}}

    def vectorizes(self, inputs: Inputs) -> bool:
        """Whether one vectorised backward pass equals one pass for each cotangent, on these inputs."""
        try:
            found = self.run(inputs)
            run = found if isinstance(found, Captured) else found.examples[0]
            cotangents = normal_numbers((2, *run.outputs.shape), 0, run.outputs)
            each = [replace(run, vectorized=vectorized).tangents(cotangents) for vectorized in (False, True)]
            pairs = ((one.materialize(), other.materialize()) for one, other in zip(*each, strict=True))
            return all(close(other, one, tolerance(one.dtype, one.device)) for one, other in pairs)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception:  # anything vmap does not support: one cotangent at a time always works
            return False

    def _record(self, inputs: Inputs) -> GraphUses:
        """Run the model on a batch: outputs with their graph, and the uses of parameters that they depend on."""
        n = batch_size(inputs, "this batch")
        with differentiable(), Recorder(READERS, self._recorded, n, self._batch_axes) as recorder:
            outputs = self._call(inputs)
        if outputs.dim() != 2 or len(outputs) != n:
            raise ShapeError(f"expected outputs of shape ({n}, k), got {tuple(outputs.shape)}.")
        return uses_in_graph(outputs, recorder, self._recorded)

    def _run_one_by_one(self, inputs: Inputs, why: str = "") -> CapturedOneByOne:
        """Run the examples of this batch, and of all later ones, one at a time."""
        n = batch_size(inputs, "this batch")
        singles = [take(inputs, slice(at, at + 1)) for at in range(n)]
        if why:
            self._one_by_one = True
            self._notes.append(f"one example at a time: {why}")
            if not self._fixed:  # alone, examples may use parameters in other ways than together
                for one in singles:
                    self.run(one)
                self.forms = self.forms_on(inputs)
                self.blocks = make_blocks(self.forms, self._parameters)
            self._fixed = True  # single examples may not use every parameter
        each = [self.run(one) for one in singles]
        return CapturedOneByOne([one for one in each if isinstance(one, Captured)])

    # --- Verification -------------------------------------------------------------------------------------------------

    def _few(self, inputs: Inputs) -> Inputs:
        """A few examples to verify the capture on: at least two, if the model takes as many at once."""
        n = batch_size(inputs, "the first batch")
        if n > 1:
            return take(inputs, slice(0, next(size for size in BATCH_SIZES if size <= n)))
        twice = tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, inputs)
        try:
            with torch.no_grad():
                self._call(twice)
            return twice
        except (InputError, ShapeError) as error:
            self._one_by_one = True
            self._notes.append(f"one example at a time: the model does not take several ({first_line(error)})")
            return inputs

    def _verify(self, inputs: Inputs) -> torch.dtype:
        """Compare the capture with the unmodified model on a few examples; return the model's lowest precision."""
        dtypes = [torch.float64]  # dtypes inside the model: one in float32 may use bfloat16

        def noted(function: Function, args: Arguments, kwargs: Keywords) -> Any:
            out = function(*args, **kwargs)
            dtypes.extend([out.dtype] if isinstance(out, Tensor) and out.is_floating_point() else [])
            return out

        with differentiable(), Intercept(noted):
            outputs = self._call(inputs)
        precision = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
        reference = AutogradReference.of(outputs, self._parameters, precision)
        found = {name: one for name, one in reference.gradients.items() if one is not None}
        if not found:
            raise UncapturedParameterError(
                "expected outputs that depend on the selected parameters, got none of the "
                f"{len(self._parameters)} connected to them. Look for torch.no_grad, torch.inference_mode, .detach() "
                "or checkpoints with use_reentrant=True in the model's forward, or select parameters that it uses."
            )
        for name, gradient in found.items():
            if not bool(torch.isfinite(gradient).all()):
                raise gradients_not_finite(f"in {name} on the first batch")
        self.unused = [name for name in self._parameters if name not in found]
        known = {name for block in self.blocks if block.kind != "dense" for name in block.parameters}
        if unused := [name for name in self.unused if name not in known]:
            self._notes.append(f"the outputs of the first examples do not depend on {listing(unused)}")
        captured = self.run(inputs, reference)
        if not close(captured.outputs, reference.outputs, tolerance(precision, reference.outputs.device)):
            gap = float((captured.outputs - reference.outputs).abs().max())
            raise UncapturedParameterError(
                "expected the outputs of the model under capture to be its own, got a difference of "
                f"{gap:.3g} on the first batch. The model may not be deterministic: call model.eval(), or select "
                "fewer parameters."
            )
        if wrong := reference.mismatches(captured.tangents(reference.cotangent[None])):
            raise _not_autograds(wrong)
        return precision

    def _new_uses(self, found: GraphUses) -> tuple[list[Record], list[Record]]:
        """Give uses the layouts verified before, or find one; return those not verified, and those without a layout."""
        n, seen = len(found.outputs), Counter[tuple[Any, ...]]()
        unverified: list[Record] = []
        for record in found.records:
            known = self._layouts.get(record.key, [])
            layout = known[0] if seen[record.key] < len(known) and len(set(known)) == 1 else None
            if layout is None or record.guess is not None or not layout.fits(record.shape, n):
                layout = next(iter(record.possible_layouts(n)), None)
                self._check_form(record)
                unverified.append(record)
            seen[record.key] += 1
            record.layout = layout
        suspect = found.records if found.may_reorder else unverified
        fresh = find_layouts(found.outputs, suspect) if n > 1 and suspect else unverified
        lost = [record for record in fresh if record.layout is None]
        return [record for record in fresh if record in unverified], lost

    def _mismatches(
        self, captured: Captured, found: GraphUses, new: Sequence[Record], reference: AutogradReference | None
    ) -> Mapping[str, str]:
        """Parameters whose gradients do not add up to autograd's: all, or those not verified so far.

        If there are none, the layouts of the uses are kept for later batches.
        """
        names = {name for record in new for name in record.parameters} | self._unverified_fallback
        blocks, fallback = self.blocks, captured.fallback
        if reference is None:
            if not names or len(captured.graph) == 1:
                return {}
            blocks = tuple(block for block in self.blocks if names.intersection(block.parameters))
            fallback = fallback if self._unverified_fallback else None
            wanted = {name: self._parameters[name] for block in blocks for name in block.parameters}
            reference = AutogradReference.of(captured.graph, wanted, self._precision)
        tangents = replace(captured, blocks=blocks, fallback=fallback).tangents(reference.cotangent[None])
        if wrong := reference.mismatches(tangents):
            return wrong
        layouts: dict[tuple[Any, ...], list[Layout | None]] = defaultdict(list)
        for record in found.records:
            layouts[record.key].append(record.layout)
        self._layouts.update((record.key, layouts[record.key]) for record in new)
        without = {site: False for site, exists in found.sites.items() if not exists}
        self._batch_axes.update({**without, **{record.guess: True for record in new if record.guess is not None}})
        used = {name for name, gradient in reference.gradients.items() if gradient is not None and gradient.any()}
        self._unverified_fallback -= used
        return {}

    def _check_form(self, record: Record) -> None:
        """Raise if the gradient of a use does not have the form of its parameter's block."""
        blocks = {name: block for block in self.blocks for name in block.parameters}
        for name, block in wanted_blocks(record, self._parameters):
            if blocks[name].kind != "dense" and blocks[name] not in (block, block.restricted_to(name)):
                raise UncapturedParameterError(
                    f"expected {name} to be used as on the first batch, got a use of another form "
                    f"({type(record.use).__name__}, output of shape {tuple(record.shape)}). The forward pass takes "
                    f"another path for these data: let the first batch have examples of every kind, or leave {name} "
                    "out of the selection."
                )

    # --- The fallback -------------------------------------------------------------------------------------------------

    def _can_fall_back(self, name: str) -> bool:
        """Whether a parameter's gradients may have no particular form."""
        return not self._fixed or any(block.kind == "dense" and block.parameters == (name,) for block in self.blocks)

    def _leave_to_fallback(self, names: Iterable[str], why: str = "no rule covers a use of it") -> bool:
        """Leave parameters to the functional fallback from now on; return whether any of them is new there."""
        new = sorted(name for name in names if name in self._recorded)
        for name in new:
            if not self._can_fall_back(name):
                raise UncapturedParameterError(
                    f"expected {name} to be used as on the first batch, got another use on a later one: {why}. Let "
                    f"the first batch have examples of every kind, or leave {name} out of the selection."
                )
            del self._recorded[name]
            self.fallback.add(name)
            self._unverified_fallback.add(name)
            self._notes.append(f"{name}: gradients example by example, since {why}")
        return bool(new)

    def _with_fallback(self, found: GraphUses, inputs: Inputs) -> Captured:
        """The captured batch; the model runs again for parameters that no rule covers, if any."""
        parameters = {name: self._parameters[name] for name in self.fallback}
        fallback = None
        if parameters and len(found.outputs) == 1:
            fallback = PerExample(found.outputs, parameters, parameters)
        elif parameters:
            fallback = PerExample.vectorized(self._call, parameters, inputs)
        vectorized = self._vectorized and not isinstance(inputs, SoftmaxColumns)  # these have many outputs
        return Captured(self.blocks, found.outputs, found.records, fallback, vectorized)


def _not_autograds(wrong: Mapping[str, str]) -> UncapturedParameterError:
    name, gap = next(iter(wrong.items()))
    return UncapturedParameterError(
        f"expected the gradients of single examples in {name} to add up to autograd's, {gap}. Leave {name} out of the "
        "selection, or check that no example of a batch has an influence on another."
    )


# --- Autograd's gradients, to compare with ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AutogradReference:
    """Autograd's gradients of the model for one random cotangent."""

    outputs: Tensor  # (n, k)
    precision: torch.dtype  # the lowest precision inside the model
    cotangent: Tensor  # (n, k)
    gradients: Mapping[str, Tensor | None]  # None if the outputs do not depend on the parameter

    @classmethod
    def of(cls, outputs: Tensor, parameters: Mapping[str, Tensor], precision: torch.dtype) -> AutogradReference:
        """From outputs with a graph, which is kept."""
        cotangent = normal_numbers(outputs.shape, len(outputs), outputs)
        found = pull(outputs, list(parameters.values()), cotangent)
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
        return cls(outputs.detach(), precision, cotangent, dict(zip(parameters, dense, strict=True)))

    def mismatches(self, tangents: Sequence[Tangent]) -> dict[str, str]:
        """Parameters whose captured gradients, summed over examples, differ from autograd's; and by how much."""
        scale = math.hypot(*(float(g.double().norm()) for g in self.gradients.values() if g is not None))
        relative = tolerance(self.precision, self.outputs.device)
        floor = scale * max(min(100 * torch.finfo(self.precision).eps, 1e-2), relative**2)  # if terms cancel
        wrong: dict[str, str] = {}
        for tangent in tangents:
            total, norm_of_terms = _sum_over_examples(tangent)
            for name, got in tangent.block.from_matrix(total).items():
                truth = self.gradients[name]
                expected = torch.zeros_like(got) if truth is None else truth.double()
                gap, norm = float((got - expected).norm()), float(expected.norm())
                if not gap <= relative * (norm + norm_of_terms) + floor:
                    wrong[name] = f"norm {norm:.6g}, got norm {float(got.norm()):.6g}, difference {gap:.3g}"
        return wrong


def _sum_over_examples(tangent: Tangent) -> tuple[Tensor, float]:
    """The sum for one cotangent, as the block's matrix, and the norm of its terms, which may cancel."""
    if not isinstance(tangent, Kronecker):
        each = tangent.materialize().double()[:, 0]
        return each.sum(0), float(each.norm())
    a, g = tangent.inputs().double(), tangent.grads().double()
    norm = (a.square().sum(-1).unsqueeze(1) * g.square().sum(-1)).sum().sqrt()
    return torch.einsum("nceto,neti->eoi", g, a), float(norm)


def tolerance(precision: torch.dtype, device: torch.device) -> float:
    """Expected relative error between two ways of computing outputs or gradients."""
    fast = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if device.type == "cuda" and fast and precision == torch.float32:
        return 1e-2
    return {torch.float64: 1e-8, torch.float16: 3e-2, torch.bfloat16: 1e-1}.get(precision, 1e-3)


def close(one: Tensor, other: Tensor, relative: float) -> bool:
    """Whether two tensors differ by at most a share of the norm of the second."""
    if one.shape != other.shape:
        return False
    gap, size = (one.double() - other.double()).norm(), other.double().norm()
    return bool(gap <= relative * size + torch.finfo(torch.float32).tiny)


# --- Where the examples are -------------------------------------------------------------------------------------------


def find_layouts(outputs: Tensor, records: Sequence[Record]) -> list[Record]:
    """Give uses a layout in which every example's gradients scale with its cotangent, or `None` if there is none.

    Uses without a gradient stay as they are; the others are returned. Factors are powers of two, such that any two
    examples have different ones in at least one of a few backward passes.
    """
    n, cotangent = len(outputs), normal_numbers(outputs.shape, len(outputs), outputs)
    plain = zip(records, pull(outputs, [record.edge for record in records], cotangent), strict=True)
    found = [(record, grads) for record, grads in plain if grads is not None and grads.any()]
    used = [record for record, _ in found]
    layouts = [record.possible_layouts(n) for record in used]
    for factors in _factors(outputs) if used else ():
        scaled = pull(outputs, [record.edge for record in used], factors.unsqueeze(1) * cotangent)
        for at, ((_, before), after) in enumerate(zip(found, scaled, strict=True)):
            layouts[at] = [one for one in layouts[at] if after is not None and _scales(before, after, one, factors)]
    for record, possible in zip(used, layouts, strict=True):
        record.layout = next(iter(possible), None)
    return used


def _factors(outputs: Tensor) -> Iterator[Tensor]:
    """Powers of two (n,) for each digit of the numbers of the examples."""
    base = 7 if outputs.dtype == torch.float16 else 15  # number of powers of two within the range of the precision
    number, place = torch.arange(len(outputs), device=outputs.device), 1
    while place == 1 or place < len(outputs):
        yield torch.pow(2.0, (number // place % base - base // 2).double()).to(outputs.dtype)
        place *= base


def _scales(before: Tensor, after: Tensor, layout: Layout, factors: Tensor) -> bool:
    """Whether the gradients of every example were multiplied by its factor."""
    n = len(factors)
    wanted = layout.canonical(before, n).reshape(n, -1).double() * factors.double().unsqueeze(1)
    gap = (layout.canonical(after, n).reshape(n, -1).double() - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    floor = min(100 * torch.finfo(before.dtype).eps, 1e-2) * float(size.max())
    return bool((gap <= tolerance(before.dtype, before.device) * size + floor).all())
