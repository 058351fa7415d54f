"""Plots: what is drawn is where the ranks say."""

from __future__ import annotations

import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from plotted import line_fit
from whence import InputError, ShapeError, Uncertainty
from whence.plots import by_source, by_verdict, gallery, rank_scatter
from whence.report import Group


def results() -> Uncertainty:
    values = {"ho": [1.0, 2.0, 3.0], "hec3": [9.0, 2.0, 3.0]}
    return Uncertainty(
        torch.zeros(3, 1), {name: torch.tensor(value).reshape(3, 1, 1) for name, value in values.items()}
    )


def test_rank_scatter_puts_each_group_at_its_ranks() -> None:
    ax = Figure().subplots()
    groups = [Group("noisy", "noise"), Group("rest"), Group("rest")]
    assert rank_scatter(results(), groups, ax) is ax
    drawn = {str(part.get_label()): part.get_offsets().tolist() for part in ax.collections}
    assert drawn == {"noisy": [[0.0, 100.0]], "rest": [[50.0, 0.0], [100.0, 50.0]]}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["noisy", "rest"]


def test_gallery_draws_every_image_in_reading_order() -> None:
    ax = Figure().subplots()
    images = torch.rand(5, 8, 8)
    assert gallery(images, list("abcde"), columns=2, ax=ax) is ax
    shown = sorted(ax.images, key=lambda image: (-image.get_extent()[3], image.get_extent()[0]))
    assert all(torch.from_numpy(part.get_array().data).equal(image) for part, image in zip(shown, images, strict=True))
    assert [text.get_text() for text in ax.texts] == list("abcde")


def test_counts_must_agree() -> None:
    with pytest.raises(ShapeError, match="expected 3 groups, one for each prediction, got 1"):
        rank_scatter(results(), [Group("x")])
    with pytest.raises(ShapeError, match="expected 2 names, one for each image, got 1"):
        gallery(torch.zeros(2, 4, 4), ["x"])
    with pytest.raises(ShapeError, match=r"expected images of shape \(m, h, w\)"):
        gallery(torch.zeros(4, 4))


def test_sources_by_the_side_of_the_diagonal() -> None:
    assert [group.tone for group in by_source(results(), share=0.34)] == ["noise", "plain", "scarcity"]
    assert {group.tone for group in by_source(results(), share=1.0)} <= {"noise", "scarcity"}
    with pytest.raises(InputError, match="expected a share between 0 and 1, got 10"):
        by_source(results(), share=10)


def test_verdicts_of_an_explanation_become_groups() -> None:
    tracer, _, _ = line_fit()
    found = tracer.explain(torch.tensor([[0.0], [50.0]]).double(), level=0.9)
    assert [(group.name, group.tone) for group in by_verdict(found)] == [
        ("confident", "plain"),
        ("scarce data", "scarcity"),
    ]


def test_both_faults_show_both_colours() -> None:
    ax = rank_scatter(results(), [Group("both", "noise"), Group("x"), Group("x")], Figure().subplots())
    both = next(part for part in ax.collections if part.get_label() == "both")
    assert to_hex(both.get_facecolor()[0]) == "#0072b2"
    assert to_hex(both.get_edgecolor()[0]) == "#d55e00"
