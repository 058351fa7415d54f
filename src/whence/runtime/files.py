"""Safetensors files with a checksum and a manifest: written atomically, and checked when they are opened."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import (
    CorruptArtifactError,
    FormatError,
    InputError,
    MissingFileError,
    WhenceError,
    first_line,
    printable,
)
from whence.runtime.model_state import as_bytes

FORMAT = 10  # of files that are written and read
MOST_CHARACTERS, MOST_ENTRIES = 16 * 2**20, 2**20  # of a manifest: a parsed entry takes a hundred bytes
DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32)  # that can be saved
METADATA = re.compile(r'\{"format":([0-9]{1,9}),"sha256":"([0-9a-f]{64})","manifest":(.*)\}', re.DOTALL)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write, which replaces `path` once it is completely on disk, and is removed on an error.

    It is written next to its target, so that the last step is an atomic rename. A process that is killed meanwhile
    leaves a folder named `.whence-*.part` behind, and the target unchanged.
    """
    if not path.parent.is_dir():
        raise InputError(f"expected a folder that exists to save in, got {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise InputError(f"expected the name of a file to save to, got the folder {str(path)!r}. Add a file name.")
    folder = Path(tempfile.mkdtemp(prefix=".whence-", suffix=".part", dir=path.parent))
    try:
        part = folder / "file"
        part.touch()
        mode = stat.S_IMODE(part.stat().st_mode)
        yield part
        part.chmod(mode)  # some versions of safetensors let only the owner read
        _flush(part)
        os.replace(part, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):  # not every system can flush a folder
        _flush(path.parent)


def _flush(path: Path) -> None:
    """Flush a file, or the entries of a folder, to the disk."""
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_file(path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Save a manifest, which JSON can hold, and tensors."""
    text = json.dumps(manifest, separators=(",", ":"))
    if len(text) > MOST_CHARACTERS or text.count(",") > MOST_ENTRIES:
        raise InputError(
            f"expected a fit whose description takes at most {MOST_CHARACTERS} characters and {MOST_ENTRIES} entries, "
            f"got {len(text)} and {text.count(',')}. Select fewer parameters."
        )
    apart: dict[str, Tensor] = {}  # safetensors needs contiguous tensors that do not share memory
    storages = set()
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"expected tensors of {DTYPES} to save, got {tensor.dtype} in {name}.")
        whole = tensor.detach().contiguous()
        place = (whole.device, whole.untyped_storage().data_ptr())
        apart[name] = whole.clone() if place in storages else whole
        storages.add(place)
    checksum = _sha256(text, apart.items())
    with replacing(path) as part:
        try:
            described = f'{{"format":{FORMAT},"sha256":"{checksum}","manifest":{text}}}'
            save_file(apart, part, {"whence": described})
        except SafetensorError as error:
            raise OSError(f"{str(path)!r} could not be written: {error}") from error


def _sha256(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Checksum of a manifest and of names, dtypes, shapes and numbers of tensors, in the order of their names."""
    digest = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(as_bytes(tensor))
    return digest.hexdigest()


@dataclass(frozen=True)
class SavedFile:
    """An open file whose checksum is right."""

    path: str  # for messages
    manifest: dict[str, Any]
    names: frozenset[str]  # of all tensors
    file: Any  # opened by safetensors
    read: set[str] = field(default_factory=set)  # names of the tensors read so far

    def tensor(self, name: str) -> Tensor:
        """A tensor by its name, as a copy."""
        if name not in self.names:
            raise damaged(self.path, f"the tensor {printable(name, 80)} is missing")
        self.read.add(name)
        found: Tensor = self.file.get_tensor(name).clone()
        if found.dtype not in DTYPES:
            raise damaged(self.path, f"{printable(name, 80)} is of dtype {found.dtype}")
        return found


@contextmanager
def opened(path: Path) -> Iterator[SavedFile]:
    """Open a file; raise unless it is a regular file of this format, and undamaged."""
    shown = repr(str(path))
    if not path.exists():
        raise MissingFileError(
            f"expected a file saved by whence, got {str(path.absolute())!r}, where there is none. Pass the path "
            "that tracer.save wrote to."
        )
    if not path.is_file():
        raise InputError(f"expected a file saved by whence, got {shown}, which is not a regular file.")
    try:
        with safe_open(path, "pt") as file:
            yield SavedFile(shown, _checked_manifest(file, shown), frozenset(file.keys()), file)
    except SafetensorError as error:
        with path.open("rb") as file:
            begins = file.read(9)
        if begins[8:] not in (b"{", b""):  # after its length, the table of tensors; a file cut short may end before it
            raise foreign(shown) from None
        raise damaged(shown, f"safetensors says: {printable(str(error), 200)}") from None


def _checked_manifest(file: Any, path: str) -> dict[str, Any]:
    """The manifest of a file whose format and checksum are right."""
    metadata = METADATA.fullmatch((file.metadata() or {}).get("whence", ""))
    if metadata is None:
        raise foreign(path)
    version, checksum, text = metadata.groups()
    if int(version) != FORMAT:
        raise FormatError(
            f"expected a file of format {FORMAT}, got format {int(version)} in {path}, which another version of whence "
            "wrote. Read it with that version, or fit and save again."
        )
    if _sha256(text, ((name, file.get_tensor(name)) for name in sorted(file.keys()))) != checksum:
        raise damaged(path, "its checksum is wrong")
    if len(text) > MOST_CHARACTERS or text.count(",") > MOST_ENTRIES:
        raise damaged(path, "its manifest has more entries than any fit")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its manifest cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise damaged(path, "its manifest is not a table")
    return found


def foreign(path: str) -> CorruptArtifactError:
    """The error for a file that whence did not write."""
    return CorruptArtifactError(
        f"expected a file saved by whence, got something else in {path}. Pass the file that `--save` or `tracer.save` "
        "wrote; commands take it first, before the data."
    )


def damaged(path: str, what: str) -> CorruptArtifactError:
    """The error for a file that differs from what whence wrote."""
    return CorruptArtifactError(
        f"expected a whole file as whence saved it, got a damaged one in {path}: {what}. "
        "Copy or download it again, or fit and save again."
    )


@contextmanager
def fitting_together(path: str) -> Iterator[None]:
    """Report any error while objects are built from a file as damage: whence did not write such a file."""
    try:
        yield
    except (WhenceError, MemoryError, OSError, torch.cuda.OutOfMemoryError):
        raise
    except Exception as error:
        what = f"its parts do not fit together ({type(error).__name__}: {printable(first_line(error), 200)})"
        raise damaged(path, what) from error
