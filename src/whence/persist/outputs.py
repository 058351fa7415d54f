"""What is looked at of the outputs: positions at which a network answers, or mixtures of many outputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from whence.tangents.linearization import Linearization
from whence.tangents.losses import Units
from whence.tangents.sketches import Sketch, SketchedBatches

from .record import Draft, Saved


def write_outputs(draft: Draft, problem: Linearization) -> None:
    """Write down positions and mixtures, where there are any."""
    draft.note(positions=problem.units is not None, mixtures=problem.sketch is not None)
    if problem.units is not None:
        draft.note(shape=list(problem.units.shape), width=problem.units.width)
        draft.put("weights", problem.units.weights)
    if problem.sketch is not None:
        assert isinstance(problem.batches, SketchedBatches)
        sketch = problem.sketch
        draft.note(
            columns=sketch.columns,
            width=sketch.width,
            dense=sketch.dense,
            counted=sketch.counted,
            seed=problem.batches.seed,
        )
        draft.put("largest", problem.batches.largest)


def read_outputs(saved: Saved, n: int, k: int) -> tuple[Units | None, Sketch | None, int, Tensor | None]:
    """Positions and mixtures, if any, the seed of these, and which columns they hold as they are."""
    units = sketch = largest = None
    seed = 0
    if saved.flag("mixtures"):
        columns, seed = saved.whole("columns", 1), saved.whole("seed", 0, 2**63)
        if columns + 1 != k:
            raise saved.wrong("columns", f"one less than {k}")
        sketch = Sketch(columns, saved.whole("width", 1), saved.flag("dense"), saved.whole("counted"))
        largest = saved.tensor("largest", (n, columns // 2), torch.int64, torch.int64)
        if not saved.target.empty and bool((largest < 0).any()):
            raise saved.wrong("largest", "positions of outputs")
    elif saved.flag("positions"):
        shape, width = tuple(saved.wholes("shape", 1)), saved.whole("width", 1)
        positions = math.prod(shape)
        if not shape or positions * width != k:
            raise saved.wrong("shape", f"positions of {k} outputs")
        weights = saved.algebra("weights", n, positions) if saved.has("weights") else None
        units = Units(shape, width, weights)
    return units, sketch, seed, largest
