"""Losses as `whence` sees them."""

from .base import Likelihood
from .gaussian import Gaussian, one_hot

__all__ = ["Gaussian", "Likelihood", "one_hot"]
