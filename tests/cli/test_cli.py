"""The command line, run as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import whence
from whence.cli.app import app

SRC = Path(__file__).resolve().parents[2] / "src"


def call(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.output


def without(module: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run some lines in an interpreter in which a module cannot be imported."""
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{module!r}] = None\n{code}"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )


def test_version() -> None:
    assert call("--version") == (0, f"whence {whence.__version__}\n")


@pytest.mark.parametrize("module", ["whence", "whence.cli"])
def test_the_package_can_be_run(module: str) -> None:
    process = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
    )
    assert process.stdout == f"whence {whence.__version__}\n", process.stderr


def test_help_names_the_commands_and_options() -> None:
    code, text = call("--help")
    assert code == 0
    assert "demo" in text
    code, text = call("demo", "--help")
    assert code == 0
    assert all(option in text for option in ("--draws", "--seed", "--out", "--quick", "--figures"))


@pytest.mark.parametrize("arguments", [("demo", "--draws", "0"), ("demo", "--no-such"), ("nonsense",)])
def test_misuse_is_exit_code_two(arguments: tuple[str, ...]) -> None:
    assert call(*arguments)[0] == 2


def test_folder_that_does_not_exist_is_told_before_any_work(tmp_path) -> None:
    code, text = call("demo", "--out", str(tmp_path / "nowhere" / "report.html"))
    assert code == 2
    assert "expected a folder that exists" in text


@pytest.mark.parametrize("module", ["typer", "rich", "pandas"])
def test_missing_command_line_extra_is_told_in_a_sentence(module: str) -> None:
    process = without(module, "from whence.cli import main; main(['--version'])")
    assert process.returncode == 3
    assert f"needs {module}. Install it with: pip install 'whence[table]'" in process.stderr
    assert "Traceback" not in process.stderr


def test_missing_scikit_learn_is_told_by_the_name_to_install() -> None:
    process = without("sklearn", "import whence.sklearn")
    assert "expected scikit-learn for whence.sklearn. Install it: pip install 'scikit-learn" in process.stderr


def test_missing_extra_of_the_demo_is_told_in_a_sentence() -> None:
    process = without(
        "sklearn",
        "import runpy; sys.argv[1:] = ['--quick']; runpy.run_module('whence_paper.demo', run_name='__main__')",
    )
    assert process.returncode == 3
    assert "needs sklearn" in process.stderr
    assert "pip install 'whence[table]'" in process.stderr
    assert "Traceback" not in process.stderr


def test_missing_extra_of_tables_is_told_in_a_sentence(tmp_path) -> None:
    path = tmp_path / "t.parquet"
    path.write_text("a,b\n1,2\n")
    process = without(
        "pyarrow",
        f"from whence.cli import main; main(['table', {str(path)!r}, '-t', 'b', '--csv', {str(tmp_path / 'r')!r}])",
    )
    assert process.returncode == 3, process.stderr
    assert "pyarrow" in process.stderr
    assert "pip install 'whence[" in " ".join(process.stderr.split())
    assert "Traceback" not in process.stderr
