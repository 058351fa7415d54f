"""Influence of training examples: attribution, explanation, what-if and suggestions."""

from __future__ import annotations

from whence.influence.attribution import Attribution, Shares
from whence.influence.calibration import Calibration
from whence.influence.explanation import Explanation
from whence.influence.suggest import Suggestion
from whence.influence.what_if import WhatIf

__all__ = [
    "Attribution",
    "Calibration",
    "Explanation",
    "Shares",
    "Suggestion",
    "WhatIf",
]
