"""No command writes over a file that it reads, or two results to one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import call, houses, write
from whence.cli.console import UNUSABLE


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "fit.whence").write_bytes(b"a fit")
    return write(tmp_path / "houses.csv", houses(30))


@pytest.mark.parametrize(("command", "option"), [("predict", "--csv"), ("report", "--out")])
def test_the_saved_fit_is_not_overwritten(command: str, option: str, data: Path) -> None:
    saved = data.parent / "fit.whence"
    result = call(command, saved, data, option, saved)
    assert result.exit_code == UNUSABLE
    assert "expected different files to read and to write" in result.stderr
    assert saved.read_bytes() == b"a fit"


def test_two_results_need_two_files(data: Path) -> None:
    same = data.parent / "same.csv"
    result = call("table", data, "--target", "price", "--export", same, "--csv", same, "--no-report")
    assert result.exit_code == UNUSABLE
    assert "expected a file of its own for each result" in result.stderr
    assert not same.exists()


def test_work_items_need_a_target(data: Path) -> None:
    result = call("table", data, "--export", data.parent / "todo.csv")
    assert result.exit_code == UNUSABLE
    assert "expected --target with --export" in result.stderr
