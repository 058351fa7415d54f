"""Parts of a page, from results whose order is known by hand; pictures, read back by another decoder."""

from __future__ import annotations

import io

import matplotlib.image
import pytest
import torch

from whence import Diagnostics, Finding, InputError, ShapeError, Uncertainty
from whence.report import Group, facts, most_uncertain, rank_scatter
from whence.report.images import png


def results() -> Uncertainty:
    """Four predictions of one output: Ho 1, 2, 3, 4 and HeC3 8, 2, 9, 1, so ratios 8, 1, 3, 1/4."""
    values = {"ho": [1.0, 2.0, 3.0, 4.0], "hec3": [8.0, 2.0, 9.0, 1.0]}
    return Uncertainty(
        torch.zeros(4, 1), {name: torch.tensor(value).reshape(4, 1, 1) for name, value in values.items()}
    )


@pytest.mark.parametrize(("by", "order"), [("ratio", "0213"), ("ho", "3210"), ("hec3", "2013")])
def test_most_uncertain_comes_first(by: str, order: str) -> None:
    gallery = most_uncertain(results(), by, count=10, names=list("0123"))
    assert "".join(card.title for card in gallery.cards) == order


def test_a_card_has_its_own_picture_group_and_lines() -> None:
    images = torch.arange(4.0).reshape(4, 1, 1).expand(4, 2, 2) / 3
    groups = [Group(str(number)) for number in range(4)]
    lines = [(f"line {number}",) for number in range(4)]
    gallery = most_uncertain(results(), "ratio", 2, images=images, groups=groups, lines=lines)
    assert [card.title for card in gallery.cards] == ["no. 0", "no. 2"]
    assert [card.lines for card in gallery.cards] == [("HeC3/Ho 8.0", "line 0"), ("HeC3/Ho 3.0", "line 2")]
    assert [card.picture for card in gallery.cards] == [png(images[0]), png(images[2])]
    assert [card.group for card in gallery.cards] == [groups[0], groups[2]]


def test_ranks_by_both_estimators() -> None:
    groups = [Group("n", "noise"), Group("p"), Group("p"), Group("s", "scarcity")]
    scatter = rank_scatter(results(), groups, list("abcd"))
    places = {point.label: (round(3 * point.x), round(3 * point.y)) for point in scatter.points}
    assert places == {"a": (0, 2), "b": (1, 1), "c": (2, 3), "d": (3, 0)}
    assert [point.group.tone for point in scatter.points][:2] == ["plain", "plain"], "toned points are drawn on top"
    assert [group.tone for group in scatter.groups()] == ["noise", "scarcity", "plain"]


@pytest.mark.parametrize("what", ["names", "groups", "lines", "images"])
def test_counts_must_agree(what: str) -> None:
    few = torch.zeros(3, 2, 2) if what == "images" else ["x"] * 3
    with pytest.raises(ShapeError, match=f"expected 4 {what}, one for each prediction, got 3"):
        most_uncertain(results(), "ho", **{what: few})


def test_an_empty_gallery_is_refused() -> None:
    with pytest.raises(InputError, match="count of at least 1, got 0"):
        most_uncertain(results(), "ho", 0)


def test_facts_keep_words_and_numbers() -> None:
    found = facts(Diagnostics((Finding("a", 0.123456, "b"), Finding("c", "d", ""))))
    assert found.rows == (("a", "0.1235", "b"), ("c", "d", ""))


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 3), (1, 1)])
def test_png_is_what_another_decoder_reads(shape: tuple[int, ...], generator: torch.Generator) -> None:
    pixels = torch.randint(256, shape, generator=generator)
    read = matplotlib.image.imread(io.BytesIO(png(pixels / 255)), format="png")
    assert (torch.from_numpy(read) * 255).round().long().equal(pixels)


def test_png_cuts_off_what_is_out_of_range() -> None:
    pixels = torch.tensor([[-1.0, 2.0, float("nan")]])
    read = matplotlib.image.imread(io.BytesIO(png(pixels)), format="png")
    assert read.tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("shape", [(4,), (3, 8, 8), (0, 4), (2, 3, 4, 5)])
def test_png_refuses_other_shapes(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="expected an image of shape"):
        png(torch.zeros(shape))
