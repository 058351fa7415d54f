"""How a fit begins and ends where several processes share it, or where it is written down on the way."""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from torch import nn

from .curvature import Structure
from .errors import InputError, LoaderError
from .memory import Budget
from .persist.checkpoint import described, open_checkpoint
from .processes import ALONE, Processes
from .tangents.batches import Batches
from .tangents.borrow import fingerprint
from .tangents.marks import mark
from .tangents.shards import all_prints, roll_call

EVERY = 60.0
"""Seconds between two looks at the sums of a pass, unless told otherwise."""


def divided(shard: Any, crew: Processes) -> tuple[Processes, Processes]:
    """Those who share the data with this process, and those who share the layers."""
    if isinstance(shard, str) and shard in ("data", "layers"):
        return (crew, ALONE) if shard == "data" else (ALONE, crew)
    if type(shard) is not int or shard < 1:
        raise InputError(f'expected shard to be "data", "layers" or a number of processes, got {shard!r}.')
    if crew.size % shard:
        raise InputError(
            f"expected shard to be the number of processes that share the layers, of which {crew.size} processes make "
            f"several whole groups, got {shard}."
        )
    return (crew, ALONE) if shard == 1 else crew.split(shard) if shard < crew.size else (ALONE, crew)


def check_sharing(structure: Structure, data: Processes, layers: Processes) -> None:
    """Raise where processes cannot share a fit in this way."""
    if not layers.alone and not structure.by_layers:
        raise InputError(
            f"expected structure 'ekfac', 'kfac' or 'diagonal', whose layers are apart, where layers are shared, got "
            f"{structure!r}. Use shard='data'."
        )
    if not data.alone and not structure.in_parts:
        raise InputError(_whole("one process, or distributed=False,", structure))


def check_checkpoint(checkpoint: Any, every: Any, structure: Structure) -> Path | None:
    """The folder of the checkpoint, if there is to be one; an error where that makes no sense.

    Args:
        checkpoint: as given.
        every: as given.
        structure: of the curvature.
    """
    if not isinstance(every, Real) or not 0 <= float(every) < math.inf:
        raise InputError(f"expected every as a number of seconds, not below zero, got {every!r}.")
    if checkpoint is None:
        return None
    if not isinstance(checkpoint, (str, os.PathLike)):
        raise InputError(f"expected checkpoint to be the name of a folder, got {checkpoint!r}.")
    if not structure.in_parts:
        raise InputError(_whole("no checkpoint", structure))
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
    crew = passes.crew
    limit = Budget(batches.device, max_memory).limit
    passes.thrifty = max_memory is not None
    if not passes.shared and folder is None:
        return Budget(batches.device, limit)
    told = {name: described(option) for name, option in options.items()}
    for some in (crew, passes.layers):
        _check_alike(some, {**told, "checkpoint": folder is not None}, fingerprint(model))
    marks = roll_call(batches)
    if len(set(passes.layers.tell("the data", (mark(marks), passes.offset, passes.here)))) > 1:
        raise LoaderError(
            "expected processes that share the layers to read the same data, all of them, got different data. Use "
            "shard='data' where each has its own."
        )
    if max_memory is None and batches.device.type == "cpu":  # what was found free is for all on this machine
        limit = limit // max(crew.neighbours, passes.layers.neighbours)
    for some in (crew, passes.layers):
        limit = min(some.tell("the memory", limit))
    if folder is not None:
        passes.kept = True
        if crew.rank == 0:
            rest = (model, marks, limit, batches.progress, passes.layers)
            passes.keeper, limit = open_checkpoint(folder, float(every), told, *rest)
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


def labels_of(groups: Any, crew: Processes) -> Any:
    """Labels of all training examples, where each process has those of its own."""
    if groups is None or crew.alone:
        return groups
    return [label for told in crew.tell("the groups", _listed(groups)) for label in told]


def digest_of(groups: Any) -> str | None:
    """A short word for labels."""
    if groups is None:
        return None
    return hashlib.sha256(repr(_listed(groups)).encode()).hexdigest()


def _listed(groups: Any) -> list[Any]:
    """Labels as a list; whether they are as many as examples is checked where these are known."""
    if hasattr(groups, "tolist"):
        groups = groups.tolist()
    return list(groups) if isinstance(groups, Iterable) else [groups]


def end(batches: Batches) -> None:
    """The fit is done: from now on this process is on its own, and the data of the others are elsewhere."""
    if not batches.passes.crew.alone:
        batches.prints[:] = all_prints(batches)
    batches.fitted()
    batches.passes.close()
