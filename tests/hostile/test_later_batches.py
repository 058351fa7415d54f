"""Models that show what they are only on later batches, and embeddings that change their weights on the way."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oracles
import whence

STRUCTURES = ["exact", "core", "ekfac", "sketch"]
every_structure = pytest.mark.parametrize("structure", STRUCTURES)


def data(n: int = 8) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=draw, dtype=torch.float64)
    return x, torch.randn(n, 2, generator=draw, dtype=torch.float64)


class Mixing(nn.Module):
    """What an example gets depends on the others: on their mean, on those before it, or on the last of them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(3, 2), way

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        if self.way == "mean":
            return out - out.mean(0)
        return out.cumsum(0) if self.way == "before" else out + (out - out[-1:])


@every_structure
@pytest.mark.parametrize("way", ["mean", "before", "last"])
@pytest.mark.parametrize("sizes", [(1, 7), (1, 1, 6), (1, 1, 1, 2, 1, 1, 1), (1,) * 8], ids=str)
def test_models_that_mix_examples_are_refused_whatever_the_first_batch(
    structure: str, way: str, sizes: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, y = data()
    batches = list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))
    with pytest.raises(whence.NotDeterministicError, match=r"mixes the examples of a batch"):
        whence.fit(Mixing(way).double(), batches, structure=structure, ridge=0.1, progress=False)


def test_equal_examples_do_not_hide_a_mixture() -> None:
    torch.manual_seed(0)
    x, y = data()
    x[:4] = x[:1]
    with pytest.raises(whence.NotDeterministicError, match=r"mixes the examples of a batch"):
        whence.fit(Mixing("mean").double(), [(x[:4], y[:4]), (x[4:], y[4:])], ridge=0.1, progress=False)


class Converting(nn.Module):
    """Computes in single precision, which rounds otherwise for another number of examples, and answers in double."""

    def __init__(self, gap: float) -> None:
        super().__init__()
        self.linear, self.gap = nn.Linear(3, 2), gap

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x.to(self.linear.weight.dtype)).double()
        return out + self.gap * float(out.detach().abs().max()) * (len(x) == 1)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float32, 1e-1), (torch.float64, 1e-4)], ids=str)
def test_the_precision_of_the_weights_decides_which_differences_are_rounding(dtype: torch.dtype, gap: float) -> None:
    torch.manual_seed(0)
    x, y = data()
    whence.fit(Converting(1e-2 * gap).to(dtype), [(x, y)], ridge=0.1, progress=False)
    with pytest.raises(whence.NotDeterministicError, match=r"mixes the examples of a batch"):
        whence.fit(Converting(gap).to(dtype), [(x, y)], ridge=0.1, progress=False)


class OneAtATime(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(3))


def test_a_model_that_takes_one_example_at_a_time_is_noted() -> None:
    torch.manual_seed(0)
    (x, y), model = data(), OneAtATime().double()
    batches = list(zip(x.split(1), y.split(1), strict=True))
    tracer = whence.fit(model, batches, ridge=0.1, progress=False)
    assert any("one example at a time" in str(finding) for finding in tracer.diagnostics)
    wanted = oracles.leverage_blocks(oracles.tangents_of(model, x)[1], 0.1)
    np.testing.assert_allclose(tracer.leverage, np.diagonal(wanted, axis1=1, axis2=2), rtol=1e-8)


# --- Embeddings with max_norm -----------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self, kind: Any = nn.Embedding) -> None:
        super().__init__()
        self.table = kind(6, 3, max_norm=0.8)
        self.linear = nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        rows = self.table(words)
        return self.linear(rows if rows.dim() == 2 else rows.sum(1)).tanh()


def words(n: int = 10) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 5, (n, 4), generator=draw), torch.randn(n, 2, generator=draw, dtype=torch.float64)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 2))

    def forward(self, words: Tensor) -> Tensor:
        return F.embedding(words, self.table, max_norm=0.8).sum(1)


@every_structure
@pytest.mark.parametrize("model", [Words(), Words(nn.EmbeddingBag), Functional()], ids=["table", "bag", "function"])
def test_embeddings_that_shorten_rows_are_refused_before_they_do(structure: str, model: nn.Module) -> None:
    model = copy.deepcopy(model).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(whence.UnsupportedLayerError, match="without max_norm"):
        whence.fit(model, [words()], structure=structure, ridge=0.1, progress=False)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
