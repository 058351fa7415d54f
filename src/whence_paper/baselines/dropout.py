"""Scatter of one network's outputs under dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .base import Baseline, Recipe, Sampled, outputs_of

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


@dataclass(frozen=True)
class MCDropout(Baseline):
    """Dropout while training and while predicting (Gal and Ghahramani 2016).

    A network that has no dropout gets it in front of every linear layer but the first, so that no input is lost.

    Attributes:
        rate: chance to drop a unit, for networks without dropout of their own.
        passes: forward passes for a prediction.
    """

    rate: float = 0.1
    passes: int = 50

    @property
    def name(self) -> str:
        """For tables."""
        return f"MC dropout, rate {self.rate:g}"

    def fit(self, recipe: Recipe) -> Sampled:
        """Train one network with dropout."""
        network = recipe.trained(recipe.data, 0, self._with_dropout)
        seed = int(torch.randint(2**31, (1,), generator=recipe.generator(600_000)))

        def sample(x: Tensor) -> Tensor:
            with torch.random.fork_rng(devices=[]):  # dropout draws from the global generator
                torch.manual_seed(seed)
                for module in network.modules():
                    if isinstance(module, DROPOUTS):
                        module.train()
                drawn = torch.cat([outputs_of([network], x) for _ in range(self.passes)])
            network.eval()
            return drawn

        return Sampled(sample, recipe.likelihood == "categorical")

    def _with_dropout(self, network: nn.Module) -> nn.Module:
        if any(isinstance(module, DROPOUTS) for module in network.modules()):
            return network
        linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
        if len(linear) < 2:
            raise ValueError(
                f"expected at least two linear layers, to put dropout before all but the first, got {len(linear)}. "
                "Give the network dropout layers of its own."
            )
        for name in linear[1:]:
            parent, _, own = name.rpartition(".")  # torch's set_submodule is younger than 2.4
            dropping = nn.Sequential(nn.Dropout(self.rate), network.get_submodule(name))
            setattr(network.get_submodule(parent), own, dropping)
        return network
