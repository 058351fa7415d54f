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

Inputs are compared along the principal directions of the training examples, which is quicker. Verdicts and areas hardly
change (`benchmarks/compared.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd
from torch.utils.hooks import RemovableHandle

from whence.data.batches import Inputs, take
from whence.influence.classes import Codes, predicted_classes, predicted_probability
from whence.influence.fitted import Fitted, evenly_spaced, training_examples
from whence.jacobian.functionals import OutputFunctional
from whence.jacobian.leaves import LeafSum
from whence.linalg import eigh, largest, leading_eigenvectors, solve_lower
from whence.results import mask_of_outputs
from whence.runtime.execution import partial_data_error

# Training examples, evenly spaced, that an input is compared with. On Fashion-MNIST the disagreement around an input
# tells noisy labels from others with an AUROC of .956 by 2,000 of them, .966 by 5,000, and .968 by all 9,000
# (`benchmarks/compared.py`). With more a small network would mostly wait for this.
COMPARED, COMPARED_BY_LEAVES = 5000, 2000
NEAREST = 5  # training examples that a distance is the mean over
AROUND = 20  # nearest examples whose own distances say how dense the examples are around an input
GRID = 2  # images are compared by the means over so many by so many fields of each channel
MOST_LAYERS, MOST_TREES = 8, 100  # layers, or trees, evenly spaced, that are compared
# Inputs of a layer that are wider than the first number are projected at random to so many directions. Of these, the
# second number with the largest variance are compared for noise, and the third for distances. Of the directions of all
# layers together the last number count.
WIDEST, LEADING, LEADING_WITHIN, PRINCIPAL = 1024, 128, 64, 128
# A layer's weight is a power of the share of the answers' variance that neighbours explain, measured on at most the
# second number of examples. Layers with a smaller share of the sum than the third are left out. The network's ambiguity
# and the labels around an input are weighed by the same power.
WEIGHT_POWER, SCORED, LEAST_WEIGHT = 4, 1000, 0.02
LEAST_DISTANCE = 1e-3  # smallest distance between inputs on a sphere of radius one
# The bandwidth is so many times the median of how unlike, 1 - similarity, the last of an example's neighbours is; and
# its lower bound.
BANDWIDTH_FACTOR, LEAST_BANDWIDTH = 3.0, 1e-4
# Leading eigenvectors of the kernel matrix that the regression uses for networks: with twice as many, areas differ by
# .001 (`benchmarks/compared.py`). Similarities of leaves are coarser and need all of them.
RANK = 128
COMPARED_AT_ONCE = 2**24  # numbers (pairs of inputs and training examples) that are computed at once
OUTPUTS, EMBEDDINGS = "outputs", "embeddings"

Layers = Mapping[str, Tensor]
"""The inputs (m, d) of layers by their names, the mean over positions; for trees, (m, trees) leaf numbers."""


class LayerInputs:
    """The inputs of layers while a model runs, and the outputs of its embeddings: of the first call and of the last.

    A layer that is called several times, as for two inputs that are compared, sees something else each time.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self.mask = mask  # (m, positions) which positions count
        self.given: dict[str, list[Tensor]] = {}
        self.embedded: dict[str, list[Tensor]] = {}

    def hooks(self, model: nn.Module, names: Sequence[str] | None) -> list[RemovableHandle]:
        """Listen to the layers with a matrix of weights, or to those named."""
        handles = []
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Embedding):
                handles.append(layer.register_forward_hook(partial(self._after, name)))
            elif names is not None and name not in names:
                continue
            elif any(parameter.dim() > 1 for parameter in layer.parameters(recurse=False)):
                handles.append(layer.register_forward_pre_hook(partial(self._before, name)))
        return handles

    def _before(self, name: str, layer: nn.Module, given: tuple[object, ...]) -> None:
        self._keep(self.given, name, layer, given[0] if given else None)

    def _after(self, name: str, layer: nn.Module, given: tuple[object, ...], output: object) -> None:
        self._keep(self.embedded, name, layer, output)

    def _keep(self, calls: dict[str, list[Tensor]], name: str, layer: nn.Module, values: object) -> None:
        if isinstance(values, Tensor) and values.is_floating_point() and values.dim() > 1:
            images = isinstance(layer, _ConvNd)
            means = means_over_fields(values) if images else mean_over_positions(values, self.mask)
            calls[name] = [*calls.get(name, [])[:1], means]

    def layers(self, examples: int) -> Layers:
        """Those whose first axis is that of the examples; without any, all embeddings together."""
        given, embedded = (
            {name: torch.cat(some, 1) for name, some in calls.items() if all(len(one) == examples for one in some)}
            for calls in (self.given, self.embedded)
        )
        return given or ({EMBEDDINGS: torch.cat(list(embedded.values()), 1)} if embedded else {})


class Answers(NamedTuple):
    """What a model answers for some inputs."""

    outputs: Tensor  # (m, k) mean over positions
    classes: Tensor | None  # (m,) predicted classes, unless outputs are no choice among classes
    probability: Tensor  # (m,) of these
    ambiguity: Tensor  # (m,) how often two labels drawn from the model's probabilities differ

    @classmethod
    def of(
        cls, fitted: Fitted, inputs: Inputs, outputs: Tensor, codes: Codes, examples: Tensor | None = None
    ) -> Answers:
        """From outputs (m, ..., k). Inputs may be training `examples` (m,), -1 for others."""
        inputs = inputs.inputs if isinstance(inputs, OutputFunctional) else inputs
        mask = mask_of_outputs(inputs) if isinstance(inputs, Mapping) else None
        if not isinstance(mask, Tensor) or mask.shape != outputs.shape[:-1] or mask.dim() < 2:
            mask = None
        probability, ambiguity = predicted_probability(fitted, outputs, codes, examples, mask)
        classes = predicted_classes(fitted, outputs, codes)
        return cls(mean_over_positions(outputs, mask), classes, probability, ambiguity)

    @classmethod
    def joined(cls, parts: Sequence[Answers]) -> Answers:
        """Those of several batches."""
        classes = [part.classes for part in parts if part.classes is not None]
        return cls(
            torch.cat([part.outputs for part in parts]),
            torch.cat(classes) if classes else None,
            torch.cat([part.probability for part in parts]),
            torch.cat([part.ambiguity for part in parts]),
        )


def outputs_and_layers(fitted: Fitted, inputs: Inputs, names: Sequence[str] | None = None) -> tuple[Tensor, Layers]:
    """Outputs (m, ..., k) of the model for one batch, and the inputs of its layers: of those named, or of all.

    The outputs stand for a model without any.
    """
    network = fitted.problem.network
    inputs = inputs.inputs if isinstance(inputs, OutputFunctional) else inputs
    seen = LayerInputs(inputs.get("attention_mask") if isinstance(inputs, Mapping) else None)
    hooks = seen.hooks(network.model, names)
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
    return outputs, seen.layers(len(outputs)) or {OUTPUTS: mean_over_positions(outputs)}


def mean_over_positions(values: Tensor, mask: Tensor | None = None) -> Tensor:
    """(m, d) means of values (m, ..., d) over all axes but the first and the last; of those in a mask (m, positions).

    Examples:
        >>> mean_over_positions(torch.ones(2, 7, 5)).shape
        torch.Size([2, 5])
        >>> mean_over_positions(torch.tensor([[[3.0], [5.0], [100.0]]]), torch.tensor([[1, 1, 0]]))
        tensor([[4.]])
    """
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    if values.dim() == 2:
        return values
    if mask is not None and mask.shape == values.shape[:2]:
        weights = mask.to(values) / mask.sum(1, keepdim=True).clamp_min(1)
        return torch.einsum("mt,mt...d->md", weights, values) / values[0, 0, ..., 0].numel()
    return values.flatten(1, -2).mean(1)


def means_over_fields(images: Tensor) -> Tensor:
    """(m, d f) means of images (m, d, ...) over each of f fields, two along every axis of two or more positions.

    Where something is in an image is lost in a mean over all of it.

    Examples:
        >>> means_over_fields(torch.tensor([[[[1.0, 3.0, 0.0, 0.0], [5.0, 7.0, 0.0, 2.0]]]]))
        tensor([[2., 0., 6., 1.]])
    """
    found = images.to(torch.promote_types(images.dtype, torch.float32))
    for axis in range(2, images.dim()):
        fields = [part.mean(axis, keepdim=True) for part in found.tensor_split(min(GRID, found.shape[axis]), axis)]
        found = torch.cat(fields, axis)
    return found.flatten(1)


@dataclass(frozen=True)
class Whitening:
    """The input of one layer, along its leading directions, whitened and scaled to length one.

    Where lengths count, one more coordinate is the same for all inputs, so that a longer vector has another direction.
    """

    center: Tensor  # (d,)
    matrix: Tensor  # (d, r)
    constant: float  # the further coordinate; zero where directions alone count

    @classmethod
    def of(cls, given: Tensor, answers: Tensor | None, lengths: bool) -> tuple[Whitening, Whitening]:
        """Whitening by the total scatter of the training examples, and by their scatter within classes.

        Args:
            given: (s, d) inputs of the layer for the training examples.
            answers: (s,) predicted classes; `None` if there are none.
            lengths: whether lengths count.
        """
        center, projection = given.mean(0), None
        centered = given - center
        if given.shape[1] > WIDEST:
            projection = random_directions(given.shape[1], WIDEST).to(given)
            centered = centered @ projection
        centered = centered.double()
        values, vectors = eigh(centered.T @ centered / len(centered))
        mean = float(values.clamp_min(0.0).mean()) or 1.0
        values, vectors = values[-LEADING:].clamp_min(0.0), vectors[:, -LEADING:]

        def whitening(root: Tensor) -> Whitening:
            constant = float((centered @ root).square().sum(1).mean().sqrt()) if lengths else 0.0
            whole = root if projection is None else projection.double() @ root
            return cls(center, whole.to(given), constant)

        total = whitening(vectors / (values + mean).sqrt())
        if answers is None:
            return total, total
        vectors = vectors[:, -LEADING_WITHIN:]
        within = centered @ vectors
        means = within.new_zeros(int(answers.max()) + 1, within.shape[1]).index_add_(0, answers, within)
        within = within - (means / torch.bincount(answers).clamp_min(1).unsqueeze(1))[answers]
        scatter = within.T @ within / len(within)
        scatter.diagonal().add_(float(scatter.trace()) / centered.shape[1] or 1.0)
        eye = torch.eye(len(scatter), dtype=scatter.dtype, device=scatter.device)
        return total, whitening(vectors @ solve_lower(torch.linalg.cholesky(scatter), eye).T)

    def __call__(self, given: Tensor) -> Tensor:
        """(m, r) unit vectors of inputs (m, d) of the layer; those of one call count for two where two were usual."""
        width = len(self.center)
        if given.shape[1] != width:
            given = given.repeat(1, max(1, width // given.shape[1]))[:, :width]
        moved = (given - self.center) @ self.matrix
        if self.constant:
            moved = torch.cat([moved, moved.new_full((len(moved), 1), self.constant)], 1)
        unit: Tensor = functional.normalize(moved, dim=1)
        return unit


def random_directions(size: int, count: int) -> Tensor:
    """(size, count) random directions, the same in every call, that keep lengths on average."""
    generator = torch.Generator("cpu").manual_seed(0)
    found: Tensor = torch.randn(size, count, generator=generator, device="cpu") / count**0.5
    return found


@dataclass(frozen=True)
class Embedding:
    """Inputs as vectors, and how similar two of them are.

    For networks these are unit vectors of whitened layers, each scaled by the root of its weight: their products are
    mean cosines. For trees they are leaf numbers, and similarities are shares of equal ones.

    Examples:
        >>> leaves = Embedding({}, torch.tensor([[0, 3], [1, 3]]))
        >>> leaves.similarities(torch.tensor([[0, 3], [1, 4]]))
        tensor([[1.0000, 0.5000],
                [0.0000, 0.5000]])
    """

    whitenings: Mapping[str, tuple[Whitening, float]]  # by layer, with the root of its weight; empty for trees
    known: Tensor  # (s, d) vectors of the training examples
    directions: Tensor | None = None  # (d, r) orthonormal ones along which vectors are compared; `None` for all

    def __call__(self, layers: Layers) -> Tensor:
        """(m, d) vectors of inputs, from the inputs of their layers."""
        return embed(self.whitenings, layers) if self.whitenings else layers["leaves"]

    def similarities(self, vectors: Tensor) -> Tensor:
        """(m, s) similarities of vectors (m, d) with all training examples, at most one."""
        if self.whitenings and self.directions is not None:
            return (vectors @ self.directions) @ self._along.T
        if self.whitenings:
            return vectors @ self.known.T
        first = self.known.amin(0)  # numbers of the leaves of one tree are exact in single precision
        ours, theirs = ((leaves - first).float() for leaves in (vectors, self.known))
        return 1.0 - torch.cdist(ours, theirs, p=0.0) / vectors.shape[1]  # which counts differences

    @cached_property
    def _along(self) -> Tensor:
        """(s, r) the training examples along the directions."""
        assert self.directions is not None
        return self.known @ self.directions


def principal_directions(vectors: Tensor, most: int) -> Tensor | None:
    """(d, most) directions in which vectors (s, d) are longest; `None` if d is not larger than that."""
    if vectors.shape[1] <= most:
        return None
    long = vectors.double()
    return eigh(long.T @ long)[1][:, -most:].to(vectors).contiguous()


def in_chunks(inputs: int, compared: int, device: torch.device) -> Iterator[Tensor]:
    """Positions of some inputs, as many at once as are compared with so many training examples."""
    yield from torch.arange(inputs, device=device).split(max(1, COMPARED_AT_ONCE // compared))


def embed(whitenings: Mapping[str, tuple[Whitening, float]], layers: Layers) -> Tensor:
    """(m, d) unit vectors of whitened layers, each times the root of its weight."""
    return torch.cat([root * whiten(layers[name]) for name, (whiten, root) in whitenings.items()], 1)


class Surroundings(NamedTuple):
    """The training examples around inputs."""

    average: Tensor  # (m,) of the squares of their labels
    effective: Tensor  # (m,) effective number of examples in this average
    distances: Tensor  # (m,) from the nearest examples
    nearest: Tensor  # (m, c) the examples around, as positions among those that distances are measured from
    check: Tensor  # (m, t) training examples that add most to the average
    near: Tensor  # (m, t) training examples with the largest weights in it


@dataclass(frozen=True)
class Neighbours:
    """The training examples that inputs are compared with (see the top of this module)."""

    index: Tensor  # (s,) these training examples, ascending
    label_embedding: Embedding  # of them, whitened by the total scatter
    distance_embedding: Embedding  # of them without repetitions, whitened by the scatter within classes
    distinct: Tensor  # (s,) which of these vectors each of them has
    names: tuple[str, ...]  # of the layers
    nearest: Tensor  # (s, c) the most similar other examples of each
    bandwidth: float
    eigenvectors: Tensor  # (s, r) leading ones of the kernel matrix K
    shrinkage: Tensor  # (r,) of their coefficients: v / (v + 1) for eigenvalues v

    @classmethod
    def of(cls, fitted: Fitted, codes: Codes) -> tuple[Neighbours, Answers]:
        """Compute them from the training data, within `using_model`.

        Also returns what the model answers for the s examples.
        """
        counted = fitted.counted.nonzero().squeeze(1)
        trees = isinstance(fitted.problem.network.model, LeafSum)
        index = evenly_spaced(counted, COMPARED_BY_LEAVES if trees else COMPARED)
        parts, seen = [], None
        for here, inputs, _ in training_examples(fitted, index, "inputs of the layers"):
            if seen is None:  # a layer whose first axis is not that of the examples may have their number by chance
                seen = evenly_chosen(tuple(outputs_and_layers(fitted, take(inputs, slice(0, 1)))[1]))
            outputs, layers = outputs_and_layers(fitted, inputs, seen)
            parts.append((Answers.of(fitted, inputs, outputs, codes, here), layers))
        if sum(len(answers.outputs) for answers, _ in parts) != len(index):
            raise partial_data_error()
        said = Answers.joined([answers for answers, _ in parts])
        outputs, answers = said.outputs, said.classes
        layers = joined_layers([layers for _, layers in parts]) or {OUTPUTS: outputs}
        weights, first, rank = {"leaves": 1.0}, next(iter(layers)), len(index)
        label_embedding = distance_embedding = Embedding({}, layers[first])
        itself = distinct = torch.arange(len(index), device=index.device)
        if not trees:
            pairs = {name: Whitening.of(some, answers, codes is None or name == first) for name, some in layers.items()}
            weights = layer_weights({name: pairs[name][0](some) for name, some in layers.items()}, outputs, answers)
            roots = {name: weight**0.5 for name, weight in weights.items()}
            total, within = ({name: (pairs[name][at], root) for name, root in roots.items()} for at in (0, 1))
            known = embed(total, layers)
            label_embedding, rank = Embedding(total, known, principal_directions(known, PRINCIPAL)), RANK
            known, distinct = without_repetitions(embed(within, layers))
            distance_embedding = Embedding(within, known, principal_directions(known, PRINCIPAL))
        similar = label_embedding.similarities(label_embedding.known)
        values, nearest = most_similar(similar, neighbour_count(len(index)), itself)
        bandwidth = LEAST_BANDWIDTH
        if values.shape[1]:
            bandwidth = max(BANDWIDTH_FACTOR * float((1.0 - values[:, -1]).median()), bandwidth)
        kernel = similar.double().sub_(1.0).div_(bandwidth).exp_()
        sizes, vectors = (some.to(values) for some in leading_eigenvectors(kernel, rank))
        shrinkage = sizes / (sizes + 1.0)
        found = cls(
            index=index,
            label_embedding=label_embedding,
            distance_embedding=distance_embedding,
            distinct=distinct,
            names=tuple(weights),
            nearest=nearest,
            bandwidth=bandwidth,
            eigenvectors=vectors,
            shrinkage=shrinkage,
        )
        return found, said

    def vectors(self, fitted: Fitted, inputs: Inputs) -> Tensor:
        """(m, d) what distances are measured between, of the inputs of a batch."""
        return self.distance_embedding(outputs_and_layers(fitted, inputs, self.names)[1])

    def surroundings(self, layers: Layers, squares: Tensor, top: int, examples: Tensor | None) -> Surroundings:
        """Compare inputs with the training examples, whose labels have squares (s,), as many at once as memory allows.

        Inputs that are training `examples` (m,), -1 for others, are not compared with themselves.
        """
        total, within = self.label_embedding(layers), self.distance_embedding(layers)
        own = same = None
        if examples is not None:
            own = self.positions(examples)
            same = torch.where(own >= 0, self.distinct[own], -1)
        named, parts = min(top, len(squares) - (own is not None)), []
        for some in in_chunks(len(total), len(self.distance_embedding.known), total.device):
            own_here, same_here = (None if one is None else one[some] for one in (own, same))
            similar = self.distance_embedding.similarities(within[some])
            distances, nearest = mean_distance(similar, same_here)
            if self.label_embedding is not self.distance_embedding:
                similar = self.label_embedding.similarities(total[some])
            weights = self.weights(similar, own_here)
            values = squares.to(weights)
            part = Surroundings(
                average=(weights @ values).to(squares),
                effective=(1.0 / torch.linalg.vector_norm(weights, dim=1).square()).to(squares),
                distances=distances.to(squares),
                nearest=nearest,
                check=self.index[largest(weights * values, named)[1]],
                near=self.index[largest(weights, named)[1]],
            )
            parts.append(part)
        return Surroundings(*(torch.cat(each) for each in zip(*parts, strict=True)))

    def positions(self, examples: Tensor) -> Tensor:
        """(m,) positions of training examples (m,) among those that are compared; -1 for others."""
        return positions(self.index, examples)

    def weights(self, similar: Tensor, own: Tensor | None = None) -> Tensor:
        """(m, s) weights of the examples' labels, which sum to one, in place of similarities (m, s) with them.

        Inputs that are training examples, at the positions `own` (m,) or -1, are predicted without themselves.
        """
        vectors = self.eigenvectors
        found = similar.sub_(1.0).div_(self.bandwidth).exp_()
        found = found.addmm_(found @ vectors * self.shrinkage, vectors.T, alpha=-1.0)
        if own is not None:
            known = (own >= 0).nonzero().squeeze(1)
            others = (vectors[own[known]] * self.shrinkage) @ vectors.T
            found[known] = others.scatter_(1, own[known].unsqueeze(1), 0.0)
        found = found.square_()
        return found.div_(found.sum(1, keepdim=True).clamp_min_(torch.finfo(found.dtype).tiny))

    def training_averages(self, squares: Tensor) -> Tensor:
        """(s,) averages of squares (s,) around the training examples, each without its own."""
        known, parts = self.label_embedding.known, []
        for some in in_chunks(len(known), len(known), known.device):
            weights = self.weights(self.label_embedding.similarities(known[some]), some)
            parts.append(weights @ squares.to(weights))
        return torch.cat(parts).to(squares)

    def training_distances(self) -> tuple[Tensor, Tensor]:
        """(r,) mean distance of each distinct vector from the nearest others, and which are around it (r, c)."""
        known = self.distance_embedding.known
        parts = [
            mean_distance(self.distance_embedding.similarities(known[some]), some)
            for some in in_chunks(len(known), len(known), known.device)
        ]
        distances, nearest = (torch.cat(each) for each in zip(*parts, strict=True))
        return distances, nearest


def without_repetitions(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (r, d) of which none is another one's copy, of unit vectors (l, d), and which of them each one is (l,).

    A copy of an example, as after oversampling, says nothing about how far others are.

    Examples:
        >>> kept, which = without_repetitions(torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]]))
        >>> kept.tolist(), which.tolist()
        ([[1.0, 0.0], [0.0, 1.0]], [0, 1, 0])
    """
    every = torch.arange(len(vectors), device=vectors.device)
    first = every[:0]
    for some in in_chunks(len(vectors), len(vectors), vectors.device):
        same = vectors[some] @ vectors.T >= 1.0 - LEAST_DISTANCE**2 / 2.0
        first = torch.cat([first, torch.where(same, every, some.unsqueeze(1)).amin(1)])
    first = first[first]  # of those that are copies of a copy
    kept = first.unique()
    return vectors[kept], torch.searchsorted(kept, first)


def positions(index: Tensor, examples: Tensor) -> Tensor:
    """(m,) positions of training examples (m,) among some of them, ascending, and -1 for others.

    Examples:
        >>> positions(torch.tensor([2, 5, 7]), torch.tensor([5, 6, 2]))
        tensor([ 1, -1,  0])
    """
    at = torch.searchsorted(index, examples).clamp_max(len(index) - 1)
    return torch.where(index[at] == examples, at, -1)


def most_similar(similar: Tensor, count: int, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(m, count) similarities with the most similar training examples, and which these are, of all (m, s).

    Inputs that are training examples, at the positions `own` (m,) or -1, are not compared with themselves.
    """
    if own is not None:
        known = (own >= 0).nonzero().squeeze(1)
        similar = similar.index_put((known, own[known]), similar.new_tensor(-2.0))
    return largest(similar, min(count, similar.shape[1] - (own is not None)))


def mean_distance(similar: Tensor, own: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(m,) mean distance from the nearest few training examples, by similarities (m, l), and which are around (m, c).

    Distances are chords of a sphere. Inputs that are training examples, at the positions `own` (m,) or -1, are not
    compared with themselves.
    """
    similar, near = most_similar(similar, AROUND, own)
    if not near.shape[1]:
        return torch.ones(len(similar), device=similar.device), near
    return (2.0 - 2.0 * similar[:, :NEAREST]).clamp_min(LEAST_DISTANCE**2).sqrt().mean(1), near


def neighbour_count(examples: int) -> int:
    """How many of the most similar among some examples are neighbours: about the root of their number.

    With few examples it is up to thirty, or an eighth of them, because an average of fewer says little about noise.
    """
    return max(1, min(max(math.isqrt(examples), min(30, examples // 8)), examples - 1))


def joined_layers(parts: Sequence[Layers]) -> dict[str, Tensor]:
    """The layers that have finite inputs of one width in all batches, joined."""
    names = [name for name in parts[0] if all(name in part for part in parts)]
    names = [name for name in names if len({part[name].shape[1] for part in parts}) == 1]
    joined = {name: torch.cat([part[name] for part in parts]) for name in names}
    return {name: given for name, given in joined.items() if bool(torch.isfinite(given).all())}


def evenly_chosen(names: Sequence[str]) -> list[str]:
    """At most a few names of layers, evenly spaced."""
    return [names[at] for at in evenly_spaced(torch.arange(len(names), device="cpu"), MOST_LAYERS).tolist()]


def layer_weights(units: Mapping[str, Tensor], outputs: Tensor, answers: Tensor | None) -> dict[str, float]:
    """Weights of the layers that count, which sum to one, from unit vectors (s, r) of the training examples.

    A power of the share of the variance of the answers, or of the outputs (s, k) without predicted classes, that the
    nearest other examples explain.
    """
    predictions = outputs if answers is None else functional.one_hot(answers)
    predictions = predictions.to(next(iter(units.values())).dtype)
    scored = evenly_spaced(torch.arange(len(predictions), device=predictions.device), SCORED)
    count, shares = neighbour_count(len(predictions)), dict[str, float]()
    for name, unit in units.items() if len(units) > 1 else ():
        similar = (unit[scored] @ unit.T).scatter_(1, scored.unsqueeze(1), -2.0)
        near = largest(similar, count)[1]
        mean = sum(predictions[one] for one in near.T) / near.shape[1]  # (m, count, k) might not fit in memory
        missed = float((predictions[scored] - mean).square().sum())
        varied = float((predictions[scored] - predictions.mean(0)).square().sum())
        shares[name] = max(0.0, 1.0 - missed / varied) ** WEIGHT_POWER if varied > 0 else 0.0
    least = LEAST_WEIGHT * sum(shares.values())
    shares = {name: share for name, share in shares.items() if share > least} or dict.fromkeys(units, 1.0)
    return {name: share / sum(shares.values()) for name, share in shares.items()}
