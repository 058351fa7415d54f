"""Tiny networks in float64 with data, one for every way a parameter can enter a forward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

EXAMPLES, TEST_POINTS, OUTPUTS = 9, 4, 2


@dataclass(frozen=True)
class Case:
    """A network in eval mode, training inputs and targets, and inputs to predict."""

    model: nn.Module
    inputs: Any
    targets: Tensor
    test_inputs: Any

    def batches(self, size: int = 5) -> list[Any]:
        """The training set as a list of batches, the last one ragged."""
        return batches_of(self.inputs, self.targets, size)


def batches_of(inputs: Any, targets: Tensor, size: int = 5) -> list[Any]:
    """A list of (inputs, targets) batches, or of dicts with "labels" where the inputs are a dict."""
    rows = [slice(start, start + size) for start in range(0, len(targets), size)]
    if isinstance(inputs, dict):
        named = {**inputs, "labels": targets}
        return [{key: value[chosen] for key, value in named.items()} for chosen in rows]
    if isinstance(inputs, tuple):
        return [(tuple(part[chosen] for part in inputs), targets[chosen]) for chosen in rows]
    return [(inputs[chosen], targets[chosen]) for chosen in rows]


def linear(weights: Any) -> nn.Linear:
    """x -> W x without a bias, W (k, p) as given."""
    tensor = torch.as_tensor(weights, dtype=torch.float64)
    layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(tensor)
    return layer.eval()


class Attention(nn.Module):
    """`nn.MultiheadAttention` over three tokens, then the mean of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, OUTPUTS)

    def forward(self, tokens: Tensor) -> Tensor:
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        return self.head(torch.tanh(mixed).mean(dim=1))


class Recurrent(nn.Module):
    """A GRU over three steps: `torch.vmap` cannot take it, so the tangents must come another way."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 2, batch_first=True)
        self.head = nn.Linear(2, OUTPUTS)

    def forward(self, steps: Tensor) -> Tensor:
        return self.head(self.cell(steps)[0][:, -1])


class Decoder(nn.Module):
    """Logits (n, t, words) of the next token, from one causal layer."""

    def __init__(self, words: int, width: int = 4, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(words, width)
        self.layer = nn.TransformerEncoderLayer(width, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=self.words.weight.dtype)
        return self.head(self.layer(self.words(x), src_mask=mask))


class BagOfWords(nn.Module):
    """The same embedding row may be used several times in one example, or never at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.head = nn.Linear(3, OUTPUTS)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(words).sum(dim=1)))


class Tied(nn.Module):
    """Two modules share one weight, and one module is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.twice = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(x)))))


class BareParameters(nn.Module):
    """Parameters outside any layer, one of them frozen; keyword inputs, as from a dict batch."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(3))
        self.mixing = nn.Parameter(torch.randn(OUTPUTS, 3))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.register_buffer("shift", torch.randn(3))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return torch.tanh(left * self.scale + right * self.frozen + self.shift) @ self.mixing.T


class Unused(nn.Module):
    """A parameter that no output depends on, beside one that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, OUTPUTS)
        self.idle = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.head(x))


class SharedOutputs(nn.Module):
    """Linear in its parameters, which all outputs share: f_c(x) = sum_j x_j B_cj . w, so leverage blocks are full."""

    def __init__(self, mixing: Tensor, weights: Tensor) -> None:
        super().__init__()
        self.register_buffer("mixing", mixing)  # (k, i, d)
        self.weights = nn.Parameter(weights.clone())  # (d,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("ni,cip,p->nc", x, self.mixing, self.weights)


class TwoInputs(nn.Module):
    """Two positional inputs of different widths."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, OUTPUTS), nn.Linear(2, OUTPUTS)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.left(left) * torch.tanh(self.right(right))


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, OUTPUTS))


def _single_output() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 1), nn.Flatten(0))


def _convolution() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2), nn.GELU(), nn.Conv2d(4, 2, 2))
    return nn.Sequential(body, nn.Tanh(), nn.Flatten(), nn.Linear(2, OUTPUTS))


def _norms() -> nn.Module:
    body = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 4), nn.GroupNorm(2, 4))
    norm = nn.BatchNorm1d(4)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2.0)
    return nn.Sequential(body, norm, nn.Tanh(), nn.Linear(4, OUTPUTS))


def _normal(*shape: int) -> Callable[[int], Any]:
    return lambda n: torch.randn(n, *shape)


def _words(n: int) -> Tensor:
    return torch.randint(0, 6, (n, 4))


def _pair(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3), torch.randn(n, 2)


def _named(n: int) -> dict[str, Tensor]:
    return {"left": torch.randn(n, 3), "right": torch.randn(n, 3)}


_BUILDERS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (_mlp, _normal(3)),
    "single_output": (_single_output, _normal(3)),
    "convolution": (_convolution, _normal(2, 4, 4)),
    "norms": (_norms, _normal(3)),
    "attention": (Attention, _normal(3, 4)),
    "recurrent": (Recurrent, _normal(3, 2)),
    "embedding": (BagOfWords, _words),
    "tied": (Tied, _normal(3)),
    "bare_parameters": (BareParameters, _named),
    "two_inputs": (TwoInputs, _pair),
    "unused": (Unused, _normal(3)),
}
NAMES = tuple(_BUILDERS)


def build(name: str, seed: int = 0) -> Case:
    """One of the networks in `NAMES`; the caller's random state is left alone."""
    make_model, make_inputs = _BUILDERS[name]
    before = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(torch.float64)
        try:
            model, inputs, test_inputs = make_model().eval(), make_inputs(EXAMPLES), make_inputs(TEST_POINTS)
            outputs = 1 if name == "single_output" else OUTPUTS
            targets = torch.randn(EXAMPLES, outputs)
        finally:
            torch.set_default_dtype(before)
    return Case(model, inputs, targets, test_inputs)
