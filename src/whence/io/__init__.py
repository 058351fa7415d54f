"""Saved fits: one self-contained safetensors file each, checked before use."""

from __future__ import annotations

from whence.io.fit import restore, save

__all__ = ["restore", "save"]
