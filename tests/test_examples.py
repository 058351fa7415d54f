"""The scripts in examples/ run, and print what they promise."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

# The libraries that a script needs, and words that it must print.
SCRIPTS = {
    "sklearn_table": (("sklearn",), ("R2 on the test set", "89 predictions", "labels to check, in this order")),
    "lightning_callback": (("lightning",), ("whence/degrees_of_freedom", "3 predictions, 1 output")),
    "hugging_face": (("transformers", "accelerate"), ("3 predictions, 2 outputs", "In words: sentence(number)")),
    "distributed": ((), ("1 process, 301 examples, 9 predictions", "standard errors")),
    "idea": (("matplotlib", "sklearn"), ("drawn: idea-left-out.png idea-many-sets.png idea-two-doubts.png",)),
    "plots": (("matplotlib", "sklearn"), ("plots-bands.png", "plots-ranks.png", "plots-risk.png")),
}

pytestmark = [
    # Lightning makes the leaves of torch's trees in the way of before, and advises on the speed of short runs.
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .train_dataloader. does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]


def test_every_script_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SCRIPTS)


# Trainings and pictures that take too long for every run; the plots have tests of their own.
SLOW = {"idea", "plots"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in SCRIPTS]
)
def test_it_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed, words = SCRIPTS[name]
    for library in needed:
        if find_spec(library) is None:
            pytest.skip(f"{library} is not installed: pip install 'whence[report,integrations]'")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for word in words:
        assert word in printed, printed
    if name == "plots":
        drawn = list((tmp_path / "out" / "plots").glob("*.png"))
        assert len(drawn) == 3
        assert all(path.stat().st_size > 5000 for path in drawn)
