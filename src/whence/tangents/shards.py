"""Training data in several processes: who has how much of them, and what is known about each example, put together."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.errors import ShapeError

from .batches import Batches, nothing, tensors_of
from .losses import Rows, Units
from .marks import row_marks
from .passes import Passes


def roll_call(batches: Batches) -> Tensor:
    """Read all data once, and learn which examples each process has: a mark of every example of all, (n,)."""
    passes = batches.passes
    parts: list[Tensor] = []
    for batch in batches.read("data"):
        leaves = [*tensors_of((batch.inputs, batch.weights)), batch.targets]
        each = [(2 * at + 1) * row_marks(leaf).cpu() for at, leaf in enumerate(leaves)]
        parts.append(torch.stack(each).sum(0))
    found = torch.cat(parts) if parts else None
    if passes.crew.alone and found is not None:
        return found
    sizes = passes.crew.tell("the data", 0 if found is None else len(found))
    if not sum(sizes):
        raise nothing()
    rank = passes.crew.rank
    passes.offset, passes.here, passes.largest = sum(sizes[:rank]), sizes[rank], max(sizes)
    return passes.crew.gather(found, "the data", torch.device("cpu"))


def all_prints(batches: Batches) -> list[tuple[int, ...]]:
    """Marks of the batches of all processes, one after the other."""
    told = batches.passes.crew.tell("the marks of the data", batches.prints)
    return [one for each in told for one in each]


def exchanged(passes: Passes, rows: Rows | None, device: torch.device) -> list[Rows]:
    """What the loss says about the examples of every process that has any, in the order of ranks."""
    crew = passes.crew
    mine = None if rows is None else rows.units
    words = None if rows is None else (rows.given, rows.tensors(), None if mine is None else (mine.shape, mine.width))
    sent = None if words is None else (words[0], [one is not None for one in words[1]], words[2], rows_shape(rows))
    told = crew.tell("the outputs", sent)
    shapes = {one[3] for one in told if one is not None}
    if len(shapes) > 1:
        raise ShapeError(
            f"expected the same number of outputs in every process, got {sorted(shapes)}. Wrap the model in a module "
            "that returns the same number of outputs for every batch."
        )
    found = []
    for rank, one in enumerate(told):
        if one is None:
            continue
        given, there, positions, _ = one
        owned = None if rank != crew.rank or words is None else [part for part in words[1] if part is not None]
        parts = iter(crew.send(owned, rank, "the outputs", device))
        outputs, residuals, roots, weights, inner = (next(parts) if here else None for here in there)
        assert outputs is not None
        assert residuals is not None
        units = None if positions is None else Units(positions[0], positions[1], inner)
        found.append(Rows(outputs, residuals, roots, weights, given, units))
    return found


def rows_shape(rows: Rows | None) -> tuple[int, ...]:
    """Sizes that must be the same everywhere."""
    return () if rows is None else tuple(rows.outputs.shape[1:])
