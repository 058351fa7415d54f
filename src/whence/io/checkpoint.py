"""Checkpoints of a fit: the sums of every pass over the data, in files from which the same call goes on."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence._version import __version__
from whence.errors import InputError, LoaderError
from whence.io.files import Container, Draft, Saved, Target, as_bytes, damaged, opened, plain, printable, write
from whence.io.model import ADDRESS, check_same, write_model
from whence.runtime.execution import State
from whence.runtime.model_state import checksum
from whence.runtime.progress import Progress

START = "start.whence"


class Checkpoint:
    """Writes the states of passes to a folder, and reads them again.

    Args:
        folder: of the checkpoint, which is there.
        every: seconds between two looks at the state of a pass.
        key: tells this fit from all others.
        examples: how many there are.
        progress: is told where the fit goes on.
    """

    def __init__(self, folder: Path, every: float, key: str, examples: int, progress: Progress) -> None:
        """No pass yet."""
        self.folder, self.every, self.key, self.examples, self.progress = folder, every, key, examples, progress
        self._number = 0
        self._facts: dict[str, Any] = {}
        self._state: State = {}
        self._last = 0.0

    def begin(self, label: str, state: State, given: Sequence[Tensor]) -> int | None:
        """Open the next pass and fill its state: how many examples are in it, `None` for all of them."""
        self._number += 1
        self._state = state
        self._facts = {
            "kind": "pass",
            "key": self.key,
            "label": label,
            "given": sorted({checksum(one) for one in given}),
        }
        self._last = time.monotonic()
        if not self._path.exists():
            return 0
        with opened(self._path) as container:
            return self._read(container)

    def note(self, done: int) -> None:
        """So many examples are in the state now: write it down if it is time."""
        if time.monotonic() - self._last >= self.every:
            self._write(done)

    def finish(self) -> None:
        """All examples are in the state, which is then let go."""
        self._write(-1)
        self._state = {}

    def restart(self) -> None:
        """The next pass is the first one again."""
        self._number = 0

    def close(self) -> None:
        """There are no more passes: let the last one's sums go."""
        self._state = {}

    @property
    def _path(self) -> Path:
        return self.folder / f"pass-{self._number:02d}.whence"

    def _write(self, done: int) -> None:
        write(self._path, {**self._facts, "done": done}, self._state)
        self._last = time.monotonic()

    def _read(self, container: Container) -> int | None:
        """Fill the state: how many examples are in it, `None` for all of them."""
        done = self._done(container)
        if done is None:
            return 0  # made from other numbers, on another machine for example: this pass starts anew
        self._fill(container)
        where = "its end" if done == -1 else f"example {done}"
        self.progress.say(f"whence: from the checkpoint: {self._facts['label']}, up to {where}")
        return None if done == -1 else done

    def _fill(self, container: Container) -> None:
        """Copy the sums into the state, after all of them are found to be there."""
        if container.entries.keys() != self._state.keys():
            raise damaged(container.path, "it holds other sums than this pass makes")
        for name, tensor in self._state.items():
            entry = container.entries[name]
            if (entry.dtype, tuple(entry.shape)) != (tensor.dtype, tuple(tensor.shape)):
                raise damaged(container.path, f"{name} is of another shape")
        for name, tensor in self._state.items():
            tensor.copy_(container.read(name))

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
    """
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
    words = json.dumps([draft.facts[name] for name in ("whence", "torch", "options", "model")], sort_keys=True)
    key = hashlib.sha256(words.encode() + memoryview(as_bytes(marks))).hexdigest()
    return Checkpoint(folder, every, key, len(marks), progress), limit


def _prepare(folder: Path) -> None:
    """Make the folder, or clean up after a process that was killed while it wrote."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"expected a folder for the checkpoint, got {str(folder)!r}, which is none.")
    if not folder.parent.is_dir():
        raise InputError(f"expected a folder that exists to put the checkpoint in, got {str(folder.parent)!r}.")
    folder.mkdir(exist_ok=True)
    for part in folder.glob(".whence-*.part"):
        shutil.rmtree(part, ignore_errors=True)
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
