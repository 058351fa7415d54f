"""Plots: what is drawn is where the ranks say."""

from __future__ import annotations

import pytest
import torch
from matplotlib.figure import Figure

from whence import ShapeError, Uncertainty
from whence.plots import gallery, rank_scatter
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
