"""The first batch: find out how a model uses its parameters, and prove it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from whence.tangents.layout import Layout
from whence.tangents.plan import make_blocks
from whence.tangents.proof import Evidence, Mismatch, compare, find_layout, gather, same
from whence.tangents.recorder import Choices, Record, Watch, differentiable
from whence.tangents.rules import READERS
from whence.tangents.switches import without_cudnn

Key = tuple[Any, ...]
Runner = type[Vectorized] | type[OneByOne]


@dataclass
class Settled:
    """How a model uses its selected parameters.

    Attributes:
        followed: Parameters whose uses are recorded.
        generic: Parameters differentiated example by example, and why.
        unused: Parameters the outputs do not depend on.
        choices: Answers to repeat in later runs.
        layouts: Where the examples are, for the uses of each kind, in order.
        blocks: All parameters, in blocks.
        runner: How the generic parameters are differentiated.
        notes: What a reader of diagnostics should know.
    """

    followed: dict[str, Tensor]
    unused: tuple[str, ...]
    generic: dict[str, str] = field(default_factory=dict)
    choices: Choices = field(default_factory=Choices)
    layouts: dict[Key, tuple[Layout, ...]] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    runner: Runner | None = None
    notes: list[str] = field(default_factory=list)


def settle(call: Call, parameters: Mapping[str, Tensor], inputs: Inputs) -> Settled:
    """Watch the model on a few examples until every parameter is proved, one way or the other."""
    evidence = _gather(call, parameters, inputs)
    unused = tuple(name for name, gradient in evidence.gradients.items() if gradient is None)
    found = Settled({name: p for name, p in parameters.items() if name not in unused}, unused)
    while not _attempt(call, parameters, evidence, found):
        found.choices.made.clear()
    found.choices.settled = True
    if found.generic:
        found.runner = _prove_generic(call, {name: parameters[name] for name in found.generic}, evidence, found.notes)
    if unused:
        found.notes.append(f"the outputs do not depend on {', '.join(unused)}: its gradient is zero")
    found.notes.extend(f"{name}: gradients example by example, since {why}" for name, why in found.generic.items())
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


def _attempt(call: Call, parameters: Mapping[str, Tensor], evidence: Evidence, found: Settled) -> bool:
    """One run under watch. True if all is proved; otherwise something has been learnt for the next one."""
    with differentiable(), Watch(found.followed, len(evidence.outputs), found.choices) as watch:
        outputs = call(evidence.inputs)
    if not same(evidence, outputs):
        gap = float((outputs - evidence.outputs).abs().max())
        raise UncapturedParameterError(
            f"expected the outputs of the model under capture to be its own, got a difference of {gap:.3g} on the "
            "first batch. The model may not be deterministic: call model.eval(), or select fewer parameters."
        )
    layouts = _find_layouts(call, outputs, watch.records, evidence, found)
    if layouts is None:
        return False
    found.blocks = make_blocks(watch.records, parameters)
    pulled = pull_back(outputs, watch.records, layouts, evidence.cotangent[None], last=True)
    tangents = tangents_of(found.blocks, pulled, Sizes(len(outputs), 1, outputs.detach()))
    captured = [one for one in tangents if one.block.parameters[0] not in found.generic]
    wrong = compare(evidence, captured)
    for name in wrong:
        _give_up(found, name, _strange_uses(call, parameters[name], evidence.inputs))
    return not wrong


def _find_layouts(
    call: Call, outputs: Tensor, records: Sequence[Record], evidence: Evidence, found: Settled
) -> list[Layout] | None:
    """The layout of every record; None if some have none, after noting what follows from it."""
    if not records:
        return []
    pulled = pull(outputs, records, evidence.cotangent * evidence.sets[:, :, None], last=False)
    columns = [[row[at] for row in pulled] for at in range(len(records))]
    known = [find_layout(record, each, evidence.sets) for record, each in zip(records, columns, strict=True)]
    if not all(sure for _, sure in known):  # sequences may be as long as there are examples
        fewer, shapes = _shapes_of_fewer(call, evidence, found)
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
            for root in (root for source in record.roles.values() for root in source.roots):
                _give_up(found, root.parameter, "no axis of a layer's output holds the examples")
        return None
    placed = [(record, layout, sure) for record, (layout, sure) in zip(records, known, strict=True) if layout]
    proved = {record.key: layout for record, layout, sure in placed if sure}
    layouts = [layout if sure else proved.get(record.key, layout) for record, layout, sure in placed]
    of: dict[Key, list[Layout]] = {}
    for record, layout in zip(records, layouts, strict=True):
        of.setdefault(record.key, []).append(layout)
    found.layouts = {key: tuple(each) if len(set(each)) > 1 else (each[0],) for key, each in of.items()}
    return layouts


def _shapes_of_fewer(call: Call, evidence: Evidence, found: Settled) -> tuple[int, list[torch.Size]]:
    """A smaller number of examples, and the shapes that the outputs of all uses have for so many."""
    fewer = (len(evidence.outputs) + 1) // 2
    again = replace(found.choices, settled=True)
    with differentiable(), Watch(found.followed, fewer, again) as watch:
        call(take(evidence.inputs, slice(0, fewer)))
    return fewer, [record.shape for record in watch.records]


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


def _strange_uses(call: Call, parameter: Tensor, inputs: Inputs) -> str:
    with torch.no_grad(), _Audit(parameter) as audit:
        call(inputs)
    names = sorted(set(audit.names))
    return f"it goes into {', '.join(names)}" if names else "it is used in a way no rule covers"


def _prove_generic(call: Call, parameters: Mapping[str, Tensor], evidence: Evidence, notes: list[str]) -> Runner:
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
