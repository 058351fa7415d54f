"""Fits in files: one self-contained file each, in the format of safetensors, checked before it is believed."""

from __future__ import annotations

from whence.io.fit import Given, restore, save

__all__ = ["Given", "restore", "save"]
