"""Pictures, read back by another decoder."""

from __future__ import annotations

import io

import matplotlib.image
import pytest
import torch

from whence import ShapeError
from whence.report.images import png


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
