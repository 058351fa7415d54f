"""Read a table from a file, as text, in pieces, without taking more memory than there is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch

from whence.errors import InputError, TooLargeError
from whence.runtime.memory import RESERVE, free_memory, readable
from whence.runtime.progress import Progress
from whence.tabular.csv_files import CsvFile
from whence.tabular.parquet_files import ParquetFile

if TYPE_CHECKING:
    import pandas

EXPANSION = 12
"""Bytes in memory for each byte of text: cells become Python strings."""


@dataclass(frozen=True)
class Table:
    """Cells as text.

    Attributes:
        columns: name of each column and its cells, numpy arrays of `str`.
        rows: number of each row in the file; the first row of data is 1.
        total: how many rows the file has.
        notes: what was guessed or repaired.
    """

    columns: dict[str, Any]
    rows: Any
    total: int
    notes: tuple[str, ...]

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.rows)

    def take(self, which: Any) -> Table:
        """Some rows."""
        return Table({name: cells[which] for name, cells in self.columns.items()}, self.rows[which], self.total, ())


def read_table(
    path: Path, rows: int, *, delimiter: str | None = None, seed: int = 0, progress: Progress | None = None
) -> Table:
    """Read a CSV or parquet file.

    Args:
        path: of the file; .gz, .bz2 and .xz are unpacked on the way.
        rows: how many rows to keep, drawn at random; all of them when zero.
        delimiter: between the cells of a CSV file; found out when not given.
        seed: of the draw.
        progress: shows how far along a long reading is.
    """
    if path.is_dir():
        raise InputError(f"expected a CSV or parquet file, got the folder {path}.")
    if not path.is_file():
        raise InputError(f"expected a CSV or parquet file, got {path}, which does not exist.{_similar(path)}")
    file: CsvFile | ParquetFile = ParquetFile(path) if ".parquet" in path.suffixes else CsvFile(path, delimiter)
    if not rows:
        _check_memory(file.size, path)
    kept, total = _sample(file, rows, seed, progress or Progress(enabled=False))
    if not total:
        raise InputError(f"expected rows below the names of the columns, got none in {path}.")
    notes = list(file.notes)
    if len(kept) < total:
        notes.append(f"{len(kept):,} of {total:,} rows were drawn at random (--rows 0 takes all)")
    numbers = kept.index.to_numpy() + 1
    return Table({name: _cells(kept[name]) for name in kept.columns}, numbers, total, tuple(notes))


def _sample(file: CsvFile | ParquetFile, rows: int, seed: int, progress: Progress) -> tuple[pandas.DataFrame, int]:
    """Rows drawn without replacement, in one pass: each gets a random key, and the smallest keys stay."""
    import pandas  # an extra: only tables need it

    generator = numpy.random.default_rng(seed)
    kept: list[pandas.DataFrame] = []
    keys = numpy.zeros(0)
    total = 0
    for piece in progress.track(_checked(file, rows), "reading, piece", file.pieces):
        total += len(piece)
        keys = numpy.concatenate([keys, generator.random(len(piece))])
        kept.append(piece)
        if rows and len(keys) > 2 * rows:
            kept, keys = _smallest(pandas.concat(kept), keys, rows)
    joined = pandas.concat(kept)
    if rows and len(joined) > rows:
        joined = _smallest(joined, keys, rows)[0][0]
    return joined, total


def _smallest(frame: pandas.DataFrame, keys: Any, rows: int) -> tuple[list[pandas.DataFrame], Any]:
    stay = numpy.sort(numpy.argpartition(keys, rows - 1)[:rows])
    return [frame.iloc[stay]], keys[stay]


def _checked(file: CsvFile | ParquetFile, rows: int) -> Iterator[pandas.DataFrame]:
    """The pieces; the first tells how wide a row is, and so whether the rows wanted will fit."""
    for number, piece in enumerate(file.read()):
        if number == 0 and len(piece) and rows:
            width = piece.memory_usage(deep=True).sum() / len(piece)
            have = RESERVE * free_memory(torch.device("cpu"))
            if 3 * rows * width > have:
                raise TooLargeError(
                    f"expected {rows:,} rows to fit in {readable(have)}, but at {readable(width)} a row they take "
                    f"about {readable(3 * rows * width)}. Take fewer: --rows {max(100, int(have / 4 / width)):d}"
                )
        yield piece


def _check_memory(size: float, path: Path) -> None:
    have = RESERVE * free_memory(torch.device("cpu"))
    if size * EXPANSION > have:
        raise TooLargeError(
            f"expected all rows of {path.name} to fit in {readable(have)}, but {readable(size)} of text take about "
            f"{readable(size * EXPANSION)}. Take a random sample instead, which is read in pieces: --rows 50000"
        )


def _cells(column: Any) -> Any:
    return numpy.array([str(cell) for cell in column], dtype=object)


def _similar(path: Path) -> str:
    """A file in the same folder that may have been meant."""
    from difflib import get_close_matches  # only where a name was wrong

    if not path.parent.is_dir():
        return ""
    near = get_close_matches(path.name, [other.name for other in path.parent.iterdir() if other.is_file()], n=1)
    return f" Was {near[0]} meant?" if near else ""
