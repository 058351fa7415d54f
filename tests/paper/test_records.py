"""Records: nothing is lost, nothing is computed twice, and a run says what made it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from whence_paper.records import Record


def test_a_run_is_found_again_by_its_configuration_and_by_nothing_else(tmp_path):
    record = Record(tmp_path / "sums.json", "sums")
    record.once({"seed": 1, "sizes": (2, 3)}, lambda: {"sum": 5})
    again = Record(tmp_path / "sums.json", "sums")
    assert again.find({"seed": 1, "sizes": [2, 3]}).results == {"sum": 5}
    assert again.find({"seed": 2, "sizes": [2, 3]}) is None
    assert again.find({"seed": 1}) is None


def test_an_interrupted_experiment_goes_on_where_it_stopped(tmp_path):
    path, done = tmp_path / "steps.json", []

    def experiment(stop_at: int | None) -> None:
        record = Record(path, "steps")
        for seed in range(4):
            if seed == stop_at:
                raise KeyboardInterrupt
            record.once({"seed": seed}, lambda seed=seed: done.append(seed) or {"value": seed})

    with pytest.raises(KeyboardInterrupt):
        experiment(stop_at=2)
    assert [run.results["value"] for run in Record(path, "steps").runs()] == [0, 1]
    experiment(stop_at=None)
    assert done == [0, 1, 2, 3]


def test_a_run_says_when_and_with_what_it_was_made(tmp_path, monkeypatch):
    record = Record(tmp_path / "one.json", "one", "whence reproduce one")
    monkeypatch.setenv("WHENCE_COMMIT", "abc1234")
    run = record.add({"seed": 0}, {"value": 1.5}, seconds=2.345)
    content = json.loads(record.path.read_text())
    around = content["surroundings"][run.made["with"]]
    assert run.made["seconds"] == 2.35 or run.made["seconds"] == 2.34
    assert around["commit"] == "abc1234"
    assert around["command"] == "whence reproduce one"
    assert {"whence", "torch", "numpy", "python"} == set(around["versions"])


def test_a_run_made_again_takes_the_place_of_the_old_one(tmp_path):
    record = Record(tmp_path / "one.json", "one")
    record.add({"seed": 0}, {"value": 1}, 0.1)
    record.add({"seed": 0}, {"value": 2}, 0.1)
    assert [run.results["value"] for run in record.runs(seed=0)] == [2]


def test_runs_of_another_machine_are_put_beside_with_what_made_them(tmp_path, monkeypatch):
    here, there = (Record(tmp_path / name / "one.json", "one") for name in ("here", "there"))
    for record, commit in ((here, "aaa"), (there, "bbb")):
        monkeypatch.setenv("WHENCE_COMMIT", commit)
        record.add({"seed": 0}, {"value": commit}, 0.1)
    there.add({"seed": 1}, {"value": "other"}, 0.1)
    here.merge(there.path)
    assert [run.results["value"] for run in here.runs()] == ["bbb", "other"]
    content = json.loads(here.path.read_text())
    assert [around["commit"] for around in content["surroundings"].values()] == ["bbb"]
    with pytest.raises(SystemExit, match="expected a record of two"):
        Record(tmp_path / "two.json", "two").merge(there.path)


def test_numbers_that_are_none_are_no_results(tmp_path):
    with pytest.raises(ValueError, match="Out of range float"):
        Record(tmp_path / "one.json", "one").add({"seed": 0}, {"value": float("nan")}, 0.1)


def test_a_file_that_is_no_record_is_not_written_over(tmp_path):
    path = tmp_path / "one.json"
    path.write_text('{"other": 1}')
    with pytest.raises(SystemExit, match="expected a record"):
        Record(path, "one").add({"seed": 0}, {"value": 1}, 0.1)
    path.write_text('{"runs": [')
    with pytest.raises(SystemExit, match="expected a record in JSON"):
        Record(path, "one").runs()


def test_several_processes_add_to_one_file(tmp_path):
    path = tmp_path / "many.json"
    add = "import sys; from pathlib import Path; from whence_paper.records import Record\n"
    add += "Record(Path(sys.argv[1]), 'many').add({'seed': int(sys.argv[2])}, {'value': int(sys.argv[2])}, 0.0)"
    workers = [subprocess.Popen([sys.executable, "-c", add, str(path), str(seed)]) for seed in range(4)]
    assert [worker.wait(120) for worker in workers] == [0] * 4
    assert sorted(run.results["value"] for run in Record(path, "many").runs()) == [0, 1, 2, 3]
    assert [file.name for file in tmp_path.iterdir()] == ["many.json"]
