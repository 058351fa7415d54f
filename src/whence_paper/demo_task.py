"""The demonstration's task: two groups of handwritten digits, one digit with random labels, one never shown.

This is the protocol of the paper's control experiment (section "Experiments: deep networks", appendix "Meta-Classes")
on the 1,797 digits of 8 x 8 pixels that come with scikit-learn.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import Tensor

DIGITS = 10
SIDE = 8


@dataclass(frozen=True)
class Task:
    """One draw: which digits form the two groups, which one is noisy, which one is missing, and the data.

    Attributes:
        plus: the digits of the group with target +1; the others have -1.
        noisy: the digit whose training labels were drawn by a coin.
        missing: the digit that was taken out of the training set.
        train_inputs: (n, 64) pixels between 0 and 1.
        train_targets: (n, 1) targets as the network sees them, +1 and -1.
        test_inputs: (m, 64), none of them in the training set.
        test_targets: (m, 1) true targets.
        test_digits: (m,) which digit each is.
        flipped: how many training targets the coin made wrong.
    """

    plus: tuple[int, ...]
    noisy: int
    missing: int
    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    test_digits: Tensor
    flipped: int

    @property
    def ordinary(self) -> Tensor:
        """(m,) test digits that are neither noisy nor missing."""
        return (self.test_digits != self.noisy) & (self.test_digits != self.missing)


def draw_task(generator: torch.Generator, train_size: int) -> Task:
    """Draw a task; `train_size` digits are set aside for training before the missing one is taken out."""
    data = load_digits()
    pixels = torch.from_numpy(data.data / 16.0)
    digits = torch.from_numpy(data.target).long()

    plus = torch.randperm(DIGITS, generator=generator)[: DIGITS // 2]
    noisy, missing = torch.randperm(DIGITS, generator=generator)[:2].tolist()
    order = torch.randperm(len(digits), generator=generator)
    train, test = order[:train_size], order[train_size:]
    train = train[digits[train] != missing]

    targets = torch.where(torch.isin(digits, plus), 1.0, -1.0).to(pixels.dtype).unsqueeze(1)
    seen = targets[train].clone()
    coin = torch.randint(2, seen.shape, generator=generator) * 2.0 - 1.0
    seen = torch.where((digits[train] == noisy).unsqueeze(1), coin.to(seen.dtype), seen)
    return Task(
        plus=tuple(sorted(plus.tolist())),
        noisy=noisy,
        missing=missing,
        train_inputs=pixels[train],
        train_targets=seen,
        test_inputs=pixels[test],
        test_targets=targets[test],
        test_digits=digits[test],
        flipped=int((seen != targets[train]).sum()),
    )
