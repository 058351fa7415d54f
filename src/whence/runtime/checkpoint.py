"""Checkpoints of a fit: files with the sums of every pass over the data, from which the same call resumes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence._version import __version__
from whence.errors import InputError, LoaderError, printable
from whence.runtime.files import SavedFile, damaged, fitting_together, opened, write_file
from whence.runtime.model_state import ADDRESS, as_bytes, check_same_model, checksum, describe_model

START = "start.whence"
State = Mapping[str, Tensor]  # tensors by name, to which a pass adds in place


class Checkpoint:
    """Saves the states of passes in a folder and restores them; `every` is in seconds, `key` identifies the fit."""

    def __init__(self, folder: Path, every: float, key: str, examples: int, say: Callable[[str], None]) -> None:
        self.folder, self.every, self.key, self.examples, self.say = folder, every, key, examples, say
        self._number, self._last = 0, 0.0
        self._description: dict[str, Any] = {}
        self._state: State = {}

    def begin(self, label: str, state: State, given: Sequence[Tensor]) -> int | None:
        """Start the next pass and restore its state; return how many examples it includes, `None` for all."""
        self._number += 1
        self._state, self._last = state, time.monotonic()
        known = sorted({checksum(one) for one in given})
        self._description = {"kind": "pass", "key": self.key, "label": label, "given": known}
        if not self._path.exists():
            return 0
        with opened(self._path) as saved:
            described, done = saved.manifest, saved.manifest.get("done")
            if described.get("kind") != "pass" or described.get("key") != self.key:
                raise InputError(
                    f"expected passes of one fit in the checkpoint, got one of another fit in {saved.path}. "
                    "Choose another folder, or remove this one."
                )
            if type(done) is not int or not -1 <= done <= self.examples:
                raise damaged(saved.path, "it does not say how many examples are in it")
            if any(described.get(name) != value for name, value in self._description.items()):
                return 0  # from other numbers, for example another machine's: the pass starts from zero
            if saved.names != state.keys():
                raise damaged(saved.path, "its sums are not those of this pass")
            for name, tensor in state.items():
                found = saved.tensor(name)
                if (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                    raise damaged(saved.path, f"{name} is of another shape")
                tensor.copy_(found)
        end = "its end" if done == -1 else f"example {done}"
        self.say(f"whence: from the checkpoint: {label}, up to {end}")
        return None if done == -1 else done

    def save_if_due(self, done: int) -> None:
        """Save the state, which includes `done` examples, if the last save was long ago."""
        if time.monotonic() - self._last >= self.every:
            self._write(done)

    def finish(self) -> None:
        """Save the state, which includes all examples, and release it."""
        self._write(-1)
        self._state = {}

    @property
    def _path(self) -> Path:
        return self.folder / f"pass-{self._number:02d}.whence"

    def _write(self, done: int) -> None:
        write_file(self._path, {**self._description, "done": done}, self._state)
        self._last = time.monotonic()


def open_checkpoint(
    folder: Path,
    every: float,
    options: Mapping[str, str],
    model: nn.Module,
    fingerprints: Tensor,
    limit: int,
    say: Callable[[str], None],
) -> tuple[Checkpoint, int]:
    """Begin or continue a checkpoint; also return the memory limit of the fit, in bytes.

    The folder may already hold a checkpoint of the same fit: the same options, model and fingerprints (n,) of the
    training examples. Its memory limit then replaces `limit`.
    """
    _prepare(folder)
    options = {"whence": __version__, "torch": torch.__version__, **options}
    path, described = folder / START, describe_model(model)
    if path.exists():
        with opened(path) as saved, fitting_together(saved.path):
            limit = _check_same_fit(saved, options, model, fingerprints)
    else:
        manifest = {"kind": "start", "limit": limit, "options": options, "model": described}
        write_file(path, manifest, {"fingerprints": fingerprints})
    text = json.dumps([options, described], sort_keys=True)
    key = hashlib.sha256(text.encode() + memoryview(as_bytes(fingerprints))).hexdigest()
    return Checkpoint(folder, every, key, len(fingerprints), say), limit


def _prepare(folder: Path) -> None:
    """Make the folder, and remove partial files of a process that was killed while writing."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise InputError(f"expected a folder for the checkpoint, got {str(folder)!r}, which is a file or a link.")
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


def _check_same_fit(saved: SavedFile, options: Mapping[str, str], model: nn.Module, fingerprints: Tensor) -> int:
    """Raise unless the checkpoint belongs to this fit; return its memory limit."""
    described = saved.manifest
    for name, here in options.items():
        there = described["options"].get(name)
        if there != here:
            raise InputError(
                f"expected a checkpoint of this fit, got one with {name} {printable(str(there), 200)} instead of "
                f"{printable(here, 200)} in {saved.path}. Use the same options, or another folder."
            )
    check_same_model(described["model"], model)
    seen = saved.tensor("fingerprints")
    if not torch.equal(seen, fingerprints):
        got = f"{len(fingerprints)} training examples instead of {len(seen)}"
        if len(seen) == len(fingerprints):
            got = f"another one in place {int((seen != fingerprints).int().argmax())}"
        raise LoaderError(
            f"expected the training data of the checkpoint, in the same order, got {got}. Pass the same data, not "
            "shuffled, or use another folder."
        )
    return int(described["limit"])


def option_text(option: Any) -> str:
    """An option as text, the same for the same option.

    Examples:
        >>> option_text(torch.float64), option_text(0.5)
        ('torch.float64', '0.5')
    """
    text = repr(option)
    if " object at 0x" in text and hasattr(option, "__dict__"):
        text = f"{type(option).__qualname__}({vars(option)})"
    return ADDRESS.sub("0x", text)
