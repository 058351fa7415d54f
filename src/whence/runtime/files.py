"""Safetensors files with a checksum and a manifest: written atomically, and checked when they are opened."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import CorruptArtifactError, FormatError, InputError, MissingFileError, WhenceError, first_line

FORMAT = 8  # of files that are written and read
MAX_HEADER_BYTES, MAX_ENTRIES = 16 * 2**20, 2**20  # a parsed entry takes a hundred bytes
DTYPES = (torch.float64, torch.float32, torch.int64, torch.int32)  # that can be saved
# Start of every header, so that format and checksum are found without parsing.
START = re.compile(rb'\{"__metadata__":\{"whence":"\{\\"format\\":([0-9]{1,9}),\\"sha256\\":\\"([0-9a-f]{64})\\",')
ZEROS = b"0" * 64  # placeholder for the checksum while it is computed


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
    text = json.dumps({"format": FORMAT, "sha256": ZEROS.decode(), "manifest": manifest}, separators=(",", ":"))
    apart: dict[str, Tensor] = {}  # safetensors needs contiguous tensors that do not share memory
    storages = set()
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise InputError(f"expected tensors of {DTYPES} to save, got {tensor.dtype} in {name}.")
        whole = tensor.detach().contiguous()
        place = (whole.device, whole.untyped_storage().data_ptr())
        apart[name] = whole.clone() if place in storages else whole
        storages.add(place)
    with replacing(path) as part:
        try:
            save_file(apart, part, {"whence": text})
        except SafetensorError as error:
            raise OSError(f"{str(path)!r} could not be written: {error}") from error
        with part.open("r+b") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
            if len(header) > MAX_HEADER_BYTES or header.count(b",") > MAX_ENTRIES:
                raise InputError(
                    f"expected a fit whose description takes at most {MAX_HEADER_BYTES} bytes and {MAX_ENTRIES} "
                    f"entries, got {len(header)} and {header.count(b',')}. Select fewer parameters."
                )
            start = header.index(ZEROS)
            checksum = _sha256(file, header, start)
            file.seek(8 + start)
            file.write(checksum)


def _sha256(file: BinaryIO, header: bytes, start: int) -> bytes:
    """Checksum of a whole file, with zeros in place of the checksum itself; the header is already read."""
    digest = hashlib.sha256(len(header).to_bytes(8, "little"))
    digest.update(header[:start] + ZEROS + header[start + len(ZEROS) :])
    while chunk := file.read(2**20):
        digest.update(chunk)
    return digest.hexdigest().encode()


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
    _check_file(path, shown)
    try:
        with safe_open(path, "pt") as file:
            yield SavedFile(shown, _manifest(file.metadata()["whence"], shown), frozenset(file.keys()), file)
    except SafetensorError as error:
        raise damaged(shown, f"safetensors says: {printable(str(error), 200)}") from None


def _manifest(text: str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text)["manifest"]
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its manifest cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise damaged(path, "its manifest is not a table")
    return found


def _check_file(path: Path, shown: str) -> None:
    """Check format and checksum, without keeping the contents."""
    if not path.exists():
        raise MissingFileError(
            f"expected a file saved by whence, got {str(path.absolute())!r}, where there is none. Pass the path "
            "that tracer.save wrote to."
        )
    if not path.is_file():
        raise InputError(f"expected a file saved by whence, got {shown}, which is not a regular file.")
    with path.open("rb") as file:
        length, size = int.from_bytes(file.read(8), "little"), path.stat().st_size
        if not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
            raise damaged(shown, f"it says that its header has {length} bytes, and it has {size} in all")
        header = file.read(length)
        found = START.match(header)
        if found is None:
            raise CorruptArtifactError(f"expected a file saved by whence, got something else in {shown}.")
        if int(found[1]) != FORMAT:
            raise FormatError(
                f"expected a file of format {FORMAT}, got format {int(found[1])} in {shown}, which another version "
                "of whence wrote. Read it with that version, or fit and save again."
            )
        if _sha256(file, header, found.start(2)) != found[2]:
            raise damaged(shown, "its checksum is wrong")
    if header.count(b",") > MAX_ENTRIES:
        raise damaged(shown, "its header has more entries than any fit")


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


def printable(text: str, most: int | None = None) -> str:
    """A text from a file, for a message: without control characters, and shortened.

    Examples:
        >>> printable(chr(27) + "[2J").isprintable(), printable("longer", 4)
        (True, 'long...')
    """
    shown = text if most is None or len(text) <= most else f"{text[:most]}..."
    return "".join(one if one.isprintable() else "\ufffd" for one in shown)
