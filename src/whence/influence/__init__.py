"""Influence of training examples: attribution, explanation, what-if and suggestions."""

from __future__ import annotations

from whence.influence.attribution import Attribution, GroupShares, Shares
from whence.influence.explanation import Calibration, Explanation
from whence.influence.suggest import Suggestion
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
