"""The verification of a capture, on one batch: nothing missed, nothing counted twice, no examples mixed.

Three facts are checked. Gradients pulled back from some of the examples alone are zero for all others, in the layout
that was found for each use; the sets of examples are such that a leak between any two would show. For a random
cotangent, the captured gradients of all examples add up to autograd's gradient, taken on the model as it is. And the
outputs under capture are the model's, whichever examples are in the batch.

What a few examples could not show is verified on later batches: uses that had no gradient or did not occur, when they
first have one, and rows that a model may have reordered, on every batch; see `whence.jacobian.capture`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_map

from whence.data.batches import Inputs, batch_size, take
from whence.errors import ShapeError, SingularCurvatureError, UncapturedParameterError
from whence.jacobian.functional import OneByOne, OneByOneWithoutCudnn, Run, Vectorized
from whence.jacobian.gradients import (
    Block,
    Dense,
    Layout,
    Tangent,
    possible_layouts,
    separating_sets,
    vanishes_outside,
)
from whence.jacobian.record import (
    Call,
    differentiable,
    gradient_forms,
    make_blocks,
    output_gradients,
    pull_back,
    record_forward,
    tangents_of,
    walk,
)
from whence.jacobian.rules import READERS
from whence.jacobian.rules.base import BatchAxes, Record, flat_arguments
from whence.runtime.model_state import without_cudnn

# --- Autograd's gradients, to compare with ----------------------------------------------------------------------------

BATCH_SIZES = (7, 5, 3, 2)
"""Examples to verify on: a number that no width, head count or sequence length is likely to share."""


@dataclass(frozen=True)
class AutogradReference:
    """Autograd's gradients of the model as it is, for one random cotangent."""

    inputs: Inputs
    outputs: Tensor  # (n, k)
    precision: torch.dtype  # the coarsest that occurs inside the model
    cotangent: Tensor  # (n, k)
    gradients: Mapping[str, Tensor | None]  # None where the outputs do not depend on the parameter

    @property
    def tolerance(self) -> float:
        """Relative error to be expected between two ways of computing the same thing."""
        return tolerance(self.precision, self.outputs.device)

    @property
    def floor(self) -> float:
        """Absolute error to be expected in a gradient whose terms cancel, in units of all gradients together."""
        return max(min(100 * torch.finfo(self.precision).eps, 1e-2), self.tolerance**2)

    @property
    def scale(self) -> float:
        """Norm of all gradients together."""
        return math.hypot(*(float(g.double().norm()) for g in self.gradients.values() if g is not None))


def tolerance(precision: torch.dtype, device: torch.device) -> float:
    """Relative error to be expected between two ways of computing outputs or gradients."""
    fast = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if device.type == "cuda" and fast and precision == torch.float32:
        return 1e-2
    return {torch.float64: 1e-8, torch.float16: 3e-2, torch.bfloat16: 1e-1}.get(precision, 1e-3)


class _Precision(TorchFunctionMode):
    """Finds the coarsest dtype in which a model computes: a float32 model may use bfloat16 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest: torch.dtype = torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.coarsest = max(self.coarsest, out.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return out


def autograd_reference(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> AutogradReference:
    """Run the model as it is on a few of the examples, and differentiate it."""
    inputs = _few(inputs)
    n = batch_size(inputs, "the first batch")
    try:
        return _autograd_reference(call, parameters, inputs, n)
    except RuntimeError as error:
        if "cudnn RNN backward" not in str(error):
            raise
    # Recurrent networks of cuDNN cannot be differentiated in evaluation mode; those of PyTorch itself can.
    with without_cudnn():
        return _autograd_reference(call, parameters, inputs, n)


def _autograd_reference(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs, n: int) -> AutogradReference:
    with differentiable():
        outputs = call(inputs)
    if outputs.dim() != 2 or len(outputs) != n:
        raise ShapeError(f"expected outputs of shape ({n}, k) on the first batch, got {tuple(outputs.shape)}.")
    precision = _check_independent(call, inputs, outputs.detach())
    reference = reference_on_graph(outputs, inputs, parameters, precision)
    for name, gradient in reference.gradients.items():
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise SingularCurvatureError(
                f"expected finite gradients of the outputs in the weights, got NaN or infinity in {name} on the first "
                "batch. Look for a square root, a logarithm or a norm at zero in the model; gradients of a float16 "
                "model may overflow: use float32."
            )
    return reference


def reference_on_graph(
    outputs: Tensor, inputs: Inputs, parameters: Mapping[str, Tensor], precision: torch.dtype
) -> AutogradReference:
    """Autograd's gradients of outputs with a graph, which is kept."""
    cotangent = random_cotangent(outputs)
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, list(parameters.values()), cotangent, retain_graph=True, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    gradients = dict(zip(parameters, dense, strict=True))
    return AutogradReference(inputs, outputs.detach(), precision, cotangent, gradients)


def random_cotangent(outputs: Tensor) -> Tensor:
    """The same for every call with as many examples."""
    generator = torch.Generator("cpu").manual_seed(len(outputs))
    return torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs.detach())


def _check_independent(call: Call, inputs: Inputs, outputs: Tensor) -> torch.dtype:
    """Raise if the outputs of an example depend on which others are in the batch; the precision of the model."""
    half = (len(outputs) + 1) // 2
    mode = _Precision()
    with torch.no_grad(), mode:
        alone = call(take(inputs, slice(0, half)))
    gap = (alone.double() - outputs[:half].double()).norm()
    if not gap <= tolerance(mode.coarsest, outputs.device) * outputs.double().norm() + torch.finfo(torch.float32).tiny:
        raise UncapturedParameterError(
            f"expected the outputs of an example not to depend on the others in its batch, got a difference of "
            f"{float((alone - outputs[:half]).abs().max()):.3g} between a batch and its first half. Call model.eval(), "
            "and use no layer that mixes examples (batch statistics, attention or pooling across the batch)."
        )
    return mode.coarsest


def _few(inputs: Inputs) -> Inputs:
    n = batch_size(inputs, "the first batch")
    if n == 1:  # with a single example every axis of size one could be the batch axis
        return tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, inputs)
    return take(inputs, slice(0, next(size for size in BATCH_SIZES if size <= n)))


@dataclass(frozen=True)
class Mismatch:
    """A parameter whose captured gradients do not add up to autograd's: norms, and that of the difference."""

    expected: float
    got: float
    gap: float


def mismatches(reference: AutogradReference, tangents: Sequence[Tangent]) -> dict[str, Mismatch]:
    """Sum the captured gradients over examples and compare with autograd's, parameter by parameter."""
    wrong: dict[str, Mismatch] = {}
    floor = reference.floor * reference.scale
    for tangent in tangents:
        total, norm_of_terms = tangent.sum_over_examples()
        for name, got in tangent.block.from_matrix(total).items():
            truth = reference.gradients[name]
            expected = torch.zeros_like(got) if truth is None else truth.double()
            gap = float((got - expected).norm())
            if not gap <= reference.tolerance * (float(expected.norm()) + norm_of_terms) + floor:
                wrong[name] = Mismatch(float(expected.norm()), float(got.norm()), gap)
    return wrong


def fallback_mismatches(
    reference: AutogradReference, run: Run, parameters: Mapping[str, Tensor]
) -> dict[str, Mismatch]:
    """The same for per-example gradients by the functional fallback."""
    grads = run.gradients(reference.cotangent[None], last=False)
    return mismatches(reference, [Dense.of_parameter(name, p, grads[name]) for name, p in parameters.items()])


# --- Where the examples are -------------------------------------------------------------------------------------------


def possible_layouts_of(record: Record, n: int) -> list[Layout]:
    """Every layout in which the output of a use could hold n examples, the likeliest first."""
    found = possible_layouts(record.use.axes(record.shape), record.shape, n)
    return [layout for layout in found if record.use.accepts(layout, record.shape, n)]


def find_layouts(outputs: Tensor, records: Sequence[Record]) -> list[tuple[list[Layout], bool]]:
    """The layouts that hold for each use in this batch, and whether they are verified.

    A layout holds if gradients pulled back from some examples alone are zero for all others. Where all gradients are
    zero this verifies nothing.
    """
    n, cotangent = len(outputs), random_cotangent(outputs)
    found = [(possible_layouts_of(record, n), False) for record in records]
    for examples in separating_sets(n).to(outputs.device):
        grads = output_gradients(outputs, records, cotangent * examples[:, None])
        for at, (gradient, (layouts, verified)) in enumerate(zip(grads, found, strict=True)):
            if gradient is not None:
                left = [layout for layout in layouts if vanishes_outside(gradient, layout, examples)]
                found[at] = (left, verified or bool(gradient.any()))
    return found


def have_gradient(outputs: Tensor, records: Sequence[Record]) -> list[bool]:
    """Which uses the outputs of this batch depend on, to first order."""
    grads = output_gradients(outputs, records, random_cotangent(outputs))
    return [one is not None and bool(one.any()) for one in grads]


LEVELS = {torch.float16: 7}
"""How many powers of two distinguish examples; 15 where the precision has room for them."""


def rows_are_in_place(outputs: Tensor, records: Sequence[Record], layouts: Sequence[Layout]) -> bool:
    """Whether every example's gradients are where the layouts say, on a batch whose rows may have been reordered.

    A cotangent is pulled back as it is, and with a power of two for each example: gradients in the rows of an example
    must be multiplied by its power, exactly. Powers are the digits of the examples' numbers, so that any two examples
    differ in one of a few such cotangents.
    """
    n = len(outputs)
    base = LEVELS.get(outputs.dtype, 15)
    digits = 1
    while base**digits < n:
        digits += 1
    cotangent = random_cotangent(outputs)
    number = torch.arange(n, device=outputs.device)
    plain = output_gradients(outputs, records, cotangent)
    for digit in range(digits):
        power = torch.pow(2.0, (number // base**digit % base - base // 2).double()).to(outputs.dtype)
        scaled = output_gradients(outputs, records, power.unsqueeze(1) * cotangent)
        for before, after, layout in zip(plain, scaled, layouts, strict=True):
            if before is not None and after is not None and not _multiplied(before, after, layout, power):
                return False
    return True


def _multiplied(before: Tensor, after: Tensor, layout: Layout, power: Tensor) -> bool:
    n = len(power)
    wanted = layout.canonical(before, n).reshape(n, -1).double() * power.double().unsqueeze(1)
    gap = (layout.canonical(after, n).reshape(n, -1).double() - wanted).norm(dim=1)
    size = wanted.norm(dim=1)
    floor = 100 * torch.finfo(before.dtype).eps * float(size.max())
    return bool((gap <= tolerance(before.dtype, before.device) * size + floor).all())


# --- Uses of the parameters -------------------------------------------------------------------------------------------

Key = tuple[Any, ...]
Runner = type[Vectorized] | type[OneByOne]
RUNNERS: tuple[Runner, ...] = (Vectorized, OneByOne, OneByOneWithoutCudnn)
"""Each works for more models than the one before, and is slower."""


@dataclass
class VerifiedUses:
    """How a model uses its selected parameters.

    Attributes:
        recorded: Parameters whose uses are recorded.
        fallback: Parameters differentiated by the functional fallback, and why.
        unused: Parameters the outputs do not depend on, as far as the examples show.
        batch_axes: Which outputs of calls have a batch axis.
        layouts: Where the examples are, for the uses of each kind, in order; nothing where that differs.
        verified_counts: How many uses of a kind there were when they had a gradient and were compared with autograd.
        used: Parameters with recorded uses.
        blocks: All parameters, in blocks.
        runner: How the fallback differentiates.
        unverified_fallback: Parameters of the fallback without a gradient so far.
        precision: The coarsest that occurs inside the model.
        notes: What a reader of diagnostics should know.
    """

    recorded: dict[str, Tensor]
    unused: tuple[str, ...] = ()
    fallback: dict[str, str] = field(default_factory=dict)
    batch_axes: BatchAxes = field(default_factory=BatchAxes)
    layouts: dict[Key, tuple[Layout, ...]] = field(default_factory=dict)
    verified_counts: dict[Key, int] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    blocks: tuple[Block, ...] = ()
    runner: Runner | None = None
    unverified_fallback: set[str] = field(default_factory=set)
    precision: torch.dtype = torch.float64
    notes: list[str] = field(default_factory=list)

    def fall_back(self, name: str, why: str) -> None:
        """Leave a parameter to the functional fallback."""
        if self.recorded.pop(name, None) is not None:
            self.fallback[name] = why


@dataclass(frozen=True)
class RecordedBatch:
    """One recorded batch: the uses that its outputs depend on, and where their examples are.

    Attributes:
        verified: whether the layout of each use is.
    """

    reference: AutogradReference
    outputs: Tensor
    records: list[Record]
    batch_axes: BatchAxes
    layouts: list[Layout] = field(default_factory=list)
    verified: list[bool] = field(default_factory=list)


def verify_uses(
    call: Call, parameters: Mapping[str, Tensor], examples: Sequence[Inputs], blocks: Sequence[Block] | None = None
) -> VerifiedUses:
    """Record the model on a few examples until every parameter is verified, by its records or by the fallback.

    Args:
        call: runs the model.
        parameters: the selected ones.
        examples: batches of a few examples each, that together use as many of the parameters as possible.
        blocks: those of an earlier verification; parameters that are not used now keep their place in them.
    """
    uses = VerifiedUses(dict(parameters))
    references = [autograd_reference(call, parameters, inputs) for inputs in examples]
    while not _verify_once(call, parameters, references, uses, blocks):
        pass
    uses.batch_axes.verified = True
    uses.precision = max((one.precision for one in references), key=lambda dtype: torch.finfo(dtype).eps)
    if uses.fallback:
        wanted = {name: parameters[name] for name in uses.fallback}
        runners = [verify_fallback(call, wanted, one, uses.notes) for one in references]
        uses.runner = max(runners, key=RUNNERS.index)
        grads = {name: [one.gradients[name] for one in references] for name in wanted}
        uses.unverified_fallback = {
            name for name, each in grads.items() if not any(g is not None and bool(g.any()) for g in each)
        }
    if uses.unused:
        uses.notes.append(f"the outputs do not depend on {', '.join(uses.unused)}: its gradient is zero")
    uses.notes.extend(f"{name}: gradients example by example, since {why}" for name, why in uses.fallback.items())
    uses.notes[:] = dict.fromkeys(uses.notes)
    return uses


def _verify_once(
    call: Call,
    parameters: Mapping[str, Tensor],
    references: Sequence[AutogradReference],
    uses: VerifiedUses,
    blocks: Sequence[Block] | None,
) -> bool:
    """Record each batch once. True if all is verified; otherwise `uses` has changed, and the next time will differ."""
    batches = []
    for reference in references:
        batch = _record(call, parameters, reference, uses)
        if batch is None or not _find_layouts(call, batch, uses):
            return False
        batches.append(batch)
    if not _merge(batches, uses):
        return False
    records = [record for batch in batches for record in batch.records]
    uses.blocks = make_blocks(records, parameters)
    uses.used = {name for record in records for name in record.parameters}
    if blocks is not None and _can_hold(blocks, records, uses.fallback):
        uses.blocks = tuple(blocks)
    reached: set[str] = set()
    for batch in batches:
        outputs, reference = batch.outputs, batch.reference
        grads = pull_back(outputs, batch.records, batch.layouts, reference.cotangent[None], last=True)
        tangents = tangents_of(uses.blocks, grads, outputs, 1)
        wrong = mismatches(reference, [one for one in tangents if one.block.parameters[0] not in uses.fallback])
        for name in wrong:
            uses.fall_back(name, uncovered_calls(call, parameters[name], reference.inputs))
        if wrong:
            return False
        reached.update(name for name, gradient in reference.gradients.items() if gradient is not None)
    uses.unused = tuple(name for name in parameters if name not in reached)
    return True


def _record(
    call: Call, parameters: Mapping[str, Tensor], reference: AutogradReference, uses: VerifiedUses
) -> RecordedBatch | None:
    """Record one batch; `None` if the outputs depend on recorded parameters in ways that no rule reads."""
    batch_axes = BatchAxes(uses.batch_axes.refuted)
    outputs, records = record_forward(call, reference.inputs, uses.recorded, len(reference.outputs), batch_axes)
    expected = reference.outputs.double()
    gap = (outputs.detach().double() - expected).norm()
    if not gap <= reference.tolerance * expected.norm() + torch.finfo(torch.float32).tiny:
        raise UncapturedParameterError(
            "expected the outputs of the model under capture to be its own, got a difference of "
            f"{float((outputs - reference.outputs).abs().max()):.3g} on the first batch. The model may not be "
            "deterministic: call model.eval(), or select fewer parameters."
        )
    found = walk(outputs, records, uses.recorded)
    for name in sorted(found.unrecorded):
        uses.fall_back(name, uncovered_calls(call, parameters[name], reference.inputs))
    if found.unrecorded:
        return None
    return RecordedBatch(reference, outputs, found.reached, batch_axes)


def _find_layouts(call: Call, batch: RecordedBatch, uses: VerifiedUses) -> bool:
    """Find the layout of every record; False if some have none, after noting what follows from it."""
    records = batch.records
    if not records:
        return True
    found = find_layouts(batch.outputs, records)
    if not all(verified for _, verified in found):  # sequences may be as long as there are examples
        fewer, shapes = _shapes_of_fewer(call, batch, uses)
        if len(shapes) == len(records):
            for at, (layouts, verified) in enumerate(found):
                if not verified:
                    found[at] = ([one for one in layouts if one.fits(shapes[at], fewer)] or layouts, verified)
    lost = [record for record, (layouts, _) in zip(records, found, strict=True) if not layouts]
    if lost:
        sites = {record.site for record in lost if record.site is not None}
        uses.batch_axes.refuted |= sites
        for record in lost if not sites else ():
            for name in record.parameters:
                uses.fall_back(name, "no axis of a layer's output holds the examples")
        return False
    first = [(record, layouts[0], verified) for record, (layouts, verified) in zip(records, found, strict=True)]
    of_kind = {record.key: layout for record, layout, verified in first if verified}
    batch.layouts[:] = [layout if verified else of_kind.get(record.key, layout) for record, layout, verified in first]
    batch.verified[:] = [verified for _, _, verified in first]
    return True


def _shapes_of_fewer(call: Call, batch: RecordedBatch, uses: VerifiedUses) -> tuple[int, list[torch.Size]]:
    """A smaller number of examples, and the shapes that the outputs of all uses have for so many."""
    fewer = (len(batch.outputs) + 1) // 2
    inputs = take(batch.reference.inputs, slice(0, fewer))
    outputs, records = record_forward(call, inputs, uses.recorded, fewer, replace(batch.batch_axes, verified=True))
    return fewer, [record.shape for record in walk(outputs, records, uses.recorded).reached]


def _merge(batches: Sequence[RecordedBatch], uses: VerifiedUses) -> bool:
    """Merge batch axes and layouts of all batches; where axes differ, the parameters are left to the fallback."""
    answers: dict[tuple[str, tuple[str, ...]], list[bool]] = {}
    for batch in batches:
        for key, these in batch.batch_axes.answers.items():
            before = answers.setdefault(key, these)
            if any(one != other for one, other in zip(before, these, strict=False)):
                for name in key[1]:
                    uses.fall_back(name, "its uses differ from batch to batch")
                return False
            answers[key] = max(before, these, key=len)
    uses.batch_axes.answers = answers
    uses.layouts, uses.verified_counts = {}, {}
    for batch in batches:
        verified = {record.key for record, yes in zip(batch.records, batch.verified, strict=True) if yes}
        of_kind: dict[Key, list[Layout]] = {}
        for record, layout in zip(batch.records, batch.layouts, strict=True):
            of_kind.setdefault(record.key, []).append(layout)
        for key, each in of_kind.items():
            layouts = tuple(each) if len(set(each)) > 1 else (each[0],)
            if key in uses.verified_counts and key in verified and layouts != uses.layouts[key]:
                layouts = ()
            elif key in uses.verified_counts:
                layouts = uses.layouts[key]
            uses.layouts[key] = layouts
        uses.verified_counts |= {key: max(len(of_kind[key]), uses.verified_counts.get(key, 0)) for key in verified}
    return True


def _can_hold(blocks: Sequence[Block], records: Sequence[Record], fallback: Iterable[str]) -> bool:
    """Whether the blocks of an earlier verification hold what is used now."""
    of = {name: block for block in blocks for name in block.parameters}
    held = all(form.fits(name, of[name]) for record in records for name, form in gradient_forms(record))
    return held and all(of[name].kind == "dense" and len(of[name].parameters) == 1 for name in fallback)


class _UncoveredCalls(TorchFunctionMode):
    """Names the functions that get a parameter and have no rule."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.parameter = parameter
        self.names: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        uses_it = any(one is self.parameter for one in flat_arguments(args, kwargs or {}))
        if func not in READERS and uses_it and isinstance(out, (Tensor, tuple, list)):
            self.names.add(resolve_name(func) or getattr(func, "__name__", repr(func)))
        return out


def uncovered_calls(call: Call, parameter: Tensor, inputs: Inputs) -> str:
    """What a model does with a parameter that no rule covers, in words."""
    with torch.no_grad(), _UncoveredCalls(parameter) as calls:
        call(inputs)
    names = sorted(calls.names)
    return f"it goes into {', '.join(names)}" if names else "it is used in a way no rule covers"


def verify_fallback(
    call: Call, parameters: Mapping[str, Tensor], reference: AutogradReference, notes: list[str]
) -> Runner:
    """The fastest way of the functional fallback that gives the right gradients."""

    def wrong_by(runner: Runner) -> dict[str, Mismatch]:
        return fallback_mismatches(reference, runner(call, parameters, reference.inputs), parameters)

    try:
        if not wrong_by(Vectorized):
            return Vectorized
        why = "it does not give the gradient autograd gives"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model may do that vmap cannot: one example at a time works always
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    notes.append(f"torch.vmap cannot run this model ({why}); {', '.join(parameters)}: one example at a time")
    runner: Runner = OneByOne
    try:
        wrong = wrong_by(OneByOne)
    except RuntimeError as error:
        if "cudnn RNN backward" not in str(error):
            raise
        runner = OneByOneWithoutCudnn
        wrong = wrong_by(OneByOneWithoutCudnn)
    for name, one in wrong.items():
        raise UncapturedParameterError(
            f"expected the gradients of single examples in {name} to add up to autograd's on the first batch (norm "
            f"{one.expected:.6g}), got norm {one.got:.6g}, difference {one.gap:.3g}. Leave {name} out of the "
            "selection, or check that no example of a batch has an influence on another."
        )
    return runner
