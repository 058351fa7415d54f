"""Data that come with scikit-learn, for benchmarks beside the peers where no folder of data is at hand."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_diabetes
from torch import Tensor
from torch.nn import functional as F

from .data import Split
from .studied import eight_by_eight

TABLE, IMAGES, TURNED = "diabetes", "digits", "turned digits"
"""442 patients with ten features; 1,797 digits; the same digits, each turned by a quarter."""

TESTED = 0.1


def diabetes(split: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs (442, 10), targets (442, 1), and which are tested: a tenth, drawn by the number of the split."""
    found = load_diabetes()
    inputs, targets = (torch.from_numpy(np.asarray(part)).float() for part in (found.data, found.target))
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(split))
    return inputs, targets.unsqueeze(1), order[: round(TESTED * len(inputs))]


def images(name: str) -> Split:
    """The digits, or the turned ones, as large as those of MNIST: (n, 1, 28, 28)."""
    split = eight_by_eight()
    train, test = (_large(part, turned=name == TURNED) for part in (split.inputs, split.test_inputs))
    return Split(train, split.labels, test, split.test_labels)


def _large(pixels: Tensor, turned: bool) -> Tensor:
    found = F.interpolate(pixels.reshape(-1, 1, 8, 8), size=28, mode="bilinear", align_corners=False)
    return found.rot90(1, (2, 3)) if turned else found
