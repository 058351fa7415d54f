"""Tracing: which training examples, which source of doubt, what to do about it."""

from __future__ import annotations

from whence.influence.attribution import Attribution, GroupShares, Shares
from whence.influence.calibration import Calibration
from whence.influence.suggest import Suggestion
from whence.influence.verdicts import Explanation
from whence.influence.what_if import WhatIf

__all__ = [
    "Attribution",
    "Calibration",
    "Explanation",
    "GroupShares",
    "Shares",
    "Suggestion",
    "WhatIf",
]
