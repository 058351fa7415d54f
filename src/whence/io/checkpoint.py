"""Files with the sums of one pass: one, or one from each of the processes that share the layers.

Whichever processes go on from them read all of these files, and take from each what is theirs: the sums of a layer are
known by its place among all. Of a matrix whose rows are shared, every file has some; their names end with `@` and the
first of them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence._version import __version__
from whence.errors import InputError, LoaderError
from whence.io.files import Container, Draft, Entry, Saved, Target, as_bytes, damaged, opened, plain, printable, write
from whence.io.model import ADDRESS, check_same, write_model
from whence.runtime.execution import State
from whence.runtime.model_state import checksum
from whence.runtime.processes import ALONE, Processes
from whence.runtime.progress import Progress

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


START = "start.whence"


class Checkpoint:
    """Writes the states of passes to a folder, and reads them again.

    Args:
        folder: of the checkpoint, which is there.
        every: seconds between two looks at the state of a pass.
        key: tells this fit from all others.
        examples: how many there are.
        progress: is told where the fit goes on.
        layers: the processes that share the layers, each of which has a checkpoint in the same folder.
    """

    def __init__(
        self, folder: Path, every: float, key: str, examples: int, progress: Progress, layers: Processes = ALONE
    ) -> None:
        """No pass yet."""
        self.folder, self.every, self.key, self.examples, self.progress = folder, every, key, examples, progress
        self.layers = layers
        self._number = 0
        self._facts: dict[str, Any] = {}
        self._state: State = {}
        self._last = 0.0

    def begin(self, label: str, state: State, given: Sequence[Tensor]) -> int | None:
        """Open the next pass and fill its state: how many examples are in it, `None` for all of them."""
        self._number += 1
        self._state = state
        marks = {one for told in self.layers.tell(label, [checksum(one) for one in given]) for one in told}
        self._facts = {"kind": "pass", "key": self.key, "label": label, "given": sorted(marks)}
        self._last = time.monotonic()
        done = self._found()
        if self.layers.alone:
            return done
        if all(one is None for one in self.layers.tell(label, done)):  # and nobody writes before all have read
            return None
        for one in state.values():  # what one process alone had begun is begun anew
            one.zero_()
        return 0

    def note(self, done: int) -> None:
        """So many examples are in the state now: write it down if it is time."""
        if time.monotonic() - self._last >= self.every:
            self._write(done)

    def finish(self) -> None:
        """All examples are in the state, which is then let go."""
        self._write(-1)
        self._state = {}
        self.layers.tell(self._facts["label"])  # all parts are there
        if self.layers.rank == 0:
            remove_others(self.folder, self._number, self.layers.size)

    def restart(self) -> None:
        """The next pass is the first one again."""
        self._number = 0

    def close(self) -> None:
        """There are no more passes: let the last one's sums go."""
        self._state = {}

    def _write(self, done: int) -> None:
        path = path_of(self.folder, self._number, self.layers.rank, self.layers.size)
        write(path, {**self._facts, "done": done}, self._state)
        self._last = time.monotonic()

    def _found(self) -> int | None:
        """What is written down of this pass, by however many processes."""
        found: int | None = 0
        for paths in files_of(self.folder, self._number):
            with ExitStack() as stack:
                done = self._read([stack.enter_context(opened(path)) for path in paths])
            found = found if done == 0 else done
            if found is None:
                break
        return found

    def _read(self, files: Sequence[Container]) -> int | None:
        told = [self._done(file) for file in files]
        if None in told:
            return 0  # made from other numbers, on another machine for example: this pass starts anew
        done = told[0]
        if any(one != -1 for one in told if len(told) > 1):
            raise damaged(files[0].path, "it is a part of a pass that was not finished")
        fill(self._state, files, alone=self.layers.alone)
        where = "its end" if done == -1 else f"example {done}"
        self.progress.say(f"whence: from the checkpoint: {self._facts['label']}, up to {where}")
        return None if done == -1 else done

    def _done(self, container: Container) -> int | None:
        """How many examples are in a file, -1 for all; `None` if it is of no use."""
        facts = container.manifest
        done = facts.get("done")
        if facts.get("kind") != "pass" or facts.get("key") != self.key:
            raise InputError(
                f"expected passes of one fit in the checkpoint, got one of another fit in {container.path}. "
                "Choose another folder, or remove this one."
            )
        if type(done) is not int or not -1 <= done <= self.examples:
            raise damaged(container.path, "it does not say how many examples are in it")
        return done if {name: facts.get(name) for name in self._facts} == self._facts else None


def open_checkpoint(
    folder: Path,
    every: float,
    options: Mapping[str, Any],
    model: nn.Module,
    marks: Tensor,
    limit: int,
    progress: Progress,
    layers: Processes = ALONE,
) -> tuple[Checkpoint, int]:
    """Begin a checkpoint, or recognise one; with the bytes of memory that the fit was planned with.

    Args:
        folder: which may be there already, with a checkpoint of the same fit.
        every: seconds between two looks at the state of a pass.
        options: of the fit, as JSON knows them.
        model: the network.
        marks: (n,) one for each training example.
        limit: bytes of memory that would be planned with now.
        progress: is told where the fit goes on.
        layers: the processes that share the layers; all of them come here, and the first begins.
    """
    if layers.rank > 0:
        layers.tell("the checkpoint")
        _check_seen(folder)
    _prepare(folder)
    draft = Draft()
    draft.note(kind="start", whence=__version__, torch=torch.__version__, limit=limit, options=dict(options))
    write_model(draft.part("model"), model)
    path = folder / START
    if path.exists():
        with opened(path) as container:
            limit = _recognise(container, draft, model, marks)
    else:
        write(path, draft.facts, {"marks": marks})
    if layers.rank == 0:
        layers.tell("the checkpoint")
    words = json.dumps([draft.facts[name] for name in ("whence", "torch", "options", "model")], sort_keys=True)
    key = hashlib.sha256(words.encode() + memoryview(as_bytes(marks))).hexdigest()
    return Checkpoint(folder, every, key, len(marks), progress, layers), limit


def _check_seen(folder: Path) -> None:
    """Raise unless the first process has begun a checkpoint here."""
    if not (folder / START).exists():
        raise InputError(
            f"expected a folder for the checkpoint that all processes see, as they share the layers, got "
            f"{str(folder)!r}, in which this one does not find what the first one wrote. Use a disk that is shared."
        )


def _prepare(folder: Path) -> None:
    """Make the folder, or clean up after a process that was killed while it wrote."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"expected a folder for the checkpoint, got {str(folder)!r}, which is none.")
    if not folder.parent.is_dir():
        raise InputError(f"expected a folder that exists to put the checkpoint in, got {str(folder.parent)!r}.")
    folder.mkdir(exist_ok=True)
    for part in folder.glob(".whence-*.part"):
        with suppress(OSError):
            part.unlink()
    if not (folder / START).exists() and os.listdir(folder):
        raise InputError(
            f"expected an empty folder or a checkpoint, got {str(folder)!r} with other files in it. Choose a folder of "
            "its own, which need not exist yet."
        )


def _recognise(container: Container, draft: Draft, model: nn.Module, marks: Tensor) -> int:
    """Raise unless the checkpoint is of this fit; else the memory it was planned with."""
    facts = container.manifest
    if facts.get("kind") != "start":
        raise damaged(container.path, "it does not say which fit it is of")
    for name in ("whence", "torch"):
        if facts.get(name) != draft.facts[name]:
            raise _another(name, facts.get(name), draft.facts[name], container)
    there, here = facts.get("options"), draft.facts["options"]
    if not isinstance(there, dict):
        raise damaged(container.path, "it tells no options")
    for name in dict.fromkeys([*here, *there]):
        if there.get(name) != here.get(name):
            raise _another(name, there.get(name), here.get(name), container)
    saved = Saved(container, facts, {}, _PLAIN, set())
    check_same(saved.part("model"), model, same_torch=True)
    n = saved.sizes("marks", 1)[0]
    seen = saved.tensor("marks", (n,), torch.int64, torch.int64)
    if n != len(marks):
        raise _others(f"{len(marks)} training examples instead of {n}")
    if not torch.equal(seen, marks):
        raise _others(f"another one in place {int((seen != marks).int().argmax())}")
    return saved.whole("limit", 0, 2**62)


def _another(name: str, there: Any, here: Any, container: Container) -> InputError:
    return InputError(
        f"expected a checkpoint of this very fit, got one with {name} {printable(str(there), 200)} instead of "
        f"{printable(str(here), 200)} in {container.path}. Use the options of that time, or another folder."
    )


def _others(got: str) -> LoaderError:
    return LoaderError(
        f"expected the training data of the checkpoint, in the same order, got {got}. Pass the data of that time, not "
        "shuffled, or use another folder."
    )


def described(thing: Any, depth: int = 3) -> Any:
    """An option as JSON knows it: the same words for the same option, as far as so many objects inside each other go.

    Examples:
        >>> described(torch.float64), described(0.5), described(len)
        ('torch.float64', 0.5, 'builtins.len')
    """
    if thing is None or isinstance(thing, (bool, int, str)):
        return thing
    if isinstance(thing, float):
        return plain(thing)
    if isinstance(thing, Tensor):
        return f"a tensor of mark {checksum(thing)}"
    if callable(thing) and hasattr(thing, "__qualname__"):
        return f"{thing.__module__}.{thing.__qualname__}"
    inner = getattr(thing, "__dict__", None)
    if inner is None or isinstance(thing, torch.dtype) or depth == 0:
        return ADDRESS.sub("0x", repr(thing))
    kind = f"{type(thing).__module__}.{type(thing).__qualname__}"
    return {"kind": kind, **{name: described(value, depth - 1) for name, value in sorted(inner.items())}}


_PLAIN = Target(torch.device("cpu"), torch.float64, torch.float64, (torch.float64, torch.float64), empty=False)
