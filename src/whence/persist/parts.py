"""Files with the sums of one pass: one, or one from each of the processes that share the layers.

Whichever processes go on from them read all of these files, and take from each what is theirs: the sums of a layer are
known by its place among all. Of a matrix whose rows are shared, every file has some; their names end with `@` and the
first of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from whence.tangents.passes import State

from .container import Container
from .header import Entry, damaged

NAME = re.compile(r"pass-(\d{1,9})(?:-(\d{1,9})-of-(\d{1,9}))?\.whence", re.ASCII)
ROWS = re.compile(r"(.*)@(\d{1,18})", re.ASCII)


def path_of(folder: Path, number: int, part: int, parts: int) -> Path:
    """Where a process writes the sums of a pass.

    Examples:
        >>> [path_of(Path(), 3, part, parts).name for part, parts in ((0, 1), (1, 2))]
        ['pass-03.whence', 'pass-03-2-of-2.whence']
    """
    which = "" if parts == 1 else f"-{part + 1}-of-{parts}"
    return folder / f"pass-{number:02d}{which}.whence"


def files_of(folder: Path, number: int) -> list[list[Path]]:
    """The files of a pass, as many together as there were processes; where some of them are missing, none."""
    found: dict[int, dict[int, Path]] = {}
    for path, part, parts in _files(folder, number):
        found.setdefault(parts, {})[part] = path
    return [
        [those[part] for part in range(parts)]
        for parts, those in sorted(found.items())
        if len(those) == parts == max(those) + 1
    ]


def remove_others(folder: Path, number: int, parts: int) -> None:
    """Remove files of a pass that other numbers of processes have left."""
    for path, _, together in _files(folder, number):
        if together != parts:
            with suppress(OSError):
                path.unlink()


def _files(folder: Path, number: int) -> Iterator[tuple[Path, int, int]]:
    """Each file of a pass, which part it is, and of how many."""
    for path in folder.glob(f"pass-{number:02d}*.whence"):
        named = NAME.fullmatch(path.name)
        part, parts = (int(named[2] or 1) - 1, int(named[3] or 1)) if named is not None else (0, 0)
        if path == path_of(folder, number, part, parts) and 0 <= part < parts:
            yield path, part, parts


def fill(state: State, files: Sequence[Container], *, alone: bool) -> None:
    """Copy this process's part of the sums into its state, after everything is found to be there.

    Args:
        state: what the pass sums.
        files: all those of the pass.
        alone: whether this process has all layers, so that nothing else may be in the files.
    """
    there = {name: (file, entry) for file in reversed(files) for name, entry in file.entries.items()}
    if alone and {_stem(name) for name in there} != {_stem(name) for name in state}:
        raise damaged(files[0].path, "it holds other sums than this pass makes")
    plans = {name: _plan(name, tensor, there, files[0].path) for name, tensor in state.items()}
    for name, plan in plans.items():
        for (file, entry), source, target in plan:
            state[name][target].copy_(file.read(entry)[source])


Place = tuple[Container, Entry]
Plan = list[tuple[Place, Any, Any]]
"""Which rows of an entry become which rows of a tensor."""


def _plan(name: str, tensor: Tensor, there: dict[str, Place], path: str) -> Plan:
    """Where the rows of a tensor come from; an error unless all of them come from somewhere."""
    rows = ROWS.fullmatch(name)
    if rows is None:
        if name not in there:
            raise damaged(path, "it holds other sums than this pass makes")
        _check(name, (tensor.dtype, tuple(tensor.shape)), there[name][1], path)
        return [(there[name], ..., ...)]
    first, last = int(rows[2]), int(rows[2]) + len(tensor)
    plan: Plan = []
    at = first
    for start, other in _slices(rows[1], there):
        entry = there[other][1]
        _check(name, (tensor.dtype, (*entry.shape[:1], *tensor.shape[1:])), entry, path)
        stop = min(start + entry.shape[0], last)
        if start <= at < stop:
            plan.append((there[other], slice(at - start, stop - start), slice(at - first, stop - first)))
            at = stop
    if at != last:
        raise damaged(path, f"rows of {rows[1]} are missing")
    return plan


def _slices(stem: str, there: dict[str, Place]) -> list[tuple[int, str]]:
    """Names of all rows of one matrix, by the first of them."""
    named = [(ROWS.fullmatch(name), name) for name in there]
    return sorted((int(rows[2]), name) for rows, name in named if rows is not None and rows[1] == stem)


def _check(name: str, wanted: tuple[torch.dtype, tuple[int, ...]], entry: Entry, path: str) -> None:
    if (entry.dtype, tuple(entry.shape)) != wanted:
        raise damaged(path, f"{name} is of another shape")


def _stem(name: str) -> str:
    rows = ROWS.fullmatch(name)
    return name if rows is None else rows[1]
