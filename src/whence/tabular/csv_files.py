"""CSV files: their compression, encoding, delimiter and names of columns, and then their rows, in pieces."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import lzma
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from whence.errors import InputError

if TYPE_CHECKING:
    import pandas

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
PACKED: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKING = 8
"""Text is about so many times larger than its compressed file."""

SAMPLE = 256 * 1024
"""Bytes that are looked at to find out what a file is."""

PIECE = 20_000
"""Rows that are read at once."""


class CsvFile:
    """A CSV file whose ways have been found out; nothing but its beginning was read.

    Args:
        path: of the file.
        delimiter: between cells, found out when `None`.
    """

    def __init__(self, path: Path, delimiter: str | None) -> None:
        """Look at the beginning of the file."""
        self.path = path
        self.notes: list[str] = []
        self._packed = PACKED.get(path.suffix.lower())
        self.size = path.stat().st_size * (PACKING if self._packed else 1)
        sample = self._beginning()
        self.encoding, text = _decode(sample, path, self.notes)
        lines = [line for line in text.splitlines() if line.strip()]
        if len(sample) == SAMPLE:
            lines = lines[:-1] or lines  # the last may be cut off
        self.delimiter = _delimiter(lines, delimiter, path)
        self.names = self._names(lines[0])
        self.pieces = max(1, round(self.size * max(len(lines), 1) / max(len(sample), 1) / PIECE))

    def read(self) -> Iterator[pandas.DataFrame]:
        """Pieces of the table, all cells text; the index counts the rows from zero."""
        try:
            yield from self._read(self.encoding)
        except UnicodeDecodeError as error:
            raise InputError(
                f"expected {self.path.name} to be text in {self.encoding}, as its beginning is, but byte {error.start} "
                "is not. Convert it, for example: iconv -f WINDOWS-1252 -t UTF-8"
            ) from error
        except (EOFError, OSError, lzma.LZMAError) as error:
            raise InputError(f"expected a whole {self.path.suffix} file, got {self.path.name}: {error}.") from error

    def _read(self, encoding: str) -> Iterator[pandas.DataFrame]:
        import pandas  # an extra: only tables need it

        with self._open() as raw, io.TextIOWrapper(raw, encoding=encoding, newline="") as text:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", pandas.errors.ParserWarning)
                    yield from pandas.read_csv(
                        text,
                        sep=self.delimiter,
                        header=0,
                        names=self.names,
                        index_col=False,
                        dtype=str,
                        na_filter=False,
                        skipinitialspace=True,
                        chunksize=PIECE,
                    )
            except pandas.errors.EmptyDataError:
                return
            except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
                raise InputError(
                    f"expected {len(self.names)} cells in each row of {self.path.name}, as in its first line, but: "
                    f"{str(error).strip()}. Put quotes around cells that hold the delimiter "
                    f"({DELIMITERS.get(self.delimiter, self.delimiter)}), or pass another --delimiter."
                ) from error

    def _open(self) -> IO[bytes]:
        opened: IO[bytes] = self._packed(self.path, "rb") if self._packed else self.path.open("rb")
        return opened

    def _beginning(self) -> bytes:
        try:
            with self._open() as file:
                sample = file.read(SAMPLE)
        except (EOFError, OSError, lzma.LZMAError) as error:
            raise InputError(f"expected a file that can be read, got {self.path}: {error}.") from error
        if not sample.strip():
            raise InputError(f"expected a first line with the names of the columns, got an empty file: {self.path}.")
        if sample[:4] in (b"PK\x03\x04", b"\xd0\xcf\x11\xe0"):
            raise InputError(f"expected CSV or parquet, got a workbook or an archive: {self.path}. Save it as CSV.")
        if sample[:4] == b"PAR1":
            raise InputError(f"expected CSV, got a parquet file: {self.path}. Give it a name that ends in .parquet.")
        return sample

    def _names(self, line: str) -> list[str]:
        given = [name.strip() for name in next(csv.reader([line], delimiter=self.delimiter, skipinitialspace=True))]
        if all(_is_number(name) for name in given):
            raise InputError(
                f"expected a first line with the names of the columns in {self.path.name}, got numbers: "
                f"{', '.join(given[:6])}. Add a line of names at the top."
            )
        names: list[str] = []
        for place, name in enumerate(given, 1):
            name = name or f"column {place}"
            again = 2
            unique = name
            while unique in names:
                unique, again = f"{name} ({again})", again + 1
            names.append(unique)
        twice = [name for name, count in Counter(given).items() if count > 1 and name]
        if twice:
            self.notes.append(f"names that occur more than once got numbers: {', '.join(map(repr, twice[:5]))}")
        return names


def _decode(sample: bytes, path: Path, notes: list[str]) -> tuple[str, str]:
    """The encoding, and the sample as text."""
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16", sample.decode("utf-16", errors="ignore")
    if b"\0" in sample:
        raise InputError(f"expected text, got a binary file: {path}. CSV and parquet can be read.")
    try:
        return "utf-8-sig", sample[: _whole(sample)].decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    try:
        text = sample.decode("cp1252")
    except UnicodeDecodeError:
        notes.append("the text is not UTF-8; it was read as Latin-1")
        return "latin-1", sample.decode("latin-1")
    notes.append("the text is not UTF-8; it was read as Windows-1252")
    return "cp1252", text


def _whole(sample: bytes) -> int:
    """Where the last line of a sample begins, so that no character is cut in two."""
    return sample.rfind(b"\n") + 1 if len(sample) == SAMPLE and b"\n" in sample else len(sample)


def _delimiter(lines: list[str], given: str | None, path: Path) -> str:
    counts = {mark: _cells(lines[:50], mark) for mark in DELIMITERS}
    best = max(counts, key=lambda mark: counts[mark])
    if given is None:
        return best if counts[best] > 1 else ","
    mark = given.replace("\\t", "\t")
    if len(mark) != 1:
        raise InputError(f"expected a delimiter of one character, got {given!r}.")
    if mark not in lines[0] and counts[best] > 1:
        raise InputError(
            f"expected {given!r} between the names of the columns in {path.name}, got none in its first line. "
            f"It looks separated by {best!r}: leave out --delimiter."
        )
    return mark


def _cells(lines: list[str], mark: str) -> int:
    """How many cells a delimiter gives in the first line, if the others mostly agree; else one."""
    counts = [len(row) for row in csv.reader(lines, delimiter=mark)]
    agree = sum(count == counts[0] for count in counts)
    return counts[0] if agree >= 0.8 * len(counts) else 1


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
