"""Curvatures: the bread of the sandwich."""

from .base import Bread, Meats, NewtonStep, Predicted, RidgePath, Sandwich, Structure
from .conjugate import conjugate_gradients
from .exact import Exact
from .groups import Groups
from .kronecker import EKFAC, KFAC, Core, Diagonal, Sketch

__all__ = [
    "EKFAC",
    "KFAC",
    "Bread",
    "Core",
    "Diagonal",
    "Exact",
    "Groups",
    "Meats",
    "NewtonStep",
    "Predicted",
    "RidgePath",
    "Sandwich",
    "Sketch",
    "Structure",
    "conjugate_gradients",
]
