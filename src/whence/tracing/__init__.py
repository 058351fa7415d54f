"""Tracing: which training examples, which source of doubt, what to do about it."""

from .attribution import Attribution, Shares
from .by_group import GroupShares
from .calibration import Calibration
from .changes import WhatIf
from .suggestions import Suggestion
from .trust import Check, Trust
from .verdicts import Explanation

__all__ = [
    "Attribution",
    "Calibration",
    "Check",
    "Explanation",
    "GroupShares",
    "Shares",
    "Suggestion",
    "Trust",
    "WhatIf",
]
