"""A fit that is asked again and again, as a service would: memory stays flat, answers stay the same."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
QUICK = ["exact, dual", "core", "ekfac"]
OTHERS = ["exact, primal", "exact, matrix-free", "sketch", "ekfac, two bases", "kfac", "diagonal"]
pytestmark = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc to measure memory")


def ask(name: str, predictions: int, batch: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Bytes gained between the first tenth of the predictions and the last; all answers are checked."""
    monkeypatch.syspath_prepend(str(ROOT))
    from benchmarks.soak import SOLVED, STRUCTURES, soak  # benchmarks are importable from the root only

    assert set(STRUCTURES) == {*QUICK, *OTHERS}
    found = soak(STRUCTURES[name], predictions, batch, 2 if name == SOLVED else 8, folder)
    assert found["predictions"] >= predictions
    assert len(found["resident"]) == 10
    assert found["worst"] < 1e-9
    return found["gained"]


@pytest.mark.parametrize("name", QUICK)
def test_many_predictions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(name, 800, 10, tmp_path, monkeypatch) < 8 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_ten_thousand_predictions(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(name, 10_000, 10, tmp_path, monkeypatch) < 4 * 2**20
