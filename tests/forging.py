"""Files taken apart and put together again, with a checksum that is right: what a forger can do."""

from __future__ import annotations

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

NAMES = {"F64": "torch.float64", "F32": "torch.float32", "I64": "torch.int64", "I32": "torch.int32"}


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

    def with_checksum(self, checksum: str, manifest: str | None = None) -> bytes:
        """All of it with this checksum; `manifest` in the place of what was parsed."""
        described = f'{{"format":{self.metadata["format"]},"sha256":"{checksum}","manifest":{self.text(manifest)}}}'
        header = json.dumps({"__metadata__": {"whence": described}, **self.table}, separators=(",", ":")).encode()
        return len(header).to_bytes(8, "little") + header + self.data

    def sealed(self, manifest: str | None = None) -> bytes:
        """All of it with the right checksum, or with any other for a table that safetensors refuses."""
        digest = hashlib.sha256(self.text(manifest).encode(errors="surrogatepass"))
        try:
            for name, entry in sorted(self.table.items()):
                start, stop = entry["data_offsets"]
                digest.update(f"{name} {NAMES[entry['dtype']]} {tuple(entry['shape'])}".encode())
                digest.update(self.data[start:stop])
        except (KeyError, TypeError, ValueError):
            pass
        return self.with_checksum(digest.hexdigest(), manifest)

    def write(self, path: Path, manifest: str | None = None) -> Path:
        path.write_bytes(self.sealed(manifest))
        return path

    def text(self, manifest: str | None = None) -> str:
        """The manifest as it stands in the file."""
        return json.dumps(self.manifest, separators=(",", ":")) if manifest is None else manifest

    def says_the_same_as(self, other: Forged) -> bool:
        return (self.text(), self.table, self.data) == (other.text(), other.table, other.data)


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
