"""Losses as `whence` sees them."""

from whence.likelihoods.base import Likelihood, Noise
from whence.likelihoods.bernoulli import Bernoulli
from whence.likelihoods.categorical import Categorical
from whence.likelihoods.gaussian import Gaussian, one_hot

__all__ = ["Bernoulli", "Categorical", "Gaussian", "Likelihood", "Noise", "one_hot"]
