"""Pictures of inputs, small enough that a thousand of them fit into a page."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.errors import ShapeError

from .images import png

SIDE = 64
"""The longer side of a thumbnail, in pixels."""
QUALITY = 72


def pictures(given: Any) -> Tensor:
    """(n, 1 or 3, h, w) from grey (n, h, w), or (n, c, h, w) or (n, h, w, c) with 1 or 3 channels; numbers as given.

    Examples:
        >>> pictures(torch.zeros(5, 8, 8)).shape, pictures(torch.zeros(5, 8, 9, 3)).shape
        (torch.Size([5, 1, 8, 8]), torch.Size([5, 3, 8, 9]))
    """
    found = torch.as_tensor(given, device="cpu").detach().cpu()
    scale = 255.0 if found.dtype == torch.uint8 else 1.0
    found = found.float() / scale
    if found.ndim == 3:
        return found.unsqueeze(1)
    if found.ndim == 4 and found.shape[1] in (1, 3):
        return found
    if found.ndim == 4 and found.shape[3] in (1, 3):
        return found.permute(0, 3, 1, 2)
    raise ShapeError(
        "expected images of shape (n, height, width), (n, channels, height, width) or (n, height, width, channels) "
        f"with 1 or 3 channels, got {tuple(found.shape)}."
    )


def stretch(images: Tensor, low: float, high: float) -> Tensor:
    """Numbers between 0 and 1; where some lie outside, from their smallest to their largest."""
    return images if low >= 0.0 and high <= 1.0 else (images - low) / max(high - low, 1e-12)


def thumbnail(image: Tensor, side: int = SIDE) -> str:
    """A picture (c, h, w) with numbers between 0 and 1 as a data URI: PNG, or WebP where that is smaller.

    Examples:
        >>> thumbnail(torch.zeros(1, 200, 100))[:22]
        'data:image/png;base64,'
    """
    h, w = image.shape[1:]
    if max(h, w) > side:
        size = (max(1, round(h * side / max(h, w))), max(1, round(w * side / max(h, w))))
        image = F.interpolate(image.unsqueeze(0), size=size, mode="area").squeeze(0)
    grey = image.shape[0] == 1
    pixels = image.squeeze(0) if grey else image.permute(1, 2, 0)
    found, kind = png(pixels), "png"
    if len(found) > 1000:
        smaller = _webp(pixels)
        if smaller is not None and len(smaller) < len(found):
            found, kind = smaller, "webp"
    return f"data:image/{kind};base64,{base64.b64encode(found).decode('ascii')}"


def _webp(pixels: Tensor) -> bytes | None:
    """The same as WebP, where Pillow is there; it comes with matplotlib."""
    try:
        from PIL import Image  # an extra: without it pictures are PNG files
    except ModuleNotFoundError:
        return None
    values = (pixels.nan_to_num(0.0).clamp(0.0, 1.0) * 255).round().byte().numpy()
    file = io.BytesIO()
    Image.fromarray(values).convert("RGB").save(file, "WEBP", quality=QUALITY, method=4)
    return file.getvalue()
