"""The study of planted errors on tables: what it plants, a small run, and its tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_breast_cancer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))


def test_one_label_in_twenty_is_another_one() -> None:
    from benchmarks.tree_quality import wrong_labels  # benchmarks are importable from the root only

    classes = np.array(["a", "b", "c", "d"] * 50, dtype=object)
    labels, wrong = wrong_labels(classes, True, 0)
    assert wrong.sum() == 10
    np.testing.assert_array_equal(labels != classes, wrong)
    numbers = np.arange(200.0)
    labels, wrong = wrong_labels(numbers, False, 0)
    assert (labels[~wrong] == numbers[~wrong]).all()
    assert set(labels) <= set(numbers)


def test_regions_are_groups_of_similar_rows() -> None:
    from benchmarks.tree_quality import regions

    points = np.random.default_rng(0).normal(size=(300, 2))
    first, second = regions(points, 1)
    assert min(first.sum(), second.sum()) >= 12
    assert not (first & second).any()
    for region in (first, second):
        assert points[region].std(0).max() < points.std(0).min()


def test_a_small_run_and_its_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from benchmarks import tree_quality, tree_tables

    x, y = load_breast_cancer(return_X_y=True, as_frame=True)
    table = tree_quality.Table(x.iloc[:, :4], y.map({0: "bad", 1: "good"}).to_numpy(object), {"max_iter": 10})
    monkeypatch.setattr(tree_quality, "TABLES", {"cancer": lambda data: table})
    out = tmp_path / "tree_quality.json"
    monkeypatch.setattr(
        sys, "argv", ["tree_quality.py", "--data", "none", "--seeds", "100", "--rows", "200", "--out", str(out)]
    )
    tree_quality.main()
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert row["wrong labels"]["rows"] == 200
    assert row["wrong labels"]["wrong"] == 10
    found = [*row["wrong labels"]["auroc"].values(), *row["regions"]["noise"].values()]
    assert all(0 <= area <= 1 for area in found)
    assert row["wrong labels"]["auroc"]["whence, trees"] > 0.6
    shown = tree_tables.tree_quality(record)
    assert shown.count("**whence, trees**") == shown.count("**whence, network**") == 5
    assert "cancer (at most 0.10)" in shown
