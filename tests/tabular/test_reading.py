"""Files as people have them: every delimiter, encoding and fault gets an answer or a clear error."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from whence.errors import InputError, TooLargeError
from whence.runtime.memory import free_memory
from whence.tabular.files import read_table


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_delimiter_is_found_out(mark: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "\n".join(mark.join(row) for row in (["a", "b"], ["1", "x y"], ["2", "z"])))
    table = read_table(path, 0)
    assert {name: list(cells) for name, cells in table.columns.items()} == {"a": ["1", "2"], "b": ["x y", "z"]}
    assert table.rows.tolist() == [1, 2]


def test_decimal_commas_do_not_pass_for_delimiters(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a;b\n1,5;2,5\n3,5;4,5\n"), 0)
    assert list(table.columns["a"]) == ["1,5", "3,5"]


def test_wrong_delimiter_names_the_right_one(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a;b\n1;2\n")
    with pytest.raises(InputError, match=r"got none in its first line\. It looks separated by ';'"):
        read_table(path, 0, delimiter=",")
    with pytest.raises(InputError, match="one character"):
        read_table(path, 0, delimiter=", ")
    assert list(read_table(written(tmp_path / "u.csv", "a#b\n1#2\n"), 0, delimiter="#").columns) == ["a", "b"]


def test_quoted_cells_may_hold_delimiters_and_line_breaks(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", 'a,b\n"1,2","x\ny"\n3,z\n'), 0)
    assert list(table.columns["a"]) == ["1,2", "3"]
    assert table.columns["b"][0] == "x\ny"


def test_names_that_occur_twice_get_numbers(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a,a,,b\n1,2,3,4\n"), 0)
    assert list(table.columns) == ["a", "a (2)", "column 3", "b"]
    assert table.columns["a (2)"][0] == "2"
    assert any("more than once" in note and "'a'" in note for note in table.notes)


@pytest.mark.parametrize(
    ("encoding", "noted"),
    [("utf-8", ""), ("utf-8-sig", ""), ("utf-16", ""), ("cp1252", "Windows-1252"), ("latin-1", "Windows-1252")],
)
def test_encoding_is_found_out(encoding: str, noted: str, tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "städt,b\nKöln,1\nUlm,2\n", encoding), 0)
    assert list(table.columns["städt"]) == ["Köln", "Ulm"]
    assert any(noted in note for note in table.notes) == bool(noted)


def test_another_encoding_further_down_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b\n" + b"1,2\n" * 80_000 + "ö,3\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"to be text in utf-8.*iconv"):
        read_table(path, 0)


def test_compressed_files_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert list(read_table(path, 0).columns["b"]) == ["2"]
    path.write_bytes(gzip.compress(b"a,b\n1,2\n" * 1000)[:-20])
    with pytest.raises(InputError, match=r"t\.csv\.gz"):
        read_table(path, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty file"),
        (b"\n\n", "empty file"),
        (b"a,b\n", "expected rows below the names"),
        (b"1,2\n3,4\n", "expected a first line with the names"),
        (b"PK\x03\x04rest", "workbook or an archive"),
        (b"PAR1rest", "ends in .parquet"),
        (b"\x00\x01\x02", "binary"),
        (b"a,b\n1,2\n1,2,3\n", "expected 2 cells in each row"),
    ],
)
def test_files_that_are_no_tables(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(path, 0)


def test_file_that_does_not_exist_and_one_that_may_be_meant(tmp_path: Path) -> None:
    written(tmp_path / "houses.csv", "a\n1\n")
    with pytest.raises(InputError, match=r"does not exist\. Did you mean 'houses.csv'"):
        read_table(tmp_path / "house.csv", 0)
    for other in ("profile.csv", "note.csv", "nofile.py", "data.csv"):
        written(tmp_path / other, "a\n1\n")
    with pytest.raises(InputError, match=r"nofile.csv, which does not exist\.$"):
        read_table(tmp_path / "nofile.csv", 0)
    with pytest.raises(InputError, match="got the folder"):
        read_table(tmp_path, 0)


def test_file_that_may_be_meant_has_any_case_and_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "houses.csv").mkdir()
    with pytest.raises(InputError, match=r"which does not exist\.$"):
        read_table(tmp_path / "house.csv", 0)
    written(tmp_path / "Flats.CSV", "a\n1\n")
    with pytest.raises(InputError, match=r"Did you mean 'Flats.CSV'"):
        read_table(tmp_path / "flat.csv", 0)


@pytest.mark.filterwarnings("error")
def test_delimiter_beyond_ascii_is_read_without_a_warning(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", 'a§b\n1§"2§3"\n4\n'), 0, delimiter="§")
    assert {name: list(found) for name, found in table.columns.items()} == {"a": ["1", "4"], "b": ["2§3", ""]}
    for long in ("a§b\n1§2§3\n", "a§b\n1§2\n1§2§3\n"):
        with pytest.raises(InputError, match="expected 2 cells in each row"):
            read_table(written(tmp_path / "t.csv", long), 0, delimiter="§")


def test_short_rows_have_missing_cells(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a,b\n1,2\n3\n"), 0)
    assert list(table.columns["b"]) == ["2", ""]


def test_sample_is_uniform_and_bounded(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n" + "".join(f"{number},x\n" for number in range(50_000)))
    table = read_table(path, 500, seed=1)
    assert len(table) == 500
    assert table.total == 50_000
    numbers = table.columns["a"].astype(int)
    assert (table.rows == numbers + 1).all()
    assert len(set(numbers)) == 500
    assert abs(numbers.mean() - 25_000) < 4 * 50_000 / 12**0.5 / 500**0.5  # four standard errors
    assert any("500 of 50,000 rows" in note for note in table.notes)
    assert (read_table(path, 500, seed=1).rows == table.rows).all()
    assert (read_table(path, 500, seed=2).rows != table.rows).any()


def test_file_larger_than_memory_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n" + "1,2\n" * 100_000)
    with path.open("r+b") as file:
        file.truncate(free_memory(torch.device("cpu")))  # a sparse file: it takes no room on the disk
    with pytest.raises(TooLargeError, match="--rows 50000"):
        read_table(path, 0)


def test_rows_too_wide_for_memory_are_refused_after_the_first_piece(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n" + "x,y\n" * 10)
    with pytest.raises(TooLargeError, match=r"Take fewer: --rows \d+"):
        read_table(path, 10**12)


def test_parquet_reads_like_csv(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame(
        {
            "n": [1.5, None],
            "w": ["x", None],
            "t": [True, False],
            "d": pandas.to_datetime(["2020-01-31", "2021-02-01"]),
            "i": np.array([3, 4]),
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    table = read_table(tmp_path / "t.parquet", 0)
    assert {name: list(cells) for name, cells in table.columns.items()} == {
        "n": ["1.5", ""],
        "w": ["x", ""],
        "t": ["true", "false"],
        "d": ["2020-01-31 00:00:00", "2021-02-01 00:00:00"],
        "i": ["3", "4"],
    }
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match="expected a parquet file"):
        read_table(tmp_path / "broken.parquet", 0)
