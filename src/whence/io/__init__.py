"""Fits in files: one self-contained safetensors file each, checked before it is used."""

from __future__ import annotations

from whence.io.fit import restore, save

__all__ = ["restore", "save"]
