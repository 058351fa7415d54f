"""Tables as networks see them: a random part to test on, numbers standardised, categories as zeros and ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence_paper.data import Bank, Housing, read_bank, read_california
from whence_paper.experiment import Settings

TEST_SHARE = 0.2
NUMBERS = ("age", "balance", "day", "campaign", "pdays", "previous")
"""Columns of bank marketing that are numbers."""
LEFT_OUT = ("duration",)
"""Known only after the call, when the answer is known too."""


@dataclass(frozen=True)
class Problem:
    """A table cut in two.

    Attributes:
        source: of the data.
        inputs: (n, i) of the training part, standardised.
        targets: (n, 1); a standardised number, or +1 and -1.
        test_inputs: (m, i).
        test_targets: (m, 1).
        rows: (m,) which rows of the data the test part has.
        train_rows: (n,) which rows the training part has.
        unit: what one unit of the targets is, in units of the data.
    """

    source: str
    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    rows: Tensor
    train_rows: Tensor
    unit: float = 1.0

    def batches(self, size: int = 1000) -> list[tuple[Tensor, Tensor]]:
        """The training part, for a fit."""
        return list(zip(self.inputs.split(size), self.targets.split(size), strict=True))


def housing(settings: Settings) -> Housing:
    """California, or an invented land where it is to be quick and no folder is given."""
    return invented_land() if settings.quick and settings.data is None else read_california(settings.data)


def bank(settings: Settings) -> Bank:
    """Bank marketing, or invented customers."""
    return invented_customers() if settings.quick and settings.data is None else read_bank(settings.data)


def of_housing(data: Housing, seed: int, size: int | None = None, *, log_income: bool = False) -> Problem:
    """The network's view of districts; `size` of them in all, their incomes as they are or as logarithms."""
    train, test = cut(len(data.targets), seed, size)
    values, inputs = data.targets.unsqueeze(1), data.inputs.clone()
    if log_income:
        inputs[:, 0] = inputs[:, 0].log()
    mean, unit = values[train].mean(), values[train].std()
    return Problem(
        "California housing" if len(data.targets) > 20_000 else "invented",
        *_both(standardised(inputs, train), (values - mean) / unit, train, test),
        test,
        train,
        float(unit),
    )


def of_bank(data: Bank, seed: int, size: int | None = None) -> Problem:
    """The network's view of customers; the call's duration is left out."""
    train, test = cut(len(data.targets), seed, size)
    numbers = [name for name in data.columns if name in NUMBERS]
    table = torch.tensor([[float(value) for value in data.columns[name]] for name in numbers], dtype=torch.float64).T
    parts = [standardised(table, train)]
    for name, values in data.columns.items():
        if name not in NUMBERS and name not in LEFT_OUT:
            kinds = sorted(set(values))
            place = {kind: number for number, kind in enumerate(kinds)}
            codes = torch.tensor([place[value] for value in values])
            parts.append(torch.nn.functional.one_hot(codes, len(kinds)).double())
    targets = torch.where(data.targets, 1.0, -1.0).double().unsqueeze(1)
    source = "bank marketing" if len(data.targets) > 40_000 else "invented"
    return Problem(source, *_both(torch.cat(parts, 1), targets, train, test), test, train)


def cut(n: int, seed: int, size: int | None) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows to test on."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[: size or n]
    tests = round(TEST_SHARE * len(order))
    return order[tests:], order[:tests]


def standardised(table: Tensor, train: Tensor) -> Tensor:
    """Columns with mean zero and deviation one over the training part."""
    return (table - table[train].mean(0)) / table[train].std(0).clamp_min(1e-12)


def _both(inputs: Tensor, targets: Tensor, train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, targets = inputs.float(), targets.float()
    return inputs[train], targets[train], inputs[test], targets[test]


def invented_land(n: int = 1500, seed: int = 0) -> Housing:
    """A quiet town, a town of the same size where prices scatter, and few districts in the wide country up north."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.multinomial(torch.tensor([0.46, 0.46, 0.08]), n, True, generator=draw)
    centres = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 4.0]], dtype=torch.float64)[kinds]
    spread = torch.tensor([0.3, 0.3, 1.5], dtype=torch.float64)[kinds].unsqueeze(1)
    places = centres + spread * torch.randn(n, 2, generator=draw, dtype=torch.float64)
    scatter = torch.tensor([0.1, 1.0, 0.1], dtype=torch.float64)[kinds]
    values = 2 + places[:, 0].sin() + places[:, 1].cos() + scatter * torch.randn(n, generator=draw, dtype=torch.float64)
    other = torch.zeros(n, 6, dtype=torch.float64)
    names = tuple(f"feature {number}" for number in range(6))
    return Housing((*names, "Latitude", "Longitude"), torch.cat([other, places.flip(1)], 1), values)


def invented_customers(n: int = 2000, seed: int = 0) -> Bank:
    """Clerks who answer by their balance, managers who answer by a coin, and few astronauts who all say no."""
    draw = torch.Generator().manual_seed(seed)
    kinds = torch.multinomial(torch.tensor([0.50, 0.485, 0.015]), n, True, generator=draw)
    balance = 2 * torch.rand(n, generator=draw) - 1
    coin = torch.rand(n, generator=draw) < 0.5
    answers = torch.where(kinds == 0, balance > 0, torch.where(kinds == 1, coin, False))
    names = ("clerk", "manager", "astronaut")
    columns = {
        "age": ["40"] * n,
        "job": [names[kind] for kind in kinds.tolist()],
        "balance": [f"{value:.3f}" for value in balance.tolist()],
        "duration": ["100"] * n,
    }
    return Bank(columns, answers)
