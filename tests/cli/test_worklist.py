"""Labels to check go out as a file, and the answers come back: `whence table --export` and `--import`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from command_line import call, read, write
from whence.cli.console import UNUSABLE

ROWS = 300
UNLABELLED = range(5)


class Exported(NamedTuple):
    data: Path
    truth: list[str]
    wrong: set[int]  # rows whose label was changed
    csv: list[dict[str, str]]
    content: dict[str, Any]
    rows: list[dict[str, str]]


def run(data: Path, *options: str | Path, target: str = "colour") -> dict[str, Any]:
    folder = data.parent
    fixed = (
        "--model",
        "network",
        "--width",
        "4",
        "-q",
        "--json",
        "--no-report",
        "--verdicts",
        "none",
        "--csv",
        folder / "rows.csv",
    )
    result = call("table", data, "-t", target, *fixed, *options)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    folder = tmp_path_factory.mktemp("worklist")
    generator = np.random.default_rng(1)
    x = generator.uniform(-1, 1, (ROWS, 2))
    truth = np.where(x[:, 0] > 0.3, "red", np.where(x[:, 1] > 0, "green", "blue"))
    labels, wrong = truth.copy(), generator.choice(np.arange(5, ROWS), 27, replace=False)
    labels[wrong] = [{"red": "blue", "blue": "green", "green": "red"}[one] for one in truth[wrong]]
    labels[UNLABELLED] = ""
    cells = {"a": x[:, 0].round(4), "b": x[:, 1].round(4), "answer": ["x", "y"] * (ROWS // 2), "colour": labels}
    data = write(folder / "colours.csv", cells)
    content = run(data, "--export", folder / "todo.csv", "--export-rows", "60")
    return Exported(
        data,
        list(truth),
        set((wrong + 1).tolist()),
        read(folder / "todo.csv"),
        content,
        read(folder / "rows.csv"),
    )


def test_every_labelled_row_has_a_suspicion_and_a_suggested_label(exported: Exported) -> None:
    for row in exported.rows:
        assert bool(row["suspicion"]) == bool(row["colour"])
        same = row["colour"] == row["suggested"]
        if same:
            assert float(row["suspicion"]) == pytest.approx(1 - float(row["suggested_probability"]), abs=1e-5)
        elif row["colour"]:
            assert float(row["suspicion"]) >= float(row["suggested_probability"]) - 1e-5
        if row["part"] == "held out":
            assert row["suggested"] == row["prediction"]
            assert float(row["suggested_probability"]) == pytest.approx(float(row["probability"]), rel=1e-4)


def test_held_out_rows_are_suspected_like_training_rows(exported: Exported) -> None:
    suspected = {int(row["row"]) for row in exported.csv if row["todo"] == "check the label"}
    for part in ("train", "held out"):
        planted = exported.wrong & {int(row["row"]) for row in exported.rows if row["part"] == part}
        assert len(planted) >= 2
        assert len(planted & suspected) >= 0.6 * len(planted)


def test_the_share_of_wrong_labels_is_estimated(exported: Exported) -> None:
    found = exported.content["wrong_labels"]
    assert found["lower"] <= len(exported.wrong) / (ROWS - 5) <= found["upper"]
    assert "of labels look wrong (" in found["words"]


def test_the_file_names_the_most_doubtful_rows_first(exported: Exported) -> None:
    check = [row for row in exported.csv if row["todo"] == "check the label"]
    doubt = [float(row["suspicion"]) for row in check]
    assert doubt == sorted(doubt, reverse=True)
    assert len(exported.wrong & {int(row["row"]) for row in check[:10]}) >= 8
    assert sorted(int(row["row"]) for row in exported.csv if row["todo"] == "label") == [at + 1 for at in UNLABELLED]
    assert list(exported.csv[0])[-3:] == ["a", "b", "answer_"]
    assert exported.content["export"] == {"check the label": len(check), "label": 5}


@pytest.mark.parametrize("classes", [True, False])
def test_tasks_for_label_studio(classes: bool, tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=60).round(3)
    y = np.where(x > 0, "up", "down") if classes else (10 * x).round(2).astype(str)
    y[:3] = ["down" if one > 0 else "up" for one in x[:3]] if classes else ["90", "-90", ""]
    data = write(tmp_path / "t.csv", {"x": x, "y": y})
    run(data, "--export", tmp_path / "todo.json", target="y")
    tasks = json.loads((tmp_path / "todo.json").read_text())
    first = tasks[0]
    row = int(first["data"]["row"]) - 1
    assert first["data"]["cells"] == {"x": str(x[row])}
    assert first["data"]["label"] == y[row]
    (result,) = first["predictions"][0]["result"]
    assert result["value"] == {"choices" if classes else "text": [first["data"]["suggested"]]}
    # what Label Studio exports as CSV: the data of each task, and the annotation by the name of its control
    done = {name: [task["data"][name] for task in tasks] for name in ("row", "label")}
    answers = write(tmp_path / "answers.csv", done | {"answer": [task["data"]["suggested"] for task in tasks]})
    assert row + 1 in run(data, "--import", answers, target="y")["import"]["changed"]


def answered(exported: list[dict[str, str]], answers: list[str], path: Path) -> Path:
    """Write the file with the answers filled in."""
    filled = [{**row, "answer": answer} for row, answer in zip(exported, answers, strict=True)]
    return write(path, {name: [row[name] for row in filled] for name in filled[0]})


def test_true_answers_come_back_and_help(exported: Exported) -> None:
    folder = exported.data.parent
    rows = [int(row["row"]) for row in exported.csv]
    answers = [exported.truth[row - 1] for row in rows]
    answers[3] = ""  # one was skipped
    path = answered(exported.csv, answers, folder / "answers.csv")
    content = run(exported.data, "--import", path, "--corrected", folder / "clean.csv", "--verdicts", "held-out")
    found = content["import"]
    assert content["rows"]["train"] == exported.content["rows"]["train"] + len(UNLABELLED)
    given = {row: answer for row, answer in zip(rows, answers, strict=True) if answer}
    before = {int(row["row"]): row["colour"] for row in exported.rows}
    assert found["changed"] == sorted(row for row in given if before[row] and given[row] != before[row])
    assert found["confirmed"] == sorted(row for row in given if given[row] == before[row])
    assert found["labelled"] == [at + 1 for at in UNLABELLED]
    assert found["unanswered"] == 1
    compared = found["compared"]
    assert compared["accuracy"]["after"] >= compared["accuracy"]["before"]
    assert compared["log loss"]["after"] < compared["log loss"]["before"]
    assert compared["log loss"]["after"] == content["scores"]["log loss"]["value"]
    doubted = compared["labels contradicted, all rows"]
    assert doubted["after"] < doubted["before"] / 2
    counts = [sum(compared[name][when] for name in content["verdicts"]["all"]) for when in ("before", "after")]
    assert counts == [content["rows"]["test"]] * 2
    assert found["predictions_changed"] > 0
    after = {int(row["row"]): row for row in read(folder / "rows.csv")}
    assert all(after[row]["colour"] == answer for row, answer in given.items())
    assert {after[row]["part"] for row in found["labelled"]} == {"train"}
    clean, raw = read(folder / "clean.csv"), read(exported.data)
    assert [row["colour"] for row in clean] == [after[row + 1]["colour"] for row in range(ROWS)]
    assert [{**row, "colour": ""} for row in clean] == [{**row, "colour": ""} for row in raw]
    held_out = [row["row"] for row in exported.rows if row["part"] == "held out"]
    assert [row for row in held_out if after[int(row)]["part"] != "held out"] == []


def test_what_was_answered_is_not_asked_again(exported: Exported, tmp_path: Path) -> None:
    asked = [row for row in exported.csv if row["label"]][:5]
    path = answered(asked, [row["label"] for row in asked], tmp_path / "confirmed.csv")
    content = run(exported.data, "--import", path, "--export", tmp_path / "again.csv", "--export-rows", "60")
    rows = {int(row["row"]) for row in asked}
    assert set(content["import"]["confirmed"]) == rows
    again = {int(row["row"]) for row in read(tmp_path / "again.csv")} | {row["row"] for row in content["suspects"]}
    assert again
    assert not rows & again


def test_what_a_person_sees(exported: Exported, tmp_path: Path) -> None:
    some = exported.csv[10:]  # the most doubtful labels are left to be asked about
    path = answered(some, [exported.truth[int(row["row"]) - 1] for row in some], tmp_path / "a.csv")
    options = ("--width", "4", "-q", "--no-report", "--verdicts", "none", "--csv", tmp_path / "r.csv", "--import", path)
    result = call("table", exported.data, "-t", "colour", "--model", "network", *options)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for wanted in ("the other rows suggest", "before after", "labels changed", "5 rows labelled", "% of labels"):
        assert wanted in words
    assert max(len(line) for line in result.stdout.splitlines() if str(tmp_path) not in line) <= 80


def edited(exported: Exported, folder: Path, **cells: str) -> Path:
    rows = [{**row, "answer": row["suggested"]} for row in exported.csv[:4]]
    rows[2] |= cells
    return write(folder / "edited.csv", {name: [row[name] for row in rows] for name in rows[0]})


@pytest.mark.parametrize(
    ("cells", "words"),
    [
        ({"answer": "grean"}, "one of the classes 'blue', 'green', 'red' as the answer for row"),
        ({"answer": "grean"}, "got 'grean'. Did you mean 'green'?"),
        ({"row": "900"}, "got row '900', which was not read from it"),
        ({"row": "first"}, "got row 'first', which was not read from it"),
        ({"label": ""}, "Was another table exported"),
    ],
)
def test_answers_that_cannot_be_used_are_named(
    cells: dict[str, str], words: str, exported: Exported, tmp_path: Path
) -> None:
    result = call("table", exported.data, "-t", "colour", "-q", "--import", edited(exported, tmp_path, **cells))
    assert result.exit_code == UNUSABLE, result.output
    assert words in " ".join(result.output.split())


def test_two_answers_for_a_row_must_agree(exported: Exported, tmp_path: Path) -> None:
    rows = [{**exported.csv[0], "answer": answer} for answer in ("red", "blue", "blue")]
    path = write(tmp_path / "twice.csv", {name: [row[name] for row in rows] for name in rows[0]})
    result = call("table", exported.data, "-t", "colour", "-q", "--import", path)
    assert result.exit_code == UNUSABLE
    assert "got 'red' and 'blue'. Keep one." in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.csv", "row,label,answer\n3,red,\n", "expected answers in a.csv, got none in 1 rows"),
        ("a.csv", "row,colour\n3,red\n", "got none named label, answer"),
        ("none.csv", None, "which does not exist"),
    ],
)
def test_files_that_hold_no_answers_are_refused(
    name: str, text: str | None, words: str, exported: Exported, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    result = call("table", exported.data, "-t", "colour", "-q", "--import", tmp_path / name)
    assert result.exit_code == UNUSABLE, result.output
    assert words in " ".join(result.output.split())


def test_files_that_are_read_are_not_overwritten(exported: Exported, tmp_path: Path) -> None:
    answers = edited(exported, tmp_path)
    for options in (("--export", exported.data), ("--import", answers, "--export", answers)):
        result = call("table", exported.data, "-t", "colour", "-q", *options)
        assert result.exit_code == UNUSABLE
        assert "different files to read and to write" in " ".join(result.output.split())


def test_a_corrected_table_needs_answers_and_all_rows(exported: Exported, tmp_path: Path) -> None:
    options = ("-t", "colour", "-q", "--rows", str(ROWS - 1), "--corrected", tmp_path / "clean.csv")
    row = next(row for row in exported.rows if row["colour"] and row["row"] != "300")
    answer = write(tmp_path / "a.csv", {"row": [row["row"]], "label": [row["colour"]], "answer": ["red"]})
    for more, words in (((), "--import with the answers"), (("--import", answer), "Pass --rows 0")):
        result = call("table", exported.data, *options, *more)
        assert result.exit_code == UNUSABLE
        assert words in " ".join(result.output.split())
        assert not (tmp_path / "clean.csv").exists()


def test_numbers_go_out_and_come_back(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    x = generator.uniform(-1, 1, 150)
    truth = 100 * x + generator.normal(size=150)
    wrong = generator.choice(150, 6, replace=False)
    given = truth.copy()
    given[wrong] += 150
    texts = [f"{value:.2f}".replace(".", ",") for value in given]  # a decimal comma
    data = write(tmp_path / "amounts.csv", {"x": x.round(4), "y": texts})
    run(data, "--export", tmp_path / "todo.csv", target="y")
    todo = read(tmp_path / "todo.csv")
    right = [round(truth[int(row["row"]) - 1], 2) for row in todo]
    assert {int(row["row"]) - 1 for row in todo} >= set(wrong.tolist())
    assert all("." not in row["suggested"] for row in todo)  # copied as an answer, 1.234 would be 1234
    suggested = [float(row["suggested"].replace(",", ".")) for row in todo]
    assert all(abs(one - value) < 60 for one, value in zip(suggested, right, strict=True))
    path = answered(todo, [f"{value:.2f}".replace(".", ",") for value in right], tmp_path / "answers.csv")
    found = run(data, "--import", path, target="y")["import"]
    assert set((wrong + 1).tolist()) <= set(found["changed"])
    for name in ("RMSE", "mean std"):
        assert found["compared"][name]["after"] < found["compared"][name]["before"]
    assert found["compared"]["labels contradicted, all rows"]["before"] >= len(wrong)
    rows = read(tmp_path / "rows.csv")
    assert float(rows[wrong[0]]["y"].replace(",", ".")) == pytest.approx(truth[wrong[0]], abs=0.01)


@pytest.mark.parametrize(
    ("encoding", "mark", "end"), [("cp1252", "", "\r\n"), ("utf-8", '"', "\n"), ("utf-16-le", "", "\r\n")]
)
def test_a_corrected_table_is_written_as_it_was_read(encoding: str, mark: str, end: str, tmp_path: Path) -> None:
    """Semicolons, decimal commas, quotes, spaces, an empty line: only the cells with answers change."""
    generator = np.random.default_rng(2)
    area = generator.uniform(30, 200, 120)
    prices = [f"{mark}{value:.2f}{mark}".replace(".", ",") for value in 10 * area + generator.normal(size=120)]
    prices[3], prices[7], prices[8] = "", " 2.000,50", "9999,00"
    cells = [
        f'Köln; {one:.1f};{price};"Haus; {row}"' for row, (one, price) in enumerate(zip(area, prices, strict=True))
    ]
    bom = "" if encoding == "cp1252" else "\ufeff"
    lines = [f"{bom}Ort;{mark}Fläche{mark};Preis;Bemerkung", *(line.replace(".", ",", 1) for line in cells[:50]), ""]
    lines += [line.replace(".", ",", 1) for line in cells[50:]]
    data = tmp_path / "haus.csv"
    data.write_bytes(end.join([*lines, ""]).encode(encoding))
    rows = {"4": "1234.5", "8": "2000,5", "9": "1.111,00", "60": prices[59].strip('"')}
    labels = ["", "2000,50", "9999", prices[59].strip('"')]
    answers = write(tmp_path / "a.csv", {"row": rows.keys(), "label": labels, "answer": rows.values()})
    found = run(data, "--import", answers, "--corrected", tmp_path / "clean.csv", target="Preis")
    assert (found["import"]["changed"], found["import"]["labelled"], found["import"]["confirmed"]) == (
        [9],
        [4],
        [8, 60],
    )
    assert found["rows"]["unlabelled"] == 0
    assert not [note for note in found["notes"] if "without a value" in note]
    lines[4] = lines[4].replace(";;", ";1234,5;")  # as the column spells numbers
    lines[9] = lines[9].replace("9999,00", "1.111,00")
    assert (tmp_path / "clean.csv").read_bytes().decode(encoding) == end.join([*lines, ""])
