"""Read a table from a CSV or parquet file as text, chunk by chunk, within the available memory."""

from __future__ import annotations

import bz2
import csv
import gzip
import lzma
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from whence.errors import InputError, TooLargeError
from whence.runtime.execution import Progress
from whence.runtime.files import replacing
from whence.runtime.memory import RESERVE, free_memory, readable
from whence.tabular.columns import parse_numbers

if TYPE_CHECKING:
    import pandas

DELIMITERS = {",": "comma", ";": "semicolon", "\t": "tab", "|": "bar"}
ENDINGS = {".csv", ".tsv", ".txt", ".dat", ".parquet"}  # of files to suggest if a name is misspelled
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSION = 8  # text is about this many times larger than its compressed file
EXPANSION = 12  # bytes in memory for each byte of text: cells become Python strings
SAMPLE = 256 * 1024  # bytes from which the encoding and the delimiter are guessed
CHUNK = 20_000  # rows read at once


@dataclass(frozen=True)
class TextTable:
    """Cells as text."""

    columns: dict[str, Any]  # name of each column and its cells, numpy arrays of `str`
    rows: Any  # number of each row in the file; the first row of data is 1
    total: int  # number of rows in the file
    notes: tuple[str, ...] = ()  # what was guessed or repaired

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, which: Any) -> TextTable:
        """Some rows."""
        return TextTable({name: cells[which] for name, cells in self.columns.items()}, self.rows[which], self.total)


class _Source(NamedTuple):
    """An open file: chunks of text cells whose index counts the rows from zero, its size in bytes, and notes."""

    chunks: Iterator[pandas.DataFrame]
    number: int  # of chunks, about
    size: float
    notes: list[str]


def write_csv(path: Path, columns: pandas.DataFrame | dict[str, Any]) -> None:
    """Write a data frame, or columns by name, atomically."""
    import pandas  # an extra: only tables need it

    with replacing(path) as file:
        pandas.DataFrame(columns).to_csv(file, index=False, float_format="%.6g")


def read_table(
    path: Path, rows: int, *, delimiter: str | None = None, seed: int = 0, progress: Progress | None = None
) -> TextTable:
    """Read a CSV file (.gz, .bz2 and .xz are decompressed) or a parquet file.

    `rows` rows are drawn at random with the seed, or all of them if it is zero. The delimiter of a CSV file is guessed
    if not given.
    """
    if path.is_dir():
        raise InputError(f"expected a CSV or parquet file, got the folder {path}.")
    if not path.is_file():
        there = path.parent.iterdir() if path.parent.is_dir() else ()
        tables = [one for one in there if one.is_file() and ENDINGS.intersection(map(str.lower, one.suffixes))]
        stems = {_stem(other): other.name for other in tables}
        near = get_close_matches(_stem(path), stems, n=1, cutoff=0.8)
        meant = f" Did you mean {stems[near[0]]!r}?" if near else ""
        raise InputError(f"expected a CSV or parquet file, got {path}, which does not exist.{meant}")
    source = _open_parquet(path) if ".parquet" in path.suffixes else _open_csv(path, delimiter)
    free = RESERVE * free_memory(torch.device("cpu"))
    if not rows and source.size * EXPANSION > free:
        raise TooLargeError(
            f"expected all rows of {path.name} to fit in {readable(free)}, but {readable(source.size)} of text take "
            f"about {readable(source.size * EXPANSION)}. Take a random sample, which is read in pieces: --rows 50000"
        )
    kept, total = _draw_rows(source, rows, seed, free, progress or Progress(enabled=False))
    if not total:
        raise InputError(f"expected rows below the names of the columns, got none in {path}.")
    notes = source.notes
    if len(kept) < total:
        notes.append(f"{len(kept):,} of {total:,} rows were drawn at random (--rows 0 takes all)")
    columns = {name: numpy.array([str(cell) for cell in kept[name]], dtype=object) for name in kept.columns}
    return TextTable(columns, kept.index.to_numpy() + 1, total, tuple(notes))


def _stem(path: Path) -> str:
    return path.name.split(".")[0].lower()


def _draw_rows(source: _Source, rows: int, seed: int, free: float, progress: Progress) -> tuple[pandas.DataFrame, int]:
    """Draw rows without replacement, in one pass: each gets a random key, and the rows with the smallest keys stay."""
    import pandas  # an extra: only tables need it

    def smallest(frames: list[pandas.DataFrame], keys: Any) -> tuple[list[pandas.DataFrame], Any]:
        stay = numpy.sort(numpy.argpartition(keys, rows - 1)[:rows])
        return [pandas.concat(frames).iloc[stay]], keys[stay]

    generator = numpy.random.default_rng(seed)
    kept: list[pandas.DataFrame] = []
    keys, total = numpy.zeros(0), 0
    for chunk in progress.track(source.chunks, "reading, piece", source.number):
        if total == 0 and len(chunk) and rows:
            width = chunk.memory_usage(deep=True).sum() / len(chunk)
            if 3 * rows * width > free:
                raise TooLargeError(
                    f"expected {rows:,} rows to fit in {readable(free)}, but at {readable(width)} a row they take "
                    f"about {readable(3 * rows * width)}. Take fewer: --rows {max(100, int(free / 4 / width)):d}"
                )
        kept.append(chunk)
        keys = numpy.concatenate([keys, generator.random(len(chunk))])
        total += len(chunk)
        if rows and len(keys) > 2 * rows:
            kept, keys = smallest(kept, keys)
    if rows and len(keys) > rows:
        kept, keys = smallest(kept, keys)
    return pandas.concat(kept) if kept else pandas.DataFrame(), total


def _open_csv(path: Path, delimiter: str | None) -> _Source:
    """Open a CSV file. Its encoding, delimiter and column names are detected from its beginning."""
    opener = OPENERS.get(path.suffix.lower(), open)
    size = path.stat().st_size * (COMPRESSION if opener is not open else 1)
    notes: list[str] = []
    try:
        with opener(path, "rb") as file:
            sample: bytes = file.read(SAMPLE)
    except (EOFError, OSError, lzma.LZMAError) as error:
        raise InputError(f"expected a file that can be read, got {path}: {error}.") from error
    if not sample.strip():
        raise InputError(f"expected a first line with the names of the columns, got an empty file: {path}.")
    encoding, text = _decode(sample, path, notes)
    lines = [line for line in text.splitlines() if line.strip()]
    if len(sample) == SAMPLE:
        lines = lines[:-1] or lines  # the last may be cut off
    separator = _find_delimiter(lines, delimiter, path)
    names = _column_names(lines[0], separator, path, notes)
    chunks = max(1, round(size * len(lines) / len(sample) / CHUNK))
    return _Source(_csv_chunks(path, encoding, separator, names), chunks, size, notes)


def _csv_chunks(path: Path, encoding: str, separator: str, names: list[str]) -> Iterator[pandas.DataFrame]:
    import pandas  # an extra: only tables need it

    options: dict[str, Any] = {"header": 0, "names": names, "index_col": False, "skipinitialspace": True}
    options |= {"dtype": str, "na_filter": False, "chunksize": CHUNK}
    options["engine"] = "c" if separator.isascii() else "python"  # the C engine takes one byte; pandas would warn
    try:
        with pandas.read_csv(path, encoding=encoding, sep=separator, **options) as reader:
            while True:
                with warnings.catch_warnings():  # not across a yield: filters belong to the whole process
                    warnings.simplefilter("error", pandas.errors.ParserWarning)
                    chunk = next(reader, None)
                if chunk is None:
                    return
                yield chunk.fillna("")  # missing cells of short rows, with the Python engine
    except pandas.errors.EmptyDataError:
        return
    except (pandas.errors.ParserError, pandas.errors.ParserWarning) as error:
        raise InputError(
            f"expected {len(names)} cells in each row of {path.name}, as in its first line, but: "
            f"{str(error).strip()}. Put quotes around cells that hold the delimiter "
            f"({DELIMITERS.get(separator, separator)}), or pass another --delimiter."
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"expected {path.name} to be text in {encoding}, as its beginning is, but byte {error.start} "
            "is not. Convert it, for example: iconv -f WINDOWS-1252 -t UTF-8"
        ) from error
    except (EOFError, OSError, lzma.LZMAError) as error:
        raise InputError(f"expected a whole {path.suffix} file, got {path.name}: {error}.") from error


WORKBOOK = "CSV or parquet, got a workbook or an archive: {}. Save it as CSV."
REFUSED = {  # types of files, by their first bytes
    b"PK\x03\x04": WORKBOOK,
    b"\xd0\xcf\x11\xe0": WORKBOOK,
    b"PAR1": "CSV, got a parquet file: {}. Give it a name that ends in .parquet.",
}
ENCODINGS = {"utf-8-sig": "UTF-8", "cp1252": "Windows-1252", "latin-1": "Latin-1"}  # the last reads anything


def _decode(sample: bytes, path: Path, notes: list[str]) -> tuple[str, str]:
    """The encoding, and the sample as text."""
    if sample[:4] in REFUSED:
        raise InputError(f"expected {REFUSED[sample[:4]].format(path)}")
    if sample[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "utf-16", sample.decode("utf-16", errors="ignore")
    if b"\0" in sample:
        raise InputError(f"expected text, got a binary file: {path}. CSV and parquet can be read.")
    whole = sample.rfind(b"\n") + 1 if len(sample) == SAMPLE else 0  # so that no character is cut in two
    encoding = text = ""
    for encoding in ENCODINGS:
        with suppress(UnicodeDecodeError):
            text = sample[: whole or None].decode(encoding)
            break
    if encoding != "utf-8-sig":
        notes.append(f"the text is not UTF-8; it was read as {ENCODINGS[encoding]}")
    return encoding, text


def _find_delimiter(lines: list[str], given: str | None, path: Path) -> str:
    def cells(mark: str) -> int:
        """Number of cells in the first line with a delimiter, if the other lines mostly agree; else one."""
        counts = [len(row) for row in csv.reader(lines[:50], delimiter=mark)]
        return counts[0] if counts.count(counts[0]) >= 0.8 * len(counts) else 1

    best = max(DELIMITERS, key=cells)
    if given is None:
        return best if cells(best) > 1 else ","
    mark = given.replace("\\t", "\t")
    if len(mark) != 1:
        raise InputError(f"expected a delimiter of one character, got {given!r}.")
    if mark not in lines[0] and cells(best) > 1:
        raise InputError(
            f"expected {given!r} between the names of the columns in {path.name}, got none in its first line. "
            f"It looks separated by {best!r}: leave out --delimiter."
        )
    return mark


def _column_names(line: str, separator: str, path: Path, notes: list[str]) -> list[str]:
    """Names from the first line; empty and repeated ones are made unique."""
    given = [name.strip() for name in next(csv.reader([line], delimiter=separator, skipinitialspace=True))]
    if numpy.isfinite(parse_numbers(given, "plain")).all():
        raise InputError(
            f"expected a first line with the names of the columns in {path.name}, got numbers: "
            f"{', '.join(given[:6])}. Add a line of names at the top."
        )
    names: list[str] = []
    for position, name in enumerate(given, 1):
        name = name or f"column {position}"
        choices = chain([name], (f"{name} ({again})" for again in count(2)))
        names.append(next(choice for choice in choices if choice not in names))
    twice = [name for name, often in Counter(given).items() if often > 1 and name]
    if twice:
        notes.append(f"names that occur more than once got numbers: {', '.join(map(repr, twice[:5]))}")
    return names


def _open_parquet(path: Path) -> _Source:
    """A parquet file, whose cells become text like those of CSV files."""
    try:
        from pyarrow import ArrowException, parquet  # an extra: only parquet files need it
    except ModuleNotFoundError as error:
        words = "expected pyarrow for a parquet file. Install it: pip install 'whence[table]', or save it as CSV."
        raise ModuleNotFoundError(words, name="pyarrow") from error
    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise InputError(f"expected a parquet file, got {path}: {error}.") from error

    def chunks() -> Iterator[pandas.DataFrame]:
        import pandas  # an extra: only tables need it

        read = 0
        for batch in file.iter_batches(batch_size=CHUNK):
            cells = {str(name): [_as_text(cell) for cell in column] for name, column in batch.to_pydict().items()}
            yield pandas.DataFrame(cells, index=range(read, read + batch.num_rows), dtype=object)
            read += batch.num_rows

    size = sum(file.metadata.row_group(at).total_byte_size for at in range(file.metadata.num_row_groups))
    return _Source(chunks(), max(1, file.metadata.num_rows // CHUNK), float(size), [])


def _as_text(cell: Any) -> str:
    """A cell as a CSV file would have it.

    Examples:
        >>> _as_text(None), _as_text(True), _as_text(1.5), _as_text(3)
        ('', 'true', '1.5', '3')
    """
    return "" if cell is None else str(cell).lower() if isinstance(cell, bool) else str(cell)
