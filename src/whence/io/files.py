"""Safetensors files with a checksum and a manifest: written atomically, and checked on every read."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from whence.errors import CorruptArtifactError, FormatError, InputError, MissingFileError

FORMAT = 7  # of files that are written and read
MAX_HEADER_BYTES, MAX_HEADER_ITEMS = 16 * 2**20, 2**20  # items of lists and tables: a parsed one takes a hundred bytes
DTYPES = {"F64": torch.float64, "F32": torch.float32, "I64": torch.int64, "I32": torch.int32}  # that can be saved
# Start of every header, so that format and checksum are found without parsing.
START = re.compile(rb'\{"__metadata__":\{"whence":"\{\\"format\\":([0-9]{1,9}),\\"sha256\\":\\"([0-9a-f]{64})\\",')
ZEROS = b"0" * 64  # placeholder for the checksum while it is computed
LARGEST = 2**48  # an upper bound on all sizes


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
    """Save a manifest and tensors."""
    described = {"format": FORMAT, "sha256": ZEROS.decode(), "manifest": manifest}
    text = json.dumps(described, allow_nan=False, separators=(",", ":"))
    apart: dict[str, Tensor] = {}  # safetensors needs contiguous tensors that do not share memory
    storages = set()
    for name, tensor in tensors.items():
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
            if len(header) > MAX_HEADER_BYTES or _items(header) > MAX_HEADER_ITEMS:
                raise InputError(
                    f"expected a fit whose description takes at most {MAX_HEADER_BYTES} bytes and {MAX_HEADER_ITEMS} "
                    f"entries, got {len(header)} and {_items(header)}. Select fewer parameters."
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


def _items(header: bytes) -> int:
    """An upper bound on the number of entries in a header."""
    return sum(header.count(sign) for sign in (b",", b"[", b"{"))


@contextmanager
def opened(path: Path) -> Iterator[Saved]:
    """Open a file; raise unless it is a plain file (no link, folder or pipe), of this format, and undamaged."""
    shown = repr(str(path))
    _check_file(path, shown)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata()
            described = _parse(metadata["whence"], shown)
            manifest = described.get("manifest")
            if set(metadata) != {"whence"} or len(described) != 3 or not isinstance(manifest, dict):
                raise damaged(shown, "its metadata are not those of this format")
            orders, entries = manifest.get("orders", {}), {}
            if not isinstance(orders, dict):
                raise damaged(shown, "it does not say in which order axes are stored")
            for name in file.keys():  # noqa: SIM118  a file is no dict
                entry = file.get_slice(name)
                if entry.get_dtype() not in DTYPES:
                    raise damaged(shown, f"{name[:80]!r} is of dtype {entry.get_dtype()}")
                entries[name] = torch.empty(entry.get_shape(), dtype=DTYPES[entry.get_dtype()], device="meta")
            yield Saved(shown, file, entries, orders, manifest, torch.device("cpu"))
    except SafetensorError as error:
        raise damaged(shown, f"safetensors says: {printable(str(error), 200)}") from None


def _check_file(path: Path, shown: str) -> None:
    """Check format and checksum, without keeping the contents."""
    if path.is_symlink():
        raise InputError(
            f"expected a file, got the symbolic link {shown}. Pass what it points to, if you trust it: "
            "Path(...).resolve()."
        )
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
    if _items(header) > MAX_HEADER_ITEMS:
        raise damaged(shown, "its header has more entries than any fit")


def _parse(text: str, path: str) -> dict[str, Any]:
    """Parse a JSON object, without duplicate names, NaN or infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name occurs twice")
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        found = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its manifest cannot be read ({type(error).__name__})") from None
    if not isinstance(found, dict):
        raise damaged(path, "its manifest is not a table")
    return found


def damaged(path: str, what: str) -> CorruptArtifactError:
    """The error for a file that differs from what whence wrote."""
    return CorruptArtifactError(
        f"expected a whole file as whence saved it, got a damaged one in {path}: {what}. "
        "Copy or download it again, or fit and save again."
    )


@dataclass
class Draft:
    """Fields and tensors to be written."""

    fields: dict[str, Any] = field(default_factory=dict)  # numbers and texts, in parts
    tensors: dict[str, Tensor] = field(default_factory=dict)  # by their full name
    # Order of the axes in memory, for tensors that are not stored axis by axis: matrix products round differently in
    # another order.
    orders: dict[str, list[int]] = field(default_factory=dict)
    name: str = ""  # of this part

    def part(self, name: str) -> Draft:
        """A new part."""
        fields = self.fields[name] = {}
        return Draft(fields, self.tensors, self.orders, f"{self.name}{name}.")

    def put(self, **values: Any) -> None:
        """Write tensors, and fields that JSON can hold; `None` is left out."""
        for name, value in values.items():
            if not isinstance(value, Tensor):
                self.fields.update({} if value is None else {name: plain(value)})
                continue
            full, tensor, strides = self.name + name, value.detach(), value.stride()
            if tensor.dtype not in DTYPES.values():
                raise InputError(
                    f"expected tensors of float64, float32, int64 or int32 to save, got {tensor.dtype} in {full}."
                )
            order = sorted(range(tensor.ndim), key=strides.__getitem__, reverse=True)
            if not tensor.is_contiguous() and tensor.permute(order).is_contiguous():
                self.orders[full] = order
                tensor = tensor.permute(order)
            self.tensors[full] = tensor


def printable(text: str, most: int | None = None) -> str:
    """A text from a file, for a message: without control characters, and shortened.

    Examples:
        >>> printable(chr(27) + "[2J").isprintable(), printable("longer", 4)
        (True, 'long...')
    """
    shown = text if most is None or len(text) <= most else f"{text[:most]}..."
    return "".join(one if one.isprintable() else "\ufffd" for one in shown)


def plain(value: Any) -> Any:
    """Convert to a value that JSON can hold: infinity and NaN become a list with their name."""
    if isinstance(value, float) and not math.isfinite(value):
        return [str(value)]
    return list(value) if isinstance(value, tuple) else value


def number(value: Any) -> float | None:
    """The number that `plain` encoded; `None` for anything else.

    Examples:
        >>> number(plain(0.5)), number(plain(float("inf"))), number("0.5")
        (0.5, inf, None)
    """
    if type(value) is list and value in (["inf"], ["-inf"], ["nan"]):
        return float(value[0])
    return float(value) if type(value) in (int, float) and abs(value) < 2**1000 else None


@dataclass(frozen=True)
class Saved:
    """A part of a saved file; every field and shape is checked when it is read.

    Axes have names. The first tensor with an axis sets its size, and later ones must agree; "any" is not checked.
    """

    path: str  # of the file, for messages
    file: Any  # opened by safetensors
    entries: Mapping[str, Tensor]  # all tensors of the file, on the meta device
    orders: Mapping[str, Any]  # order of axes in memory, by name of the tensor, unless standard
    fields: Mapping[str, Any]  # numbers and texts of this part
    device: torch.device  # device for tensors
    # Allowed dtypes of a tensor, by the names that `tensor` takes.
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = field(default_factory=dict)
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of axes, by name; several if one name is all
    used: set[str] = field(default_factory=set)  # names of all tensors read so far
    name: str = ""  # of this part

    def part(self, name: str) -> Saved:
        """A part inside this one, which inherits its sizes."""
        fields = self._checked(name, "a part", lambda one: isinstance(one, dict))
        return replace(self, fields=fields, sizes=dict(self.sizes), name=f"{self.name}{name}.")

    def read(self, full: str) -> Tensor:
        """A tensor by its full name, as a copy."""
        return self.file.get_tensor(full).clone()  # type: ignore[no-any-return]  # safetensors has no annotations

    def has(self, name: str) -> bool:
        """Whether a tensor, field or part of this name exists."""
        return self.name + name in self.entries or name in self.fields

    def tensor(self, name: str, dtype: str, *axes: str) -> Tensor:
        """A tensor of this dtype and shape; axes are names of sizes, such as "n", "k", "k"."""
        full = self.name + name
        entry = self.entries.get(full)
        wanted = [size for axis in axes for size in self.sizes.get(axis, (None,))]
        shown = ", ".join("any" if size is None else str(size) for size in wanted)
        if entry is None or len(entry.shape) != len(wanted) or entry.dtype not in self.dtypes[dtype]:
            raise self.wrong(name, f"a tensor of {self.dtypes[dtype][0]} and shape ({shown})")
        order = self.orders.get(full, list(range(len(wanted))))
        if not isinstance(order, list) or sorted(map(repr, order)) != [repr(axis) for axis in range(len(wanted))]:
            raise damaged(self.path, f"the axes of {full} are in no order")
        back = [order.index(axis) for axis in range(len(wanted))]
        shape = [entry.shape[axis] for axis in back]
        if any(size not in (None, found) for size, found in zip(wanted, shape, strict=True)):
            raise self.wrong(name, f"a tensor of shape ({shown})")
        if len(axes) == len(shape):  # no name stands for several axes
            for axis, size in zip(axes, shape, strict=True):
                if axis != "any" and self.sizes.setdefault(axis, (size,)) != (size,):
                    raise self.wrong(name, f"a tensor whose axes {axis} are of one size")
        self.used.add(full)
        return self.read(full).to(self.device).permute(back)

    def index(self, name: str, *axes: str, below: int = LARGEST) -> Tensor:
        """A tensor of positions from 0 to `below` - 1."""
        found = self.tensor(name, "index", *axes)
        if bool(((found < 0) | (found >= below)).any()):
            raise self.wrong(name, f"positions below {below}")
        return found

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float:
        """A number within bounds."""
        found = number(self.fields.get(name))
        if found is None or not low <= found <= high:
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return found

    def whole(self, name: str, low: int = 0, high: int = LARGEST) -> int:
        """A whole number within bounds."""
        wanted = f"a whole number from {low} to {high}"
        return int(self._checked(name, wanted, lambda one: type(one) is int and low <= one <= high))

    def wholes(self, name: str, low: int = 0, high: int = LARGEST) -> list[int]:
        """A list of whole numbers within bounds."""
        wanted = f"whole numbers from {low} to {high}"
        return self._list(name, wanted, lambda one: type(one) is int and low <= one <= high)

    def flag(self, name: str) -> bool:
        """A bool."""
        return bool(self._checked(name, "yes or no", lambda one: type(one) is bool))

    def text(self, name: str, *choices: str) -> str:
        """A text, one of the choices if there are any."""
        wanted = " or ".join(map(repr, choices)) or "a text"
        return printable(self._checked(name, wanted, lambda one: type(one) is str and one in (choices or (one,))))

    def texts(self, name: str) -> list[str]:
        """A list of texts."""
        return [printable(one) for one in self._list(name, "texts", lambda one: type(one) is str)]

    def table(self, name: str, columns: int) -> list[list[Any]]:
        """A list of rows with this number of cells, which are not checked."""
        return self._list(name, f"rows of {columns} cells", lambda row: type(row) is list and len(row) == columns)

    def wrong(self, name: str, wanted: str) -> CorruptArtifactError:
        """The error for something missing or wrong."""
        return damaged(self.path, f"{self.name}{name} is missing, or not {wanted}")

    def _checked(self, name: str, wanted: str, sound: Callable[[Any], bool]) -> Any:
        found = self.fields.get(name)
        if not sound(found):
            raise self.wrong(name, wanted)
        return found

    def _list(self, name: str, wanted: str, sound: Callable[[Any], bool]) -> list[Any]:
        found = self._checked(name, f"a list of {wanted}", lambda ones: type(ones) is list and all(map(sound, ones)))
        return list(found)
