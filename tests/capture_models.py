"""One small model for every way in which the capture can meet a parameter. Nothing here imports the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

WIDTH, LENGTH, WORDS = 4, 3, 6


@dataclass(frozen=True)
class Model:
    """How to build a model and its inputs, and what is expected of the capture.

    Attributes:
        build: Makes the module.
        inputs: Makes n examples.
        generic: Parameters that are expected to go the generic way.
        kinds: The form that is expected of some blocks.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    generic: frozenset[str] = frozenset()
    kinds: dict[str, str] = field(default_factory=dict)


def prepared(model: Model) -> nn.Module:
    """The module in float64 and in evaluation mode."""
    return model.build().double().eval()


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


def encoder(*, batch_first: bool, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 5, batch_first=batch_first, norm_first=norm_first)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Flat(stack) if batch_first else Transposed(stack)


def running(norm: Any) -> Any:
    """A norm with running statistics that are not the initial ones."""
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return norm


def affine(norm: Any) -> Any:
    """A norm with weights that are not ones and zeros."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    return norm


MODELS: dict[str, Model] = {
    "linear": Model(lambda: Flat(nn.Linear(WIDTH, 3)), vectors),
    "linear without bias": Model(lambda: Flat(nn.Linear(WIDTH, 3, bias=False)), vectors),
    "linear on a sequence": Model(lambda: Flat(nn.Linear(WIDTH, 3), nn.Tanh(), nn.Linear(3, 2)), tokens),
    "subclass with its own forward": Model(
        lambda: Flat(Twisted(WIDTH, 3)), tokens, kinds={"layers.0.weight": "dense", "layers.0.bias": "dense"}
    ),
    "relu in place": Model(
        lambda: Flat(nn.Linear(WIDTH, 5), nn.ReLU(inplace=True), nn.Linear(5, 3), nn.ReLU(inplace=True)), vectors
    ),
    "a module called twice": Model(
        lambda: Flat(*[nn.Linear(WIDTH, WIDTH)] * 2), tokens, kinds={"layers.0.weight": "kronecker"}
    ),
    "sequence first": Model(lambda: Transposed(nn.Linear(WIDTH, 3)), tokens),
    "folded, outer": Model(lambda: Folded(nn.Linear(WIDTH, 3), outer=True), tokens),
    "folded, inner": Model(lambda: Folded(nn.Linear(WIDTH, 3), outer=False), tokens),
    "Conv1D": Model(lambda: Flat(Conv1D(WIDTH, 3), nn.Tanh(), Conv1D(3, 2)), tokens),
    "x @ W + b": Model(lambda: Applied(lambda x, w, b: x @ w + b, w=(WIDTH, 3), b=(3,)), tokens),
    "x @ W.T": Model(
        lambda: Applied(lambda x, w: x @ w.T + torch.matmul(x, w.t()), w=(3, WIDTH)), tokens, kinds={"w": "kronecker"}
    ),
    "W @ x": Model(lambda: Applied(lambda x, w: torch.matmul(w, x.mT), w=(3, WIDTH)), tokens, kinds={"w": "kronecker"}),
    "mm": Model(
        lambda: Applied(lambda x, w, v: torch.mm(x, w).mm(v.mT), w=(WIDTH, 3), v=(2, 3)),
        vectors,
        kinds={"w": "kronecker", "v": "kronecker"},
    ),
    "addmm method": Model(
        lambda: Applied(lambda x, w, b: b.addmm(x, w) + b.addmm(x, w, alpha=1), w=(WIDTH, 3), b=(3,)),
        vectors,
        frozenset({"w", "b"}),
    ),
    "product of weights": Model(
        lambda: Applied(lambda x, a, b: F.linear(x, torch.mm(a, b)), a=(3, 2), b=(2, WIDTH)), tokens
    ),
    "rows of a weight": Model(
        lambda: Applied(lambda x, w, b: F.linear(x, w[1:3], b[1:3]) + F.linear(x, w[:2], b[:2]), w=(4, WIDTH), b=(4,)),
        tokens,
        kinds={"w": "kronecker"},
    ),
    "a matrix in two products": Model(lambda: TiedLinears(transposed=True), vectors, kinds={"one.weight": "dense"}),
    "tied linear layers": Model(
        lambda: TiedLinears(transposed=False), tokens, kinds={"one.weight": "kronecker", "one.bias": "dense"}
    ),
    "Conv1d": Model(
        lambda: Flat(
            nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.Tanh(), nn.Conv1d(4, 4, 2, dilation=2, groups=2, bias=False)
        ),
        images(2, 9),
    ),
    "Conv2d": Model(
        lambda: Flat(
            nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), nn.Tanh(), nn.Conv2d(4, 3, 1)
        ),
        images(2, 5, 6),
    ),
    "Conv2d, same and circular": Model(
        lambda: Flat(
            nn.Conv2d(2, 2, (4, 3), padding="same", dilation=(1, 2)),
            nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
            nn.Conv2d(2, 2, 3, padding=2, padding_mode="reflect"),
            nn.Conv2d(2, 3, 2, padding="valid"),
        ),
        images(2, 4, 5),
    ),
    "Conv2d, depthwise": Model(lambda: Flat(nn.Conv2d(3, 6, 3, groups=3), nn.ReLU(inplace=True)), images(3, 4, 4)),
    "Conv3d": Model(lambda: Flat(nn.Conv3d(2, 4, 2, groups=2, padding=(0, 1, 0))), images(2, 3, 2, 3)),
    "Conv2d, frames folded": Model(lambda: Folded(nn.Conv2d(1, 2, 2, padding=1), outer=True), images(3, 1, 3, 3)),
    "ConvTranspose1d": Model(
        lambda: Flat(nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1, output_padding=1)), images(2, 4)
    ),
    "ConvTranspose2d": Model(
        lambda: Flat(nn.ConvTranspose2d(4, 6, (2, 3), stride=(1, 2), groups=2, dilation=(2, 1))),
        images(4, 2, 3),
        kinds={"layers.0.weight": "kronecker", "layers.0.bias": "dense"},
    ),
    "ConvTranspose2d, frames folded": Model(
        lambda: Folded(nn.ConvTranspose2d(1, 2, 2, bias=False), outer=False), images(2, 1, 2, 3)
    ),
    "ConvTranspose3d": Model(
        lambda: Flat(nn.ConvTranspose3d(2, 2, 2, stride=2, output_padding=(1, 0, 1))), images(2, 2, 1, 2)
    ),
    "LayerNorm": Model(
        lambda: Flat(affine(nn.LayerNorm(WIDTH)), affine(nn.LayerNorm([LENGTH, WIDTH]))),
        tokens,
        kinds={"layers.0.weight": "dense"},
    ),
    "LayerNorm without bias": Model(lambda: Flat(affine(nn.LayerNorm(WIDTH, bias=False))), vectors),
    "torch.layer_norm": Model(
        lambda: Applied(lambda x, w, b: torch.layer_norm(x, (WIDTH,), w, b), w=(WIDTH,), b=(WIDTH,)), tokens
    ),
    "RMSNorm": Model(lambda: Flat(affine(nn.RMSNorm(WIDTH)), affine(nn.RMSNorm(WIDTH, eps=0.1))), tokens),
    "torch.rms_norm": Model(lambda: Applied(lambda x, w: torch.rms_norm(x, (WIDTH,), w), w=(WIDTH,)), tokens),
    "BatchNorm1d": Model(lambda: Flat(running(affine(nn.BatchNorm1d(WIDTH)))), vectors),
    "BatchNorm2d": Model(
        lambda: Flat(nn.Conv2d(2, 3, 2), running(affine(nn.BatchNorm2d(3))), nn.ReLU(inplace=True)), images(2, 3, 3)
    ),
    "GroupNorm": Model(lambda: Flat(affine(nn.GroupNorm(2, 4))), images(4, 2, 3)),
    "GroupNorm, frames folded": Model(lambda: Folded(affine(nn.GroupNorm(1, 2)), outer=True), images(3, 2, 2)),
    "InstanceNorm": Model(lambda: Flat(affine(nn.InstanceNorm2d(2, affine=True))), images(2, 3, 2)),
    "PReLU": Model(lambda: Flat(nn.PReLU(2), nn.PReLU()), images(2, 3)),
    "Embedding": Model(lambda: Flat(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)), words),
    "Embedding with padding": Model(lambda: Flat(nn.Embedding(WORDS, WIDTH, padding_idx=-2)), words),
    "Embedding, sparse": Model(lambda: Flat(nn.Embedding(WORDS, WIDTH, sparse=True)), words),
    "table[index]": Model(lambda: Applied(lambda x, w: w[x], w=(WORDS, 2, 2)), words, kinds={"w": "rows"}),
    "index_select": Model(
        lambda: Applied(lambda x, w: w.index_select(0, x[:, 0]) * torch.index_select(w, 0, x[:, 1]), w=(WORDS, 2)),
        words,
    ),
    "EmbeddingBag, mean": Model(Bags, words),
    "EmbeddingBag, sum": Model(lambda: Bags(mode="sum", weighted=True), words),
    "EmbeddingBag, padding": Model(lambda: Bags(mode="mean", padding_idx=2), words),
    "EmbeddingBag, offsets": Model(lambda: Bags(offsets=True), words),
    "EmbeddingBag, last offset": Model(lambda: Bags(offsets=True, last=True, mode="sum"), words),
    "EmbeddingBag, max": Model(lambda: Bags(mode="max"), words, frozenset({"inner.weight"})),
    "attention": Model(lambda: SelfAttention(batch_first=True), tokens),
    "attention, sequence first": Model(lambda: SelfAttention(batch_first=False, bias=False), tokens),
    "attention, extra keys": Model(
        lambda: SelfAttention(batch_first=True, add_zero_attn=True),
        tokens,
        frozenset(
            f"attention.{name}" for name in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        ),
    ),
    "cross attention": Model(
        lambda: CrossAttention(together=True),
        lambda n: (tokens(n), tokens(n)[:, :2].exp()),
        kinds={"attention.in_proj_weight": "kronecker"},
    ),
    "cross attention, three": Model(lambda: CrossAttention(together=False), lambda n: (tokens(n), tokens(n).exp())),
    "cross attention, other widths": Model(
        lambda: CrossAttention(together=True, kdim=2, vdim=2), lambda n: (tokens(n), tokens(n)[..., :2])
    ),
    "transformer": Model(lambda: encoder(batch_first=True, norm_first=False), tokens),
    "transformer, sequence first": Model(lambda: encoder(batch_first=False, norm_first=True), tokens),
    "LSTM": Model(
        lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True, batch_first=True),
        tokens,
        kinds={"inner.weight_ih_l1_reverse": "kronecker", "inner.weight_hh_l1_reverse": "kronecker"},
    ),
    "LSTM with projection": Model(lambda: Recurrent(nn.LSTM, proj_size=2, bias=False), tokens),
    "GRU": Model(lambda: Recurrent(nn.GRU, num_layers=2, bidirectional=True), tokens),
    "RNN": Model(lambda: Recurrent(nn.RNN, batch_first=True), tokens),
    "RNN, relu": Model(lambda: Recurrent(nn.RNN, nonlinearity="relu"), tokens),
    "LSTMCell": Model(lambda: Cells(nn.LSTMCell), tokens),
    "GRUCell": Model(lambda: Cells(nn.GRUCell), tokens),
    "RNNCell": Model(lambda: Cells(nn.RNNCell, bias=False), tokens),
    "RNNCell, relu": Model(lambda: Cells(nn.RNNCell, nonlinearity="relu"), tokens),
    "GRU, packed": Model(
        Packed, tokens, frozenset(f"inner.{kind}_{of}_l0" for kind in ("weight", "bias") for of in ("ih", "hh"))
    ),
    "LoRA": Model(LoRA, tokens, kinds={"down": "kronecker", "up": "kronecker"}),
    "tied embedding": Model(LanguageModel, words, kinds={"words.weight": "dense", "positions.weight": "rows"}),
    "tied embedding, flat positions": Model(
        lambda: LanguageModel(flat_positions=True), words, kinds={"positions.weight": "rows"}
    ),
    "class token and positions": Model(Vision, tokens),
    "relative bias": Model(RelativeBias, tokens, kinds={"table": "rows"}),
    "weight norm": Model(lambda: Flat(parametrizations.weight_norm(nn.Linear(WIDTH, 3))), tokens),
    "spectral norm": Model(lambda: Flat(parametrizations.spectral_norm(nn.Linear(WIDTH, 3))), tokens),
    "biases put together": Model(
        lambda: Applied(
            lambda x, w, q, v: F.linear(x, w, torch.cat([q, torch.zeros_like(q), v])), w=(6, WIDTH), q=(2,), v=(2,)
        ),
        tokens,
        kinds={"w": "kronecker", "q": "dense"},
    ),
    "positions of another length": Model(
        lambda: Applied(lambda x, p: x + F.interpolate(p, size=LENGTH, mode="linear").transpose(1, 2), p=(1, WIDTH, 5)),
        tokens,
    ),
    "a scalar": Model(lambda: Applied(lambda x, s: x * s.exp() + s, s=()), vectors),
    "einsum": Model(
        lambda: Applied(lambda x, w: torch.einsum("ntd,de->nte", x, w), w=(WIDTH, 3)), tokens, frozenset({"w"})
    ),
    "known and unknown use": Model(
        lambda: Applied(lambda x, w: F.linear(x, w) + torch.einsum("ntd,ed->nte", x, w), w=(3, WIDTH)),
        tokens,
        frozenset({"w"}),
    ),
}
