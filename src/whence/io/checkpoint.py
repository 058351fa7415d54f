"""Checkpoints of a fit: files with the sums of every pass over the data, from which the same call resumes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from whence._version import __version__
from whence.errors import InputError, LoaderError
from whence.io.files import Draft, Saved, damaged, opened, plain, printable, write_file
from whence.io.fit import ADDRESS, check_same, write_model
from whence.runtime.execution import Progress, State
from whence.runtime.model_state import as_bytes, checksum

START = "start.whence"


class Checkpoint:
    """Saves the states of passes in a folder and restores them; `every` is in seconds, `key` identifies the fit."""

    def __init__(self, folder: Path, every: float, key: str, examples: int, progress: Progress) -> None:
        self.folder, self.every, self.key, self.examples, self.progress = folder, every, key, examples, progress
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
            done = saved.fields.get("done")
            if saved.fields.get("kind") != "pass" or saved.fields.get("key") != self.key:
                raise InputError(
                    f"expected passes of one fit in the checkpoint, got one of another fit in {saved.path}. "
                    "Choose another folder, or remove this one."
                )
            if type(done) is not int or not -1 <= done <= self.examples:
                raise damaged(saved.path, "it does not say how many examples are in it")
            if any(saved.fields.get(name) != value for name, value in self._description.items()):
                return 0  # from other numbers, for example another machine's: the pass starts from zero
            if saved.entries.keys() != state.keys():
                raise damaged(saved.path, "its sums are not those of this pass")
            for name, entry in saved.entries.items():
                if (entry.dtype, entry.shape) != (state[name].dtype, state[name].shape):
                    raise damaged(saved.path, f"{name} is of another shape")
            for name, tensor in state.items():
                tensor.copy_(saved.read(name))
        end = "its end" if done == -1 else f"example {done}"
        self.progress.say(f"whence: from the checkpoint: {label}, up to {end}")
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
    options: Mapping[str, Any],
    model: nn.Module,
    fingerprints: Tensor,
    limit: int,
    progress: Progress,
) -> tuple[Checkpoint, int]:
    """Begin or continue a checkpoint; also return the memory limit of the fit, in bytes.

    The folder may already hold a checkpoint of the same fit: the same options (in JSON), model and fingerprints (n,) of
    the training examples. Its memory limit then replaces `limit`.
    """
    _prepare(folder)
    draft = Draft()
    versions = {"whence": __version__, "torch": torch.__version__}
    draft.put(kind="start", limit=limit, options={**versions, **options})
    write_model(draft.part("model"), model)
    path = folder / START
    if path.exists():
        with opened(path) as saved:
            limit = _check_same_fit(saved, draft, model, fingerprints)
    else:
        write_file(path, draft.fields, {"fingerprints": fingerprints})
    text = json.dumps([draft.fields[name] for name in ("options", "model")], sort_keys=True)
    key = hashlib.sha256(text.encode() + memoryview(as_bytes(fingerprints))).hexdigest()
    return Checkpoint(folder, every, key, len(fingerprints), progress), limit


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


def _check_same_fit(saved: Saved, draft: Draft, model: nn.Module, fingerprints: Tensor) -> int:
    """Raise unless the checkpoint belongs to this fit; return its memory limit."""
    fields = saved.fields
    if fields.get("kind") != "start":
        raise damaged(saved.path, "it does not name its fit")
    there, here = fields.get("options"), draft.fields["options"]
    if not isinstance(there, dict):
        raise damaged(saved.path, "it holds no options")
    for name in dict.fromkeys([*here, *there]):
        if there.get(name) != here.get(name):
            raise InputError(
                f"expected a checkpoint of this fit, got one with {name} {printable(str(there.get(name)), 200)} "
                f"instead of {printable(str(here.get(name)), 200)} in {saved.path}. Use the same options, "
                "or another folder."
            )
    saved = replace(saved, dtypes={"index": (torch.int64,)})
    check_same(saved.part("model"), model, same_torch=True)
    seen = saved.tensor("fingerprints", "index", "examples")
    if not torch.equal(seen, fingerprints):
        got = f"{len(fingerprints)} training examples instead of {len(seen)}"
        if len(seen) == len(fingerprints):
            got = f"another one in place {int((seen != fingerprints).int().argmax())}"
        raise LoaderError(
            f"expected the training data of the checkpoint, in the same order, got {got}. Pass the same data, not "
            "shuffled, or use another folder."
        )
    return saved.whole("limit", 0, 2**62)


def json_of(option: Any, depth: int = 3) -> Any:
    """An option as JSON: the same text for the same option, down to `depth` levels of nested objects.

    Examples:
        >>> json_of(torch.float64), json_of(0.5), json_of(len)
        ('torch.float64', 0.5, 'builtins.len')
    """
    if option is None or isinstance(option, (bool, int, str)):
        return option
    if isinstance(option, float):
        return plain(option)
    if isinstance(option, Tensor):
        return f"a tensor of checksum {checksum(option)}"
    if callable(option) and hasattr(option, "__qualname__"):
        return f"{option.__module__}.{option.__qualname__}"
    inner = getattr(option, "__dict__", None)
    if inner is None or isinstance(option, torch.dtype) or depth == 0:
        return ADDRESS.sub("0x", repr(option))
    kind = f"{type(option).__module__}.{type(option).__qualname__}"
    return {"kind": kind, **{name: json_of(value, depth - 1) for name, value in sorted(inner.items())}}
