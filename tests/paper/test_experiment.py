"""The frame of an experiment: options, record, drawing again, and the failure of a quick run whose finding is lost."""

from __future__ import annotations

import pytest

from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record

COMPUTED: list[int] = []


def compute(settings: Settings, record: Record) -> None:
    for seed in settings.seeds:
        record.once({"seed": seed}, lambda seed=seed: COMPUTED.append(seed) or {"value": seed + settings.add})


def show(settings: Settings, record: Record) -> list:
    path = settings.out / "table.txt"
    path.write_text(" ".join(str(run.results["value"]) for run in record.runs()))
    return [path]


def check(settings: Settings, record: Record) -> list[str]:
    return [f"{run.results['value']} is over 10" for run in record.runs() if run.results["value"] > 10]


ADDING = Experiment(
    "adding", "Adds.", compute, show, check, lambda parser: parser.add_argument("--add", type=int, default=1)
)


@pytest.fixture(autouse=True)
def _forget():
    COMPUTED.clear()


def test_runs_are_made_shown_and_kept(tmp_path, capsys):
    record = ADDING.main(["--out", str(tmp_path), "--seeds", "3", "--add", "2"])
    assert [run.results["value"] for run in record.runs()] == [2, 3, 4]
    assert (tmp_path / "table.txt").read_text() == "2 3 4"
    assert "table.txt" in capsys.readouterr().out
    ADDING.main(["--out", str(tmp_path), "--seeds", "4", "--add", "2"])
    assert COMPUTED == [0, 1, 2, 3]


def test_drawing_again_computes_nothing(tmp_path):
    with pytest.raises(SystemExit, match="expected a record at"):
        ADDING.main(["--out", str(tmp_path), "--redraw"])
    ADDING.main(["--out", str(tmp_path), "--seeds", "1"])
    (tmp_path / "table.txt").unlink()
    COMPUTED.clear()
    ADDING.main(["--out", str(tmp_path), "--redraw"])
    assert (tmp_path / "table.txt").read_text() == "1"
    assert COMPUTED == []


def test_a_quick_run_fails_where_a_finding_is_lost(tmp_path, capsys):
    ADDING.main(["--out", str(tmp_path), "--quick"])
    assert (tmp_path / "adding-quick.json").exists()
    with pytest.raises(SystemExit) as end:
        ADDING.main(["--out", str(tmp_path), "--quick", "--first-seed", "20"])
    assert end.value.code == 1
    assert "21 is over 10" in capsys.readouterr().out


def test_a_full_run_tells_and_does_not_fail(tmp_path, capsys):
    ADDING.main(["--out", str(tmp_path), "--seeds", "1", "--first-seed", "20"])
    assert "not as in the paper: 21 is over 10" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--seeds", "0"], "--seeds of at least 1"),
        (["--data", "nowhere"], "--data to be a folder"),
        (["--device", "abacus"], "--device to be cpu or cuda"),
    ],
)
def test_wrong_options_are_told(arguments, words, capsys):
    with pytest.raises(SystemExit):
        ADDING.main(arguments)
    assert words in capsys.readouterr().err
