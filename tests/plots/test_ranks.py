"""Plots: what is drawn is where the ranks say."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from plotted import line_fit
from whence import ShapeError, Uncertainty
from whence.influence.explanation import BOTH, CONFIDENT, NOISY, SCARCE
from whence.plots import rank_scatter


def results() -> Uncertainty:
    values = {"ho": [1.0, 2.0, 3.0], "hec3": [9.0, 2.0, 3.0]}
    return Uncertainty(
        torch.zeros(3, 1), {name: torch.tensor(value).reshape(3, 1, 1) for name, value in values.items()}
    )


def test_rank_scatter_puts_each_group_at_its_ranks() -> None:
    ax = Figure().subplots()
    assert rank_scatter(results(), ["noisy", "rest", "rest"], {"noisy": "noise"}, ax) is ax
    drawn = {str(part.get_label()): part.get_offsets().tolist() for part in ax.collections}
    assert drawn == {"noisy": [[0.0, 100.0]], "rest": [[50.0, 0.0], [100.0, 50.0]]}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["noisy", "rest"]


def test_counts_must_agree() -> None:
    with pytest.raises(ShapeError, match="expected 3 groups, one for each prediction, got 1"):
        rank_scatter(results(), ["x"])


def test_verdicts_have_their_colours() -> None:
    tracer, x, _ = line_fit()
    ax = rank_scatter(tracer.predict(x), tracer.explain(x).verdicts, ax=Figure().subplots())
    assert {str(part.get_label()) for part in ax.collections} == set(tracer.explain(x).verdicts)
    ax = rank_scatter(results(), [SCARCE, NOISY, CONFIDENT], ax=Figure().subplots())
    drawn = {str(part.get_label()): to_hex(part.get_facecolor()[0]) for part in ax.collections}
    assert drawn == {CONFIDENT: "#9aa0a6", SCARCE: "#d55e00", NOISY: "#0072b2"}
    assert list(drawn) == [CONFIDENT, SCARCE, NOISY], "what matters lies on top"


def test_both_faults_show_both_colours() -> None:
    ax = rank_scatter(results(), [BOTH, "x", "x"], ax=Figure().subplots())
    both = next(part for part in ax.collections if part.get_label() == BOTH)
    assert to_hex(both.get_facecolor()[0]) == "#0072b2"
    assert to_hex(both.get_edgecolor()[0]) == "#d55e00"
