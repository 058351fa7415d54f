"""Losses: residuals, Hessians in the outputs, and noise.

To add a likelihood, add a module here, its tests, and an entry in `LIKELIHOODS`.
"""

from whence.likelihoods.base import Likelihood, Noise
from whence.likelihoods.cross_entropy import Bernoulli, Categorical
from whence.likelihoods.gaussian import Gaussian, one_hot

LIKELIHOODS: dict[str, type[Likelihood]] = {kind.name: kind for kind in (Gaussian, Categorical, Bernoulli)}
"""The names for `fit(likelihood=...)`, and the likelihoods that a saved fit may hold. Options are dataclass fields."""

__all__ = ["LIKELIHOODS", "Bernoulli", "Categorical", "Gaussian", "Likelihood", "Noise", "one_hot"]
