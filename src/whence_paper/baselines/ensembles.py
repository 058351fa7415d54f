"""Several networks: from other first weights on the same data, or on resampled data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch

from .base import Baseline, Recipe, Sampled, outputs_of


@dataclass(frozen=True)
class DeepEnsemble(Baseline):
    """Networks that differ in their first weights and in the order of examples (Lakshminarayanan et al. 2017).

    Attributes:
        members: how many; the paper trains 10.
    """

    members: int = 10

    @property
    def name(self) -> str:
        """For tables."""
        return f"deep ensemble of {self.members}"

    def fit(self, recipe: Recipe) -> Sampled:
        """Train the members that the recipe does not have yet."""
        networks = [recipe.network(member) for member in range(self.members)]
        return Sampled(partial(outputs_of, networks), recipe.likelihood == "categorical")


@dataclass(frozen=True)
class Bootstrap(Baseline):
    """Networks on training sets drawn from the training set with replacement.

    Attributes:
        members: how many.
        fresh: other first weights for each, or the same for all, so that only the data differ.
    """

    members: int = 10
    fresh: bool = True

    @property
    def name(self) -> str:
        """For tables."""
        return f"bootstrap of {self.members}" + ("" if self.fresh else ", same first weights")

    def fit(self, recipe: Recipe) -> Sampled:
        """Train all members."""
        n = len(recipe.data)
        networks = []
        for member in range(self.members):
            drawn = torch.randint(n, (n,), generator=recipe.generator(500_000 + member))
            networks.append(recipe.trained(recipe.data.take(drawn), member if self.fresh else 0))
        return Sampled(partial(outputs_of, networks), recipe.likelihood == "categorical")
