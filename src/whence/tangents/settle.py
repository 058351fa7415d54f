"""A few examples of the first batches: find out how a model uses its parameters, and prove it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, resolve_name

from whence.errors import UncapturedParameterError
from whence.tangents.assemble import Sizes, tangents_of
from whence.tangents.backward import pull, pull_back
from whence.tangents.batches import Inputs, take
from whence.tangents.forms import Block, Dense
from whence.tangents.generic import Call, OneByOne, Plain, Vectorized
from whence.tangents.graph import Walk, walk
from whence.tangents.layout import Layout
from whence.tangents.plan import claims, fits, make_blocks
from whence.tangents.proof import Evidence, Mismatch, compare, find_layout, gather, same
from whence.tangents.recorder import Choices, Record, Watch, differentiable
from whence.tangents.rules import READERS
from whence.tangents.switches import without_cudnn

Key = tuple[Any, ...]
Runner = type[Vectorized] | type[OneByOne]
RUNNERS: tuple[Runner, ...] = (Vectorized, OneByOne, Plain)
"""Each works for more models than the one before, and is slower."""


@dataclass
class Settled:
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

    evidence: Evidence
    outputs: Tensor
    records: list[Record]
    choices: Choices
    layouts: list[Layout] = field(default_factory=list)
    sure: list[bool] = field(default_factory=list)


def settle(
    call: Call, parameters: Mapping[str, Tensor], examples: Sequence[Inputs], blocks: Sequence[Block] | None = None
) -> Settled:
    """Watch the model on a few examples until every parameter is proved, one way or the other.

    Args:
        call: runs the model.
        parameters: the selected ones.
        examples: batches of a few examples each, that together use as many of the parameters as possible.
        blocks: those that an earlier proof has found; parameters that are not used now keep their place in them.
    """
    found = Settled(dict(parameters))
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


def _gather(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> Evidence:
    try:
        return gather(call, parameters, inputs)
    except RuntimeError as error:
        if "cudnn RNN backward" not in str(error):
            raise
    # Recurrent networks of cuDNN cannot be differentiated in evaluation mode; those of PyTorch itself can.
    with without_cudnn():
        return gather(call, parameters, inputs)


def _attempt(
    call: Call,
    parameters: Mapping[str, Tensor],
    evidence: Sequence[Evidence],
    found: Settled,
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


def _watch(call: Call, parameters: Mapping[str, Tensor], evidence: Evidence, found: Settled) -> Attempt | None:
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


def _agree(attempts: Sequence[Attempt], found: Settled) -> bool:
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


def _find_layouts(call: Call, attempt: Attempt, found: Settled) -> bool:
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


def _shapes_of_fewer(call: Call, attempt: Attempt, found: Settled) -> tuple[int, list[torch.Size]]:
    """A smaller number of examples, and the shapes that the outputs of all uses have for so many."""
    fewer = (len(attempt.outputs) + 1) // 2
    again = replace(attempt.choices, settled=True)
    with differentiable(), Watch(found.followed, fewer, again) as watch:
        outputs = call(take(attempt.evidence.inputs, slice(0, fewer)))
    return fewer, [record.shape for record in used(watch.records, walk(outputs, watch.records, found.followed))]


def _give_up(found: Settled, name: str, why: str) -> None:
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


def prove_generic(call: Call, parameters: Mapping[str, Tensor], evidence: Evidence, notes: list[str]) -> Runner:
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
    runner: Runner, call: Call, parameters: Mapping[str, Tensor], evidence: Evidence
) -> dict[str, Mismatch]:
    run = runner(call, parameters, evidence.inputs)
    grads = run.gradients(evidence.cotangent[None], last=True)
    tangents = [
        Dense(Block(name, (name,), (tuple(p.shape),), "dense"), (grads[name].flatten(2) if p.dim() else grads[name],))
        for name, p in parameters.items()
    ]
    return compare(evidence, tangents)
