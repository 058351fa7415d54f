"""Scores of the study of what the estimators are worth, by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.data import Task

from benchmarks import worth, worth_scores, worth_tables


def test_two_classes_rank_alike_by_all_plain_scores() -> None:
    outputs = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    orders = [score.argsort().tolist() for score in worth_scores.plain(outputs, "cross-entropy").values()]
    assert orders[0] == orders[1] == orders[2]


def test_a_margin_in_standard_deviations() -> None:
    mean = torch.tensor([[1.0, 4.0, 3.0]])
    covariance = torch.tensor([[[9.0, 0.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 3.0]]])
    contrast = worth_scores.top_two(mean)
    assert contrast.tolist() == [[0.0, 1.0, -1.0]]
    assert float(worth_scores.over_deviation(mean, covariance, contrast)) == pytest.approx(1 / 2)


def task(missing: int | None) -> Task:
    labels = torch.tensor([0, 1, 2, 3, 3])
    empty = torch.empty(0)
    return Task(empty, empty, empty, labels, torch.tensor([0, 1, 0, 1, 1]), noisy=0, missing=missing)


def test_questions_and_areas() -> None:
    outputs = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])  # example 3 is wrong
    found = worth.judge({"score": torch.tensor([5.0, 4.0, 1.0, 3.0, 2.0])}, task(1), outputs)["score"]
    assert found == {"noisy": 1.0, "missing": 0.75, "wrong": 0.5, "wrong, ordinary": 1.0}
    assert "missing" not in worth.questions(task(None), outputs)


def test_an_area_without_anything_to_find_is_not_shown() -> None:
    row = {"auroc": {"margin": {"noisy": 0.8, "wrong, ordinary": 0.0}}, "wrong": {"noisy": 3, "wrong, ordinary": 0}}
    assert worth_tables.area(row, "margin", "noisy") == 0.8
    assert torch.tensor(worth_tables.area(row, "margin", "wrong, ordinary")).isnan()
