"""The protocol of de Jong et al. (arXiv 2408.12175): fewer examples, shuffled labels, and the error of two measures.

A network is trained on smaller and smaller parts of the training set, which makes it worse by scarcity, and with more
and more labels shuffled, in the training set and in the test set, which makes it worse by noise. An ideal aleatoric
measure follows the accuracy in the second case and not in the first; an ideal epistemic measure the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SIZES = (0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 1.0)
"""Shares of the training set, as in the package disentanglement-error."""
SHUFFLED = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Shares of the labels that change places with each other."""


@dataclass(frozen=True)
class Curve:
    """What was measured at each place of one of the two experiments.

    Attributes:
        accuracy: of the predictions.
        measures: by name, means over the test points.
    """

    accuracy: Sequence[float]
    measures: dict[str, Sequence[float]]

    def correlation(self, name: str) -> float:
        """Pearson's, of the accuracy with minus a measure; zero for a measure that does not move.

        Examples:
            >>> round(Curve([0.5, 0.7, 0.9], {"entropy": [0.9, 0.5, 0.1]}).correlation("entropy"), 6)
            1.0
        """
        pairs = torch.tensor([self.accuracy, [-value for value in self.measures[name]]], dtype=torch.float64)
        centred = pairs - pairs.mean(1, keepdim=True)
        lengths = centred.norm(dim=1)
        return float(centred[0] @ centred[1] / (lengths[0] * lengths[1])) if bool(lengths.all()) else 0.0


def disentanglement_error(sizes: Curve, noise: Curve, aleatoric: str, epistemic: str) -> float:
    """Mean distance of the four correlations from their ideals: 0 is best, 1 what constants have halfway.

    As in the notebook that made the published figures: |corr(A, size)|, |1 - corr(E, size)|, |1 - corr(A, noise)| and
    |corr(E, noise)|.

    Args:
        sizes: over parts of the training set.
        noise: over shares of shuffled labels.
        aleatoric: name of the measure of noise.
        epistemic: name of the measure of scarcity.

    Examples:
        >>> sizes = Curve([0.1, 0.5, 0.9], {"A": [1.0, 2.0, 1.0], "E": [9.0, 5.0, 1.0]})
        >>> noise = Curve([0.9, 0.5, 0.1], {"A": [1.0, 5.0, 9.0], "E": [1.0, 2.0, 1.0]})
        >>> round(disentanglement_error(sizes, noise, "A", "E"), 6)
        0.0
    """
    gaps = (
        sizes.correlation(aleatoric),
        1 - sizes.correlation(epistemic),
        1 - noise.correlation(aleatoric),
        noise.correlation(epistemic),
    )
    return sum(map(abs, gaps)) / len(gaps)


def smaller(labels: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Which examples are left of a training set: the same share of each class, and at least one of each.

    With generators of the same seed a smaller share is part of a larger one.

    Args:
        labels: (n,) classes.
        share: between 0 and 1.
        draw: decides which.

    Examples:
        >>> labels = torch.tensor([0, 0, 0, 0, 1, 1])
        >>> labels[smaller(labels, 0.5, torch.Generator().manual_seed(0))].sort().values
        tensor([0, 0, 1])
    """
    order = torch.randperm(len(labels), generator=draw)
    said = labels[order]
    kept = [order[said == label][: max(1, int(int((said == label).sum()) * share))] for label in said.unique()]
    return torch.cat(kept)


def shuffled(labels: Tensor, share: float, draw: torch.Generator) -> Tensor:
    """Labels of which a share, drawn at random, have changed places with each other.

    Args:
        labels: (n,) classes.
        share: between 0 and 1.
        draw: decides which.

    Examples:
        >>> labels = torch.arange(10)
        >>> int((shuffled(labels, 0.5, torch.Generator().manual_seed(0)) != labels).sum()) <= 5
        True
    """
    chosen = torch.randperm(len(labels), generator=draw)[: int(len(labels) * share)]
    found = labels.clone()
    found[chosen] = labels[chosen[torch.randperm(len(chosen), generator=draw)]]
    return found
