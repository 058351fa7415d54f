"""Circles stand at their places, as large as their errors, in the colour of their source."""

from __future__ import annotations

import math

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from plotted import results
from whence import ShapeError
from whence.plots import source_map
from whence.report import Group

BLUE, VERMILLION, GREY = "#0072b2", "#d55e00", "#9aa0a6"


def test_a_map_of_four_districts() -> None:
    u = results(ho=[1.0, 2.0, 3.0, 9.0], hec3=[9.0, 1.0, 2.0, 3.0])
    ax = Figure().subplots()
    assert source_map([1, 2, 3, 4], [59, 60, 60, 61], u, [0.0, -1.0, 0.5, 4.0], ax=ax) is ax
    by_colour = {to_hex(part.get_facecolor()[0]): part for part in ax.collections if len(part.get_offsets())}
    places = {colour: part.get_offsets().tolist() for colour, part in by_colour.items()}
    assert places == {BLUE: [[1.0, 59.0]], VERMILLION: [[4.0, 61.0]], GREY: [[2.0, 60.0], [3.0, 60.0]]}
    large, small = by_colour[GREY].get_sizes()
    assert large > small, "an error of -1 is larger than one of 0.5, and drawn first"
    assert by_colour[VERMILLION].get_sizes()[0] > large > by_colour[BLUE].get_sizes()[0] > 0
    assert ax.get_aspect() == pytest.approx(1 / math.cos(math.radians(60)))
    told = [text.get_text() for text in ax.get_legend().get_texts()]
    assert told[:2] == ["uncertain by HeC3: noisy labels nearby", "uncertain by Ho: few examples nearby"]
    assert told[-1] == "error 4"


def test_groups_of_ones_own_and_no_errors() -> None:
    groups = [Group("x", "noise"), Group("y")]
    ax = source_map(
        torch.zeros(2), torch.zeros(2), results([1.0, 2.0], [1.0, 2.0]), groups=groups, ax=Figure().subplots()
    )
    assert [str(part.get_label()) for part in ax.collections] == ["y", "x"], "what matters lies on top"
    assert {float(part.get_sizes()[0]) for part in ax.collections} == {14.0}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["x", "y"]


def test_counts_must_agree() -> None:
    u = results([1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ShapeError, match="expected 2 longitudes"):
        source_map([1.0], [1.0, 2.0], u)
    with pytest.raises(ShapeError, match="expected 2 errors"):
        source_map([1.0, 2.0], [1.0, 2.0], u, [1.0])
    with pytest.raises(ShapeError, match="expected 2 groups"):
        source_map([1.0, 2.0], [1.0, 2.0], u, groups=[Group("x")])
