"""Write a file so that whatever happens, the old one or the new one is there, whole."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from whence.errors import CorruptArtifactError, FormatError, InputError

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


LARGEST = 2**48
"""Above any size that occurs."""


@dataclass
class Draft:
    """Facts and tensors to be written.

    Attributes:
        facts: numbers and words, in parts.
        tensors: by their full name.
        orders: of the tensors that are not stored axis by axis, how their axes follow each other in memory. Products
            of matrices round differently for another order, so that it is kept.
        name: of this part.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)
    orders: dict[str, list[int]] = field(default_factory=dict)
    name: str = ""

    def part(self, name: str) -> Draft:
        """A part of its own."""
        facts: dict[str, Any] = {}
        self.facts[name] = facts
        return Draft(facts, self.tensors, self.orders, f"{self.name}{name}.")

    def note(self, **facts: Any) -> None:
        """Write facts down; numbers that JSON does not know become words."""
        self.facts.update({name: plain(fact) for name, fact in facts.items()})

    def put(self, name: str, tensor: Tensor | None) -> None:
        """Write a tensor down, if there is one."""
        if tensor is None:
            return
        if tensor.dtype not in DTYPES.values():
            raise InputError(f"expected tensors of float64, float32 or int64 to save, got {tensor.dtype} in {name}.")
        strides = tensor.stride()
        order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
        turned = tensor.detach().permute(order)
        if not tensor.is_contiguous() and turned.is_contiguous():
            self.orders[self.name + name] = order
            tensor = turned
        self.tensors[self.name + name] = tensor


def printable(text: str, most: int | None = None) -> str:
    """Words of a file as they may be shown: without the signs that a terminal obeys, and not too long.

    Examples:
        >>> printable(chr(27) + "[2J").isprintable(), printable("longer", 4)
        (True, 'long...')
    """
    shown = text if most is None or len(text) <= most else f"{text[:most]}..."
    return shown if shown.isprintable() else "".join(one if one.isprintable() else "\ufffd" for one in shown)


def plain(fact: Any) -> Any:
    """A fact as JSON has it: it knows no infinity."""
    if isinstance(fact, float) and not math.isfinite(fact):
        return [str(fact)]
    return list(fact) if isinstance(fact, tuple) else fact


def number(fact: Any) -> float | None:
    """A number as `plain` left it; `None` for anything else.

    Examples:
        >>> number(plain(0.5)), number(plain(float("inf"))), number("0.5")
        (0.5, inf, None)
    """
    if type(fact) is list and fact in (["inf"], ["-inf"], ["nan"]):
        return float(fact[0])
    return float(fact) if type(fact) in (int, float) and abs(fact) < 2**1000 else None


@dataclass(frozen=True)
class Target:
    """Where and how tensors are wanted.

    Attributes:
        device: of the model.
        algebra: dtype of the algebra, as wanted.
        working: dtype in which gradients are handled, as wanted.
        stored: the same two, as saved.
        empty: whether tensors are stand-ins without memory.
    """

    device: torch.device
    algebra: torch.dtype
    working: torch.dtype
    stored: tuple[torch.dtype, torch.dtype]
    empty: bool


@dataclass(frozen=True)
class Saved:
    """A part of what was saved, read with suspicion."""

    container: Container
    facts: Mapping[str, Any]
    orders: Mapping[str, Any]
    target: Target
    used: set[str]
    name: str = ""

    def part(self, name: str) -> Saved:
        """A part of its own."""
        facts = self._fact(name)
        if not isinstance(facts, dict):
            raise self.wrong(name, "a part")
        return Saved(self.container, facts, self.orders, self.target, self.used, f"{self.name}{name}.")

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return self.name + name in self.container.entries

    def sizes(self, name: str, axes: int) -> tuple[int, ...]:
        """The shape of a tensor with so many axes."""
        entry = self.container.entries.get(self.name + name)
        if entry is None or len(entry.shape) != axes:
            raise self.wrong(name, f"a tensor of {axes} axes")
        order = self._order(self.name + name, axes)
        return tuple(entry.shape[order.index(axis)] for axis in range(axes))

    def algebra(self, name: str, *shape: int) -> Tensor:
        """A tensor in the dtype of the algebra."""
        return self.tensor(name, shape, self.target.stored[0], self.target.algebra)

    def working(self, name: str, *shape: int) -> Tensor:
        """A tensor in the dtype in which gradients are handled."""
        return self.tensor(name, shape, self.target.stored[1], self.target.working)

    def double(self, name: str, *shape: int) -> Tensor:
        """A tensor that is of float64 always."""
        return self.tensor(name, shape, torch.float64, torch.float64)

    def tensor(self, name: str, shape: Sequence[int], stored: torch.dtype, wanted: torch.dtype) -> Tensor:
        """A tensor of exactly this shape and dtype, as it is wanted."""
        if self.sizes(name, len(shape)) != tuple(shape):
            raise self.wrong(name, f"a tensor of shape {tuple(shape)}")
        full = self.name + name
        entry = self.container.entries[full]
        if entry.dtype != stored:
            raise self.wrong(name, f"a tensor of {stored}")
        self.used.add(full)
        if self.target.empty:
            return torch.empty(tuple(shape), dtype=wanted, device="meta")
        order = self._order(full, len(shape))
        back = [order.index(axis) for axis in range(len(shape))]
        return self.container.read(entry).to(self.target.device, wanted).permute(back)

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A number within bounds."""
        found = number(self._fact(name))
        if found is None or not low <= found <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return found

    def whole(self, name: str, low: int = 0, high: int = LARGEST) -> int:
        """A whole number within bounds."""
        found = self._fact(name)
        if type(found) is not int or not low <= found <= high:
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return found

    def flag(self, name: str) -> bool:
        """Yes or no."""
        found = self._fact(name)
        if type(found) is not bool:
            raise self.wrong(name, "yes or no")
        return found

    def text(self, name: str, *choices: str) -> str:
        """Words, perhaps one of some."""
        found = self._fact(name)
        if not isinstance(found, str) or (choices and found not in choices):
            raise self.wrong(name, " or ".join(map(repr, choices)) or "words")
        return printable(found)

    def texts(self, name: str) -> list[str]:
        """A list of words."""
        found = self._fact(name)
        if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
            raise self.wrong(name, "a list of words")
        return [printable(one) for one in found]

    def wholes(self, name: str, low: int = 0, high: int = LARGEST) -> list[int]:
        """A list of whole numbers within bounds."""
        found = self._fact(name)
        if not isinstance(found, list) or not all(type(one) is int and low <= one <= high for one in found):
            raise self.wrong(name, f"a list of whole numbers from {low} to {high}")
        return list(found)

    def wrong(self, name: str, wanted: str) -> CorruptArtifactError:
        """The error for something that is missing or not what it must be."""
        return damaged(self.container.path, f"{self.name}{name} is missing, or not {wanted}")

    def _fact(self, name: str) -> Any:
        if name not in self.facts:
            raise self.wrong(name, "there")
        return self.facts[name]

    def _order(self, full: str, axes: int) -> list[int]:
        order = self.orders.get(full, list(range(axes)))
        if not isinstance(order, list) or sorted(map(repr, order)) != [repr(axis) for axis in range(axes)]:
            raise damaged(self.container.path, f"the axes of {full} are in no order")
        return order
