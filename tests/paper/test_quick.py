"""Quick versions of the experiments: they run end to end, and fail where a finding of the paper is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from whence_paper.cifar import beyond, table3
from whence_paper.disentanglement import experiment as disentanglement
from whence_paper.images import figure4, grids, label_noise, lambda_sweep, table1, table2
from whence_paper.records import Record


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """One for all, so that networks are trained once."""
    return tmp_path_factory.mktemp("paper")


@pytest.mark.parametrize(
    ("module", "name", "files"),
    [
        (table1, "table1", ["table1-quick.md"]),
        (table2, "table2", ["table2-quick.md"]),
        (figure4, "figure4", ["figure4-quick-mnist-0.png"]),
        (lambda_sweep, "lambda-sweep", ["lambda-sweep-quick.md", "lambda-sweep-quick.png"]),
        (label_noise, "label-noise", ["label-noise-quick.md", "label-noise-quick.png"]),
        (grids, "grids", ["grids-quick-mnist.png"]),
        (table3, "table3", ["table3-quick.md"]),
        (beyond, "beyond", ["beyond-quick.md"]),
        (disentanglement, "disentanglement", ["disentanglement-quick.md"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_quick(module, name, files, folder, monkeypatch):
    module.main(["--quick", "--out", str(folder)])  # leaves by SystemExit where a finding is lost
    record = Record(folder / f"{name}-quick.json", name)
    assert record.runs()
    for file in files:
        path = folder / file
        assert path.stat().st_size > 300
        path.unlink()
    module.main(["--quick", "--redraw", "--out", str(folder)])
    assert all((folder / file).exists() for file in files)


def test_a_lost_finding_fails(folder, tmp_path):
    table1.main(["--quick", "--out", str(folder), "--cases", "mnist", "--seeds", "1"])
    content = json.loads((folder / "table1-quick.json").read_text())
    for run in content["runs"]:
        run["results"]["noisy_auroc"]["HeC3/Ho"] = 0.6
    (tmp_path / "table1-quick.json").write_text(json.dumps(content))
    with pytest.raises(SystemExit) as end:
        table1.main(["--quick", "--redraw", "--out", str(tmp_path)])
    assert end.value.code == 1


def test_methods_that_were_not_run_are_not_shown(tmp_path):
    disentanglement.main(["--quick", "--methods", "whence", "--out", str(tmp_path)])
    page = (tmp_path / "disentanglement-quick.md").read_text()
    assert "whence: noise, scarcity" in page
    assert "ensemble of 5" not in page
    run = Record(tmp_path / "disentanglement-quick.json", "disentanglement").runs()[0]
    assert run.configuration["methods"] == ["whence"]
