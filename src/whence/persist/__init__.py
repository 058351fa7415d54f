"""Fits in files: one self-contained file each, in the format of safetensors, checked before it is believed."""

from .fitted import restore, save
from .problem import Given

__all__ = ["Given", "restore", "save"]
