"""Tracing: which training examples, which source of doubt, what to do about it."""

from .attribution import Attribution, Shares
from .by_group import GroupShares
from .calibration import Calibration
from .changes import WhatIf
from .suggestions import Suggestion
from .verdicts import Explanation

__all__ = ["Attribution", "Calibration", "Explanation", "GroupShares", "Shares", "Suggestion", "WhatIf"]
