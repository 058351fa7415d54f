"""Losses as `whence` sees them."""

from .base import Likelihood, Noise
from .bernoulli import Bernoulli
from .categorical import Categorical
from .gaussian import Gaussian, one_hot

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Noise", "one_hot"]
