"""`whence table` and what can be done with a table that it saved, as a user would."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from safetensors import safe_open

from command_line import call, houses, read, write
from whence.cli.console import UNUSABLE
from whence.trust.checks import MEANING


class Run(NamedTuple):
    folder: Path
    content: dict[str, Any]
    rows: list[dict[str, str]]


@pytest.fixture(scope="module")
def regression(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("regression")
    columns = houses()
    columns["price"][7] = ""  # to be predicted only
    data = write(folder / "houses.csv", columns)
    files = ("--out", folder / "report.html", "--csv", folder / "rows.csv", "--save", folder / "saved")
    result = call("table", data, "-t", "price", "--model", "network", "--width", "6", "--json", "--quiet", *files)
    assert result.exit_code == 0, result.output
    return Run(folder, json.loads(result.stdout), read(folder / "rows.csv"))


@pytest.fixture(scope="module")
def classification(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("classification")
    generator = np.random.default_rng(1)
    x = generator.uniform(-1, 1, (90, 2))
    kind = np.where(x[:, 0] > 0.3, "red", np.where(x[:, 1] > 0, "green", "blue"))
    data = write(folder / "colours.csv", {"a": x[:, 0], "b": x[:, 1], "colour": kind})
    result = call(
        "table", data, "-t", "colour", "--model", "network", "--width", "4", "--json", "-q", "--no-report",
        "--csv", folder / "rows.csv", "--save", folder / "saved",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    return Run(folder, json.loads(result.stdout), read(folder / "rows.csv"))


SMALL_NETWORK = ("--model", "network", "--width", "4", "-q", "--json", "--no-report")


def test_columns_are_told_apart(regression: Run) -> None:
    content = regression.content
    assert {one["name"]: one["kind"] for one in content["columns"]} == {
        "area": "number",
        "town": "category",
        "rooms": "number",
        "built": "date",
        "mixed": "category",
    }
    assert {one["name"]: one["reason"] for one in content["left_out"]} == {
        "house_id": "a different text in nearly every row (119)",
        "country": "the same value in all rows ('DE')",
    }
    notes = " ".join(content["notes"])
    assert "'mixed' mixes numbers" in notes
    assert content["rows"]["unlabelled"] == 1
    assert content["target"]["task"] == "regression"


def test_columns_are_listed_without_a_target(tmp_path: Path) -> None:
    columns = houses()
    columns["price"][3] = ""
    data = write(tmp_path / "my houses.csv", columns)
    result = call("table", data, "--json", "-q")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    listed = {one["name"]: one for one in content["columns"]}
    assert list(listed) == list(columns)
    town = {"name": "town", "used_as": "category", "missing": 0, "example": columns["town"][0]}
    assert listed["town"] == {**town, "as_target": "2 classes"}
    price = {"name": "price", "used_as": "number", "missing": 1, "example": columns["price"][0]}
    assert listed["price"] == {**price, "as_target": "amounts"}
    assert listed["built"]["used_as"] == "date"
    assert listed["country"]["used_as"] == "left out: the same value in all rows ('DE')"
    assert listed["house_id"]["as_target"] is None
    assert content["next"] == f"whence table '{data}' --target price"
    words = " ".join(call("table", data, "-q").stdout.split())
    assert "column used as missing such as as the target" in words
    assert "rooms number" in words
    assert [path.name for path in tmp_path.iterdir()] == ["my houses.csv"]  # nothing is written


def test_the_report_shows_dates_as_dates(regression: Run) -> None:
    page = (regression.folder / "report.html").read_text(encoding="utf-8")
    assert re.search(r"\b(199|20[01])\d-0\d-15\b", page)
    assert not re.search(r"\b(199|20[01])\d0\d15\b", page)


def test_every_row_has_a_line(regression: Run) -> None:
    rows = regression.rows
    assert [int(row["row"]) for row in rows] == list(range(1, 151))
    assert rows[0]["house_id"] == "H00000"
    assert {row["verdict"] for row in rows} <= {"confident", "noisy labels nearby", "scarce data", "both"}
    for row in rows:
        assert float(row["ratio"]) == pytest.approx(float(row["hec3"]) / float(row["ho"]), rel=1e-4)
        assert float(row["lower"]) < float(row["prediction"]) < float(row["upper"])
    parts = [row["part"] for row in rows]
    assert parts[7] == "no target"
    assert parts.count("held out") == regression.content["rows"]["test"] == 30
    assert all(bool(row["suspicion"]) == (row["part"] != "no target") for row in rows)
    for row in rows:
        if row["suspicion"]:  # held-out rows on the scale of training rows
            off = abs(float(row["price"]) - float(row["suggested"])) / float(row["suggested_std"])
            assert float(row["suspicion"]) == pytest.approx(off, rel=1e-3, abs=1e-3)


def test_scores_are_those_of_the_held_out_lines(regression: Run) -> None:
    tested = [row for row in regression.rows if row["part"] == "held out"]
    price, predicted = (np.array([float(row[name]) for row in tested]) for name in ("price", "prediction"))
    inside = [float(row["lower"]) <= float(row["price"]) <= float(row["upper"]) for row in tested]
    scores = {name: one["value"] for name, one in regression.content["scores"].items()}
    assert scores["R2"] == pytest.approx(
        1 - ((price - predicted) ** 2).sum() / ((price - price.mean()) ** 2).sum(), abs=1e-4
    )
    assert scores["coverage"] == pytest.approx(np.mean(inside))
    assert scores["R2"] > 0.7
    assert scores["coverage"] > 0.8


def test_report_and_rows_show_the_same_interval(regression: Run) -> None:
    page = (regression.folder / "report.html").read_text(encoding="utf-8")
    data = json.loads(re.search(r'<script[^>]*id="data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    mean, half = (np.frombuffer(base64.b64decode(data["arrays"][name]), "<f4") for name in ("mean", "wide"))
    tested = [row for part in ("held out", "no target") for row in regression.rows if row["part"] == part]
    lower, upper = (np.array([float(row[name]) for row in tested]) for name in ("lower", "upper"))
    np.testing.assert_allclose(mean - half, lower, rtol=1e-4)
    np.testing.assert_allclose(mean + half, upper, rtol=1e-4)
    coverage = regression.content["scores"]["coverage"]["value"]
    assert f"Ranges that promise 95 % hold {100 * coverage:.1f}\xa0% of the observed values" in page


def test_a_column_of_huge_numbers_is_used_like_any_other(tmp_path: Path) -> None:
    generator = np.random.default_rng(3)
    x = generator.normal(size=60)
    scores = []
    for unit in (1.0, 1e90):
        data = write(tmp_path / "huge.csv", {"x": x * unit, "y": x + 0.1 * np.sin(100 * x)})
        result = call("table", data, "-t", "y", *SMALL_NETWORK, "--csv", tmp_path / "r")
        assert result.exit_code == 0, result.output
        scores.append(json.loads(result.stdout)["scores"]["R2"]["value"])
    assert scores[0] > 0.9
    assert scores[1] == pytest.approx(scores[0], abs=0.02)


def test_a_single_huge_number_is_noted(tmp_path: Path) -> None:
    x = np.random.default_rng(3).normal(size=60)
    data = write(tmp_path / "huge.csv", {"x": [*x[:1], 1e200, *x[2:]], "y": x})
    result = call("table", data, "-t", "y", *SMALL_NETWORK, "--csv", tmp_path / "r.csv")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert "'x' holds text in 1 of" in content["notes"][0]  # it cannot be squared
    assert "(such as '1e+200'); treated as missing numbers" in content["notes"][0]
    assert content["scores"]["R2"]["value"] > 0.9


def test_a_large_mean_of_the_target_costs_no_digits(tmp_path: Path) -> None:
    x = np.random.default_rng(3).normal(size=60)
    data = write(tmp_path / "far.csv", {"x": x, "y": [f"{1e9 + value:.6f}" for value in x]})
    result = call("table", data, "-t", "y", *SMALL_NETWORK, "--csv", tmp_path / "r.csv")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["scores"]["R2"]["value"] > 0.9
    assert "'y' varies little" in content["notes"][0]


def test_noise_is_found_where_it_is(regression: Run) -> None:
    towns = houses()["town"]
    ratio = np.array([float(row["ratio"]) for row in regression.rows])
    assert np.median(ratio[towns == "loud"]) > 1.5 * np.median(ratio[towns == "quiet"])
    # more than half of all rows are in the loud town, so that its noise is not far above the average
    noise = np.array([float(row["noise"]) for row in regression.rows])
    assert np.median(noise[towns == "loud"]) > 1.3 * np.median(noise[towns == "quiet"])


def test_named_rows_are_training_rows(regression: Run) -> None:
    trained = {row["row"] for row in regression.rows if row["part"] == "train"}
    named = {number for row in regression.rows for number in (row["check"] + " " + row["near"]).split()}
    assert named <= trained
    assert len(named) > 10


def test_report_is_there_and_names_the_target(regression: Run) -> None:
    text = (regression.folder / "report.html").read_text(encoding="utf-8")
    assert "price: how uncertain are predictions" in text


def test_saved_table_predicts_the_same(regression: Run, tmp_path: Path) -> None:
    columns = houses()
    del columns["price"], columns["country"]
    data = write(tmp_path / "new.csv", columns)
    result = call("predict", regression.folder / "saved", data, "--json", "-q")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["rows"]
    for name in ("prediction", "ho", "hec3", "noise_p"):
        ours, theirs = ([float(row[name]) for row in rows] for rows in (found, regression.rows))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
    assert [row["check"] for row in found] == [row["check"] for row in regression.rows]


def test_new_rows_with_strange_values_are_noted(regression: Run, tmp_path: Path) -> None:
    columns = {name: list(values[:3]) for name, values in houses().items()}
    columns["town"][0], columns["area"][1] = "elsewhere", "large"
    csv_file = tmp_path / "out.csv"
    result = call("predict", regression.folder / "saved", write(tmp_path / "new.csv", columns), "-q", "--csv", csv_file)
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "'town' holds a category that was not in the training data in 1 of 3 rows, such as 'elsewhere'" in words
    assert "'area' holds text that is not a number in 1 of 3 rows, such as 'large'" in words
    assert len(read(csv_file)) == 3


def test_missing_column_in_new_rows_is_named(regression: Run, tmp_path: Path) -> None:
    columns = houses(5)
    del columns["area"]
    result = call("predict", regression.folder / "saved", write(tmp_path / "new.csv", columns), "-q")
    assert result.exit_code == UNUSABLE
    assert "got none named 'area'" in result.output


def test_explain_names_shares_of_training_rows(regression: Run, tmp_path: Path) -> None:
    data = regression.folder / "houses.csv"
    result = call("explain", regression.folder / "saved", data, "--row", "3", "--top", "4", "--json", "-q")
    assert result.exit_code == 0, result.output
    (content,) = json.loads(result.stdout)
    line = regression.rows[2]
    assert content["row"] == 3
    assert content["verdict"] == line["verdict"]
    trained = {row["row"] for row in regression.rows if row["part"] == "train"}
    assert {str(cause["training_row"]) for cause in content["causes"]} <= trained
    for name in ("prediction", "lower", "upper", "std"):
        assert content[name] == pytest.approx(float(line[name]), rel=1e-4)
    prices = {row["row"]: row for row in regression.rows}
    for cause in content["causes"]:
        row = prices[str(cause["training_row"])]
        assert cause["label"] == float(row["price"])
        assert cause["prediction_without_it"] == pytest.approx(float(row["suggested"]), rel=1e-4)
    shares = [cause["share_of_hec3"] for cause in content["causes"]]
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) < 1
    assert "row 3:" in call("explain", regression.folder / "saved", data, "-r", "3", "-q").stdout
    assert "from 1 to 150" in call("explain", regression.folder / "saved", data, "-r", "999", "-q").output


def test_rows_left_out_are_predicted_as_by_the_training_frame(classification: Run, tmp_path: Path) -> None:
    saved, data = classification.folder / "saved", classification.folder / "colours.csv"
    (content,) = json.loads(call("explain", saved, data, "--row", "3", "--top", "90", "--json", "-q").stdout)
    suggested = {row["row"]: (row["suggested"], float(row["suggested_probability"])) for row in classification.rows}
    agreeing = [one for one in content["causes"] if suggested[str(one["training_row"])][0] == one["label"]]
    assert len(agreeing) > 20
    for one in agreeing:
        assert one["probability_without_it"] == pytest.approx(suggested[str(one["training_row"])][1], abs=1e-4)
    assert content["prediction"] == classification.rows[2]["prediction"]
    assert content["probability"] == pytest.approx(float(classification.rows[2]["probability"]), rel=1e-4)


def test_a_row_without_any_value_is_to_be_checked(regression: Run, tmp_path: Path) -> None:
    cells = dict(read(regression.folder / "houses.csv")[0])
    rows = {name: [value, ""] for name, value in cells.items()}
    new = write(tmp_path / "new.csv", {**rows, "other": ["1", "1"]})  # a line of commas alone is skipped by readers
    result = call("predict", regression.folder / "saved", new, "--json", "-q")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)["rows"]
    assert [row["verdict"] for row in found][1] == "check the input"


def test_report_of_a_saved_table(regression: Run, tmp_path: Path) -> None:
    out = tmp_path / "new.html"
    result = call(
        "report", regression.folder / "saved", regression.folder / "houses.csv", "--rows", "30", "-o", out, "-q"
    )
    assert result.exit_code == 0, result.output
    assert "row " in out.read_text(encoding="utf-8")


def test_saved_file_holds_no_code(regression: Run) -> None:
    with safe_open(regression.folder / "saved", "pt") as file:  # numbers and text, by its format
        assert {"attached.training.inputs", "attached.usual.area"} <= set(file.keys())
        assert json.loads(file.metadata()["whence"])["manifest"]["attached"]["table"]["target"]["name"] == "price"


@pytest.mark.parametrize("how", ["cut", "changed", "gone", "folder", "other"])
def test_damaged_saved_table_is_told(how: str, regression: Run, tmp_path: Path) -> None:
    path, content = tmp_path / "saved", (regression.folder / "saved").read_bytes()
    if how == "folder":
        path.mkdir()
    elif how != "gone":
        changed = content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]
        path.write_bytes({"cut": content[: len(content) // 2], "changed": changed, "other": b"a,b\n1,2\n"}[how])
    result = call("predict", path, regression.folder / "houses.csv", "-q")
    assert result.exit_code == UNUSABLE, result.output
    assert "Traceback" not in result.output
    assert "tracer" not in result.output


def test_classes(classification: Run) -> None:
    content = classification.content
    assert content["target"]["classes"] == ["blue", "green", "red"]
    tested = [row for row in classification.rows if row["part"] == "held out"]
    right = np.mean([row["colour"] == row["prediction"] for row in tested])
    assert content["scores"]["accuracy"]["value"] == pytest.approx(right)
    assert right > 0.8
    assert all(1 / 3 <= float(row["probability"]) <= 1 for row in classification.rows)
    assert content["files"]["report"] is None
    result = call("explain", classification.folder / "saved", classification.folder / "colours.csv", "-r", "1", "-q")
    assert result.exit_code == 0, result.output
    assert "probability" in result.stdout


def test_training_rows_in_a_report_do_not_vote_about_themselves(classification: Run, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    result = call("report", classification.folder / "saved", classification.folder / "colours.csv", "-o", path, "-q")
    assert result.exit_code == 0, result.output
    found = re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    noise = np.frombuffer(base64.b64decode(json.loads(found[1])["arrays"]["noise"]), "<f4")
    np.testing.assert_allclose(noise, [float(row["noise"]) for row in classification.rows], rtol=1e-3, atol=1e-6)


def test_what_a_person_sees(tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    x = generator.normal(size=60)
    data = write(tmp_path / "two.csv", {"x": x, "y": np.where(x + 0.3 * generator.normal(size=60) > 0, "yes", "no")})
    result = call(
        "table", data, "-t", "y", "--width", "4", "-q", "-o", tmp_path / "r.html", "--csv", tmp_path / "r.csv"
    )
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for wanted in (
        "chosen by 48 validation rows",
        "chosen for its smaller log loss on 48 validation rows: network ",
        "60 rows (48 to train on, 12 held out); columns used: 1 number",
        "y: classification, 2 classes",
        "rows, never trained on",
    ):
        assert wanted in words
    for wanted in ("accuracy", "AUROC", "Verdicts on the held-out rows", "Labels to check first", "r.html"):
        assert wanted in words
    assert any(f"Trust {level}: {meaning}" in words for level, meaning in MEANING.items())
    assert "tracer" not in words
    assert max(len(line) for line in result.stdout.splitlines() if str(tmp_path) not in line) <= 80
    assert [line for line in result.stdout.splitlines() if line != line.rstrip()] == []
    page = " ".join((tmp_path / "r.html").read_text(encoding="utf-8").split())
    assert "chosen for its smaller log loss on 48 validation rows: network " in page


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("trees")
    data = write(folder / "houses.csv", houses())
    files = ("--out", folder / "report.html", "--csv", folder / "rows.csv", "--save", folder / "saved")
    result = call("table", data, "-t", "price", "--model", "trees", "--json", "--quiet", *files)
    assert result.exit_code == 0, result.output
    return Run(folder, json.loads(result.stdout), read(folder / "rows.csv"))


def test_trees_are_said_with_their_score(trees: Run) -> None:
    model = trees.content["model"]
    assert model["kind"] == "trees"
    assert model["validation"]["score"] == "RMSE"
    assert list(model["validation"]) == ["score", "trees"]
    assert model["leaves"] >= model["trees"] > 0
    tested = [row for row in trees.rows if row["part"] == "held out"]
    inside = [float(row["lower"]) <= float(row["price"]) <= float(row["upper"]) for row in tested]
    assert trees.content["scores"]["coverage"]["value"] == pytest.approx(np.mean(inside))
    assert trees.content["scores"]["R2"]["value"] > 0.5


def test_saved_trees_predict_the_same(trees: Run, tmp_path: Path) -> None:
    out = tmp_path / "again.csv"
    result = call("predict", trees.folder / "saved", trees.folder / "houses.csv", "--csv", out, "-q")
    assert result.exit_code == 0, result.output
    for before, after in zip(trees.rows, read(out), strict=True):
        for name in ("prediction", "lower", "upper", "ho", "hec3", "noise", "scarcity"):
            assert float(after[name]) == pytest.approx(float(before[name]), rel=1e-5)
        assert after["verdict"] == before["verdict"]
    result = call("explain", trees.folder / "saved", trees.folder / "houses.csv", "-r", "3", "-q")
    assert result.exit_code == 0, result.output
    assert "with 95 % confidence" in result.stdout


@pytest.mark.parametrize("kind", ["regression", "trees"])
def test_saved_tables_know_inputs_that_cannot_be(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    saved = request.getfixturevalue(kind).folder / "saved"
    columns = {name: list(values[:3]) for name, values in houses().items()}
    columns["area"][1] = "90000"
    data, out, page = write(tmp_path / "new.csv", columns), tmp_path / "out.csv", tmp_path / "new.html"
    assert call("predict", saved, data, "--csv", out, "-q").exit_code == 0
    assert [row["verdict"] == "check the input" for row in read(out)] == [False, True, False]
    (found,) = json.loads(call("explain", saved, data, "-r", "2", "--json", "-q").stdout)
    assert found["verdict"] == "check the input"
    assert "area is 90000, far from every training value" in found["because"]
    assert call("report", saved, data, "-o", page, "-q").exit_code == 0
    assert "area is 90000, far from every training value" in page.read_text(encoding="utf-8")


def strange_rows(tmp_path: Path, **cells: str) -> Path:
    """Five rows, of which the second has other cells."""
    columns = {name: list(values[:5]) for name, values in houses().items()}
    for name, cell in cells.items():
        columns[name][1] = cell
    return write(tmp_path / "new.csv", columns)


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"area": "inf"}, "row 2 cannot be right: area is inf, far from every training value"),
        ({"area": "1e60"}, "row 2 cannot be right: area is 1e+60, far from every training value"),
        ({"rooms": "1e200"}, "row 2 cannot be right: rooms is 1e+200, far from every training value"),
        ({"price": "9e12"}, "row 2 cannot be right: price is 9e+12, far from every training value"),
    ],
)
@pytest.mark.parametrize("kind", ["regression", "trees"])
def test_one_impossible_row_does_not_ruin_the_scores_of_the_others(
    kind: str, cells: dict[str, str], reason: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    saved, data = request.getfixturevalue(kind).folder / "saved", strange_rows(tmp_path, **cells)
    found = json.loads(call("predict", saved, data, "--json", "-q").stdout)
    assert [note for note in found["notes"] if reason in note and note.endswith("; not in the scores")]
    others = {name: [value for at, value in enumerate(values[:5]) if at != 1] for name, values in houses().items()}
    alone = json.loads(call("predict", saved, write(tmp_path / "others.csv", others), "--json", "-q").stdout)
    assert found["scores"] == pytest.approx(alone["scores"], rel=1e-5)  # single precision, in batches of other sizes
    assert call("report", saved, data, "-o", tmp_path / "r.html", "-q").exit_code == 0
    page = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "(4 predictions with a label, 1 without)" in page
    assert reason in page
    del found["rows"][1]
    for one, other in zip(found["rows"], alone["rows"], strict=True):
        assert one["verdict"] == other["verdict"]
        assert one["prediction"] == pytest.approx(other["prediction"], rel=1e-5)


@pytest.mark.parametrize(("cell", "verdict"), [("large", True), ("", True), ("12.5", False)])
@pytest.mark.parametrize("kind", ["regression", "trees"])
def test_a_value_that_every_training_row_has_must_be_there(
    kind: str, cell: str, verdict: bool, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    saved, data = request.getfixturevalue(kind).folder / "saved", strange_rows(tmp_path, area=cell or "?")
    rows = json.loads(call("predict", saved, data, "--json", "-q").stdout)["rows"]
    assert [row["verdict"] == "check the input" for row in rows] == [False, verdict, False, False, False]
    page = tmp_path / "new.html"
    assert call("report", saved, data, "-o", page, "-q").exit_code == 0
    words = "area has no value that can be read; every training row has one"
    assert (words in page.read_text(encoding="utf-8")) == verdict
    rows = json.loads(call("predict", saved, strange_rows(tmp_path, rooms="?"), "--json", "-q").stdout)["rows"]
    assert rows[1]["verdict"] != "check the input"  # training rows lack it, too


def test_targets_that_cannot_be_read_are_noted(regression: Run, tmp_path: Path) -> None:
    data = strange_rows(tmp_path, price="dear")
    found = json.loads(call("predict", regression.folder / "saved", data, "--json", "-q").stdout)
    assert "'price' holds text that is not a number in 1 of 5 rows, such as 'dear'" in found["notes"]


def test_classes_that_are_read_as_no_label_are_noted(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=60)
    columns = {"x": x, "y": np.where(x > 0.5, "None", np.where(x > 0, "mild", "severe"))}
    files = ("--csv", tmp_path / "r.csv", "--save", tmp_path / "s")
    result = call("table", write(tmp_path / "t.csv", columns), "-t", "y", *SMALL_NETWORK, *files)
    assert result.exit_code == 0, result.output
    told = f"'None' in {(x > 0.5).sum()} rows of 'y' was read as no label"
    assert [note for note in json.loads(result.stdout)["notes"] if told in note]
    result = call("predict", tmp_path / "s", tmp_path / "t.csv", "-q", "--csv", tmp_path / "p.csv")
    assert told in " ".join(result.output.split())


def test_report_of_trees(trees: Run, tmp_path: Path) -> None:
    page = (trees.folder / "report.html").read_text(encoding="utf-8")
    coverage = trees.content["scores"]["coverage"]["value"]
    assert f"Ranges that promise 95 % hold {100 * coverage:.1f}\xa0% of the observed values" in page
    out = tmp_path / "again.html"
    result = call("report", trees.folder / "saved", trees.folder / "houses.csv", "--out", out, "-q")
    assert result.exit_code == 0, result.output
    assert out.is_file()


def test_rows_of_a_group_are_held_out_together(tmp_path: Path) -> None:
    columns = houses(120)
    columns["owner_id"] = [f"{number // 4}" for number in range(120)]
    data = write(tmp_path / "owners.csv", columns)
    files = ("--no-report", "--csv", tmp_path / "rows.csv", "--verdicts", "none")
    options = ("-t", "price", "--model", "trees", "-q", "--json")
    result = call("table", data, *options, "--groups", "owner_id", *files)
    assert result.exit_code == 0, result.output
    parts: dict[str, set[str]] = {}
    for number, row in enumerate(read(tmp_path / "rows.csv")):
        parts.setdefault(columns["owner_id"][number], set()).add(row["part"])
    assert all(len(found) == 1 for found in parts.values())
    assert {"train", "held out"} == set.union(*parts.values())
    assert "'owner_id'" in " ".join(json.loads(result.stdout)["notes"])
