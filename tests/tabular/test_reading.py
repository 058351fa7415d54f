"""Files as people have them: every delimiter, encoding and fault gets an answer or a clear error."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from whence.errors import InputError, TooLargeError
from whence.runtime.memory import free_memory
from whence.tabular.files import MISSING, read_table, write_corrected


def written(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_delimiter_is_found_out(mark: str, tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "\n".join(mark.join(row) for row in (["a", "b"], ["1", "x y"], ["2", "z"])))
    table = read_table(path, 0)
    assert table.frame.fillna("").to_dict("list") == {"a": ["1", "2"], "b": ["x y", "z"]}
    assert table.frame.index.tolist() == [1, 2]


def test_decimal_commas_do_not_pass_for_delimiters(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a;b\n1,5;2,5\n3,5;4,5\n"), 0)
    assert list(table.frame["a"]) == ["1,5", "3,5"]


def test_delimiter_can_be_given(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a;b\n1;2\n")
    for wrong in (", ", "§"):
        with pytest.raises(InputError, match="one ASCII character"):
            read_table(path, 0, delimiter=wrong)
    assert list(read_table(written(tmp_path / "u.csv", "a#b\n1#2\n"), 0, delimiter="#").frame) == ["a", "b"]


def test_quoted_cells_may_hold_delimiters_and_line_breaks(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", 'a,b\n"1,2","x\ny"\n3,z\n'), 0)
    assert list(table.frame["a"]) == ["1,2", "3"]
    assert table.frame["b"].iloc[0] == "x\ny"


def test_names_that_occur_twice_get_numbers(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a,a,,b\n1,2,3,4\n"), 0)
    assert table.frame.to_dict("list") == {"a": ["1"], "a.1": ["2"], "Unnamed: 2": ["3"], "b": ["4"]}


@pytest.mark.parametrize(
    ("encoding", "noted"),
    [("utf-8", ""), ("utf-8-sig", ""), ("utf-16", ""), ("cp1252", "Windows-1252"), ("latin-1", "Windows-1252")],
)
def test_encoding_is_found_out(encoding: str, noted: str, tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "städt,b\nKöln,1\nUlm,2\n", encoding), 0)
    assert list(table.frame["städt"]) == ["Köln", "Ulm"]
    assert any(noted in note for note in table.notes) == bool(noted)


def test_another_encoding_further_down_is_told(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"a,b\n" + b"1,2\n" * 80_000 + "ö,3\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"codec can't decode byte.*iconv"):
        read_table(path, 0)


def test_compressed_files_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,2\n"))
    assert list(read_table(path, 0).frame["b"]) == ["2"]
    path.write_bytes(gzip.compress(b"a,b\n1,2\n" * 1000)[:-20])
    with pytest.raises(InputError, match=r"t\.csv\.gz"):
        read_table(path, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "which is empty"),
        (b"\n\n", "which is empty"),
        (b"a,b\n", "expected rows below the names"),
        (b"1,2\n3,4\n", "expected a first line with the names"),
        (b"PK\x03\x04\0rest", "Save a workbook as CSV"),
        (b"PAR1\0rest", "ends in .parquet"),
        (b"a,b\n1,2\n1,2,3\n", "Expected 2 fields in line 3, saw 3. Put quotes"),
        (b"a,b\n1,2,3\n4,5,6\n", "Put quotes around cells"),
    ],
)
def test_files_that_are_no_tables(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_table(path, 0)


def test_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"house.csv, which does not exist\.$"):
        read_table(tmp_path / "house.csv", 0)
    with pytest.raises(InputError, match="which is a folder"):
        read_table(tmp_path, 0)


def test_short_rows_have_missing_cells(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a,b\n1,2\n3\n"), 0)
    assert table.frame.fillna("").to_dict("list") == {"a": ["1", "3"], "b": ["2", ""]}


def test_texts_that_are_read_as_no_label_are_told(tmp_path: Path) -> None:
    table = read_table(written(tmp_path / "t.csv", "a,y\n-,mild\n1, none\n2,none\n3,NA\n4,\n5,mild\n"), 0)
    assert table.missing_labels("y") == [
        "'none' in 2 rows of 'y' was read as no label; if it is a class, give it another name",
        "'NA' in 1 row of 'y' was read as no label; if it is a class, give it another name",
    ]
    clean = read_table(written(tmp_path / "u.csv", "a,y\n-,mild\n1,\n"), 0)
    assert clean.missing_labels("y") == clean.missing_labels("another") == []


def test_all_spellings_of_no_value_are_listed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8").lower()
    assert [spelling for spelling in MISSING if spelling and f"`{spelling}`" not in page] == []


def test_answers_to_short_rows_get_their_delimiters(tmp_path: Path) -> None:
    lines = ["a;b;y", "1;2;x", "3;4", "5", '"6;7"; 8 ', "9;10;", "11;12;z"]
    table = read_table(written(tmp_path / "t.csv", "\n".join(lines)), 0, delimiter=";")
    answers = ["red", "blue", "a;b", "green"]
    write_corrected(tmp_path / "clean.csv", table, table.frame["y"].loc[2:5].fillna(dict(enumerate(answers, 2))))
    lines[2:6] = ["3;4;red", "5;;blue", '"6;7"; 8 ;"a;b"', "9;10;green"]
    assert (tmp_path / "clean.csv").read_text() == "\n".join(lines)
    again = read_table(tmp_path / "clean.csv", 0, delimiter=";").frame
    assert again["y"].tolist() == ["x", *answers, "z"]


def test_sample_is_uniform_and_bounded(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n" + "".join(f"{number},x\n" for number in range(50_000)))
    table = read_table(path, 500, seed=1)
    assert len(table.frame) == 500
    assert table.total == 50_000
    numbers = table.frame["a"].astype(int)
    assert (table.frame.index == numbers + 1).all()
    assert len(set(numbers)) == 500
    assert abs(numbers.mean() - 25_000) < 4 * 50_000 / 12**0.5 / 500**0.5  # four standard errors
    assert any("500 of 50,000 rows" in note for note in table.notes)
    assert (read_table(path, 500, seed=1).frame.index == table.frame.index).all()
    assert (read_table(path, 500, seed=2).frame.index != table.frame.index).any()


def test_file_larger_than_memory_is_refused_after_the_first_piece(tmp_path: Path) -> None:
    path = written(tmp_path / "t.csv", "a,b\n" + "1,2\n" * 100_000)
    with path.open("r+b") as file:
        file.truncate(free_memory(torch.device("cpu")))  # a sparse file: it takes no room on the disk
    with pytest.raises(TooLargeError, match=r"Take fewer: --rows \d+"):
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
    assert table.frame.fillna("").to_dict("list") == {
        "n": ["1.5", ""],
        "w": ["x", ""],
        "t": ["True", "False"],
        "d": ["2020-01-31", "2021-02-01"],
        "i": ["3", "4"],
    }
    assert table.missing_labels("n") == table.missing_labels("w") == []  # nothing is there
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(InputError, match="which cannot be read"):
        read_table(tmp_path / "broken.parquet", 0)


def test_an_index_with_a_name_is_a_column_of_a_parquet_file(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pandas.DataFrame({"n": ["1", "2"]})
    path = tmp_path / "t.parquet"
    for index, columns in (
        (pandas.Index(["Ulm", "Bonn"], name="town"), {"town": ["Ulm", "Bonn"]}),
        (
            pandas.MultiIndex.from_arrays([["x", "y"], ["3", "4"]], names=["part", "number"]),
            {"part": ["x", "y"], "number": ["3", "4"]},
        ),
        (pandas.Index(["Ulm", "Bonn"]), {}),
        (pandas.Index(["Ulm", "Bonn"], name="n"), {}),  # the column keeps its name
    ):
        frame.set_index(index).to_parquet(path)
        table = read_table(path, 0)
        assert table.frame.to_dict("list") == {**columns, "n": ["1", "2"]}
        assert table.frame.index.tolist() == [1, 2]
