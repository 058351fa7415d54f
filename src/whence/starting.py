"""How a fit begins and ends where several processes share it, or where it is written down on the way."""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from .curvature import Structure
from .errors import InputError, LoaderError
from .memory import Budget
from .persist.checkpoint import described, open_checkpoint
from .processes import Processes
from .tangents.batches import Batches
from .tangents.borrow import fingerprint
from .tangents.marks import mark
from .tangents.shards import all_prints, roll_call

EVERY = 60.0
"""Seconds between two looks at the sums of a pass, unless told otherwise."""


def check_shard(shard: Any, structure: Structure, crew: Processes) -> None:
    """Raise where processes cannot share a fit in this way."""
    if shard not in ("data", "layers"):
        raise InputError(f'expected shard to be "data" or "layers", got {shard!r}.')
    if crew.alone:
        return
    if shard == "layers" and not structure.by_layers:
        raise InputError(
            f"expected structure 'ekfac', 'kfac' or 'diagonal', whose layers are apart, with shard='layers', got "
            f"{structure!r}. Use shard='data'."
        )
    if not structure.in_parts:
        raise InputError(_whole("one process, or distributed=False,", structure))


def check_checkpoint(checkpoint: Any, every: Any, structure: Structure, together: bool) -> Path | None:
    """The folder of the checkpoint, if there is to be one; an error where that makes no sense.

    Args:
        checkpoint: as given.
        every: as given.
        structure: of the curvature.
        together: whether several processes share the layers.
    """
    if not isinstance(every, Real) or not 0 <= float(every) < math.inf:
        raise InputError(f"expected every as a number of seconds, not below zero, got {every!r}.")
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise InputError(f"expected checkpoint to be the name of a folder, got {checkpoint!r}.")
    if not structure.in_parts:
        raise InputError(_whole("no checkpoint", structure))
    if together:
        raise InputError("expected no checkpoint where processes share the layers, got one. Use shard='data'.")
    return Path(checkpoint)


def _whole(instead: str, structure: Structure) -> str:
    return (
        f"expected {instead} with {structure!r}, whose passes over the data are not all sums over examples. Use "
        "Exact(road='primal'), 'core', 'sketch', 'ekfac', 'kfac' or 'diagonal'."
    )


def begin(
    batches: Batches,
    model: nn.Module,
    max_memory: float | None,
    folder: Path | None,
    every: float,
    options: Mapping[str, Any],
) -> Budget:
    """Learn which process has which examples, and whether some of the work is done already.

    Args:
        batches: the training data.
        model: the network.
        max_memory: bytes that each process may take; what is free, where that is not told.
        folder: of the checkpoint, if there is to be one.
        every: seconds between two looks at the sums of a pass.
        options: everything that the result depends on, beside model and data.

    Returns:
        The memory to plan with: the same in every process, and the same as when the checkpoint was begun.
    """
    passes = batches.passes
    crew = passes.crew if passes.layers.alone else passes.layers
    budget = Budget(batches.device, max_memory)
    if crew.alone and folder is None:
        return budget
    told = {name: described(option) for name, option in options.items()}
    _check_alike(crew, {**told, "checkpoint": folder is not None}, fingerprint(model))
    marks = roll_call(batches)
    if not passes.layers.alone and len(set(crew.tell("the data", mark(marks)))) > 1:
        raise LoaderError(
            "expected all processes to read the same data, all of them, with shard='layers', got different data. Use "
            "shard='data' where each has its own."
        )
    limit = _shared(budget.limit, max_memory is None, batches, crew)
    if folder is not None:
        passes.kept = True
        if crew.rank == 0:
            passes.keeper, limit = open_checkpoint(folder, float(every), told, model, marks, limit, batches.progress)
        limit = crew.tell("the checkpoint", limit)[0]
    return Budget(batches.device, limit)


def _check_alike(crew: Processes, options: Mapping[str, Any], weights: Mapping[str, int]) -> None:
    """Raise unless all processes fit the same network with the same options."""
    first, *others = crew.tell("the options", (options, weights))
    for rank, (given, marks) in enumerate(others, start=1):
        for what, mine, theirs in (("option", first[0], given), ("weights of", first[1], marks)):
            name = next((one for one in mine.keys() | theirs.keys() if mine.get(one) != theirs.get(one)), None)
            if name is not None:
                raise InputError(
                    f"expected the same {what} {name} in all processes, got another in rank {rank} than in rank 0. "
                    "Give all of them the same options, and the same trained weights."
                )


def _shared(limit: int, found: bool, batches: Batches, crew: Processes) -> int:
    """What every process can plan with, where those of one machine share what was found free there."""
    here = platform.node() if batches.device.type == "cpu" else f"{platform.node()} {batches.device}"
    told = crew.tell("the memory", (limit, here if found else f"{here} {crew.rank}"))
    return int(min(limit / sum(place == other for _, other in told) for limit, place in told))


def labels_of(groups: Any, crew: Processes) -> Any:
    """Labels of all training examples, where each process has those of its own."""
    if groups is None or crew.alone:
        return groups
    mine = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    return [label for told in crew.tell("the groups", mine) for label in told]


def digest_of(groups: Any) -> str | None:
    """A short word for labels."""
    if groups is None:
        return None
    listed = groups.tolist() if hasattr(groups, "tolist") else list(groups)
    return hashlib.sha256(repr(listed).encode()).hexdigest()


def end(batches: Batches) -> None:
    """The fit is done: from now on this process is on its own, and the data of the others are elsewhere."""
    if not batches.passes.crew.alone:
        batches.prints[:] = all_prints(batches)
    batches.passes.close()
