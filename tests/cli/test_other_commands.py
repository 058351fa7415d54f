"""`whence doctor`, `reproduce`, and how the program ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from command_line import call
from whence.cli.console import FAILED, INTERRUPTED, UNUSABLE
from whence.cli.doctor import BY_HAND

SRC = Path(__file__).resolve().parents[2] / "src"


def test_experiments_are_listed_and_run() -> None:
    names = [one["name"] for one in json.loads(call("reproduce", "--list", "--json").stdout)]
    assert {"sinc", "spirals"} <= set(names)
    assert "sinc" in call("reproduce").stdout
    result = call("reproduce", "sync")
    assert result.exit_code == UNUSABLE
    assert "Did you mean 'sinc'?" in " ".join(result.output.split())
    assert call("reproduce", "sinc", "--no-such-option").exit_code == UNUSABLE  # argparse's own code


def test_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    result = call("doctor", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert len(content["found"]) == 4 * (1 + torch.cuda.is_available())  # on each device
    assert content["wrong"] == []
    monkeypatch.setitem(BY_HAND, "ho", BY_HAND["ho"] + 1e-9)
    result = call("doctor")
    assert result.exit_code == FAILED
    assert "12 of 16 numbers agree" in " ".join(result.stdout.split()) or torch.cuda.is_available()
    assert "ho by exact, dual on cpu: expected 0.020700001" in " ".join(result.output.split())


@pytest.mark.parametrize("command", ["table", "demo", "fit", "predict", "explain", "report", "reproduce", "doctor"])
def test_help_has_examples(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"whence {command}" in result.stdout.split("Options")[0].split("Usage")[1].split("\n", 1)[1]


def test_help_of_table_says_nothing_of_texts() -> None:
    assert "text" not in call("table", "--help").stdout.split("--structure")[1].split("--model")[0]


def test_exit_codes_are_in_the_help() -> None:
    words = " ".join(call("--help").stdout.split())
    assert "Exit codes: 0 done; 1 a bug in whence" in words
    assert "130 interrupted" in words


def test_completion_is_offered() -> None:
    result = subprocess.run(
        [sys.executable, "-c", "from whence.cli import main; main()"],
        env={
            **os.environ,
            "PYTHONPATH": str(SRC),
            "_WHENCE_COMPLETE": "complete_bash",
            "COMP_WORDS": "whence ta",
            "COMP_CWORD": "1",
        },
        capture_output=True,
        text=True,
    )
    assert result.stdout.split() == ["table"], result.stderr


INTERRUPTIBLE = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from whence.cli import main; "


def test_interrupt_is_clean(tmp_path: Path) -> None:
    path = tmp_path / "slow.py"
    path.write_text(
        "import time, torch\ndef model(): return torch.nn.Linear(1, 1)\n"
        "def train_loader():\n    print('ready', flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen(
        # A shell that starts something in the background has interrupts ignored; here they are not.
        [sys.executable, "-c", INTERRUPTIBLE + f"main(['fit', {str(path)!r}, '--save', 'saved'])"],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert "interrupted; no file was left half-written" in errors
    assert "Traceback" not in errors
    assert [one.name for one in tmp_path.iterdir() if one.name != "__pycache__"] == ["slow.py"]


def test_fault_of_whence_is_told_as_such(tmp_path: Path) -> None:
    """An error that nobody foresaw: a loader whose length lies in a way that breaks the reader."""
    path = tmp_path / "odd.py"
    path.write_text(
        "import torch\nclass Odd:\n    def __iter__(self):\n        raise ZeroDivisionError('inside')\n"
        "def model(): return torch.nn.Linear(1, 1).double()\ndef train_loader(): return Odd()\n"
    )
    result = call("fit", path, "-q")
    assert result.exit_code == FAILED
    assert "a bug in whence" in " ".join(result.output.split())


def test_a_reader_that_leaves_is_no_fault(tmp_path: Path) -> None:
    """As `whence reproduce --list | head -1`, with more output than a pipe holds."""
    code = (
        "from whence.cli.console import Output, handle_errors\n"
        "import typer\n"
        "@handle_errors\n"
        "def run() -> None:\n"
        "    for _ in range(20000): Output(False).say('a line')\n"
        "typer.run(run)"
    )
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file)
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(120) == 141
    assert errors.read_text() == ""
