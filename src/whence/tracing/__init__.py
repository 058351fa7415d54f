"""Tracing: which training examples, which source of doubt, what to do about it."""

from .attribution import Attribution, Shares, attribute, join
from .fitted import check_count

__all__ = ["Attribution", "Shares", "attribute", "check_count", "join"]
