"""The head of a file: what it holds, where, and its checksum; read with suspicion.

The file is a safetensors file. Its metadata hold a JSON manifest and the SHA-256 of everything else in the file: of
all bytes, with the checksum's own digits as zeros. Nothing is parsed before that sum is right, and nothing in the
manifest is believed before it fits the rest.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from whence.errors import CorruptArtifactError, FormatError

FORMAT = 1
"""The format that is written and read."""

MOST_HEADER = 16 * 2**20
"""Bytes of the largest header that is read."""

MOST_ITEMS = 2**20
"""Entries of lists and tables in the largest header that is read: each takes a hundred bytes once it is parsed."""

MOST_AXES = 8

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "I64": torch.int64,
}
"""Names of the dtypes that occur, as safetensors has them."""

ZEROS = b"0" * 64

START = re.compile(rb'\{"__metadata__":\{"whence":"([0-9]{1,9})","sha256":"([0-9a-f]{64})","manifest":"')
"""How every header begins, so that version and checksum are found without parsing."""


@dataclass(frozen=True)
class Entry:
    """One tensor of a file.

    Attributes:
        dtype: of its numbers.
        shape: as stored.
        start: first byte, counted from the end of the header.
        size: bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    size: int


def compose(manifest: Mapping[str, Any], tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> bytes:
    """The header for tensors stored one after the other, with zeros for a checksum."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    text = json.dumps(manifest, allow_nan=False, separators=(",", ":"))
    metadata = {"whence": str(FORMAT), "sha256": ZEROS.decode(), "manifest": text}
    table: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        table[name] = {"dtype": names[dtype], "shape": list(shape), "data_offsets": [start, end]}
    found = json.dumps(table, separators=(",", ":")).encode()
    return found + b" " * (-len(found) % 8)


def begin(header: bytes, path: str) -> tuple[str, int]:
    """The checksum and where it stands, after a look at the version."""
    found = START.match(header)
    if found is None:
        raise CorruptArtifactError(f"expected a file saved by whence, got something else in {path}.")
    version = int(found[1])
    if version < 1:
        raise damaged(path, f"there is no format {version}")
    if version != FORMAT:
        raise FormatError(
            f"expected a file of format {FORMAT}, got format {version} in {path}, which another version of whence "
            "wrote. Read it with that version, or fit and save again."
        )
    return found[2].decode(), found.start(2)


def parse(header: bytes, data: int, path: str) -> tuple[dict[str, Any], dict[str, Entry]]:
    """The manifest and the table of tensors of a header followed by so many bytes of data."""
    if items(header) > MOST_ITEMS:
        raise damaged(path, "its header has more entries than any fit")
    table = _json(header, path)
    metadata = table.pop("__metadata__")
    if not isinstance(metadata, dict) or set(metadata) != {"whence", "sha256", "manifest"}:
        raise damaged(path, "its metadata are not those of this format")
    entries, end = {}, 0
    for name, given in table.items():
        entries[name] = _entry(name, given, end, path)
        end += entries[name].size
    if end != data:
        raise damaged(path, f"its table tells of {end} bytes of numbers, and there are {data}")
    text = metadata["manifest"]
    if not isinstance(text, str):
        raise damaged(path, "its manifest is no text")
    return _json(text, path), entries


def items(header: bytes) -> int:
    """At most so many entries are in a header."""
    return sum(header.count(sign) for sign in (b",", b"[", b"{"))


def _json(text: bytes | str, path: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise damaged(path, "its header is no table")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _entry(name: str, given: Any, start: int, path: str) -> Entry:
    if not isinstance(given, dict) or set(given) != {"dtype", "shape", "data_offsets"}:
        raise damaged(path, f"the entry of {name[:80]!r} has other fields than a tensor's")
    dtype = DTYPES.get(given["dtype"]) if isinstance(given["dtype"], str) else None
    shape, offsets = given["shape"], given["data_offsets"]
    if dtype is None or not _sizes(shape) or len(shape) > MOST_AXES or not _sizes(offsets) or len(offsets) != 2:
        raise damaged(path, f"the entry of {name[:80]!r} is not a tensor's")
    size = math.prod(shape) * dtype.itemsize
    if offsets != [start, start + size]:
        raise damaged(path, f"{name[:80]!r} of shape {tuple(shape)} is said to be at {offsets}")
    return Entry(dtype, tuple(shape), start, size)


def _sizes(given: Any) -> bool:
    return isinstance(given, list) and all(type(one) is int and 0 <= one < 2**48 for one in given)


def damaged(path: str, what: str) -> CorruptArtifactError:
    """The error for a file that cannot be believed."""
    return CorruptArtifactError(
        f"expected a whole file as whence saved it, got a damaged one in {path}: {what}. "
        "Copy or download it again, or fit and save again."
    )
