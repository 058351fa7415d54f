"""From recorded uses to blocks: which parameters go together, and in what form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from whence.tangents.forms import Block, Kind
from whence.tangents.recorder import Record
from whence.tangents.rules.base import Followed, Use


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
