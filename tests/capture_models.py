"""One small model for every way in which the capture can meet a parameter. Nothing here imports the package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from capture_modules import (
    LENGTH,
    WIDTH,
    WORDS,
    Applied,
    Bags,
    Cells,
    Conv1D,
    CrossAttention,
    Flat,
    Folded,
    LanguageModel,
    LoRA,
    Packed,
    Recurrent,
    RelativeBias,
    SelfAttention,
    TiedLinears,
    Transposed,
    Twisted,
    Vision,
    images,
    tokens,
    vectors,
    words,
)


@dataclass(frozen=True)
class Model:
    """How to build a model and its inputs, and what is expected of the capture.

    Attributes:
        build: Makes the module.
        inputs: Makes n examples.
        fallback: Parameters that are expected to go the fallback way.
        kinds: The form that is expected of some blocks.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    fallback: frozenset[str] = frozenset()
    kinds: dict[str, str] = field(default_factory=dict)


def prepared(model: Model) -> nn.Module:
    """The module in float64 and in evaluation mode."""
    return model.build().double().eval()


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


RECURRENT = ("inner.weight_ih", "inner.weight_hh", "inner.bias_ih", "inner.bias_hh")

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
        kinds={"w": "dense"},
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
    "EmbeddingBag, offsets": Model(lambda: Bags(offsets=True), words, frozenset({"inner.weight"})),
    "EmbeddingBag, last offset": Model(
        lambda: Bags(offsets=True, last=True, mode="sum"), words, frozenset({"inner.weight"})
    ),
    "EmbeddingBag, max": Model(lambda: Bags(mode="max"), words, frozenset({"inner.weight"})),
    "attention": Model(lambda: SelfAttention(batch_first=True), tokens),
    "attention, sequence first": Model(lambda: SelfAttention(batch_first=False, bias=False), tokens),
    "attention, extra keys": Model(lambda: SelfAttention(batch_first=True, add_zero_attn=True), tokens),
    "attention, learned extra keys": Model(lambda: SelfAttention(batch_first=True, add_bias_kv=True), tokens),
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
    "LSTMCell": Model(lambda: Cells(nn.LSTMCell), tokens, frozenset(RECURRENT)),
    "RNNCell": Model(lambda: Cells(nn.RNNCell, bias=False), tokens, frozenset(RECURRENT[:2])),
    "GRU, packed": Model(Packed, tokens, frozenset(f"{name}_l0" for name in RECURRENT)),
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
