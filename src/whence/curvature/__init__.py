"""Curvatures: the bread of the sandwich."""

from whence.curvature.aligned import conjugate_gradients
from whence.curvature.base import FittedCurvature, Groups, Meats, NewtonStep, Predicted, RidgePath, Sandwich, Structure
from whence.curvature.core import Core, Sketch
from whence.curvature.ekfac import EKFAC, KFAC, Diagonal
from whence.curvature.exact import Auto, Exact

__all__ = [
    "EKFAC",
    "KFAC",
    "Auto",
    "Core",
    "Diagonal",
    "Exact",
    "FittedCurvature",
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
