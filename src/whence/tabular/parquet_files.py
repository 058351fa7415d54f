"""Parquet files, whose cells become text like those of CSV files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whence.errors import InputError

if TYPE_CHECKING:
    import pandas

PIECE = 20_000
"""Rows that are read at once."""


class ParquetFile:
    """A parquet file; nothing but its description was read.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the description."""
        try:
            from pyarrow import ArrowException, parquet  # an extra: only parquet files need it
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                "expected pyarrow for a parquet file. Install it: pip install 'whence[table]', or save the table as "
                "CSV.",
                name="pyarrow",
            ) from error

        try:
            self._file: Any = parquet.ParquetFile(path)
        except (ArrowException, OSError) as error:
            raise InputError(f"expected a parquet file, got {path}: {error}.") from error
        self.path = path
        self.notes: list[str] = []
        self.names = [str(name) for name in self._file.schema_arrow.names]
        about = self._file.metadata
        self.size = float(sum(about.row_group(at).total_byte_size for at in range(about.num_row_groups)))
        self.pieces = max(1, about.num_rows // PIECE)

    def read(self) -> Iterator[pandas.DataFrame]:
        """Pieces of the table, all cells text; the index counts the rows from zero."""
        import pandas  # an extra: only tables need it

        done = 0
        for batch in self._file.iter_batches(batch_size=PIECE):
            columns = {
                name: [_text(cell) for cell in batch.column(at).to_pylist()] for at, name in enumerate(self.names)
            }
            yield pandas.DataFrame(columns, index=range(done, done + batch.num_rows), dtype=object)
            done += batch.num_rows


def _text(cell: Any) -> str:
    """A cell as a CSV file would have it.

    Examples:
        >>> _text(None), _text(True), _text(1.5), _text(3)
        ('', 'true', '1.5', '3')
    """
    if cell is None:
        return ""
    return str(cell).lower() if isinstance(cell, bool) else str(cell)
