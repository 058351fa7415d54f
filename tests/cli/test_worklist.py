"""Labels to check and rows to label: `whence table --export`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from command_line import call, read, write

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


def test_amounts_far_from_what_the_others_suggest(tmp_path: Path) -> None:
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
    assert all(abs(float(row["suggested"]) - value) < 60 for row, value in zip(todo, right, strict=True))
