"""Saved fits: one self-contained safetensors file each, checked before use."""

from __future__ import annotations

from whence.io.fit import read_attached, restore, save

__all__ = ["read_attached", "restore", "save"]
