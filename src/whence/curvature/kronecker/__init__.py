"""Curvatures built layer by layer from Kronecker factors."""

from .core import Core
from .sketch import Sketch
from .structures import EKFAC, KFAC, Diagonal

__all__ = ["EKFAC", "KFAC", "Core", "Diagonal", "Sketch"]
