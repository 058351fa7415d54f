"""What a fit will take, told before it runs."""

from .asked import estimate
from .result import Estimate

__all__ = ["Estimate", "estimate"]
