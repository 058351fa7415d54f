"""What `whence table` refuses, and how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command_line import call, houses, write
from whence.cli.console import LACKING, UNUSABLE

BROKEN: list[tuple[str, dict[str, Any], tuple[str, ...], str]] = [
    ("no such column", houses(30), ("-t", "prise"), "Did you mean 'price'?"),
    ("no such column to ignore", houses(30), ("-t", "price", "-x", "twon"), "Did you mean 'town'?"),
    ("text in the target", {**houses(30), "price": ["1.5"] * 10 + ["2"] * 18 + ["?", "tbd"]}, ("-t", "price"), "'tbd'"),
    ("one row", houses(1), ("-t", "price"), "at least 20 rows"),
    ("constant target", {**houses(30), "price": [5] * 30}, ("-t", "price"), "target that varies"),
    ("huge target", {**houses(30), "price": np.linspace(1e19, 1e20, 30)}, ("-t", "price"), "by a power of ten"),
    ("tiny target", {**houses(30), "price": np.linspace(1e-21, 1e-20, 30)}, ("-t", "price"), "by a power of ten"),
    ("nothing but a target", {"price": range(40)}, ("-t", "price"), "it has no other column"),
    ("nothing but an identifier", {"id": range(40), "y": np.sin(range(40))}, ("-t", "y"), "numbers the rows"),
    ("a target of texts", houses(60), ("-t", "house_id"), "Is it the right column,"),
    ("a task with a typo", houses(30), ("-t", "price", "--task", "regresion"), "Did you mean 'regression'?"),
    ("a structure with a typo", houses(30), ("-t", "price", "--structure", "exat"), "Did you mean 'exact'?"),
    ("a model with a typo", houses(30), ("-t", "price", "--model", "tree"), "Did you mean 'trees'?"),
    ("verdicts with a typo", houses(30), ("-t", "price", "--verdicts", "heldout"), "Did you mean 'held-out'?"),
    ("another task", houses(30), ("-t", "town", "--task", "regression"), "expected numbers in the target"),
]


@pytest.mark.parametrize(("name", "columns", "options", "message"), BROKEN, ids=[one[0] for one in BROKEN])
def test_broken_input_is_one_clear_message(
    name: str, columns: dict[str, Any], options: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    data = write(tmp_path / "t.csv", columns)
    files = ("--csv", tmp_path / "r.csv", "-o", tmp_path / "r.html")
    result = call("table", data, *options, *files, "-q")
    assert result.exit_code == UNUSABLE, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--csv", "nowhere/r.csv"), "expected a folder that exists"),
        (("--save", "full"), "expected the name of a file to write, got the folder full"),
        (("--csv", "t.csv"), "for both"),
        (("--out", "full"), "is a directory"),
    ],
)
def test_files_that_cannot_be_written_are_told_before_any_work(
    options: tuple[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "t.csv", houses(30))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("keep me")
    result = call("table", "t.csv", "-t", "price", *options)
    assert result.exit_code == UNUSABLE
    assert message in " ".join(result.output.replace("│", " ").split())
    assert (tmp_path / "full" / "precious.txt").read_text() == "keep me"


@pytest.mark.parametrize(("command", "option"), [("report", "-o"), ("predict", "--csv")])
def test_new_rows_are_not_written_over(command: str, option: str, tmp_path: Path) -> None:
    data = write(tmp_path / "new.csv", houses(30))
    before = data.read_bytes()
    result = call(command, tmp_path / "no fit is needed to see this", data, option, data, "-q")
    assert result.exit_code == UNUSABLE
    assert "for both" in " ".join(result.output.split())
    assert data.read_bytes() == before


def test_too_large_is_another_exit_code(tmp_path: Path) -> None:
    data = write(tmp_path / "t.csv", houses(30))
    result = call("table", data, "-t", "price", "--rows", str(10**12), "--csv", tmp_path / "r.csv", "--no-report")
    assert result.exit_code == LACKING
    assert "Take fewer: --rows" in " ".join(result.output.split())
