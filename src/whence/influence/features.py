"""Distance of an input from the training examples in the input of the last layer, without using labels.

The leverage of gradients can miss something: an input may have an ordinary gradient and still be unlike all training
examples with its predicted class (`SameClass`), or point in a direction that none of them has (`NearestDirection`).
`FeatureDistance` compares its distance with the distances between training examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from whence.data.batches import Inputs
from whence.influence.fitted import Fitted, evenly_spaced, predicted_outputs

LEAST_SCATTER = 1e-9
"""Scatter of features along directions in which they do not differ, in units of their mean square."""

NEAREST_LABELS = 50
"""Number of nearest training examples, by features of the last layer, whose labels are compared with its own."""

SHARED_SHAPE = 0.1
"""Weight of the scatter shared by all classes relative to each class's own: this many examples per feature."""

COMPARED_DIRECTIONS = 2000
"""Number of training examples, evenly spaced, searched for the nearest directions of features. On 29 draws of
digits, MNIST, Fashion-MNIST and CIFAR-10, five times as many give the same AUROC for missing classes within .01."""

FEW_FEATURES = 16
"""With this many features, the exponent of the distance between directions is one half."""

NEAREST_DIRECTIONS = 5
"""Number of training examples with the nearest directions over which distances are averaged."""

COMPARED_AT_ONCE = 2**24
"""Pairs of inputs and training examples that are compared at once."""

NEAREST = 0.25
"""Smallest distance between directions in units of the usual one, for inputs that point exactly like an example."""


def outputs_and_features(fitted: Fitted, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Outputs (m, ..., k), and the input (m, d) of the linear layer that runs last.

    The latter is `None` unless it is one vector per example.
    """
    given: list[Tensor] = []

    def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        given[:] = arguments[:1]

    layers = [layer for layer in fitted.problem.network.model.modules() if isinstance(layer, nn.Linear)]
    hooks = [layer.register_forward_pre_hook(record) for layer in layers]
    try:
        with torch.no_grad():
            outputs = fitted.problem.network.shaped(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    vectors = bool(given) and given[0].dim() == 2 and len(given[0]) == len(outputs)
    return outputs, given[0].to(torch.promote_types(given[0].dtype, torch.float32)) if vectors else None


class LastFeatures(NamedTuple):
    """Features of the last layer, and the class that the network predicts."""

    features: Tensor  # (m, d)
    predicted: Tensor  # (m,)

    @classmethod
    def of(
        cls, fitted: Fitted, outputs: Tensor, features: Tensor | None, codes: tuple[float, float] | None
    ) -> LastFeatures | None:
        """From outputs (m, k) and features; `None` unless the outputs are one choice among classes.

        Args:
            fitted: the fit.
            outputs: outputs of the network.
            features: input of its last layer, if that is one vector per example.
            codes: target values for other classes and for the class itself; `None` without classes.
        """
        if codes is None or features is None or has_several_labels(fitted) or outputs[0].numel() != outputs.shape[-1]:
            return None
        flat = outputs.reshape(len(outputs), -1)
        if flat.shape[1] > 1:
            predicted = predicted_outputs(fitted, outputs)
            return cls(features, flat.argmax(1) if predicted is None else predicted.squeeze(1))
        middle = 0.0 if fitted.problem.likelihood.has_classes else sum(codes) / 2  # for logits, and for codes
        return cls(features, (flat.squeeze(1) > middle).long())

    @staticmethod
    def joined(parts: Sequence[LastFeatures | None], most: int) -> LastFeatures | None:
        """Join all parts; `None` if one of them is, or if they hold more than `most` numbers in all."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts) or sum(part.features.numel() for part in known) > most:
            return None
        return LastFeatures(*(torch.cat(each) for each in zip(*known, strict=True)))


@dataclass(frozen=True)
class FeatureDistance:
    """Distances of features from those of the training examples, in units of the usual distance among these.

    The product of two distances. The first is that from the examples with the same predicted class, the root of a
    leverage (`SameClass`). The second is that from the nearest directions of all examples (`NearestDirection`). Each is
    divided by the median of the training examples, each left out. Directions of few features d say little, so the
    second is raised to the power d / (d + 16).

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]])
        >>> known = LastFeatures(features, torch.tensor([0, 0, 1, 1]))
        >>> far = FeatureDistance.of(known, torch.tensor([True] * 4), torch.arange(4), 2)
        >>> asked = LastFeatures(torch.tensor([[1.0, 0.05], [2.0, 1.9]]), torch.tensor([0, 0]))
        >>> [round(one, 1) for one in far.beyond_usual(asked).tolist()]
        [0.1, 10.7]
    """

    same_class: SameClass
    nearest: NearestDirection
    usual: float = 1.0  # median distance of training examples from others with the same predicted class
    usual_angle: float = 1.0  # median distance of training examples from the nearest other directions
    power: float = 0.0  # exponent of distances between directions

    @classmethod
    def of(cls, known: LastFeatures, counted: Tensor, compared: Tensor, k: int) -> FeatureDistance:
        """Compute it from the training examples.

        Args:
            known: features and predicted classes of all examples.
            counted: (n,) which of them count.
            compared: (s,) the examples whose distances from the others define the usual distance.
            k: number of classes.
        """
        same_class = SameClass.of(known, counted, k)
        found = cls(same_class, NearestDirection.of(known.features, counted, same_class))
        if not len(compared):
            return found
        own = LastFeatures(known.features[compared], known.predicted[compared])
        usual = float(same_class.leverages_without(own).sqrt().median())
        usual_angle, d = float(found.nearest.distances(own.features, compared).nanmedian()), known.features.shape[1]
        power = d / (d + FEW_FEATURES) if usual_angle > 0 else 0.0  # zero for one feature only, or mostly copies
        return replace(found, usual=usual, usual_angle=usual_angle, power=power)

    def beyond_usual(self, asked: LastFeatures, own: Tensor | None = None) -> Tensor:
        """(m,) distances of inputs over the usual one. If they are training examples `own`, each without itself."""
        leverages = self.same_class.leverages(asked) if own is None else self.same_class.leverages_without(asked)
        found = leverages.sqrt() / self.usual
        if self.power > 0:
            angles = self.nearest.distances(asked.features, own) / self.usual_angle
            found = found * angles.clamp_min(NEAREST).to(found) ** self.power
        return found


@dataclass(frozen=True)
class SameClass:
    """Leverages of features among training examples with the same predicted class.

    The leverage of a regression with an intercept, 1 / n_c + (x - m_c)^T (S_c + b S)^-1 (x - m_c), for the n_c examples
    with predicted class c, their mean m_c and their scatter S_c around it. S is the mean square of all examples around
    the mean of their predicted class, and b a tenth of the number of features: classes with few examples borrow their
    shape from all.

    Examples:
        >>> known = LastFeatures(torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.tensor([0, 0, 1, 1]))
        >>> same_class = SameClass.of(known, torch.tensor([True, True, True, True]), 2)
        >>> asked = LastFeatures(torch.tensor([[1.0], [5.0]]), torch.tensor([0, 0]))
        >>> [round(one, 2) for one in same_class.leverages(asked).tolist()]
        [0.5, 8.12]
    """

    means: Tensor  # (k, d)
    scatter: Tensor  # (d, d) S, and a little along directions in which features do not differ
    roots: Tensor  # (k, d, d) lower triangles L with L L^T = S_c + b S
    counts: Tensor  # (k,) number of examples with each predicted class

    @classmethod
    def of(cls, known: LastFeatures, counted: Tensor, k: int) -> SameClass:
        """Compute it from the training examples that count, for k classes.

        A class without examples gets the mean and the shared shape of all.
        """
        features, predicted = known.features[counted].double(), known.predicted[counted]
        d = features.shape[1]
        counts = torch.bincount(predicted, minlength=k)
        sums = features.new_zeros(k, d).index_add_(0, predicted, features)
        empty = (counts == 0).unsqueeze(1)
        means = torch.where(empty, features.mean(0), sums / counts.clamp_min(1).unsqueeze(1))
        apart = features - means[predicted]
        scatter = (apart.T @ apart) / max(1, len(apart))
        scatter.diagonal().add_(LEAST_SCATTER * float(features.square().mean()) or 1.0)
        roots = features.new_empty(k, d, d)
        for c, root in enumerate(roots):
            some = apart[predicted == c]
            torch.linalg.cholesky(some.T @ some + SHARED_SHAPE * d * scatter, out=root)
        return cls(means, scatter, roots, counts)

    def leverages(self, asked: LastFeatures) -> Tensor:
        """(m,) leverages of features with their predicted classes."""
        predicted, apart = asked.predicted, asked.features.double() - self.means[asked.predicted]
        found = 1.0 / self.counts[predicted].clamp_min(1).to(apart.dtype)
        for c in predicted.unique().tolist():
            some = predicted == c
            white = torch.linalg.solve_triangular(self.roots[c], apart[some].T, upper=False)
            found[some] += white.square().sum(0)
        return found

    def leverages_without(self, known: LastFeatures) -> Tensor:
        """(n,) leverages of training examples, each without itself."""
        own = self.leverages(known).clamp_max(1.0 - 1e-6)
        return own / (1.0 - own)


@dataclass(frozen=True)
class NearestDirection:
    """Directions in which the features of some training examples lie, seen from the mean of all.

    In networks trained for long, the length of the features says how sure the network is, and their direction what it
    sees. An input of a class that is missing from the training set may be near the mean, within the scatter of every
    class, and still lie in a direction in which no training example lies. Features scatter widely along directions that
    say little, so they are whitened first by S + mean(diagonal of S) for the scatter S within predicted classes. The
    distance is the mean chord between unit vectors, over the few nearest.

    Examples:
        >>> known = LastFeatures(torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]]), torch.tensor([0, 0, 1]))
        >>> counted = torch.tensor([True, True, True])
        >>> nearest = NearestDirection.of(known.features, counted, SameClass.of(known, counted, 2))
        >>> [round(one, 2) for one in nearest.distances(torch.tensor([[2.0, -1.0], [9.0, 9.0]])).tolist()]
        [0.84, 1.48]
        >>> [round(one, 2) for one in nearest.distances(known.features, own=torch.arange(3)).tolist()]  # without itself
        [1.25, 1.25, 1.98]
    """

    center: Tensor  # (d,) mean of the features
    root: Tensor  # (d, d) lower triangle that whitens them
    directions: Tensor  # (r, d) whitened features of training examples, scaled to length one
    examples: Tensor  # (r,) which training examples these are, ascending

    @classmethod
    def of(cls, features: Tensor, counted: Tensor, same_class: SameClass) -> NearestDirection:
        """From features (n, d) of the training examples, using those that count (n,), and their scatter."""
        examples = evenly_spaced(counted.nonzero().squeeze(1), COMPARED_DIRECTIONS)
        shape = same_class.scatter.clone()
        shape.diagonal().add_(float(shape.diagonal().mean()))
        center = features[counted].double().mean(0)
        found = cls(center, torch.linalg.cholesky(shape), features[:0], examples)
        return replace(found, directions=found._direction(features[examples]))

    def _direction(self, features: Tensor) -> Tensor:
        """(m, d) unit vectors from the mean to features (m, d), whitened."""
        white = torch.linalg.solve_triangular(self.root, (features.double() - self.center).T, upper=False)
        return functional.normalize(white.T, dim=1).to(features.dtype)

    def distances(self, features: Tensor, own: Tensor | None = None) -> Tensor:
        """(m,) distances of features (m, d). If they are training examples `own` (m,), each without itself."""
        found = [features.new_empty(0)]
        most = min(NEAREST_DIRECTIONS, len(self.examples) - (own is not None))
        step = max(1, COMPARED_AT_ONCE // max(1, len(self.examples)))
        for low in range(0, len(features), step):
            unit = self._direction(features[low : low + step])
            cosines = unit @ self.directions.T
            if own is not None:
                cosines.masked_fill_(own[low : low + step].unsqueeze(1) == self.examples, -2.0)
            near = self.directions[cosines.topk(most, dim=1).indices]
            found.append((unit.unsqueeze(1) - near).norm(dim=2).mean(1))  # differences are more accurate than products
        return torch.cat(found)


def disagreement(features: Tensor, labels: Tensor, index: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """(s,) share of the nearest training examples, by cosine of features, with another label than the example's own.

    Also its standard error (s,). An example of a rare class is compared with only as many examples as its class has
    beside it, because no more could agree.

    Args:
        features: (n, d) of the training examples.
        labels: (n,) their classes.
        index: (s,) the examples to compare with the others. None is compared with itself.
        counted: (n,) which examples count.

    Examples:
        >>> features = torch.tensor([[1.0, 0.0], [1.0, 0.2], [0.9, 0.1], [0.0, 1.0]])
        >>> labels, counted = torch.tensor([0, 0, 1, 0]), torch.tensor([True, True, True, True])
        >>> disagreement(features, labels, torch.tensor([0, 2]), counted)[0]
        tensor([0.5000, 0.0000])
    """
    unit = functional.normalize(features, dim=1)
    sizes = torch.bincount(labels[counted], minlength=int(labels.max()) + 1)
    most = min(NEAREST_LABELS, int(sizes.max()) - 1)
    found = [unit.new_zeros(2, 0 if most > 0 else len(index))]
    for some in index.split(max(1, COMPARED_AT_ONCE // len(unit))) if most > 0 else ():
        cosines = (unit[some] @ unit.T).masked_fill_(~counted, -2.0).scatter_(1, some.unsqueeze(1), -2.0)
        others = labels[cosines.topk(most, dim=1).indices] != labels[some].unsqueeze(1)
        available = (sizes[labels[some]] - 1).clamp(0, most).unsqueeze(1)
        compared_labels = torch.arange(most, device=available.device) < available
        number = available.squeeze(1).clamp_min(1).to(unit.dtype)
        share = (others & compared_labels).sum(1) / number
        found.append(torch.stack([share, (share * (1.0 - share) / number).sqrt()]))
    shares, errors = torch.cat(found, 1)
    return shares, errors


def has_several_labels(fitted: Fitted) -> bool:
    """Whether there are several outputs, each with its own yes-or-no label."""
    likelihood = fitted.problem.likelihood
    return likelihood.has_classes and not likelihood.couples_outputs and fitted.problem.width > 1
