"""The ridge of a weight decay, for each kind of mean."""

from __future__ import annotations

import pytest
import torch

from whence import Categorical, InputError
from whence.integrations.weight_decay import decay_of, ridge_of


@pytest.mark.parametrize(
    ("likelihood", "targets", "expected"),
    [
        ("gaussian", torch.zeros(10), 20 * 0.1 / 2),
        ("gaussian", torch.zeros(10, 3), 20 * 3 * 0.1 / 2),
        ("categorical", torch.zeros(10, dtype=torch.long), 20 * 0.1),
        (Categorical(), torch.zeros(10, dtype=torch.long), 20 * 0.1),
        ("bernoulli", torch.zeros(10, 4), 20 * 4 * 0.1),
    ],
)
def test_lambda_counts_what_the_mean_divides_by(likelihood: object, targets: torch.Tensor, expected: float) -> None:
    loader = [(torch.zeros(10, 2), targets), {"x": torch.zeros(10, 2), "labels": targets}]
    assert ridge_of(0.1, loader, likelihood) == pytest.approx(expected)  # type: ignore[arg-type]


def test_the_largest_decay_of_all_groups_counts() -> None:
    weight, bias = (torch.nn.Parameter(torch.zeros(1)) for _ in range(2))
    adam = torch.optim.Adam([{"params": [weight], "weight_decay": 0.3}, {"params": [bias]}])
    assert decay_of([adam]) == 0.3
    assert decay_of([]) == 0.0
    with pytest.raises(InputError, match="expected a weight decay above zero"):
        ridge_of(0.0, [], "gaussian")
