"""Curvatures: the bread of the sandwich."""

from .base import Bread, Meats, NewtonStep, Predicted, RidgePath, Sandwich, Structure
from .exact import Exact

__all__ = ["Bread", "Exact", "Meats", "NewtonStep", "Predicted", "RidgePath", "Sandwich", "Structure"]
