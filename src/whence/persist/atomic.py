"""Write a file so that whatever happens, the old one or the new one is there, whole."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from whence.errors import InputError

EXCLUSIVE = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes the place of `path` once all of it is on the disk, and vanishes on an error.

    It is written beside its target, so that the last step is a rename, which is all or nothing. A process that is
    killed meanwhile leaves a file named `.whence-*.part` behind, and the target as it was.
    """
    if not path.parent.is_dir():
        raise InputError(f"expected a folder that exists to save in, got {str(path.parent)!r}. Make it first.")
    if path.is_dir():
        raise InputError(f"expected the name of a file to save to, got the folder {str(path)!r}. Add a file name.")
    part = path.parent / f".whence-{secrets.token_hex(8)}.part"
    try:
        with os.fdopen(os.open(part, EXCLUSIVE, 0o666), "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    _settle(path.parent)


def _settle(folder: Path) -> None:
    """Bring the rename itself to the disk, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
