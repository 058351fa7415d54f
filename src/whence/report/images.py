"""Pixels as PNG files, small enough to stand inside the page."""

from __future__ import annotations

import struct
import zlib

import numpy as np
from torch import Tensor

from whence.errors import ShapeError


def png(pixels: Tensor) -> bytes:
    r"""A PNG file of an image: (h, w) grey or (h, w, 3) colour, with values between 0 (black) and 1 (white).

    Values outside are cut off.

    Examples:
        >>> import torch
        >>> png(torch.zeros(8, 8))[:8]
        b'\x89PNG\r\n\x1a\n'
    """
    if pixels.ndim not in (2, 3) or 0 in pixels.shape or (pixels.ndim == 3 and pixels.shape[2] != 3):
        raise ShapeError(
            f"expected an image of shape (height, width) or (height, width, 3), got {tuple(pixels.shape)}. "
            "For (3, height, width) call .permute(1, 2, 0) first."
        )
    values = pixels.detach().to("cpu").double().nan_to_num(0.0).clamp(0.0, 1.0).numpy()
    grey = np.rint(values * 255.0).astype(np.uint8)
    height, width = grey.shape[:2]
    header = struct.pack(">IIBBBBB", width, height, 8, 0 if pixels.ndim == 2 else 2, 0, 0, 0)
    lines = b"".join(b"\0" + line.tobytes() for line in grey)  # each line starts with its filter: none
    body = _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(lines, 9)) + _chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
