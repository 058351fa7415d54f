"""The protocol of the paper's control experiment: two meta-classes, one class noisy, one class missing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from whence import one_hot
from whence_paper.data import Images

CLASSES = 10
OUTPUTS = 2


@dataclass(frozen=True)
class Task:
    """One draw. All that is random follows from the seed, on whatever device the images are.

    Attributes:
        images: the data.
        seed: decides meta-classes, the noisy and the missing class, and the random labels.
        size: training examples before the missing class is taken out, drawn at random; `None` for all.
        noise: share of the noisy class's training labels that are drawn by a coin.
    """

    images: Images
    seed: int
    size: int | None = None
    noise: float = 1.0

    @cached_property
    def _drawn(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        special = torch.randperm(CLASSES, generator=draw)[:2]
        answers = torch.empty(CLASSES, dtype=torch.long)
        answers[torch.randperm(CLASSES, generator=draw)] = torch.arange(CLASSES) % OUTPUTS
        n = len(self.images.labels)
        order = torch.randperm(n, generator=draw)[: self.size or n]
        coins = torch.randint(OUTPUTS, (n,), generator=draw)
        chances = torch.rand(n, generator=draw)
        return special, answers, order, coins, chances

    @property
    def noisy(self) -> int:
        """The class whose training labels are random."""
        return int(self._drawn[0][0])

    @property
    def missing(self) -> int:
        """The class that is left out of the training set."""
        return int(self._drawn[0][1])

    @property
    def answers(self) -> Tensor:
        """(10,) the meta-class of each class."""
        return self._drawn[1]

    def training(self, *, clean: bool = False, complete: bool = False) -> tuple[Tensor, Tensor]:
        """Inputs and targets (n, 2) of +1 and -1.

        Args:
            clean: with true labels of the noisy class.
            complete: with the missing class.
        """
        _, answers, order, coins, chances = self._drawn
        labels = self.images.labels.cpu()
        chosen = order if complete else order[labels[order] != self.missing]
        said = answers[labels[chosen]]
        if not clean:
            wrong = (labels[chosen] == self.noisy) & (chances[chosen] < self.noise)
            said = torch.where(wrong, coins[chosen], said)
        device = self.images.inputs.device
        return self.images.inputs[chosen.to(device)], one_hot(said, OUTPUTS).to(device)

    @property
    def test_answers(self) -> Tensor:
        """(m,) true meta-classes of the test images."""
        return self.answers[self.images.test_labels.cpu()]

    def test_points_of(self, label: int) -> Tensor:
        """(m,) which test images are of a class."""
        return self.images.test_labels.cpu() == label

    def describe(self) -> dict[str, object]:
        """For a record."""
        names = self.images.classes
        ones = [names[label] for label in range(CLASSES) if self.answers[label] == 1]
        return {"noisy": names[self.noisy], "missing": names[self.missing], "second meta-class": ones}
