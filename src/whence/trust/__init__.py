"""How far to trust a fit: checks with a number, a level and a sentence each."""

from __future__ import annotations

from whence.trust.assessment import assess
from whence.trust.checks import Check, Trust, trust_of_fit

__all__ = ["Check", "Trust", "assess", "trust_of_fit"]
