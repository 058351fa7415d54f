"""Pictures, read back by another decoder."""

from __future__ import annotations

import base64
import io

import matplotlib.image
import pytest
import torch
from PIL import Image

from whence import ShapeError
from whence.report.inputs import channels_last, thumbnail, thumbnails


def decoded(uri: str) -> torch.Tensor:
    """Pixels by matplotlib's reader, between 0 and 1."""
    return torch.from_numpy(matplotlib.image.imread(io.BytesIO(base64.b64decode(uri.split(",")[1])), format="png"))


@pytest.mark.parametrize("shape", [(5, 3), (2, 7, 3), (1, 1)])
def test_small_images_are_kept_to_the_pixel(shape: tuple[int, ...], generator: torch.Generator) -> None:
    pixels = torch.randint(256, shape, generator=generator)
    assert (decoded(thumbnail(channels_last(pixels / 255))) * 255).round().long().equal(pixels)


def test_what_is_out_of_range_is_cut_off() -> None:
    pixels = torch.tensor([[[-1.0], [2.0], [float("nan")]]])
    assert decoded(thumbnail(pixels)).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize("shape", [(4,), (2, 8, 8), (0, 4), (3, 4, 5, 6)])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="expected images of shape"):
        channels_last(torch.zeros(shape))


@pytest.mark.parametrize("shape", [(20, 30), (1, 20, 30), (3, 20, 30), (20, 30, 3)])
def test_pictures_of_every_layout_become_thumbnails(shape: tuple[int, ...], generator: torch.Generator) -> None:
    uri = thumbnail(channels_last(torch.rand(*shape, generator=generator)), side=10)
    kind, text = uri.removeprefix("data:image/").split(";base64,")
    read = Image.open(io.BytesIO(base64.b64decode(text)), formats=[kind])
    assert read.size == (10, 7)


def test_bytes_and_numbers_give_the_same_picture(generator: torch.Generator) -> None:
    values = torch.randint(256, (8, 8), generator=generator)
    assert thumbnail(channels_last(values.byte())) == thumbnail(channels_last(values / 255))


def test_numbers_outside_are_stretched_for_all_alike() -> None:
    """Pictures from -1 to 1, as many networks want them, are neither cut off nor each on a scale of its own."""
    left, right = thumbnails({0: torch.full((8, 8), -1.0)}, {0: torch.full((8, 8), 1.0), 1: torch.zeros(8, 8)})
    read = [float(decoded(uri).mean()) for uri in (left[0], right[0], right[1])]
    assert read == pytest.approx([0.0, 1.0, 0.5], abs=0.01)
