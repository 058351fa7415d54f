"""The estimated share of wrong labels, where it is known how many were planted."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.wrong_labels import breast_cancer, diabetes, penguins, plant

from whence.influence.training import wrong_labels


@pytest.mark.parametrize("table", [breast_cancer(), penguins()], ids=["breast cancer", "penguins"])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.05, 0.1])
def test_planted_wrong_labels_are_counted(table: tuple[np.ndarray, np.ndarray], share: float) -> None:
    draws = [plant(table, share, seed) for seed in range(3)]
    said = [(one.truth, one.estimate) for one in draws if not one.estimate.unknown]
    assert len(said) >= 2
    for truth, found in said:
        assert found.lower - 0.01 <= truth <= found.upper + 0.01
        assert found.upper - found.lower < 0.1
        assert found.share == pytest.approx(truth, abs=0.04)
        if share == 0.0:
            assert found.share < 0.005
        if share == 0.1:
            assert found.lower > 0.03


def test_nothing_is_said_where_classes_overlap() -> None:
    assert all(plant(diabetes(), share, 0).estimate.unknown for share in (0.0, 0.1))


def test_nothing_is_said_of_coins_and_of_few_labels() -> None:
    generator = np.random.default_rng(0)
    labels, p = generator.integers(2, size=1000), generator.uniform(0.5, 1, 1000)
    assert "cannot be distinguished" in wrong_labels(labels, np.zeros(1000), p, 2).unknown
    assert "100 labels that the model has not seen are too few" in str(
        wrong_labels(np.zeros(100), np.zeros(100), p[:100], 2)
    )
    assert not wrong_labels(np.zeros(300), np.zeros(300), p[:300], 2).unknown


def test_intervals_hold_the_share_that_labels_were_drawn_with() -> None:
    generator = np.random.default_rng(1)
    q = (np.arange(2000) + 0.5) / 2000
    covered, off = 0, []
    for _ in range(40):
        hard = generator.random(2000) < 1 / (1 + np.exp(-(-6 + 2 * np.log(q / (1 - q)))))
        wrong = generator.random(2000) < 0.05
        found = wrong_labels(hard ^ wrong, np.zeros(2000), 1 - q / 2, 2)
        covered += found.lower <= 0.05 <= found.upper
        off.append(found.share - 0.05)
    assert covered >= 35
    assert abs(np.mean(off)) < 0.005
