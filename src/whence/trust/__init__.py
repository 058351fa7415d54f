"""How far to trust a fit: checks, each with a number, a level and a sentence."""

from __future__ import annotations

from whence.trust.assessment import assess
from whence.trust.checks import Check, Trust, trust_of_fit

__all__ = ["Check", "Trust", "assess", "trust_of_fit"]
