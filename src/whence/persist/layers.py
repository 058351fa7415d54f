"""Curvatures layer by layer: blocks, bases, spectra, weights."""

from __future__ import annotations

import math
from typing import Any

import torch

from whence.curvature.kronecker.basis import Basis
from whence.curvature.kronecker.moments import Squares
from whence.curvature.kronecker.room import Known
from whence.curvature.kronecker.stream import LayerStream
from whence.curvature.kronecker.turn import Turn
from whence.curvature.kronecker.two_bases import TurnedWeights
from whence.curvature.kronecker.weights import Weights
from whence.tangents.forms import Block
from whence.tangents.linearization import Linearization

from .record import Draft, Saved


def write_stream(draft: Draft, stream: LayerStream) -> None:
    """What the capture found out about the model."""
    known = stream.known
    sizes = {"fixed": known.fixed, "each": known.each, "work": known.work}
    draft.note(**sizes, notes=list(stream.notes), blocks=len(known.blocks))
    for at, block in enumerate(known.blocks):
        draft.part(f"layer_{at}").note(
            name=block.name,
            parameters=list(block.parameters),
            shapes=[list(shape) for shape in block.shapes],
            kind=block.kind,
            groups=block.groups,
            transposed=block.transposed,
        )


def read_stream(saved: Saved, problem: Linearization) -> LayerStream:
    """A stream that knows what the first capture found, and is proved on the training data where they are given."""
    count = saved.whole("blocks", 1, len(problem.selection.parameters))
    blocks = tuple(_read_block(saved.part(f"layer_{at}"), problem) for at in range(count))
    if sorted(name for block in blocks for name in block.parameters) != sorted(problem.selection.parameters):
        raise saved.wrong("blocks", "all selected parameters")
    known = Known(blocks, saved.number("fixed", 0.0), saved.number("each", 0.0), saved.number("work", 0.0))
    stream = LayerStream(problem, known)
    stream.notes = saved.texts("notes")
    return stream


def _read_block(saved: Saved, problem: Linearization) -> Block:
    names = saved.texts("parameters")
    parameters = problem.selection.parameters
    if not names or any(name not in parameters for name in names):
        raise saved.wrong("parameters", "names of selected parameters")
    shapes = tuple(tuple(parameters[name].shape) for name in names)
    if saved.facts.get("shapes") != [list(shape) for shape in shapes]:
        raise saved.wrong("shapes", f"the model's, {shapes}")
    kind: Any = saved.text("kind", "kronecker", "rows", "dense")
    groups, transposed = saved.whole("groups", 1), saved.flag("transposed")
    fits = len(names) == 1 or (kind == "kronecker" and len(names) == 2) or kind == "dense"
    if not fits or (kind != "dense" and (not shapes[0] or shapes[0][0] % groups)):
        raise saved.wrong("kind", f"a form that parameters of shapes {shapes} can take")
    block = Block(saved.text("name"), tuple(names), shapes, kind, groups, transposed)
    if math.prod(block.matrix_shape) != block.numel:
        raise saved.wrong("kind", f"a form that parameters of shapes {shapes} can take")
    return block


def write_basis(draft: Draft, basis: Basis) -> None:
    """Both sides, where they are not the identity."""
    draft.put("inputs", basis.inputs)
    draft.put("outputs", basis.outputs)


def read_basis(saved: Saved, block: Block) -> Basis:
    """The same, put together again."""
    full = block.matrix_shape
    inputs = outputs = None
    if saved.has("inputs"):
        lead = full[:1] if block.kind == "kronecker" else ()
        columns = saved.sizes("inputs", len(lead) + 2)[-1]
        inputs = saved.working("inputs", *lead, full[-1], _at_most(saved, columns, full[-1]))
    if saved.has("outputs"):
        lead, size = (full[:1], full[1]) if block.kind == "kronecker" else ((1,), full[-1])
        columns = saved.sizes("outputs", 3)[-1]
        outputs = saved.working("outputs", *lead, size, _at_most(saved, columns, size))
    odd = (block.kind == "rows" and inputs is not None) or (block.kind == "dense" and outputs is not None)
    if odd or (block.kind == "kronecker" and (inputs is None) != (outputs is None)):
        raise saved.wrong("inputs", f"a basis of a {block.kind} block")
    return Basis(block, inputs, outputs)


def _at_most(saved: Saved, columns: int, rows: int) -> int:
    if not 1 <= columns <= rows:
        raise saved.wrong("inputs", "a basis with as many columns as rows, or fewer")
    return columns


def write_squares(draft: Draft, name: str, squares: Squares) -> None:
    """Sums of squares, inside and outside of the basis."""
    draft.put(name, squares.inside)
    draft.note(**{f"{name}_outside": squares.outside})


def read_squares(saved: Saved, name: str, basis: Basis) -> Squares:
    """The same, put together again."""
    return Squares(saved.double(name, *basis.shape), saved.number(f"{name}_outside", 0.0))


def write_turn(draft: Draft, turn: Turn) -> None:
    """A basis of the meats, and the rotation to it."""
    write_basis(draft.part("basis"), turn.basis)
    draft.put("inputs", turn.inputs)
    draft.put("outputs", turn.outputs)


def read_turn(saved: Saved, basis: Basis) -> Turn:
    """The same, put together again: leading coordinates of `basis`, as many as the rotation has."""
    turned = read_basis(saved.part("basis"), basis.block)
    shape = turned.shape
    if any(mine > whole for mine, whole in zip(shape, basis.shape, strict=True)) or turned.inputs is None:
        raise saved.wrong("basis", f"a part of {basis.shape}")
    if turned.outputs is None:
        return Turn(turned, saved.working("inputs", shape[-1], shape[-1]), None)
    e, o, i = shape
    return Turn(turned, saved.working("inputs", e, i, i), saved.working("outputs", e, o, o))


def write_weights(draft: Draft, weights: Weights) -> None:
    """Weights of the directions in each estimator."""
    draft.put("inside", weights.inside)
    draft.put("outside", weights.outside)
    draft.note(rounded=weights.rounded)
    if isinstance(weights, TurnedWeights):
        draft.note(which=list(weights.which))
        draft.put("solved", weights.solved)
        draft.put("meats", weights.meats)


def read_weights(saved: Saved, basis: Basis, turn: Turn | None, count: int) -> Weights:
    """The same, put together again, for `count` estimators."""
    inside = saved.working("inside", count, *basis.shape)
    plain = Weights(basis, inside, saved.working("outside", count, 1, 1, 1), saved.flag("rounded"))
    if turn is None:
        return plain
    which = saved.wholes("which", 0, count - 1)
    if len(set(which)) != len(which):
        raise saved.wrong("which", "estimators")
    shape = turn.basis.shape
    flipped = shape if turn.outputs is None else (shape[0], shape[2], shape[1])
    solved, meats = saved.working("solved", *turn.shape), saved.working("meats", len(which), *flipped)
    return TurnedWeights(basis, inside, plain.outside, plain.rounded, turn, which, solved, meats)


def rounded(weights: Weights, device: torch.device, tf32: bool) -> bool:
    """Whether products may be rounded on this device: weights made for exact products do not bear it."""
    return tf32 and (device.type != "cuda" or weights.rounded or not weights.basis.outside)
