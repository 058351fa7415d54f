"""Training examples that look alike to the model, whatever the loss and the structure of the fit.

A network sees an input as the inputs of its layers. Each of them is whitened, with a ridge of the mean eigenvalue, and
scaled to length one. The similarity of two inputs is a weighted mean of their cosines over the layers: a layer has more
weight the better its nearest neighbours predict the network's own answers. Trees see an input as its leaves, and the
similarity is the share of trees in which two inputs share a leaf. Labels do not enter.

The examples whose labels tell about an input are those that a regression on similar examples would predict it from.
With the kernel k(x, x') = exp((similarity - 1) / bandwidth), the prediction at x is sum_i a_i y_i, where

    a = (K + I)^-1 k(x) = k(x) - U diag(v / (v + 1)) U^T k(x)

with the eigenvalues v and eigenvectors U of K, of which the leading ones suffice for networks. For a training example j
that is left out, a_i = -[(K + I)^-1]_ij / [(K + I)^-1]_jj. Labels count with weights proportional to a_i^2, as in the
variance of this prediction. For this, layers are whitened by the scatter of all examples. How far an input is from the
examples is measured with their scatter around the mean of the same answer instead, so that directions in which inputs
with the same answer hardly differ count more.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from whence.data.batches import Inputs, take
from whence.influence.classes import Codes, predicted_classes
from whence.influence.fitted import Fitted, evenly_spaced, training_examples
from whence.jacobian.functionals import OutputFunctional
from whence.jacobian.leaves import LeafSum
from whence.linalg import eigh, largest, solve_lower
from whence.runtime.execution import partial_data_error

COMPARED = 2000  # training examples, evenly spaced, that inputs are compared with
# Nearest training examples over which a distance is averaged, and how many nearest ones by the scatter of all examples
# these are sought among.
NEAREST, CANDIDATES = 5, 10
MOST_LAYERS, MOST_TREES = 8, 100  # layers, or trees, evenly spaced, that are compared
# Inputs of a layer that are wider are projected at random to the first number of directions. Of these, the second
# number with the largest variance are compared.
WIDEST, LEADING = 1024, 128
# A layer's weight is this power of the share of the answers' variance that neighbours explain, judged by as many
# examples. Layers with less weight are left out.
TRUST, JUDGED, LEAST_WEIGHT = 4, 1000, 0.02
SAME = 1e-3  # smallest distance between inputs on a sphere of radius one
# The bandwidth is so many times the median of how unlike, 1 - similarity, the last of an example's neighbours is; and
# its lower bound.
WIDTH, LEAST_BANDWIDTH = 3.0, 1e-4
# Leading eigenvectors of the kernel matrix that the regression uses for networks. On 2,400 images the averages of
# squares have a correlation of at least .9995 with those by all eigenvectors. Similarities of leaves are coarser and
# need all of them.
RANK = 128
COMPARED_AT_ONCE = 2**24  # numbers (pairs of inputs and training examples) that are computed at once
OUTPUTS = "outputs"

Layers = Mapping[str, Tensor]
"""The inputs (m, d) of layers by their names, the mean over positions; for trees, (m, trees) leaf numbers."""


def outputs_and_layers(fitted: Fitted, inputs: Inputs, names: Sequence[str] | None = None) -> tuple[Tensor, Layers]:
    """Outputs (m, ..., k) of the model for one batch, and the inputs of its layers: of those named, or of all.

    Layers are modules with a matrix of weights. The outputs stand for a model without any.
    """
    network = fitted.problem.network
    inputs = inputs.inputs if isinstance(inputs, OutputFunctional) else inputs
    found: dict[str, Tensor] = {}

    def keep(name: str, layer: nn.Module, given: tuple[object, ...]) -> None:
        if given and isinstance(given[0], Tensor) and given[0].is_floating_point() and given[0].dim() > 1:
            found[name] = mean_over_positions(given[0], 1 if isinstance(layer, _ConvNd) else -1)

    hooks = [
        layer.register_forward_pre_hook(partial(keep, name))
        for name, layer in network.model.named_modules()
        if any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False))
        and (names is None or name in names)
    ]
    try:
        with torch.no_grad():
            outputs = network.shaped(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    if isinstance(network.model, LeafSum):
        leaves = inputs["leaves"]
        trees = evenly_spaced(torch.arange(leaves.shape[1], device=leaves.device), MOST_TREES)
        return outputs, {"leaves": leaves[:, trees]}
    layers = {name: given for name, given in found.items() if len(given) == len(outputs)}
    return outputs, layers or {OUTPUTS: mean_over_positions(outputs, -1)}


def mean_over_positions(values: Tensor, channels: int) -> Tensor:
    """(m, d) means of values (m, ..., d, ...) over all but the first axis and the one of the channels.

    Examples:
        >>> mean_over_positions(torch.ones(2, 3, 4, 4), 1).shape, mean_over_positions(torch.ones(2, 7, 5), -1).shape
        (torch.Size([2, 3]), torch.Size([2, 5]))
    """
    found = values.movedim(channels, 1).flatten(2).mean(2) if values.dim() > 2 else values
    return found.to(torch.promote_types(found.dtype, torch.float32))


class View(ABC):
    """The training examples that inputs are compared with, and how similar an input is to each."""

    known: Tensor  # (s, d) rows of the training examples

    @abstractmethod
    def rows(self, layers: Layers) -> Tensor:
        """(m, d) rows of inputs, from the inputs of the layers."""

    @abstractmethod
    def similarities(self, rows: Tensor, near: Tensor | None = None) -> Tensor:
        """Similarities, at most one, of rows (m, d) with all training examples (m, s), or with some `near` (m, c)."""

    def distances(self, rows: Tensor, near: Tensor) -> Tensor:
        """(m,) mean distance of inputs from the nearest few of some training examples (m, c), as chords of a sphere."""
        if not near.shape[1]:
            return torch.ones(len(rows), device=rows.device)
        each = max(1, near.shape[1] * rows.shape[1])
        parts = [
            self.similarities(rows[some], near[some]).topk(min(NEAREST, near.shape[1]), dim=1).values
            for some in torch.arange(len(rows), device=rows.device).split(max(1, COMPARED_AT_ONCE // each))
        ]
        return (2.0 - 2.0 * torch.cat(parts)).clamp_min(SAME**2).sqrt().mean(1)


@dataclass(frozen=True)
class LayerView(View):
    """Unit vectors of every layer, scaled by the root of the layer's weight: products are mean cosines."""

    layers: Mapping[str, tuple[Whitened, float]]  # with the roots of their weights, which sum to one
    known: Tensor

    def rows(self, layers: Layers) -> Tensor:
        """(m, d), scaled to length one."""
        return unit_rows(self.layers, layers)

    def similarities(self, rows: Tensor, near: Tensor | None = None) -> Tensor:
        """(m, s), or (m, c)."""
        return rows @ self.known.T if near is None else (self.known[near] @ rows.unsqueeze(2)).squeeze(2)


@dataclass(frozen=True)
class LeafView(View):
    """Leaf numbers in every tree: similarities are shares of trees in which two inputs share a leaf.

    Examples:
        >>> view = LeafView(torch.tensor([[0, 3], [1, 3]]))
        >>> view.similarities(torch.tensor([[0, 3], [1, 4]]))
        tensor([[1.0000, 0.5000],
                [0.0000, 0.5000]])
    """

    known: Tensor

    def rows(self, layers: Layers) -> Tensor:
        """(m, trees)."""
        return layers["leaves"]

    def similarities(self, rows: Tensor, near: Tensor | None = None) -> Tensor:
        """(m, s), or (m, c)."""
        if near is not None:
            return (self.known[near] == rows.unsqueeze(1)).float().mean(2)
        found = torch.zeros(len(rows), len(self.known), dtype=torch.float32, device=rows.device)
        for ours, theirs in zip(rows.T, self.known.T, strict=True):
            found += ours.unsqueeze(1) == theirs
        return found / rows.shape[1]


@dataclass(frozen=True)
class Whitened:
    """The input of one layer, along its leading directions, whitened and scaled to length one.

    Where lengths count, one more coordinate is the same for all inputs, so that a longer vector has another direction.
    """

    center: Tensor  # (d,)
    whitening: Tensor  # (d, r)
    constant: float  # the further coordinate; zero where directions alone count

    @classmethod
    def of(cls, given: Tensor, answers: Tensor | None, lengths: bool) -> tuple[Whitened, Whitened]:
        """Whitened by the scatter of all training examples, and by that around the mean of the same answer.

        Args:
            given: (s, d) inputs of the layer for the training examples.
            answers: (s,) predicted classes; `None` if there are none.
            lengths: whether lengths count.
        """
        center, wide = given.mean(0), given.shape[1] > WIDEST
        some = random_directions(given.shape[1], WIDEST).to(given) if wide else None
        apart = (given - center).double() if some is None else ((given - center) @ some).double()
        values, vectors = eigh(apart.T @ apart / len(apart))
        mean = float(values.clamp_min(0.0).mean()) or 1.0
        values, vectors = values[-LEADING:].clamp_min(0.0), vectors[:, -LEADING:]

        def whitened(root: Tensor) -> Whitened:
            moved = apart @ root
            constant = float(moved.square().sum(1).mean().sqrt()) if lengths else 0.0
            whole = root if some is None else some.double() @ root
            return cls(center, whole.to(given), constant)

        every = whitened(vectors / (values + mean).sqrt())
        if answers is None:
            return every, every
        inside = apart @ vectors
        means = inside.new_zeros(int(answers.max()) + 1, inside.shape[1]).index_add_(0, answers, inside)
        inside = inside - (means / torch.bincount(answers).clamp_min(1).unsqueeze(1))[answers]
        scatter = inside.T @ inside / len(inside)
        scatter.diagonal().add_(float(scatter.trace()) / apart.shape[1] or 1.0)
        eye = torch.eye(len(scatter), dtype=scatter.dtype, device=scatter.device)
        return every, whitened(vectors @ solve_lower(torch.linalg.cholesky(scatter), eye).T)

    def unit(self, given: Tensor) -> Tensor:
        """(m, r) unit vectors of inputs (m, d) of the layer."""
        moved = (given - self.center) @ self.whitening
        if self.constant:
            moved = torch.cat([moved, moved.new_full((len(moved), 1), self.constant)], 1)
        unit: Tensor = functional.normalize(moved, dim=1)
        return unit


def unit_rows(whitened: Mapping[str, tuple[Whitened, float]], layers: Layers) -> Tensor:
    """(m, d) unit vectors of whitened layers, each times the root of its weight."""
    return torch.cat([root * layer.unit(layers[name]) for name, (layer, root) in whitened.items()], 1)


def random_directions(size: int, count: int) -> Tensor:
    """(size, count) random directions, the same in every call, that keep lengths on average."""
    generator = torch.Generator("cpu").manual_seed(0)
    found: Tensor = torch.randn(size, count, generator=generator, device="cpu") / count**0.5
    return found


@dataclass(frozen=True)
class Neighbours:
    """The training examples that inputs are compared with, seen in two ways (see the top of this module)."""

    index: Tensor  # (s,) which training examples these are, ascending
    around: View  # finds the examples whose labels tell about an input
    apart: View  # measures distances from the examples
    names: tuple[str, ...]  # of the layers
    nearest: Tensor  # (s, c) the most similar other examples of each, in `around`
    bandwidth: float
    eigenvectors: Tensor  # (s, r) leading ones of the kernel matrix K
    shrinkage: Tensor  # (r,) of their coefficients: s / (s + 1) for eigenvalues s

    @classmethod
    def of(cls, fitted: Fitted, codes: Codes) -> tuple[Neighbours, Tensor, Tensor | None]:
        """Compute them from the training data, within `using_model`.

        Also returns the outputs (s, ..., k) for these examples, and their predicted classes (s,), if there are any.
        """
        index = evenly_spaced(fitted.counted.nonzero().squeeze(1), COMPARED)
        parts, seen = [], None
        for _, inputs, _ in training_examples(fitted, index, "inputs of the layers"):
            if seen is None:  # a layer whose first axis is not that of the examples may have their number by chance
                seen = tuple(outputs_and_layers(fitted, take(inputs, slice(0, 1)))[1])
            parts.append(outputs_and_layers(fitted, inputs, seen))
        if sum(len(outputs) for outputs, _ in parts) != len(index):
            raise partial_data_error()
        outputs = torch.cat([outputs for outputs, _ in parts])
        answers = predicted_classes(fitted, outputs, codes)
        around: View
        apart: View
        if isinstance(fitted.problem.network.model, LeafSum):
            around = apart = LeafView(torch.cat([layers["leaves"] for _, layers in parts]))
            names: tuple[str, ...] = ("leaves",)
            rank = len(index)
        else:
            layers = joined_layers([layers for _, layers in parts])
            first = next(iter(layers))
            whitened = {
                name: Whitened.of(some, answers, codes is None or name == first) for name, some in layers.items()
            }
            units = {name: pair[0].unit(layers[name]) for name, pair in whitened.items()}
            weights = layer_weights(units, outputs, answers)
            names, rank = tuple(weights), RANK
            views = [{name: (whitened[name][at], weight**0.5) for name, weight in weights.items()} for at in (0, 1)]
            around, apart = (LayerView(view, unit_rows(view, layers)) for view in views)
        similar = around.similarities(around.known)
        itself, count = torch.arange(len(index), device=index.device), count_for(len(index))
        values, nearest = most_similar(similar, max(count, CANDIDATES), itself)
        bandwidth = LEAST_BANDWIDTH
        if values.shape[1]:
            unlike = 1.0 - values[:, min(count, values.shape[1]) - 1]
            bandwidth = max(WIDTH * float(unlike.median()), bandwidth)
        sizes, vectors = (some[..., -rank:].to(values) for some in eigh(((similar - 1.0) / bandwidth).double().exp()))
        found = cls(index, around, apart, names, nearest, bandwidth, vectors, sizes / (sizes + 1.0))
        return found, outputs, answers

    @property
    def count(self) -> int:
        """How many of the most similar examples are neighbours."""
        return count_for(len(self.index))

    def weights(self, similar: Tensor, own: Tensor | None = None) -> Tensor:
        """(m, s) weights of the examples' labels, which sum to one, from similarities (m, s) with them.

        Inputs that are training examples, at the positions `own` (m,) or -1, are predicted without themselves.
        """
        vectors = self.eigenvectors
        found = ((similar - 1.0) / self.bandwidth).exp_()
        found = found.sub_((found @ vectors * self.shrinkage) @ vectors.T)
        if own is not None:
            known = (own >= 0).nonzero().squeeze(1)
            others = (vectors[own[known]] * self.shrinkage) @ vectors.T
            found[known] = others.scatter_(1, own[known].unsqueeze(1), 0.0)
        found = found.square_()
        return found.div_(found.sum(1, keepdim=True).clamp_min_(torch.finfo(found.dtype).tiny))

    def positions(self, examples: Tensor) -> Tensor:
        """(m,) positions among the compared ones of training examples (m,), -1 for others."""
        at = torch.searchsorted(self.index, examples).clamp_max(len(self.index) - 1)
        return torch.where(self.index[at] == examples, at, -1)


def most_similar(similar: Tensor, count: int, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(m, count) similarities with the most similar training examples, and which these are, of all (m, s).

    Inputs that are training examples, at the positions `own` (m,) or -1, are not compared with themselves.
    """
    if own is not None:
        known = (own >= 0).nonzero().squeeze(1)
        similar = similar.index_put((known, own[known]), similar.new_tensor(-2.0))
    return largest(similar, min(count, similar.shape[1] - (own is not None)))


def count_for(examples: int) -> int:
    """How many of the most similar among some examples are neighbours: about the root of their number.

    With few examples it is up to thirty, or an eighth of them, because an average of fewer says little about noise.
    """
    return max(1, min(max(math.isqrt(examples), min(30, examples // 8)), examples - 1))


def joined_layers(parts: Sequence[Layers]) -> dict[str, Tensor]:
    """The layers that have finite inputs of one width in all batches, joined; at most a few, evenly spaced."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    names = [name for name in names if len({part[name].shape[1] for part in parts}) == 1]
    joined = {name: torch.cat([part[name] for part in parts]) for name in names}
    names = [name for name, given in joined.items() if bool(torch.isfinite(given).all())]
    places = evenly_spaced(torch.arange(len(names), device="cpu"), MOST_LAYERS).tolist()
    return {names[at]: joined[names[at]] for at in places}


def layer_weights(units: Mapping[str, Tensor], outputs: Tensor, answers: Tensor | None) -> dict[str, float]:
    """Weights of the layers that count, which sum to one, from unit vectors (s, r) of the training examples.

    A power of the share of the variance of the answers, or of the outputs (s, k) without predicted classes, that the
    nearest other examples explain.
    """
    said = outputs.reshape(len(outputs), -1) if answers is None else functional.one_hot(answers)
    said = said.to(next(iter(units.values())).dtype)
    judged = evenly_spaced(torch.arange(len(said), device=said.device), JUDGED)
    count, shares = count_for(len(said)), dict[str, float]()
    for name, unit in units.items() if len(units) > 1 else ():
        similar = (unit[judged] @ unit.T).scatter_(1, judged.unsqueeze(1), -2.0)
        near = largest(similar, count)[1]
        missed = (
            said[judged] - sum(said[one] for one in near.T) / near.shape[1]
        )  # (m, count, k) might not fit in memory
        varied = (said[judged] - said.mean(0)).square().sum()
        shares[name] = max(0.0, 1.0 - float(missed.square().sum() / varied)) ** TRUST if float(varied) > 0 else 0.0
    least = LEAST_WEIGHT * sum(shares.values())
    shares = {name: share for name, share in shares.items() if share > least} or dict.fromkeys(units, 1.0)
    return {name: share / sum(shares.values()) for name, share in shares.items()}
