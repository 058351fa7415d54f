"""A manifest and tensors in one file: written at once or not at all, read after its checksum is right.

Reading is done with plain reads into memory of our own. A mapped file that somebody cuts short would end the process.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from whence.errors import InputError

from .atomic import replacing
from .header import MOST_HEADER, MOST_ITEMS, ZEROS, Entry, begin, compose, damaged, items, parse

PIECE = 2**20
"""Bytes hashed at once."""

READING = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


def write(path: Path, manifest: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Save a manifest and tensors."""
    header = compose(manifest, {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()})
    if len(header) > MOST_HEADER or items(header) > MOST_ITEMS:
        raise InputError(
            f"expected a fit whose description takes at most {MOST_HEADER} bytes and {MOST_ITEMS} entries, got "
            f"{len(header)} and {items(header)}. Select fewer parameters."
        )
    length = len(header).to_bytes(8, "little")
    digest = hashlib.sha256(length + header)
    with replacing(path) as file:
        file.write(length + header)
        for tensor in tensors.values():
            data = memoryview(as_bytes(tensor))
            digest.update(data)
            file.write(data)
        file.seek(8 + header.index(ZEROS))
        file.write(digest.hexdigest().encode())


def as_bytes(tensor: Tensor) -> Any:
    """The bytes of a tensor in the order of its axes, as an array of uint8."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


class Container:
    """An open file whose checksum is right.

    Attributes:
        path: for messages.
        manifest: as written.
        entries: the tensors it holds.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        """Check the whole file without keeping any of it, then read its head."""
        self.path = path
        self._file = file
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= min(size - 8, MOST_HEADER):
            raise damaged(path, f"it says that its header has {length} bytes, and it has {size} bytes in all")
        header = file.read(length)
        checksum, at = begin(header, path)
        if _digest(file, header, at) != checksum:
            raise damaged(path, "its checksum is wrong")
        self._start = 8 + length
        self.manifest, self.entries = parse(header, size - self._start, path)

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.size for entry in self.entries.values())

    def read(self, entry: Entry) -> Tensor:
        """The numbers of one tensor."""
        found = torch.empty(entry.size, dtype=torch.uint8, device="cpu")
        if entry.size:
            self._file.seek(self._start + entry.start)
            room: Any = found.numpy()
            if self._file.readinto(room) != entry.size:  # type: ignore[attr-defined]  # binary files have it; IO[bytes] does not say
                raise damaged(self.path, "it was cut short while it was read")
        return found.view(entry.dtype).reshape(entry.shape)


def _digest(file: BinaryIO, header: bytes, at: int) -> str:
    """SHA-256 of the whole file, with zeros for the checksum; the header has been read already."""
    digest = hashlib.sha256(len(header).to_bytes(8, "little"))
    digest.update(header[:at] + ZEROS + header[at + len(ZEROS) :])
    while piece := file.read(PIECE):
        digest.update(piece)
    return digest.hexdigest()


@contextmanager
def opened(path: Path) -> Iterator[Container]:
    """Open a file, which must be a file: no link, no folder, no pipe."""
    try:
        handle = os.open(path, READING)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK):
            raise InputError(
                f"expected a file, got the symbolic link {str(path)!r}. Pass what it points to, if you trust it: "
                "Path(...).resolve()."
            ) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise InputError(f"expected a file saved by whence, got {str(path)!r}, which is no plain file.")
    with os.fdopen(handle, "rb") as file:
        yield Container(file, repr(str(path)))
