"""Read a table from a CSV or parquet file as text, chunk by chunk, within the available memory."""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import lzma
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pandas
import torch

from whence.display import count
from whence.errors import InputError, TooLargeError, WhenceError
from whence.runtime.execution import Progress
from whence.runtime.files import replacing
from whence.runtime.memory import RESERVE, free_memory, readable

# Spellings of "no value", lower case; docs/cli.md lists them.
MISSING = frozenset({"", "na", "n/a", "#n/a", "<na>", "nan", "nat", "null", "none", "nil", "?", "-", "--", "."})
DELIMITERS = ",;\t|"
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
COMPRESSION = 8  # text is about this many times larger than its compressed file
COPIES = 3  # of the rows in memory, while they are read and converted
SAMPLE = 256 * 1024  # bytes from which the encoding and the delimiter are guessed
CHUNK = 20_000  # rows read at once


@dataclass(frozen=True)
class TextTable:
    """Rows of a file."""

    frame: pandas.DataFrame  # cells as `as_text` gives them; the index numbers the rows of the file from 1
    total: int  # number of rows in the file
    notes: tuple[str, ...]  # what was guessed, and whether rows were drawn
    path: Path
    encoding: str
    delimiter: str | None  # of a CSV file; `None` for parquet
    missing: Mapping[str, Mapping[str, int]]  # texts of each column that were read as no value, and how often

    def missing_labels(self, name: str) -> list[str]:
        """Notes on texts in the column to predict that were read as no label, for they may be classes."""
        return [
            f"{text!r} in {count(rows, 'row')} of {name!r} was read as no label; if it is a class, give it another name"
            for text, rows in self.missing.get(name, {}).items()
        ]


class OpenFile(NamedTuple):
    """A file that is read in chunks."""

    chunks: Iterator[pandas.DataFrame]
    about: float  # how many rows there are, about
    encoding: str = "utf-8"
    delimiter: str | None = None


def as_text(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Cells as text, without spaces around it; NaN for those that hold no value.

    Examples:
        >>> import pandas
        >>> as_text(pandas.DataFrame({"a": [" x", "N/A", 3]}))["a"].fillna("missing").tolist()
        ['x', 'missing', '3']
    """
    text = frame.astype(str).apply(lambda cells: cells.str.strip())
    return text.mask(text.apply(lambda cells: cells.str.lower().isin(MISSING)))


def _missing_texts(frame: pandas.DataFrame, text: pandas.DataFrame) -> dict[str, dict[str, int]]:
    """How often each text of a column is no value in `as_text`; empty cells are none."""
    found = {}
    for name in frame:
        cells = frame.loc[text[name].isna() & frame[name].notna(), name].astype(str).str.strip()
        found[str(name)] = {str(cell): int(rows) for cell, rows in cells[cells != ""].value_counts().items()}
    return found


def write_csv(path: Path, frame: pandas.DataFrame) -> None:
    """Write a data frame atomically."""
    with replacing(path) as file:
        frame.to_csv(file, index=False, float_format="%.6g")


def write_corrected(path: Path, table: TextTable, cells: pandas.Series) -> None:
    """Write the file again with other cells in one column, by the number of the row; all else stays byte by byte.

    A parquet file is written as CSV.
    """
    name, delimiter = str(cells.name), table.delimiter
    if delimiter is None:
        write_csv(path, table.frame.assign(**{name: cells.combine_first(table.frame[name])}))
        return
    with OPENERS.get(table.path.suffix.lower(), open)(table.path, "rb") as file:
        text = file.read().decode(table.encoding)  # a byte order mark stays in the text
    place, pieces, end, replaced = table.frame.columns.get_loc(name), [], 0, dict[int, str]()
    for row, record in enumerate(_records(text, delimiter)):
        if row in cells.index:  # row 0 has the names of the columns
            lacking = delimiter * (place + 1 - len(record))  # of a line that ends before the column
            start, stop = (record[-1][1],) * 2 if lacking else record[place]
            cell, before = cells[row], text[start:stop].strip()
            quoted = before.startswith('"')
            replaced[row] = before[1:-1].replace('""', '"') if quoted else before
            if quoted or delimiter in cell or '"' in cell:
                cell = '"' + cell.replace('"', '""') + '"'
            pieces += [text[end:start], lacking, cell]
            end = stop
    if not as_text(cells.to_frame().assign(**{name: cells.index.map(replaced)})).equals(
        table.frame.loc[cells.index, [name]]
    ):
        raise InputError(f"expected quotes around cells of {name!r} only at their ends, got others in {table.path}.")
    with replacing(path) as part, OPENERS.get(path.suffix.lower(), open)(part, "wb") as file:
        file.write("".join([*pieces, text[end:]]).encode(table.encoding))


def _records(text: str, delimiter: str) -> Iterator[list[tuple[int, int]]]:
    r"""Where the cells of each line begin and end, with quotes as pandas reads them; empty lines are skipped.

    Examples:
        >>> list(_records('a;b\n"1;2"; 3\n', ";"))
        [[(0, 1), (2, 3)], [(4, 9), (10, 12)]]
    """
    mark = re.escape(delimiter)
    cell = re.compile(rf' *(?:"(?:[^"]|"")*")?[^{mark}\r\n]*({mark}|\r\n|\r|\n|\Z)')
    record = []
    for found in cell.finditer(text, text.startswith("\ufeff")):
        record.append((found.start(), found.start(1)))
        if found[1] != delimiter:
            if len(record) > 1 or text[slice(*record[0])].strip():
                yield record
            record = []


def read_table(
    path: Path, rows: int, *, delimiter: str | None = None, seed: int = 0, progress: Progress | None = None
) -> TextTable:
    """Read a CSV file (.gz, .bz2 and .xz are decompressed) or a parquet file.

    `rows` rows are drawn at random with the seed, or all of them if it is zero. The delimiter of a CSV file is guessed
    if not given.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        raise InputError(f"expected a CSV or parquet file, got {path}, which {what}.")
    notes: list[str] = []
    try:
        file = _open_parquet(path) if ".parquet" in path.suffixes else _open_csv(path, delimiter)
        amount = max(1, round(file.about / CHUNK))
        pieces = (progress or Progress(enabled=False)).track(file.chunks, "reading, piece", amount)
        frame, total = _draw_rows(pieces, rows, file.about, numpy.random.default_rng(seed))
    except WhenceError:
        raise
    except (ValueError, OSError, EOFError, lzma.LZMAError, pandas.errors.ParserWarning) as error:
        raise _unreadable(path, error) from error
    if not total:
        raise InputError(f"expected rows below the names of the columns, got none in {path}.")
    if pandas.to_numeric(pandas.Series(frame.columns), errors="coerce").notna().all():
        raise InputError(
            f"expected a first line with the names of the columns in {path.name}, got numbers: "
            f"{', '.join(frame.columns[:6])}. Add a line of names at the top."
        )
    if file.encoding == "cp1252":
        notes.append("the text is not UTF-8; it was read as Windows-1252")
    if len(frame) < total:
        notes.append(f"{len(frame):,} of {total:,} rows were drawn at random (--rows 0 takes all)")
    text = as_text(frame)
    return TextTable(text, total, tuple(notes), path, file.encoding, file.delimiter, _missing_texts(frame, text))


def _unreadable(path: Path, error: Exception) -> InputError:
    """The error for a file that cannot be read, with what to do about it."""
    if isinstance(error, pandas.errors.EmptyDataError):
        return InputError(f"expected a CSV or parquet file, got {path}, which is empty.")
    advice = ""
    if isinstance(error, pandas.errors.ParserError | pandas.errors.ParserWarning):
        advice = " Put quotes around cells that contain the delimiter, or pass another --delimiter."
    elif isinstance(error, UnicodeDecodeError):
        advice = " Convert it to UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8."
    reason = str(error).strip().rstrip(".")
    return InputError(f"expected a CSV or parquet file, got {path}, which cannot be read: {reason}.{advice}")


def _draw_rows(
    chunks: Iterator[pandas.DataFrame], rows: int, about: float, generator: numpy.random.Generator
) -> tuple[pandas.DataFrame, int]:
    """Draw rows without replacement, in one pass: each gets a random key, and the rows with the smallest keys stay."""
    kept: list[pandas.DataFrame] = []
    keys, total, free = numpy.zeros(0), 0, RESERVE * free_memory(torch.device("cpu"))
    for chunk in chunks:
        if not total and len(chunk):
            each = COPIES * float(chunk.memory_usage(deep=True).sum()) / len(chunk)
            wanted = rows or about
            if wanted * each > free:
                raise TooLargeError(
                    f"expected {wanted:,.0f} rows to fit in {readable(free)}, but they take about "
                    f"{readable(wanted * each)}. Take fewer: --rows {max(100, int(free / each / 2))}"
                )
        kept.append(chunk.set_index(numpy.arange(total, total + len(chunk)) + 1))
        keys = numpy.concatenate([keys, generator.random(len(chunk))])
        total += len(chunk)
        if rows and len(keys) > 2 * rows:
            stay = numpy.sort(numpy.argpartition(keys, rows - 1)[:rows])
            kept, keys = [pandas.concat(kept).iloc[stay]], keys[stay]
    frame = pandas.concat(kept) if kept else pandas.DataFrame()
    return frame.iloc[numpy.sort(numpy.argsort(keys)[: rows or None])], total


def _open_csv(path: Path, delimiter: str | None) -> OpenFile:
    """A CSV file, whose encoding and delimiter are guessed."""
    opener = OPENERS.get(path.suffix.lower(), open)
    with opener(path, "rb") as file:
        sample: bytes = file.read(SAMPLE)
    encoding, text = _decode(sample, path)
    lines = [line for line in text.splitlines() if line.strip()]
    mark = _guess_delimiter(lines[:50]) if delimiter is None else delimiter.replace("\\t", "\t")
    if len(mark) != 1 or not mark.isascii():
        raise InputError(f"expected a delimiter of one ASCII character, got {delimiter!r}.")
    size = path.stat().st_size * (1 if opener is open else COMPRESSION)
    options: dict[str, Any] = {"dtype": str, "na_filter": False, "skipinitialspace": True, "index_col": False}

    def chunks() -> Iterator[pandas.DataFrame]:
        with pandas.read_csv(path, sep=mark, encoding=encoding, chunksize=CHUNK, **options) as reader:
            while True:
                with warnings.catch_warnings():  # not across a yield: filters belong to the whole process
                    warnings.simplefilter("error", pandas.errors.ParserWarning)
                    chunk = next(reader, None)
                if chunk is None:
                    return
                yield chunk

    return OpenFile(chunks(), size * len(lines) / max(1, len(sample)), encoding, mark)


def _decode(sample: bytes, path: Path) -> tuple[str, str]:
    """The encoding, and the sample as text."""
    for encoding, mark in {"utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}.items():
        if sample.startswith(mark):
            return encoding, sample.decode(encoding, errors="ignore").removeprefix("\ufeff")
    if b"\0" in sample:
        raise InputError(
            f"expected CSV, or parquet with a name that ends in .parquet, got another kind of file: {path}. Save a "
            "workbook as CSV."
        )
    try:
        # the end may be cut off
        return "utf-8", codecs.getincrementaldecoder("utf-8")().decode(sample).removeprefix("\ufeff")
    except UnicodeDecodeError:
        return "cp1252", sample.decode("cp1252", errors="replace")


def _guess_delimiter(lines: list[str]) -> str:
    """The delimiter with the most cells in the first line, if most of the lines have as many."""

    def cells(mark: str) -> int:
        counts = [len(row) for row in csv.reader(lines, delimiter=mark)]
        return counts[0] if counts and counts.count(counts[0]) >= 0.8 * len(counts) else 1

    return max(DELIMITERS, key=cells)


def _open_parquet(path: Path) -> OpenFile:
    """A parquet file."""
    try:
        from pyarrow import parquet  # an extra: only parquet files need it
    except ModuleNotFoundError as error:
        words = "expected pyarrow for a parquet file. Install it: pip install 'whence[table]', or save it as CSV."
        raise ModuleNotFoundError(words, name="pyarrow") from error
    file = parquet.ParquetFile(path)

    def chunks() -> Iterator[pandas.DataFrame]:
        for batch in file.iter_batches(batch_size=CHUNK):
            frame = batch.to_pandas(integer_object_nulls=True)
            named = [name for name in frame.index.names if name is not None and name not in frame.columns]
            yield frame.reset_index(named)  # an index with a name is a column like others

    return OpenFile(chunks(), float(file.metadata.num_rows))
