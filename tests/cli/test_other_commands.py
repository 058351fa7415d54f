"""`whence fit` with what it saved, `doctor`, `reproduce`, and how the program ends."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from command_line import call
from whence.cli.leaving import FAILED, INTERRUPTED, UNUSABLE
from whence.cli.oracle import by_hand, self_check
from whence.tabular.saved import replacing_folder

SRC = Path(__file__).resolve().parents[2] / "src"

SPEC = """
import torch

X = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)

def model():
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1, dtype=torch.float64)

def train_loader():
    return [(X, 2 * X + (99 * X).sin())]

def test_loader():
    return [torch.tensor([[0.0], [30.0]], dtype=torch.float64)]

def fit_options():
    return {"ridge": 0.1, "recenter": True}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "line.py"
    path.write_text(SPEC)
    return path


def test_fit_predict_explain_report_of_a_spec(spec: Path, tmp_path: Path) -> None:
    saved, html = tmp_path / "saved", tmp_path / "report.html"
    result = call("fit", spec, "--save", saved, "--out", html, "--json", "-q")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["examples"], content["outputs"], content["ridge"]) == (40, 1, 0.1)
    assert content["trust"]["linearization"] in ("fine", "not checked")  # where seconds run out
    assert html.is_file()
    assert sorted(path.name for path in saved.iterdir()) == ["fit.whence", "spec.json"]

    result = call("predict", saved, "--spec", spec, "--json", "-q")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["verdict"] for row in rows] == ["confident", "scarce data"]
    assert rows[1]["hec3"] > 100 * rows[0]["hec3"]

    result = call("explain", saved, "--spec", spec, "--row", "2", "-q")
    assert result.exit_code == 0, result.output
    assert "scarce data" in result.stdout
    assert call("report", saved, "--spec", spec, "--out", tmp_path / "again.html", "-q").exit_code == 0
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert "row 2" in again  # counted as by explain
    assert "was not checked on a sample" in again
    assert "was not checked on a sample" not in html.read_text(encoding="utf-8")  # fit has looked


CLASSES = """
import torch

X = torch.tensor([[0.0], [1.0], [2.0]], dtype=torch.float64).repeat(10, 1)

def model():
    net = torch.nn.Linear(1, 3, dtype=torch.float64)
    net.load_state_dict({"weight": torch.tensor([[-2.0], [0.0], [2.0]]), "bias": torch.tensor([2.0, 1.0, -2.0])})
    return net

def train_loader():
    return [(X, X[:, 0].long())]

def test_loader():
    return [torch.tensor([[0.0], [5.0]], dtype=torch.float64)]

def fit_options():
    return {"likelihood": "categorical", "ridge": 1.0}
"""


def test_a_classifier_is_told_by_its_classes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("classes.py").write_text(CLASSES)
    assert call("fit", "classes.py", "--save", "saved", "--no-trust", "-q").exit_code == 0
    result = call("predict", "saved", "--spec", "classes.py", "--json", "-q")
    rows = json.loads(result.stdout)["rows"]
    # logits 2, 1, -2 and -8, 1, 8
    chance = [1 / (1 + math.exp(-1) + math.exp(-4)), 1 / (1 + math.exp(-7) + math.exp(-16))]
    assert [row["class"] for row in rows] == [0, 2]
    assert [row["probability"] for row in rows] == pytest.approx(chance)
    result = call("predict", "saved", "--spec", "classes.py", "-q")
    assert result.exit_code == 0, result.output
    assert "row class probability ho" in " ".join(result.stdout.split())
    result = call("explain", "saved", "--spec", "classes.py", "--row", "1", "-q")
    assert result.exit_code == 0, result.output
    assert "example 1: class 0, probability 0.721" in result.stdout
    assert result.stdout.count("confident") <= 1  # what the verdict rests on does not say it again


def test_several_outputs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("two.py").write_text(SPEC.replace("Linear(1, 1", "Linear(1, 2").replace("(99 * X).sin()", "torch.ones(1, 2)"))
    assert call("fit", "two.py", "--save", "saved", "--no-trust", "-q").exit_code == 0
    result = call("predict", "saved", "--spec", "two.py", "-q")
    assert result.exit_code == 0, result.output
    assert "row mean_0 mean_1 ho" in " ".join(result.stdout.split())


def test_spec_is_never_run_from_the_folder(spec: Path, tmp_path: Path) -> None:
    assert call("fit", spec, "--save", tmp_path / "saved", "-q").exit_code == 0
    result = call("predict", tmp_path / "saved", "-q")
    assert result.exit_code == UNUSABLE
    assert "Pass it: --spec line.py" in " ".join(result.output.split())


def test_changed_spec_is_noted_and_changed_weights_are_refused(spec: Path, tmp_path: Path) -> None:
    assert call("fit", spec, "--save", tmp_path / "saved", "-q").exit_code == 0
    spec.write_text(SPEC + "\n# a remark\n")
    result = call("predict", tmp_path / "saved", "--spec", spec, "--csv", tmp_path / "r.csv", "-q")
    assert result.exit_code == 0, result.output
    assert "has changed since the fit was made" in " ".join(result.stdout.split())
    spec.write_text(SPEC.replace("manual_seed(0)", "manual_seed(1)"))
    assert call("predict", tmp_path / "saved", "--spec", spec, "-q").exit_code == UNUSABLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def model(): return 1\ndef train_loader(): return []", "expected model() in"),
        ("x = 1", "got no model and no train_loader"),
        ("import nonsense_that_is_not_there", "ModuleNotFoundError"),
        ("def model(:", "SyntaxError"),
        ("def model():\n    return 1 / 0\ndef train_loader(): return []", "line 2: ZeroDivisionError"),
        ("import torch\ndef model(): return torch.nn.Linear(1, 1)\ndef train_loader(): return []", "empty"),
    ],
)
def test_broken_specs_are_told(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    result = call("fit", path, "-q")
    assert result.exit_code == UNUSABLE, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_options_win_over_the_spec(spec: Path) -> None:
    result = call("fit", spec, "--ridge", "3", "--json", "-q", "--no-trust")
    assert json.loads(result.stdout)["trust"] is None
    assert json.loads(result.stdout)["ridge"] == 3.0
    assert call("fit", spec, "--ridge", "much", "-q").exit_code == UNUSABLE
    assert call("fit", spec, "--likelihood", "poisson", "-q").exit_code == UNUSABLE


def test_hand_worked_numbers() -> None:
    """Written out once more, without the program: residuals over one minus leverage, times x / F, squared, summed."""
    left_out = (Fraction(-1, 4), Fraction(-4, 5), Fraction(1))
    expected = sum((Fraction(x, 9) * u) ** 2 for x, u in zip((1, 2, 2), left_out, strict=True))
    assert by_hand(0)["hec3"] == expected == Fraction(883, 10800)
    left_out = (Fraction(-1, 9), Fraction(-1, 3), Fraction(4, 3))
    expected = sum((Fraction(x, 10) * u) ** 2 for x, u in zip((1, 2, 2), left_out, strict=True))
    assert by_hand(1)["hec3"] == expected == Fraction(613, 8100)


def test_doctor() -> None:
    result = call("doctor", "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["passed"] is True
    assert len(content["checks"]) == 16
    numbers = [one.split("+")[0] for one in (content["versions"]["torch"], torch.__version__)]
    assert numbers[0] == numbers[1]  # only some packages say for which GPU they were built
    assert "numbers agree with those worked out by hand" in " ".join(call("doctor").stdout.split())


def test_doctor_finds_a_wrong_number() -> None:
    """The comparison itself: a number that is off in the tenth digit fails."""
    check = self_check(torch.device("cpu"))[0]
    assert check.passed
    assert not type(check)(check.name, check.found * (1 + 1e-8) + 1e-8, check.expected).passed


def test_experiments_are_listed_and_run() -> None:
    names = [one["name"] for one in json.loads(call("reproduce", "--list", "--json").stdout)]
    assert {"sinc", "spirals"} <= set(names)
    assert "sinc" in call("reproduce").stdout
    result = call("reproduce", "sync")
    assert result.exit_code == UNUSABLE
    assert "Was 'sinc' meant?" in " ".join(result.output.split())
    assert call("reproduce", "sinc", "--no-such-option").exit_code == UNUSABLE  # argparse's own code


@pytest.mark.parametrize("command", ["table", "demo", "fit", "predict", "explain", "report", "reproduce", "doctor"])
def test_help_has_examples(command: str) -> None:
    result = call(command, "--help")
    assert result.exit_code == 0
    assert f"whence {command}" in result.stdout.split("Options")[0].split("Usage")[1].split("\n", 1)[1]


def test_exit_codes_are_in_the_help() -> None:
    words = " ".join(call("--help").stdout.split())
    assert "Exit codes: 0 done; 1 a fault of whence" in words
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_folder_is_there_whole_or_as_it_was(error: type[BaseException], tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    with replacing_folder(folder, "mark") as new:
        (new / "mark").write_text("first")

    def fail() -> None:
        with replacing_folder(folder, "mark") as new:
            (new / "mark").write_text("second")
            raise error

    with pytest.raises(error):
        fail()
    assert (folder / "mark").read_text() == "first"
    with replacing_folder(folder, "mark") as new:
        (new / "mark").write_text("third")
    assert (folder / "mark").read_text() == "third"
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def test_fault_of_whence_is_told_as_such(tmp_path: Path) -> None:
    """An error that nobody foresaw: a loader whose length lies in a way that breaks the reader."""
    path = tmp_path / "odd.py"
    path.write_text(
        "import torch\nclass Odd:\n    def __iter__(self):\n        raise ZeroDivisionError('inside')\n"
        "def model(): return torch.nn.Linear(1, 1).double()\ndef train_loader(): return Odd()\n"
    )
    result = call("fit", path, "-q")
    assert result.exit_code == FAILED
    assert "a fault of whence" in " ".join(result.output.split())


def test_report_without_anything_to_be_about_is_refused_before_the_fit(spec: Path, tmp_path: Path) -> None:
    spec.write_text(SPEC.replace("def test_loader", "def other_loader"))
    result = call("fit", spec, "--out", tmp_path / "report.html", "-q")
    assert result.exit_code == UNUSABLE
    assert "to define test_loader()" in " ".join(result.output.split())
    assert call("fit", spec, "--save", tmp_path, "-q").exit_code == UNUSABLE  # it holds something else
