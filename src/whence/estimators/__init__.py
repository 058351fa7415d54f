"""Estimators: from residuals and leverages to the weights of training examples."""

from .clusters import leave_groups_out
from .leave_one_out import LeftOut, Policy, leave_one_out
from .meats import ESTIMATORS, finish
from .weighing import Weighing

__all__ = ["ESTIMATORS", "LeftOut", "Policy", "Weighing", "finish", "leave_groups_out", "leave_one_out"]
