"""A NaN never comes before a number."""

from __future__ import annotations

import math

import torch

from whence.linalg import largest, largest_first
from whence.plots import ranks


def test_nan_is_last_and_ties_keep_their_order() -> None:
    scores = torch.tensor([1.0, math.nan, 3.0, 1.0, -math.inf, math.inf])
    assert largest_first(scores).tolist() == [5, 2, 0, 3, 4, 1]
    assert largest_first(scores)[:2].tolist() == [5, 2]
    assert ranks(scores)[1] == 0.0
    assert ranks(scores)[5] == 1.0


def test_ties_are_broken_by_a_second_score() -> None:
    scores, ties = torch.tensor([1.0, 0.0, 1.0, math.nan]), torch.tensor([2.0, 9.0, 3.0, 99.0])
    assert largest_first(scores, ties).tolist() == [2, 0, 1, 3]


def test_the_largest_of_each_row_are_numbers_while_there_are_some() -> None:
    scores = torch.tensor([[math.nan, 1.0, 2.0], [math.nan, math.nan, 5.0], [3.0, 2.0, 1.0]])
    values, index = largest(scores, 2)
    assert index[:, 0].tolist() == [2, 2, 0]
    assert values[:, 0].tolist() == [2.0, 5.0, 3.0]
    assert index[0, 1] == 1
    assert math.isnan(float(values[1, 1]))
