"""Small modules, one for every way in which a parameter can be used. Nothing here imports the package."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

WIDTH, LENGTH, WORDS = 4, 3, 6


def vectors(n: int) -> Tensor:
    return torch.randn(n, WIDTH, dtype=torch.float64)


def tokens(n: int) -> Tensor:
    return torch.randn(n, LENGTH, WIDTH, dtype=torch.float64)


def words(n: int) -> Tensor:
    return torch.randint(0, WORDS, (n, LENGTH))


def images(channels: int, *sizes: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, channels, *sizes, dtype=torch.float64)


class Flat(nn.Module):
    """A module in front of a fixed map to two outputs that has no parameters."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return mix(self.layers(x))


def mix(x: Tensor) -> Tensor:
    """Any features (n, ...) to outputs (n, 2), nonlinear so that positions differ."""
    flat = x.flatten(1)
    index = torch.arange(flat.shape[1], dtype=flat.dtype, device=flat.device)
    return torch.stack([(flat.tanh() * (index * 0.7).cos()).sum(1), (flat.sin() * (index * 0.3 + 1).sin()).sum(1)], 1)


class Twisted(nn.Linear):
    """A subclass whose forward pass is not a linear layer's."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.tanh(), self.weight * 2, self.bias) + F.linear(x, self.weight)


class Conv1D(nn.Module):
    """Hugging Face's: a linear layer with its weight input first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.outputs = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], self.outputs)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class Applied(nn.Module):
    """Parameters of given shapes, used by a function of them and of the inputs."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.5 + 0.1))

    def forward(self, x: Any) -> Tensor:
        return mix(self.function(x, **dict(self.named_parameters())))


class Transposed(nn.Module):
    """Sequence first inside."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return mix(self.inner(x.transpose(0, 1)).transpose(0, 1))


class Folded(nn.Module):
    """Tokens folded into the batch, the examples outermost or innermost."""

    def __init__(self, inner: nn.Module, *, outer: bool) -> None:
        super().__init__()
        self.inner, self.outer = inner, outer

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        if self.outer:
            return mix(self.inner(x.flatten(0, 1)).unflatten(0, (n, -1)))
        return mix(self.inner(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (-1, n)).transpose(0, 1))


class SelfAttention(nn.Module):
    def __init__(self, *, batch_first: bool, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first, **options)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.attention.batch_first else x.transpose(0, 1)
        causal = torch.ones(LENGTH, LENGTH).triu(1).bool()
        out, weights = self.attention(x, x, x, attn_mask=causal)
        out = out if self.attention.batch_first else out.transpose(0, 1)
        return mix(out) + mix(weights)


class CrossAttention(nn.Module):
    """Queries from one sequence, keys and values from another, or from two others."""

    def __init__(self, *, together: bool, **options: Any) -> None:
        super().__init__()
        self.together = together
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        padding = torch.zeros(len(y), y.shape[1], dtype=torch.bool)
        padding[:, -1] = True
        out, _ = self.attention(x, y, y if self.together else y.cos(), key_padding_mask=padding, need_weights=False)
        return mix(out)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.inner(x if self.inner.batch_first else x.transpose(0, 1))
        out = out if self.inner.batch_first else out.transpose(0, 1)
        ends = last if isinstance(last, tuple) else (last,)
        return mix(out) + sum(mix(end.transpose(0, 1)) for end in ends)


class Cells(nn.Module):
    """One cell called once for every token."""

    def __init__(self, kind: type[nn.RNNCellBase], **options: Any) -> None:
        super().__init__()
        self.inner = kind(WIDTH, 3, **options)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for token in x.unbind(1):
            state = self.inner(token, state)
        return sum(mix(part) for part in (state if isinstance(state, tuple) else (state,)))


class Packed(nn.Module):
    """Sequences of different lengths, sorted by length inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.GRU(WIDTH, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        lengths = (x[:, 0, 0] > 0).long() + 2
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return mix(self.inner(packed)[1].transpose(0, 1))


class LoRA(nn.Module):
    """A frozen layer with a low-rank correction."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, 3)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH)), nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return mix(self.base(x) + F.linear(F.linear(x, self.down), self.up) * 0.5)


class TiedLinears(nn.Module):
    """An autoencoder whose decoder is the encoder's transpose, and whose encoder is used twice."""

    def __init__(self, *, transposed: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.transposed = transposed
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        return mix(F.linear(hidden, self.one.weight.t()) if self.transposed else self.two(hidden))


class LanguageModel(nn.Module):
    """Embeddings tied to the output layer, positions from a second table."""

    def __init__(self, *, flat_positions: bool = False) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(5, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.flat_positions = flat_positions

    def forward(self, x: Tensor) -> Tensor:
        where = torch.arange(x.shape[1])
        places = self.positions(where if self.flat_positions else where[None])
        return mix(self.head((self.words(x) + places).tanh()))


class Vision(nn.Module):
    """A class token, position embeddings cut to length, a layer scale, a channel bias."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.position = nn.Parameter(torch.randn(1, LENGTH + 4, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1)
        x = x + self.position[:, : x.shape[1]]
        normed = self.norm(x)
        x = x + self.scale * self.attention(normed, normed, normed, need_weights=False)[0]
        return mix(x[:, 0])


class RelativeBias(nn.Module):
    """A bias table looked up by relative position and added to windows folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * LENGTH - 1, 2))
        steps = torch.arange(LENGTH)
        self.register_buffer("index", steps[:, None] - steps + LENGTH - 1)

    def forward(self, x: Tensor) -> Tensor:  # (n, t, d)
        windows = torch.stack([x, x.flip(1)], 1).flatten(0, 1).unflatten(-1, (2, -1)).transpose(1, 2)
        scores = windows @ windows.transpose(-1, -2)  # (n w, h, t, t)
        bias = self.table[self.index.view(-1)].view(LENGTH, LENGTH, -1).permute(2, 0, 1).contiguous()
        return mix((scores + bias.unsqueeze(0)).softmax(-1).unflatten(0, (len(x), -1)))


class Bags(nn.Module):
    """A bag of words, given as a matrix or one word after the other."""

    def __init__(self, *, offsets: bool = False, weighted: bool = False, last: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.EmbeddingBag(WORDS, WIDTH, include_last_offset=last, **options)
        self.offsets, self.weighted, self.last = offsets, weighted, last

    def forward(self, x: Tensor) -> Tensor:
        weights = x.to(self.inner.weight.dtype).cos() if self.weighted else None
        if not self.offsets:
            return mix(self.inner(x, None, weights))
        lengths = x[:, 0] % 3 + 1  # ragged: the first 1 to 3 words of each example
        words = torch.cat([row[:length] for row, length in zip(x, lengths, strict=True)])
        ends = lengths.cumsum(0)
        starts = torch.cat([ends.new_zeros(1), ends if self.last else ends[:-1]])
        return mix(self.inner(words, starts))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 2)).double()
