"""Files taken apart and put together again, with a checksum that is right: what a forger can do."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

ZEROS = "0" * 64


class Forged:
    """A saved file as its parts: manifest, table of tensors, data. Independent of the code under test."""

    def __init__(self, raw: bytes) -> None:
        length = int.from_bytes(raw[:8], "little")
        self.table: dict[str, Any] = json.loads(raw[8 : 8 + length])
        self.metadata: dict[str, Any] = json.loads(self.table.pop("__metadata__")["whence"])
        self.manifest: Any = self.metadata.pop("manifest")
        self.data = raw[8 + length :]

    def copy(self) -> Forged:
        return copy.deepcopy(self)

    def header(self, manifest: str | None = None) -> bytes:
        """The header with zeros for a checksum; `manifest` in the place of what was parsed."""
        text = manifest if manifest is not None else json.dumps(self.manifest)
        described = f'{{"format":{self.metadata["format"]},"sha256":"{ZEROS}","manifest":{text}}}'
        return json.dumps({"__metadata__": {"whence": described}, **self.table}, separators=(",", ":")).encode()

    def sealed(self, manifest: str | None = None) -> bytes:
        """All of it with the right checksum."""
        return seal(self.header(manifest), self.data)

    def write(self, path: Path, manifest: str | None = None) -> Path:
        path.write_bytes(self.sealed(manifest))
        return path


def seal(header: bytes, data: bytes) -> bytes:
    """A file with the right checksum in the place of the first 64 zeros."""
    raw = len(header).to_bytes(8, "little") + header + data
    return raw.replace(ZEROS.encode(), hashlib.sha256(raw).hexdigest().encode(), 1)


def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something stands in nested tables and lists."""
    found = [path] if path else []
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inside:
        found += spots(one, (*path, key))
    return found


def replace(value: Any, path: tuple[Any, ...], new: Any) -> None:
    """Put a copy of something else at a spot."""
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = copy.deepcopy(new)


def look(value: Any, path: tuple[Any, ...]) -> Any:
    """What stands at a spot."""
    for key in path:
        value = value[key]
    return value
