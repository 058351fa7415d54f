"""Many studies at once: deadlines, what is packed, merged records; and replaced labels of images, in small."""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def given(folder: Path, deadline: float) -> argparse.Namespace:
    work = folder / "work"
    work.mkdir()
    named = {"data": folder, "device": "cpu", "work": work, "out": folder / "out", "tiny": False}
    return argparse.Namespace(**named, at_once=2, cores=2, deadline=deadline)


def test_studies_until_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.gpu_studies import Study

    from benchmarks import gpu_studies

    programs = {
        "quick": "print('found it')",
        "broken": "raise SystemExit(3)",
        "endless": "import time; time.sleep(60)",
        "long": "print('never')",
    }
    monkeypatch.setattr(gpu_studies, "command", lambda study, given: [sys.executable, "-c", programs[study.name]])
    studies = [Study(name, "", (), 100.0 if name == "long" else 0.0) for name in programs]
    done, left = gpu_studies.run(studies, given(tmp_path, deadline=3.0))
    assert {one.study.name: one.ended for one in done} == {
        "quick": "done",
        "broken": "failed (3)",
        "endless": "stopped",
    }
    assert [study.name for study in left] == ["long"]
    assert next(one for one in done if one.study.name == "quick").last() == "found it"
    with tarfile.open(tmp_path / "out" / "studies.tar.gz") as archive:
        assert "studies/quick.log" in archive.getnames()


def test_commands_name_their_records(tmp_path: Path) -> None:
    from benchmarks.gpu_studies import STUDIES, command

    settings = given(tmp_path, 1.0)
    lines = {study.name: command(study, settings) for group in STUDIES.values() for study in group}
    assert len(lines) == sum(map(len, STUDIES.values()))  # names differ
    assert str(settings.work / "people-worst-341.json") in lines["people-worst-341"]
    assert str(settings.work / "disentanglement") in lines["disentanglement-3"]
    assert lines["people-worst-341"][-2:] == ["--memory", "55"]  # half of the GPU's, with two at once
    assert "--memory" not in lines["datamodeling"]


def test_merged_records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import merge_records
    from whence_paper.records import Record

    for seed in (0, 1):
        made = {"when": "2026-11-17", "processor": "a CPU", "threads": 1, "torch": "2.13", "commit": f"abc{seed}"}
        content = {**made, "command": f"run {seed}", "rows": [{"case": "a", "seed": seed}]}
        (tmp_path / f"{seed}.json").write_text(json.dumps(content))
        Record(tmp_path / f"paper-{seed}.json", "doubling").once({"seed": seed}, lambda: {"twice": 2})
    for kind in ("", "paper-"):
        files = [str(tmp_path / f"{kind}{name}.json") for name in ("all", 0, 1)]
        monkeypatch.setattr(sys, "argv", ["merge_records.py", *files])
        merge_records.main()
    rows = json.loads((tmp_path / "all.json").read_text())
    assert ([row["seed"] for row in rows["rows"]], rows["commands"]) == ([0, 1], ["run 0", "run 1"])
    assert [one[-5:] for one in rows["origins"]] == ["abc0.", "abc1."]  # where each part was measured
    assert len(Record(tmp_path / "paper-all.json", "doubling").runs()) == 2


def test_replaced_labels_of_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks.data import random_images

    from benchmarks import label_errors_images

    monkeypatch.setattr(label_errors_images, "read_cifar", lambda folder, most: random_images(80, 20, (3, 32, 32)))
    out = tmp_path / "found.json"
    told = ["--data", str(tmp_path), "--tiny", "--n", "60", "--epochs", "2", "--structures", "sketch:size=16"]
    monkeypatch.setattr(sys, "argv", ["label_errors_images.py", *told, "--seeds", "200", "--out", str(out)])
    label_errors_images.main()
    (row,) = json.loads(out.read_text())["rows"]
    wanted = {"whence sketch:size=16", "loss, in-sample", "loss, cross-validated", "labels of 50 neighbours"}
    assert wanted <= row["auroc"].keys()
    assert all(0 <= area <= 1 for area in row["auroc"].values())


def test_the_plain_loop_stands_in(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.training import fault, or_else

    good, bad = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        good.weight.copy_(torch.eye(2))
        good.bias.zero_()
        bad.weight.copy_(-torch.eye(2))
        bad.bias.zero_()
    inputs, answers = torch.eye(2), torch.arange(2)

    def judge(network: nn.Module) -> str | None:
        return fault(network, inputs, answers, steps=5000)

    assert or_else(lambda: good, lambda: bad, judge) is good
    assert not capsys.readouterr().out
    assert or_else(lambda: bad, lambda: good, judge) is good
    assert "accuracy 0.000, below 0.4" in capsys.readouterr().out

    def breaks() -> nn.Module:
        raise RuntimeError("no capture")

    assert or_else(breaks, lambda: good, judge) is good
    assert "RuntimeError: no capture" in capsys.readouterr().out
    bad.weight.data.fill_(torch.nan)
    assert fault(bad, inputs, answers, steps=10) == "weights are not finite"
    assert fault(good, inputs[:0], answers[:0], steps=5000) is None


def test_batches_of_images_are_decoded_once(tmp_path: Path) -> None:
    from benchmarks.data import decode, read_cifar

    home = tmp_path / "cifar-10"
    home.mkdir()
    draw = torch.Generator().manual_seed(0)
    for name in ("data_batch_1", "test_batch"):
        coded = torch.randint(256, (4, 3, 32, 32), generator=draw, dtype=torch.uint8).numpy()
        (home / f"{name}.res.xz").write_bytes(lzma.compress(coded.tobytes()))
    np.save(home / "labels.npy", np.arange(50_004) % 10)
    before = read_cifar(tmp_path)
    assert decode(tmp_path) == ["data_batch_1.res.xz", "test_batch.res.xz"]
    assert decode(tmp_path) == []
    after = read_cifar(tmp_path)
    assert torch.equal(before.inputs, after.inputs)
    assert torch.equal(before.test_inputs, after.test_inputs)
