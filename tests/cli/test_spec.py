"""`whence fit` with a Python file of the user's own, and the commands that ask what it saved."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from command_line import call
from whence.cli.console import UNUSABLE

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
    saved, html = tmp_path / "fit.whence", tmp_path / "report.html"
    result = call("fit", spec, "--save", saved, "--out", html, "--json", "-q")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert (content["examples"], content["outputs"], content["ridge"]) == (40, 1, 0.1)
    assert content["trust"]["linearization"] in ("fine", "not checked")  # where seconds run out
    assert html.is_file()
    assert saved.is_file()

    result = call("predict", saved, "--spec", spec, "--json", "-q")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["verdict"] for row in rows] == ["confident", "scarce data"]
    assert rows[1]["hec3"] > 100 * rows[0]["hec3"]

    result = call("explain", saved, "--spec", spec, "--row", "2", "-q")
    assert result.exit_code == 0, result.output
    assert "scarce data" in result.stdout
    assert "Examples are counted from 1, in the order of test_loader()" in " ".join(result.stdout.split())
    (found,) = json.loads(call("explain", saved, "--spec", spec, "--row", "2", "--json", "-q").stdout)
    assert found["mean"] == pytest.approx([rows[1]["mean"]])
    causes = {one["training_example"]: one for one in found["causes"]}
    assert {1, 40} <= set(causes)  # those at both ends, as people count
    assert {rows[1]["near"].split()[0], rows[1]["check"].split()[0]} == {"40"}
    x = torch.linspace(-1, 1, 40, dtype=torch.float64)
    slope = float((x * (2 * x + (99 * x).sin())).sum() / ((x * x).sum() + 0.1))
    assert causes[40]["residual"] == pytest.approx(abs(slope - 2 - math.sin(99)), rel=0.05)
    assert causes[40]["residual_without_it"] > causes[40]["residual"]
    assert 0 < causes[40]["share_of_hec3"] < 1
    assert call("report", saved, "--spec", spec, "--out", tmp_path / "again.html", "-q").exit_code == 0
    again = (tmp_path / "again.html").read_text(encoding="utf-8")
    assert "row 2" in again  # counted as by explain
    assert "training example 40" in again
    assert "training example 0" not in again
    assert "All checks" in again
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
    assert "row class probability probability_std ratio" in " ".join(result.stdout.split())
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


def test_a_data_file_beside_a_spec_is_refused_before_the_spec_is_run(spec: Path, tmp_path: Path) -> None:
    assert call("fit", spec, "--save", tmp_path / "saved", "--no-trust", "-q").exit_code == 0
    spec.write_text("raise SystemExit('it was run')")
    result = call("predict", tmp_path / "saved", "new.csv", "--spec", spec, "-q")
    assert result.exit_code == UNUSABLE
    words = "".join(result.output.split())
    assert "andnootherdata,gotthedatanew.csv" in words


def test_what_is_read_is_not_written_over(spec: Path, tmp_path: Path) -> None:
    assert call("fit", spec, "--save", tmp_path / "saved", "--no-trust", "-q").exit_code == 0
    spec.write_text(text := "raise SystemExit('it was run')")
    asked = ("fit", spec, "--out"), *((name, tmp_path / "saved", "--spec", spec) for name in ("predict", "report"))
    for words, option in zip(asked, ((spec,), ("--csv", spec), ("--out", spec)), strict=True):
        result = call(*words, *option, "-q")
        assert result.exit_code == UNUSABLE
        assert "for both" in " ".join(result.output.split())
    assert spec.read_text() == text


def test_fit_is_recentered_where_asked(spec: Path, tmp_path: Path) -> None:
    means = []
    for text in (SPEC.replace(', "recenter": True', ""), SPEC):
        spec.write_text(text)
        assert call("fit", spec, "--save", tmp_path / "saved", "--no-trust", "-q").exit_code == 0
        rows = json.loads(call("predict", tmp_path / "saved", "--spec", spec, "--json", "-q").stdout)["rows"]
        means.append(rows[1]["mean"])
    assert means[0] != pytest.approx(60, rel=0.2)  # the network is untrained
    assert means[1] == pytest.approx(60, rel=0.2)  # by the slope of the data


def test_what_was_not_checked_has_no_figures(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("whence.cli.fit.SECONDS", 1e-9)  # none are left for anything
    result = call("fit", spec, "-q")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "not checked" in words
    assert " . " not in words


def test_spec_must_be_named(spec: Path, tmp_path: Path) -> None:
    assert call("fit", spec, "--save", tmp_path / "saved", "-q").exit_code == 0
    result = call("predict", tmp_path / "saved", "-q")
    assert result.exit_code == UNUSABLE
    assert "expected --spec with the Python file" in " ".join(result.output.split())


def test_changed_weights_are_refused(spec: Path, tmp_path: Path) -> None:
    assert call("fit", spec, "--save", tmp_path / "saved", "-q").exit_code == 0
    spec.write_text(SPEC + "\n# a remark\n")
    result = call("predict", tmp_path / "saved", "--spec", spec, "--csv", tmp_path / "r.csv", "-q")
    assert result.exit_code == 0, result.output
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
        (SPEC.replace('{"ridge": 0.1, "recenter": True}', '{"ridge": "much"}'), "ridge"),
        (SPEC.replace('{"ridge": 0.1, "recenter": True}', "3"), "expected fit_options() in"),
        (SPEC.replace('"ridge"', '"rigde"'), "got 'rigde'. Did you mean 'ridge'?"),
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


def test_a_table_is_not_run(spec: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text("raise SystemExit('it was run')")
    for result in (call("fit", data, "-q"), call("fit", data, "--no-trust", "-q")):
        assert result.exit_code == UNUSABLE
        assert "For a table use `whence table" in " ".join(result.output.split())
    assert call("fit", spec, "--save", tmp_path / "saved", "--no-trust", "-q").exit_code == 0
    result = call("predict", tmp_path / "saved", "--spec", data, "-q")
    assert result.exit_code == UNUSABLE
    assert "expected a Python file (.py)" in " ".join(result.output.split())


@pytest.mark.parametrize("content", ["a,b,target\n1,2,3\n4,5,6\n", "PAR1 and more of it", '{"text": "a"}'])
@pytest.mark.parametrize("command", ["predict", "explain", "report"])
def test_data_in_the_place_of_a_saved_fit(command: str, content: str, tmp_path: Path) -> None:
    data = tmp_path / "data.csv"
    data.write_text(content)
    result = call(command, data, tmp_path / "saved.whence", "-q")
    assert result.exit_code == UNUSABLE
    said = " ".join(result.output.split())
    assert "expected a file saved by whence, got something else" in said
    assert "before the data" in said
    assert "damaged" not in said


def test_fit_without_checks(spec: Path) -> None:
    result = call("fit", spec, "--json", "-q", "--no-trust")
    assert list(json.loads(result.stdout)["trust"]) == ["level"]


def test_report_without_anything_to_be_about_is_refused_before_the_fit(spec: Path, tmp_path: Path) -> None:
    spec.write_text(SPEC.replace("def test_loader", "def other_loader"))
    result = call("fit", spec, "--out", tmp_path / "report.html", "-q")
    assert result.exit_code == UNUSABLE
    assert "to define test_loader()" in " ".join(result.output.split())
    assert call("fit", spec, "--save", tmp_path, "-q").exit_code == UNUSABLE  # a folder
