"""How far to trust a fit: checks with a number, a level and a sentence each."""

from .assess import assess
from .at_once import at_once
from .result import Check, Trust

__all__ = ["Check", "Trust", "assess", "at_once"]
