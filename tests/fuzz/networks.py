"""Small networks drawn at random, out of blocks of every kind that a capture may meet. Nothing here imports whence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

WORDS = 6


@dataclass
class Drawn:
    """A network and how to make its inputs.

    Attributes:
        model: in evaluation mode.
        inputs: makes n examples: a tensor, a tuple or a dict.
        key: says of inputs by what their examples may be sorted, so that the first batch is unlike the others.
        words: what it is made of.
        plain: whether it consists of linear layers, each used once, and functions without parameters.
        other: makes n examples with another number of tokens, where the network takes any.
    """

    model: nn.Module
    inputs: Callable[[int], Any]
    key: Callable[[Any], Tensor]
    words: list[str]
    plain: bool = False
    other: Callable[[int], Any] | None = None


# --- Blocks on the last axis: (n, h) or (n, t, h) to the same -----------------------------------------------------


def normal(*shape: int, scale: float = 0.6) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * scale)


class Act(nn.Module):
    """A function without parameters."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        if self.name == "relu in place":
            return F.relu(x * 1.0, inplace=True)
        return {"tanh": torch.tanh, "relu": torch.relu, "gelu": F.gelu, "silu": F.silu, "softplus": F.softplus}[
            self.name
        ](x)


def act(rng: Random) -> Act:
    return Act(rng.choice(["tanh", "tanh", "relu", "gelu", "silu", "softplus", "relu in place"]))


class Applied(nn.Module):
    """Parameters of given shapes, used by a function of them and of the inputs."""

    def __init__(self, function: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        for name, shape in shapes.items():
            self.register_parameter(name, normal(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))


class Residual(nn.Module):
    def __init__(self, inner: nn.Module, scale: float | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.scale = None if scale is None else nn.Parameter(torch.tensor(scale))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.inner(x) if self.scale is None else self.scale * self.inner(x))


OFF_ZERO = 1e-3  # after a layer norm means are zero up to rounding, which must not decide where a row goes


class Gate(nn.Module):
    """A branch that is shut wherever the mean of the inputs is below a bound; `how` it multiplies by its weight."""

    def __init__(self, h: int, how: str, bound: float) -> None:
        super().__init__()
        self.weight, self.how, self.bound = normal(h, h), how, bound
        self.two = normal(h, h, h) if how == "bilinear" else None

    def forward(self, x: Tensor) -> Tensor:
        open_ = (x.mean(-1, keepdim=True) - self.bound - OFF_ZERO).relu()
        if self.how == "einsum":
            inner = torch.einsum("...d,de->...e", x, self.weight)
        elif self.how == "tensordot":
            inner = torch.tensordot(x, self.weight, dims=([-1], [0]))
        elif self.how == "bilinear":
            inner = F.bilinear(x, x @ self.weight, self.two)
        elif self.how == "elementwise":
            inner = (x.unsqueeze(-1) * self.weight).sum(-2)
        else:
            inner = F.linear(x, self.weight)
        return x + open_ * inner


class Experts(nn.Module):
    """Each row goes to one of some layers, by its mean; `how` it gets there."""

    def __init__(self, h: int, count: int, how: str) -> None:
        super().__init__()
        self.how, self.count = how, count
        if how in ("table", "table einsum"):
            self.weight, self.bias = normal(count, h, h), normal(count, h)
        else:
            self.experts = nn.ModuleList(nn.Linear(h, h) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, shape[-1])
        where = ((x.mean(-1) + 0.5 + OFF_ZERO) * self.count).long().clamp(0, self.count - 1)
        if self.how == "table":
            out = torch.bmm(self.weight[where], x.unsqueeze(-1)).squeeze(-1) + self.bias[where]
        elif self.how == "table einsum":
            out = torch.einsum("nij,nj->ni", self.weight[where], x) + self.bias.index_select(0, where)
        elif self.how == "masks":
            out = torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                out = out + (where == at).unsqueeze(-1).to(x.dtype) * expert(x)
        elif self.how == "used alone":
            out = torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                if bool((where == at).any()):
                    out = out + torch.where((where == at).unsqueeze(-1), expert(x), torch.zeros_like(x))
        else:  # rows are picked, and put back
            out = torch.zeros_like(x)
            for at, expert in enumerate(self.experts):
                rows = (where == at).nonzero().squeeze(1)
                if self.how == "picked" or len(rows):
                    out = out.index_copy(0, rows, expert(x[rows]))
        return out.reshape(shape)


class Sorted(nn.Module):
    """The batch is put in order, goes through a layer, and is put back."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        order = x.flatten(1).mean(1).argsort(descending=True, stable=True)
        return self.inner(x[order])[order.argsort()]


class Mixed(nn.Module):
    """Examples of a batch that depend on each other, which no fit can answer for."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Twisted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.tanh(), self.weight * 2, self.bias) + F.linear(x, self.weight)


class Tied(nn.Module):
    """One matrix in two layers, straight or turned."""

    def __init__(self, h: int, turned: bool) -> None:
        super().__init__()
        self.one, self.two, self.turned = nn.Linear(h, h), nn.Linear(h, h), turned
        if not turned:
            self.two.weight = self.one.weight
        else:
            del self.two

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x).tanh()
        return F.linear(hidden, self.one.weight.t()) if self.turned else self.two(hidden)


class LoRA(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.base = nn.Linear(h, h).requires_grad_(False)
        self.down, self.up = normal(1, h), normal(h, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class GLU(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.both = nn.Linear(h, 2 * h)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.both(x))


class Unused(nn.Module):
    """Parameters that no output depends on."""

    def __init__(self, h: int, inner: nn.Module) -> None:
        super().__init__()
        self.idle, self.inner = nn.Linear(h, 2), inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Attention(nn.Module):
    """Attention of tokens to one another."""

    def __init__(self, h: int, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(h, 1, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Heads(nn.Module):
    """Attention written out, with einsum or matmul."""

    def __init__(self, h: int, how: str) -> None:
        super().__init__()
        self.q, self.k, self.v, self.how = normal(h, h), normal(h, h), nn.Linear(h, h), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "einsum":
            scores = torch.einsum("ntd,de,nse->nts", x, self.q @ self.k.T, x)
        else:
            scores = (x @ self.q) @ (x @ self.k).transpose(1, 2)
        return x + scores.softmax(-1) @ self.v(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], h: int, **options: Any) -> None:
        super().__init__()
        self.inner = kind(h, h, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0][..., : x.shape[-1]]


class Cells(nn.Module):
    def __init__(self, kind: type[nn.RNNCellBase], h: int) -> None:
        super().__init__()
        self.inner = kind(h, h)

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        found = []
        for token in x.unbind(1):
            state = self.inner(token, state)
            found.append(state[0] if isinstance(state, tuple) else state)
        return torch.stack(found, 1)


class AlongTime(nn.Module):
    """A convolution over the tokens."""

    def __init__(self, h: int, **options: Any) -> None:
        super().__init__()
        self.inner = nn.Conv1d(h, h, 3, padding=1, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Places(nn.Module):
    """A learned position for each token, as a parameter or as a table."""

    def __init__(self, h: int, t: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.places = nn.Embedding(t, h) if how == "table" else normal(1, t + 1, h)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "table":
            return x + self.places(torch.arange(x.shape[1], device=x.device))
        return x + self.places[:, : x.shape[1]]


class SequenceFirst(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


class Fold(nn.Module):
    """Tokens folded into the batch."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.flatten(0, 1)).unflatten(0, (len(x), -1))


def affine(norm: Any) -> Any:
    """A norm with weights and statistics that are not the first ones."""
    for parameter in norm.parameters():
        nn.init.normal_(parameter, 0.8, 0.4)
    if getattr(norm, "running_mean", None) is not None:
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return norm


ROUTES = ("table", "table einsum", "masks", "used alone", "picked", "picked if any")
GATES = ("einsum", "tensordot", "bilinear", "elementwise", "linear")

Build = Callable[[Random, int], nn.Module]

ANYWHERE: dict[str, Build] = {
    "linear": lambda rng, h: nn.Sequential(nn.Linear(h, h, bias=rng.random() < 0.8), act(rng)),
    "residual": lambda rng, h: Residual(nn.Sequential(nn.Linear(h, h), act(rng))),
    "rezero": lambda rng, h: Residual(nn.Sequential(nn.Linear(h, h), act(rng)), 0.0 if rng.random() < 0.5 else 0.3),
    "LayerNorm": lambda rng, h: affine(nn.LayerNorm(h, bias=rng.random() < 0.7)),
    "RMSNorm": lambda rng, h: affine(nn.RMSNorm(h)),
    "PReLU": lambda rng, h: nn.Sequential(nn.Linear(h, h), nn.PReLU()),
    "einsum": lambda rng, h: Applied(lambda x, w: torch.einsum("...d,de->...e", x, w), w=(h, h)),
    "tensordot": lambda rng, h: Applied(lambda x, w: torch.tensordot(x, w, dims=1).tanh(), w=(h, h)),
    "x @ W + b": lambda rng, h: Applied(lambda x, w, b: (x @ w + b).tanh(), w=(h, h), b=(h,)),
    "Bilinear": lambda rng, h: Applied(lambda x, w, v: F.bilinear(x, x, w, v) * 0.3 + x, w=(h, h, h), v=(h,)),
    "twisted": lambda rng, h: Twisted(h, h),
    "tied": lambda rng, h: Tied(h, rng.random() < 0.5),
    "LoRA": lambda rng, h: LoRA(h),
    "GLU": lambda rng, h: GLU(h),
    "weight norm": lambda rng, h: parametrizations.weight_norm(nn.Linear(h, h)),
    "scale": lambda rng, h: Applied(lambda x, s, b: x * s.exp() + b, s=(h,), b=()),
    "dropout": lambda rng, h: nn.Sequential(nn.Linear(h, h), nn.Dropout(0.3)),
    "called twice": lambda rng, h: nn.Sequential(*[nn.Linear(h, h)] * 2, nn.Tanh()),
    "unused": lambda rng, h: Unused(h, nn.Linear(h, h)),
    "frozen": lambda rng, h: nn.Sequential(nn.Linear(h, h).requires_grad_(False), nn.Tanh()),
    "gate": lambda rng, h: Gate(h, rng.choice(GATES), rng.choice([-0.5, 0.0, 0.3])),
    "experts": lambda rng, h: Experts(h, rng.choice([2, 3]), rng.choice(ROUTES)),
    "sorted": lambda rng, h: Sorted(nn.Sequential(nn.Linear(h, h), nn.Tanh())),
}

VECTORS: dict[str, Build] = {
    "BatchNorm1d": lambda rng, h: affine(nn.BatchNorm1d(h)),
    "low rank": lambda rng, h: Applied(lambda x, a, b: F.linear(x, torch.mm(a, b)).tanh(), a=(h, 2), b=(2, h)),
    "addmm": lambda rng, h: Applied(lambda x, w, b: torch.addmm(b, x, w).tanh(), w=(h, h), b=(h,)),
    "rows of a weight": lambda rng, h: Applied(
        lambda x, w, b: torch.cat([F.linear(x, w[:1], b[:1]), F.linear(x, w[1:], b[1:])], -1), w=(h, h), b=(h,)
    ),
    "shared features": lambda rng, h: Applied(lambda x, w: (x.unsqueeze(-1) * w).sum(1).tanh(), w=(h, h)),
}

TOKENS: dict[str, Build] = {
    "attention": lambda rng, h: Attention(h, bias=rng.random() < 0.7),
    "attention by hand": lambda rng, h: Heads(h, rng.choice(["einsum", "matmul"])),
    "transformer": lambda rng, h: nn.TransformerEncoderLayer(
        h, 1, 3, batch_first=True, norm_first=rng.random() < 0.5, dropout=0.1
    ),
    "LSTM": lambda rng, h: Recurrent(nn.LSTM, h, bidirectional=rng.random() < 0.3),
    "GRU": lambda rng, h: Recurrent(nn.GRU, h, bias=rng.random() < 0.7),
    "RNN": lambda rng, h: Recurrent(nn.RNN, h, nonlinearity=rng.choice(["tanh", "relu"])),
    "GRUCell": lambda rng, h: Cells(nn.GRUCell, h),
    "LSTMCell": lambda rng, h: Cells(nn.LSTMCell, h),
    "RNNCell": lambda rng, h: Cells(nn.RNNCell, h),
    "convolution over tokens": lambda rng, h: AlongTime(h, groups=h if rng.random() < 0.3 else 1),
    "places": lambda rng, h: Places(h, 3, rng.choice(["table", "parameter"])),
    "sequence first": lambda rng, h: SequenceFirst(nn.Sequential(nn.Linear(h, h), nn.Tanh())),
    "folded": lambda rng, h: Fold(nn.Sequential(nn.Linear(h, h), nn.Tanh())),
}


# --- Whole networks -------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A stem from the inputs to (n, h) or (n, t, h), blocks, and a head."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module, pool: str | None, scale: float):
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.Sequential(*blocks), head
        self.pool, self.scale = pool, scale

    def forward(self, *given: Any, **named: Any) -> Tensor:
        x = self.blocks(self.stem(*given, **named))
        if self.pool == "mean":
            x = x.mean(1)
        elif self.pool == "last":
            x = x[:, -1]
        elif self.pool == "flat":
            x = x.flatten(1)
        return self.scale * self.head(x)


class Whole(nn.Module):
    """The inputs as they are."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Two(nn.Module):
    """Two inputs, added after a layer each."""

    def __init__(self, p: int, q: int, h: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(p, h), nn.Linear(q, h, bias=False)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.left(left) + self.right(right)).tanh()


class Tasks(nn.Module):
    """A layer for each task; `how` an example gets to its own."""

    def __init__(self, p: int, h: int, count: int, how: str) -> None:
        super().__init__()
        self.how = how
        self.layers = nn.ModuleList(nn.Linear(p, h) for _ in range(count))

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        if self.how == "all":
            every = torch.stack([layer(x) for layer in self.layers], 1)
            return every[torch.arange(len(x), device=x.device), task]
        out = x.new_zeros(len(x), self.layers[0].out_features)
        for at, layer in enumerate(self.layers):
            here = task == at
            if bool(here.any()):
                out[here] = layer(x[here])
        return out


class Lengths(nn.Module):
    """Sequences of several lengths: packed, or sorted by length and put back."""

    def __init__(self, p: int, h: int, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, nn.GRU(p, h, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        t = x.shape[1]
        if self.how == "packed":
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=t)[0]
        order = lengths.argsort(descending=True, stable=True)
        out = self.inner(x[order])[0][order.argsort()]
        return out * (torch.arange(t, device=x.device) < lengths.unsqueeze(1)).unsqueeze(-1)


class Words(nn.Module):
    """Embeddings of several kinds."""

    def __init__(self, h: int, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "bag":
            self.table: Any = nn.EmbeddingBag(WORDS, h, mode="mean")
        elif how == "bag, sum":
            self.table = nn.EmbeddingBag(WORDS, h, mode="sum", padding_idx=1)
        elif how == "index":
            self.table = normal(WORDS, h)
        else:
            self.table = nn.Embedding(WORDS, h, padding_idx=0 if how == "padding" else None)

    def forward(self, x: Tensor) -> Tensor:
        return self.table[x] if self.how == "index" else self.table(x)


class TiedHead(nn.Module):
    """A head whose weights are rows of an embedding."""

    def __init__(self, table: nn.Embedding, k: int) -> None:
        super().__init__()
        self.table, self.k = table, k

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.table.weight[: self.k])


class Images(nn.Module):
    """Convolutions of several kinds, to (n, h) or pixels (n, h w, channels)."""

    def __init__(self, layers: list[nn.Module], how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.Sequential(*layers), how

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(x)
        if self.how == "mean":
            return x.mean((2, 3))
        if self.how == "grid":
            return x.movedim(1, -1)
        if self.how == "flat":
            return F.adaptive_avg_pool2d(x, (1, 2)).flatten(1)
        return x.flatten(2).transpose(1, 2)


CONVOLUTIONS: dict[str, Callable[[Random, int], list[nn.Module]]] = {
    "Conv2d": lambda rng, c: [nn.Conv2d(c, 2, (3, 2), padding=(1, 0), stride=(1, rng.choice([1, 2])))],
    "Conv2d, circular": lambda rng, c: [
        nn.Conv2d(c, 2, 3, padding=1, padding_mode=rng.choice(["circular", "reflect"]))
    ],
    "Conv2d, same": lambda rng, c: [nn.Conv2d(c, 2, (2, 3), padding="same", dilation=(1, rng.choice([1, 2])))],
    "Conv2d, depthwise": lambda rng, c: [
        nn.Conv2d(c, 2 * c, 2, groups=c, bias=rng.random() < 0.5),
        nn.Conv2d(2 * c, 2, 1),
    ],
    "ConvTranspose2d": lambda rng, c: [nn.ConvTranspose2d(c, 2, 2, stride=rng.choice([1, 2]))],
    "BatchNorm2d": lambda rng, c: [nn.Conv2d(c, 2, 2), affine(nn.BatchNorm2d(2)), nn.ReLU()],
    "GroupNorm": lambda rng, c: [nn.Conv2d(c, 2, 2), affine(nn.GroupNorm(rng.choice([1, 2]), 2))],
    "InstanceNorm": lambda rng, c: [nn.Conv2d(c, 2, 2), affine(nn.InstanceNorm2d(2, affine=True))],
    "PReLU of channels": lambda rng, c: [nn.Conv2d(c, 2, 2), nn.PReLU(2)],
    "max pooling": lambda rng, c: [nn.Conv2d(c, 2, 2, padding=1), nn.MaxPool2d(2, stride=1)],
}


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def first_mean(inputs: Any) -> Tensor:
    """By which examples are sorted: the mean of the first floating-point input."""
    leaves = list(inputs.values()) if isinstance(inputs, dict) else [inputs] if isinstance(inputs, Tensor) else inputs
    return leaves[0].double().flatten(1).mean(1)


def second(inputs: Any) -> Tensor:
    """The second input: tasks, or minus lengths."""
    values = list(inputs.values()) if isinstance(inputs, dict) else inputs
    return values[1].double()


def negative_second(inputs: Any) -> Tensor:
    return -second(inputs)


def draw(rng: Random, k: int, positions: bool) -> Drawn:
    """A network with k outputs, at several positions or one."""
    kind = rng.choice(POSITIONAL if positions else KINDS)
    found = kind(rng, k, positions)
    if rng.random() < 0.15:
        frozen = rng.choice(list(found.model.parameters()))
        if sum(p.requires_grad for p in found.model.parameters()) > 1:
            frozen.requires_grad_(False)
            found.words.append("one frozen")
            found.plain = False
    found.model.eval()
    return found


def blocks_of(rng: Random, h: int, table: dict[str, Build], words: list[str], most: int = 2) -> list[nn.Module]:
    names = [rng.choice(list(table)) for _ in range(rng.randint(0, most))]
    words += names
    return [table[name](rng, h) for name in names]


def head_of(rng: Random, h: int, k: int) -> nn.Module:
    return nn.Linear(h, k, bias=rng.random() < 0.8)


def scale_of(rng: Random) -> float:
    return rng.choice([1.0, 1.0, 1.0, 3.0])


def vectors(rng: Random, k: int, positions: bool) -> Drawn:
    p, h = rng.randint(2, 4), rng.randint(2, 4)
    words = ["vectors"]
    early = blocks_of(rng, p, ANYWHERE, words, 1)
    if rng.random() < 0.02:
        early.append(Mixed())
        words.append("mixed batch")
    stem = nn.Sequential(*early, nn.Linear(p, h), act(rng)) if rng.random() < 0.85 else nn.Sequential(*early)
    h = h if len(stem) > len(early) else p
    model = Network(stem, blocks_of(rng, h, ANYWHERE | VECTORS, words), head_of(rng, h, k), None, scale_of(rng))
    return Drawn(model, lambda n: randn(n, p), first_mean, words)


def perceptron(rng: Random, k: int, positions: bool) -> Drawn:
    """Linear layers alone, for which the Kronecker structures are written out."""
    p, h = rng.randint(2, 4), rng.randint(2, 5)
    layers: list[nn.Module] = [nn.Linear(p, h, bias=rng.random() < 0.8), act(rng)]
    if rng.random() < 0.4:
        layers += [nn.Linear(h, h, bias=rng.random() < 0.8), act(rng)]
    t = rng.choice([0, 2, 3]) if not positions else 2
    pool = None if positions or not t else "mean"
    model = Network(nn.Sequential(*layers), [], head_of(rng, h, k), pool, 1.0)
    make = (lambda n: randn(n, t, p)) if t else (lambda n: randn(n, p))
    length = rng.randint(1, 3)
    other = (lambda n: randn(n, length, p)) if t else None
    return Drawn(model, make, first_mean, ["perceptron" + (" on tokens" if t else "")], plain=True, other=other)


def linear(rng: Random, k: int, positions: bool) -> Drawn:
    p = rng.randint(1, 4)
    model = Network(Whole(), [], head_of(rng, p, k), None, 1.0)
    return Drawn(model, lambda n: randn(n, p), first_mean, ["linear model"], plain=True)


def sequences(rng: Random, k: int, positions: bool) -> Drawn:
    p, t = rng.randint(2, 3), rng.randint(2, 3)
    words = ["tokens"]
    h = p if rng.random() < 0.5 else rng.randint(2, 4)
    stem = Whole() if h == p else nn.Linear(p, h)
    blocks = blocks_of(rng, h, ANYWHERE | TOKENS | TOKENS, words)
    pool = None if positions else rng.choice(["mean", "last", "flat"])
    head = head_of(rng, h * t if pool == "flat" else h, k)
    length = rng.randint(1, 3)
    other = None if pool == "flat" else lambda n: randn(n, length, p)
    model = Network(stem, blocks, head, pool, scale_of(rng))
    return Drawn(model, lambda n: randn(n, t, p), first_mean, words, other=other)


def texts(rng: Random, k: int, positions: bool) -> Drawn:
    h, t = rng.randint(2, 4), rng.randint(2, 3)
    how = rng.choice(["table", "padding", "index"] + ["bag", "bag, sum"] * (not positions))
    how = "padding" if rng.random() < 0.03 else how
    words = [f"words, {how}"]
    bagged = how.startswith("bag")
    stem = Words(h, how)
    blocks = blocks_of(rng, h, ANYWHERE if bagged else ANYWHERE | TOKENS, words)
    pool = None if positions or bagged else rng.choice(["mean", "last"])
    head = head_of(rng, h, k)
    if how == "table" and rng.random() < 0.3:
        head = TiedHead(stem.table, k)
        words.append("tied head")
    length = rng.randint(1, 3)
    model = Network(stem, blocks, head, pool, 1.0)
    return Drawn(
        model,
        lambda n: torch.randint(0, WORDS, (n, t)),
        first_mean,
        words,
        other=lambda n: torch.randint(0, WORDS, (n, length)),
    )


def pictures(rng: Random, k: int, positions: bool) -> Drawn:
    c, size = rng.choice([1, 2]), rng.choice([3, 4])
    name = rng.choice(list(CONVOLUTIONS))
    words = [name]
    layers = [*CONVOLUTIONS[name](rng, c), act(rng)]
    if rng.random() < 0.3:
        layers += [nn.Conv2d(2, 2, 1), act(rng)]
    how = rng.choice(["pixels", "grid"]) if positions else rng.choice(["mean", "flat"])
    if positions:
        layers.append(nn.AdaptiveAvgPool2d((1, 2)))
    h = 4 if how == "flat" else 2
    blocks = blocks_of(rng, h, ANYWHERE, words, 1)
    model = Network(Images(layers, how), blocks, head_of(rng, h, k), None, 1.0)
    return Drawn(model, lambda n: randn(n, c, size, size), first_mean, words)


def pairs(rng: Random, k: int, positions: bool) -> Drawn:
    p, q, h = rng.randint(1, 3), rng.randint(1, 3), rng.randint(2, 3)
    named = rng.random() < 0.5
    words = ["dict" if named else "tuple"]
    model = Network(Two(p, q, h), blocks_of(rng, h, ANYWHERE | VECTORS, words), head_of(rng, h, k), None, 1.0)

    def inputs(n: int) -> Any:
        left, right = randn(n, p), randn(n, q)
        return {"left": left, "right": right} if named else (left, right)

    return Drawn(model, inputs, first_mean, words)


def tasks(rng: Random, k: int, positions: bool) -> Drawn:
    p, h, count = rng.randint(2, 3), rng.randint(2, 3), rng.choice([2, 3])
    how = rng.choice(["all", "used alone"])
    named = rng.random() < 0.5
    words = [f"tasks, {how}"]
    model = Network(Tasks(p, h, count, how), blocks_of(rng, h, ANYWHERE, words, 1), head_of(rng, h, k), None, 1.0)

    def inputs(n: int) -> Any:
        x, task = randn(n, p), torch.randint(0, count, (n,))
        return {"x": x, "task": task} if named else (x, task)

    return Drawn(model, inputs, second, words)


def lengths(rng: Random, k: int, positions: bool) -> Drawn:
    p, h, t = 2, rng.randint(2, 3), 3
    how = rng.choice(["packed", "sorted"])
    words = [f"lengths, {how}"]
    pool = None if positions else "mean"
    model = Network(Lengths(p, h, how), blocks_of(rng, h, ANYWHERE, words, 1), head_of(rng, h, k), pool, 1.0)

    def inputs(n: int) -> Any:
        return randn(n, t, p), torch.randint(1, t + 1, (n,))

    return Drawn(model, inputs, negative_second, words)


KINDS = (vectors, vectors, vectors, perceptron, linear, sequences, sequences, texts, pictures, pairs, tasks, lengths)
POSITIONAL = (sequences, sequences, texts, pictures, lengths, perceptron, perceptron)
