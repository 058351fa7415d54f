"""The proof that a capture is right, on one batch: nothing missed, nothing counted twice, no examples mixed.

Three facts are checked. Gradients pulled back from some of the examples alone vanish on all others, in the layout that
was found for each use; the sets of examples are such that a leak between any two would show. For a random cotangent,
the captured gradients of all examples add up to autograd's gradient, taken on the model as it is. And the outputs under
capture are the model's, whichever examples are in the batch.

What a few examples could not show is looked at on later batches: uses that had no gradient or did not occur, when they
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
from whence.jacobian.functional import Call, OneByOne, Plain, Vectorized
from whence.jacobian.gradients import Block, Dense, Kronecker, Layout, Tangent, candidates, halves, separates
from whence.jacobian.graph import Walk, walk
from whence.jacobian.record import (
    Choices,
    Record,
    Sizes,
    Watch,
    claims,
    differentiable,
    fits,
    make_blocks,
    pull,
    pull_back,
    tangents_of,
)
from whence.jacobian.rules import READERS
from whence.runtime.model_state import without_cudnn

PRIMES = (7, 5, 3, 2)
"""Sizes of the batch for the proof: a number that no width, head count or sequence length is likely to share."""


@dataclass(frozen=True)
class AutogradReference:
    """What autograd says of the model as it is."""

    inputs: Inputs
    outputs: Tensor  # (n, k)
    precision: torch.dtype  # the coarsest that occurs inside the model
    cotangent: Tensor  # (n, k)
    gradients: Mapping[str, Tensor | None]  # None where the outputs do not depend on the parameter
    sets: Tensor  # (s, n) of bool: sets of examples that tell any two apart

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


class _Precision(TorchFunctionMode):
    """Finds the coarsest dtype in which a model computes: a float32 model may use bfloat16 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.coarsest = torch.float64

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point():
            self.coarsest = max(self.coarsest, out.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        return out


def tolerance(precision: torch.dtype, device: torch.device) -> float:
    """Relative error to be expected between two ways of computing outputs or gradients."""
    fast = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if device.type == "cuda" and fast and precision == torch.float32:
        return 1e-2
    return {torch.float64: 1e-8, torch.float16: 3e-2, torch.bfloat16: 1e-1}.get(precision, 1e-3)


def autograd_reference(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> AutogradReference:
    """Run the model as it is on a few of the examples, and differentiate it."""
    inputs = _few(inputs)
    n = batch_size(inputs, "the first batch")
    with differentiable():
        outputs = call(inputs)
    if outputs.dim() != 2 or len(outputs) != n:
        raise ShapeError(f"expected outputs of shape ({n}, k) on the first batch, got {tuple(outputs.shape)}.")
    precision = _refuse_mixing(call, inputs, outputs.detach())
    cotangent = _draw(outputs)
    found: Sequence[Tensor | None] = [None] * len(parameters)
    if outputs.requires_grad:
        found = torch.autograd.grad(outputs, list(parameters.values()), cotangent, allow_unused=True)
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    gradients = dict(zip(parameters, dense, strict=True))
    for name, gradient in gradients.items():
        if gradient is not None and not bool(torch.isfinite(gradient).all()):
            raise SingularCurvatureError(
                f"expected finite gradients of the outputs in the weights, got NaN or infinity in {name} on the first "
                "batch. Look for a square root, a logarithm or a norm at zero in the model; gradients of a float16 "
                "model may overflow: use float32."
            )
    return AutogradReference(inputs, outputs.detach(), precision, cotangent, gradients, halves(n).to(outputs.device))


def _refuse_mixing(call: Call, inputs: Inputs, outputs: Tensor) -> torch.dtype:
    """Raise if the outputs of an example depend on which others are in the batch; the precision of the model."""
    half = (len(outputs) + 1) // 2
    with torch.no_grad(), _Precision() as mode:
        alone = call(take(inputs, slice(0, half)))
    gap = (alone.double() - outputs[:half].double()).norm()
    if not gap <= tolerance(mode.coarsest, outputs.device) * outputs.double().norm() + torch.finfo(torch.float32).tiny:
        raise UncapturedParameterError(
            f"expected the outputs of an example not to depend on the others in its batch, got a difference of "
            f"{float((alone - outputs[:half]).abs().max()):.3g} between a batch and its first half. Call model.eval(), "
            "and use no layer that mixes examples (batch statistics, attention or pooling across the batch)."
        )
    coarsest: torch.dtype = mode.coarsest
    return coarsest


def _few(inputs: Inputs) -> Inputs:
    n = batch_size(inputs, "the first batch")
    if n == 1:  # with a single example every axis of size one could be the examples'
        return tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, inputs)
    return take(inputs, slice(0, next(prime for prime in PRIMES if prime <= n)))


def find_layout(
    record: Record,
    pulled: Sequence[Tensor | None],
    sets: Tensor,
    other: tuple[Sequence[int], int] | None = None,
) -> tuple[Layout | None, bool]:
    """Where the examples are, and whether that is proved: gradients of zero everywhere prove nothing.

    Args:
        record: The use.
        pulled: Gradients in its output, each from one set of examples alone.
        sets: (s, n) of bool.
        other: the shape of the output for another number of examples, where that is known.
    """
    n = sets.shape[1]
    possible = (layout for layout in _possible(record, n) if other is None or layout.fits(*other))
    known = [(gradient, chosen) for gradient, chosen in zip(pulled, sets, strict=True) if gradient is not None]
    proved = any(bool(gradient.any()) for gradient, _ in known)
    for layout in possible:
        if all(separates(layout, gradient, chosen) for gradient, chosen in known):
            return layout, proved
    return None, proved


LEVELS = {torch.float16: 7}
"""Powers of two that tell examples apart, 15 where the precision has room for them."""


def keeps_rows(outputs: Tensor, records: Sequence[Record], layouts: Sequence[Layout]) -> bool:
    """Whether every example's gradients are where the layouts say, on a batch whose rows may have been reordered.

    A cotangent is pulled back as it is, and with a power of two for each example: gradients in the rows of an example
    must be multiplied by its power, exactly. Powers are the digits of the examples' numbers, so that any two examples
    differ in one of a few such cotangents.
    """
    n = len(outputs)
    base = LEVELS.get(outputs.dtype, 15)
    places = 1
    while base**places < n:
        places += 1
    cotangent = _draw(outputs)
    number = torch.arange(n, device=outputs.device)
    plain = pull(outputs, records, cotangent[None], last=False)[0]
    for place in range(places):
        power = torch.pow(2.0, (number // base**place % base - base // 2).double()).to(outputs.dtype)
        scaled = pull(outputs, records, (power.unsqueeze(1) * cotangent)[None], last=False)[0]
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


def layouts_here(outputs: Tensor, records: Sequence[Record]) -> list[Layout | None]:
    """Where the examples of the batch at hand are, told apart by sets of them; `None` for records without a place."""
    n, cotangent = len(outputs), _draw(outputs)
    left = [_possible(record, n) for record in records]
    for chosen in halves(n).to(outputs.device):
        pulled = pull(outputs, records, (cotangent * chosen[:, None])[None], last=False)[0]
        left = [
            layouts if one is None else [layout for layout in layouts if separates(layout, one, chosen)]
            for layouts, one in zip(left, pulled, strict=True)
        ]
    return [layouts[0] if layouts else None for layouts in left]


def _possible(record: Record, n: int) -> list[Layout]:
    """Every layout that n examples could have in the output of a use, the likeliest first."""
    found = candidates(record.use.axes(record.shape), record.shape, n)
    return [layout for layout in found if record.use.accepts(layout, record.shape, n)]


def has_gradient(outputs: Tensor, records: Sequence[Record]) -> list[bool]:
    """Which records the outputs of this batch depend on, to first order."""
    pulled = pull(outputs, records, _draw(outputs)[None], last=False)[0]
    return [one is not None and bool(one.any()) for one in pulled]


def evidence_of(
    outputs: Tensor, inputs: Inputs, parameters: Mapping[str, Tensor], precision: torch.dtype
) -> AutogradReference:
    """What autograd says of the graph at hand."""
    cotangent = _draw(outputs)
    found: Sequence[Tensor | None] = torch.autograd.grad(
        outputs, list(parameters.values()), cotangent, retain_graph=True, allow_unused=True
    )
    dense = [g.to_dense() if g is not None and g.is_sparse else g for g in found]
    sets = halves(len(outputs)).to(outputs.device)
    gradients = dict(zip(parameters, dense, strict=True))
    return AutogradReference(inputs, outputs.detach(), precision, cotangent, gradients, sets)


def _draw(outputs: Tensor) -> Tensor:
    """A random cotangent, the same whenever it is asked for."""
    generator = torch.Generator("cpu").manual_seed(len(outputs))
    return torch.randn(outputs.shape, generator=generator, dtype=torch.float64, device="cpu").to(outputs.detach())


def same(evidence: AutogradReference, outputs: Tensor) -> bool:
    """Whether these outputs are the model's."""
    gap = (outputs.detach().double() - evidence.outputs.double()).norm()
    return bool(gap <= evidence.tolerance * evidence.outputs.double().norm() + torch.finfo(torch.float32).tiny)


@dataclass(frozen=True)
class Mismatch:
    """A parameter whose captured gradients do not add up to autograd's."""

    expected: float
    got: float
    gap: float


def compare(evidence: AutogradReference, tangents: Sequence[Tangent]) -> dict[str, Mismatch]:
    """Sum the captured gradients over examples and compare with autograd's, parameter by parameter."""
    wrong: dict[str, Mismatch] = {}
    floor = evidence.floor * evidence.scale
    for tangent in tangents:
        total, spread = _total(tangent)
        for name, got in tangent.block.from_matrix(total).items():
            truth = evidence.gradients[name]
            expected = torch.zeros_like(got) if truth is None else truth.double()
            gap = float((got - expected).norm())
            if not gap <= evidence.tolerance * (float(expected.norm()) + spread) + floor:
                wrong[name] = Mismatch(float(expected.norm()), float(got.norm()), gap)
    return wrong


def _total(tangent: Tangent) -> tuple[Tensor, float]:
    """Sum over the examples, one cotangent, and the size of what may have cancelled in it."""
    if isinstance(tangent, Kronecker):
        a, g = tangent.inputs().double(), tangent.grads().double()
        spread = float((a.square().sum(-1).unsqueeze(1) * g.square().sum(-1)).sum().sqrt())
        return torch.einsum("nceto,neti->eoi", g, a), spread
    each = tangent.materialize().double()[:, 0]
    return each.sum(0), float(each.norm())


Key = tuple[Any, ...]
Runner = type[Vectorized] | type[OneByOne]
RUNNERS: tuple[Runner, ...] = (Vectorized, OneByOne, Plain)
"""Each works for more models than the one before, and is slower."""


@dataclass
class VerifiedUses:
    """How a model uses its selected parameters.

    Attributes:
        followed: Parameters whose uses are recorded.
        generic: Parameters differentiated example by example, and why.
        unused: Parameters the outputs do not depend on, as far as was seen.
        choices: Answers to repeat in later runs.
        layouts: Where the examples are, for the uses of each kind, in order; nothing where that differs.
        proved: Kinds of uses that had a gradient when they were compared with autograd, and how many there were.
        seen: Parameters with recorded uses.
        blocks: All parameters, in blocks.
        runner: How the generic parameters are differentiated.
        doubtful: Generic parameters without a gradient so far.
        precision: The coarsest that occurs inside the model.
        notes: What a reader of diagnostics should know.
    """

    followed: dict[str, Tensor]
    unused: tuple[str, ...] = ()
    generic: dict[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    layouts: dict[Key, tuple[Layout, ...]] = field(default_factory=dict)
    proved: dict[Key, int] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    blocks: tuple[Block, ...] = ()
    runner: Runner | None = None
    doubtful: set[str] = field(default_factory=set)
    precision: torch.dtype = torch.float64
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Attempt:
    """One run under watch, with the uses that the outputs depend on and where their examples are."""

    evidence: AutogradReference
    outputs: Tensor
    records: list[Record]
    choices: Choices
    layouts: list[Layout] = field(default_factory=list)
    sure: list[bool] = field(default_factory=list)


def verify_uses(
    call: Call, parameters: Mapping[str, Tensor], examples: Sequence[Inputs], blocks: Sequence[Block] | None = None
) -> VerifiedUses:
    """Watch the model on a few examples until every parameter is proved, one way or the other.

    Args:
        call: runs the model.
        parameters: the selected ones.
        examples: batches of a few examples each, that together use as many of the parameters as possible.
        blocks: those that an earlier proof has found; parameters that are not used now keep their place in them.
    """
    found = VerifiedUses(dict(parameters))
    evidence = [_gather(call, parameters, inputs) for inputs in examples]
    while not _attempt(call, parameters, evidence, found, blocks):
        pass
    found.choices.settled = True
    found.precision = max((one.precision for one in evidence), key=lambda dtype: torch.finfo(dtype).eps)
    if found.generic:
        generic = {name: parameters[name] for name in found.generic}
        runners = [prove_generic(call, generic, one, found.notes) for one in evidence]
        found.runner = max(runners, key=RUNNERS.index)
        alive = {name for one in evidence for name, grad in one.gradients.items() if grad is not None and grad.any()}
        found.doubtful = found.generic.keys() - alive
    if found.unused:
        found.notes.append(f"the outputs do not depend on {', '.join(found.unused)}: its gradient is zero")
    found.notes.extend(f"{name}: gradients example by example, since {why}" for name, why in found.generic.items())
    found.notes[:] = dict.fromkeys(found.notes)
    return found


def _gather(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> AutogradReference:
    try:
        return autograd_reference(call, parameters, inputs)
    except RuntimeError as error:
        if "cudnn RNN backward" not in str(error):
            raise
    # Recurrent networks of cuDNN cannot be differentiated in evaluation mode; those of PyTorch itself can.
    with without_cudnn():
        return autograd_reference(call, parameters, inputs)


def _attempt(
    call: Call,
    parameters: Mapping[str, Tensor],
    evidence: Sequence[AutogradReference],
    found: VerifiedUses,
    blocks: Sequence[Block] | None,
) -> bool:
    """One run under watch of each batch. True if all is proved; otherwise something has been learnt for the next."""
    attempts = []
    for one in evidence:
        attempt = _watch(call, parameters, one, found)
        if attempt is None or not _find_layouts(call, attempt, found):
            return False
        attempts.append(attempt)
    if not _agree(attempts, found):
        return False
    records = [record for attempt in attempts for record in attempt.records]
    found.blocks = make_blocks(records, parameters)
    found.seen = {name for record in records for name in record.parameters}
    if blocks is not None and _as_before(records, found.generic, blocks):
        found.blocks = tuple(blocks)
    reached: set[str] = set()
    for attempt in attempts:
        outputs, one = attempt.outputs, attempt.evidence
        pulled = pull_back(outputs, attempt.records, attempt.layouts, one.cotangent[None], last=True)
        tangents = tangents_of(found.blocks, pulled, Sizes(len(outputs), 1, outputs.detach()))
        wrong = compare(one, [tangent for tangent in tangents if tangent.block.parameters[0] not in found.generic])
        for name in wrong:
            _give_up(found, name, strange_uses(call, parameters[name], one.inputs))
        if wrong:
            return False
        reached.update(name for name, gradient in one.gradients.items() if gradient is not None)
    found.unused = tuple(name for name in parameters if name not in reached)
    return True


def _watch(
    call: Call, parameters: Mapping[str, Tensor], evidence: AutogradReference, found: VerifiedUses
) -> Attempt | None:
    """Run under watch; `None` if the outputs depend on followed parameters in ways that no rule reads."""
    choices = Choices(found.choices.refuted)
    with differentiable(), Watch(found.followed, len(evidence.outputs), choices) as watch:
        outputs = call(evidence.inputs)
    if not same(evidence, outputs):
        gap = float((outputs - evidence.outputs).abs().max())
        raise UncapturedParameterError(
            f"expected the outputs of the model under capture to be its own, got a difference of {gap:.3g} on the "
            "first batch. The model may not be deterministic: call model.eval(), or select fewer parameters."
        )
    way = walk(outputs, watch.records, found.followed)
    for name in sorted(way.unrecorded):
        _give_up(found, name, strange_uses(call, parameters[name], evidence.inputs))
    if way.unrecorded:
        return None
    return Attempt(evidence, outputs, used(watch.records, way), choices)


def used(records: Sequence[Record], way: Walk) -> list[Record]:
    """The records that the outputs depend on, without those of no rows, as of an expert that no example was sent to."""
    return [records[at] for at in way.reached if 0 not in records[at].shape]


def _agree(attempts: Sequence[Attempt], found: VerifiedUses) -> bool:
    """Put together what the batches said about choices and layouts; where they differ, the parameters are generic."""
    made: dict[tuple[str, tuple[str, ...]], list[bool]] = {}
    for attempt in attempts:
        for key, answers in attempt.choices.made.items():
            before = made.setdefault(key, answers)
            if any(one != other for one, other in zip(before, answers, strict=False)):
                for name in key[1]:
                    _give_up(found, name, "its uses differ from batch to batch")
                return False
            made[key] = max(before, answers, key=len)
    found.choices.made = made
    found.layouts, found.proved = {}, {}
    for attempt in attempts:
        known = list(zip(attempt.records, attempt.layouts, attempt.sure, strict=True))
        sure = {record.key for record, _, yes in known if yes}
        of: dict[Key, list[Layout]] = {}
        for record, layout, _ in known:
            of.setdefault(record.key, []).append(layout)
        for key, each in of.items():
            layouts = tuple(each) if len(set(each)) > 1 else (each[0],)
            if key in found.proved and key in sure and layouts != found.layouts[key]:
                layouts = ()
            elif key in found.proved:
                layouts = found.layouts[key]
            found.layouts[key] = layouts
        found.proved |= {key: max(len(of[key]), found.proved.get(key, 0)) for key in sure}
    return True


def _as_before(records: Sequence[Record], generic: Iterable[str], blocks: Sequence[Block]) -> bool:
    """Whether the blocks of an earlier proof hold what is used now."""
    of = {name: block for block in blocks for name in block.parameters}
    held = all(fits(claim, name, of[name]) for record in records for name, claim in claims(record))
    return held and all(of[name].kind == "dense" and len(of[name].parameters) == 1 for name in generic)


def _find_layouts(call: Call, attempt: Attempt, found: VerifiedUses) -> bool:
    """Find the layout of every record; False if some have none, after noting what follows from it."""
    records, evidence = attempt.records, attempt.evidence
    if not records:
        return True
    pulled = pull(attempt.outputs, records, evidence.cotangent * evidence.sets[:, :, None], last=False)
    columns = [[row[at] for row in pulled] for at in range(len(records))]
    known = [find_layout(record, each, evidence.sets) for record, each in zip(records, columns, strict=True)]
    if not all(sure for _, sure in known):  # sequences may be as long as there are examples
        fewer, shapes = _shapes_of_fewer(call, attempt, found)
        if len(shapes) == len(records):
            ways = zip(records, columns, shapes, known, strict=True)
            known = [
                (layout if sure else find_layout(record, each, evidence.sets, (shape, fewer))[0] or layout, sure)
                for record, each, shape, (layout, sure) in ways
            ]
    lost = [record for record, (layout, _) in zip(records, known, strict=True) if layout is None]
    if lost:
        events = {record.event for record in lost if record.event is not None}
        found.choices.refuted |= events
        for record in lost if not events else ():
            for name in record.parameters:
                _give_up(found, name, "no axis of a layer's output holds the examples")
        return False
    placed = [(record, layout, sure) for record, (layout, sure) in zip(records, known, strict=True) if layout]
    proved = {record.key: layout for record, layout, sure in placed if sure}
    attempt.layouts[:] = [layout if sure else proved.get(record.key, layout) for record, layout, sure in placed]
    attempt.sure[:] = [sure for _, _, sure in placed]
    return True


def _shapes_of_fewer(call: Call, attempt: Attempt, found: VerifiedUses) -> tuple[int, list[torch.Size]]:
    """A smaller number of examples, and the shapes that the outputs of all uses have for so many."""
    fewer = (len(attempt.outputs) + 1) // 2
    again = replace(attempt.choices, settled=True)
    with differentiable(), Watch(found.followed, fewer, again) as watch:
        outputs = call(take(attempt.evidence.inputs, slice(0, fewer)))
    return fewer, [record.shape for record in used(watch.records, walk(outputs, watch.records, found.followed))]


def _give_up(found: VerifiedUses, name: str, why: str) -> None:
    if found.followed.pop(name, None) is not None:
        found.generic[name] = why


class _Audit(TorchFunctionMode):
    """Names the functions that get a parameter and have no rule."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self.parameter = parameter
        self.names: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        values = [*args, *(kwargs or {}).values()]
        flat = [one for value in values for one in (value if isinstance(value, (list, tuple)) else [value])]
        out = func(*args, **(kwargs or {}))
        differentiable = isinstance(out, (Tensor, tuple, list))
        if func not in READERS and differentiable and any(one is self.parameter for one in flat):
            self.names.append(resolve_name(func) or getattr(func, "__name__", repr(func)))
        return out


def strange_uses(call: Call, parameter: Tensor, inputs: Inputs) -> str:
    """What a model does with a parameter that no rule covers, in words."""
    with torch.no_grad(), _Audit(parameter) as audit:
        call(inputs)
    names = sorted(set(audit.names))
    return f"it goes into {', '.join(names)}" if names else "it is used in a way no rule covers"


def prove_generic(
    call: Call, parameters: Mapping[str, Tensor], evidence: AutogradReference, notes: list[str]
) -> Runner:
    """The faster way that gives the right gradients."""
    try:
        if not _mismatches(Vectorized, call, parameters, evidence):
            return Vectorized
        why = "it does not give the gradient autograd gives"
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model may do that vmap cannot: one example at a time works always
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:120]
    notes.append(f"torch.vmap cannot run this model ({why}); {', '.join(parameters)}: one example at a time")
    runner: Runner = OneByOne
    try:
        wrong = _mismatches(OneByOne, call, parameters, evidence)
    except RuntimeError as error:
        if "cudnn RNN backward" not in str(error):
            raise
        runner = Plain
        wrong = _mismatches(Plain, call, parameters, evidence)
    for name, one in wrong.items():
        raise UncapturedParameterError(
            f"expected the gradients of single examples in {name} to add up to autograd's on the first batch (norm "
            f"{one.expected:.6g}), got norm {one.got:.6g}, difference {one.gap:.3g}. Leave {name} out of the "
            "selection, or check that no example of a batch has an influence on another."
        )
    return runner


def _mismatches(
    runner: Runner, call: Call, parameters: Mapping[str, Tensor], evidence: AutogradReference
) -> dict[str, Mismatch]:
    run = runner(call, parameters, evidence.inputs)
    grads = run.gradients(evidence.cotangent[None], last=True)
    tangents = [
        Dense(Block(name, (name,), (tuple(p.shape),), "dense"), (grads[name].flatten(2) if p.dim() else grads[name],))
        for name, p in parameters.items()
    ]
    return compare(evidence, tangents)
