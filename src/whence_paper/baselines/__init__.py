"""What users compare with, each behind the same three steps: a recipe, `fit`, `predict`.

Examples:
    >>> import torch
    >>> from torch import nn
    >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
    >>> def train(network, data, generator):
    ...     optimiser = torch.optim.Adam(network.parameters(), lr=0.05)
    ...     for _ in range(20):
    ...         optimiser.zero_grad()
    ...         nn.functional.mse_loss(network(data.inputs), data.targets).backward()
    ...         optimiser.step()
    >>> recipe = Recipe(lambda: nn.Linear(1, 1), train, Data(x, 2 * x))
    >>> answer = DeepEnsemble(members=3).fit(recipe).predict(x[:5])
    >>> answer.mean.shape, answer.variance.shape
    (torch.Size([5, 1]), torch.Size([5, 1]))
"""

from .base import Answer, Baseline, Data, Fitted, Recipe, Sampled
from .dropout import MCDropout
from .ensembles import Bootstrap, DeepEnsemble
from .laplace_torch import LaplaceTorch
from .swag import SWAG

__all__ = [
    "SWAG",
    "Answer",
    "Baseline",
    "Bootstrap",
    "Data",
    "DeepEnsemble",
    "Fitted",
    "LaplaceTorch",
    "MCDropout",
    "Recipe",
    "Sampled",
]
