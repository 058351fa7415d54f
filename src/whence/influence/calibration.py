"""Reference values for explanations: what the training examples, each left out, say about noise and scarcity.

Noise: every training example has a square that says how much its label contradicts the others (`label_squares`). Around
an input squares are averaged, with the weights of `Neighbours.weights`. Such an average is shrunk towards that of the
whole data set; the squares of training examples, given the averages around them, correct it (`IsotonicRegression`). If
the noise were the same everywhere, the squares v could be shuffled among the examples. The shuffled average has mean
mean(v) and variance var(v) (sum w^2 - 1 / n). A gamma distribution with these moments gives the p-value.

Scarcity: the distance of an input from the training examples is compared with those of training examples, each from the
others (`Distances`). An input is unusual if few ordinary examples are as scarce, or have as ambiguous answers. Examples
around which labels contradict each other are not ordinary, unless few are left. An input with noisy labels around it is
compared with the training examples of which this is also true, by its scarcity alone, because contradicting labels
scatter inputs in the network and make its answers ambiguous.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from whence.influence.classes import Codes, class_codes, class_labels, has_several_labels, predicted_probability
from whence.influence.fitted import Fitted
from whence.influence.neighbours import CANDIDATES, Neighbours
from whence.jacobian.leaves import LeafSum

# Labels, and targets of a regression (the second number), are called noisy if the square expected around them is this
# many times the average of the data set. If half of all targets are noisy, theirs is at most twice the average.
NOISIER, NOISIER_TARGETS = 2.5, 1.5
# For classes that limit is at least the first, and at most the second or one minus the average: labels are not called
# noisy if two of them differ in less than a tenth of all pairs.
LEAST_DISAGREEMENT, MOST_DISAGREEMENT = 0.1, 2 / 3
SAME_PLACE = 1e-5  # averages of squares with a smaller relative difference are the same up to rounding
MOST_CERTAIN = 0.999  # upper bound of the noise when odds are computed
# A scarcity below the first is not unusual, and neither is an answer if two labels drawn from the network's own
# probabilities differ in a smaller share of cases than the second.
LEAST_SCARCITY, LEAST_AMBIGUITY = 1.05, 0.1
# A half, twice: the weight in the scarcity of the local score (the distance relative to those of the nearest examples),
# beside that of the distance itself; and the weight of scarcity, in standard deviations, beside noise in the source.
BESIDE = 0.5
FEW = 20  # the median of so many examples with the same answer counts as much as that of all examples
# The spread of logarithms is the distance of this quantile from their median, and at least the second number: one
# standard deviation of a normal distribution.
UPPER, LEAST_SPREAD = 0.84, 0.05
# Least number of examples around which labels agree, to compare scarcity with these alone: fewer could not show that
# less than 5 % have a higher one.
LEAST_ORDINARY = 19
# A class is rare if fewer training examples have its label than the first number, and than this share of the median of
# the classes.
RARE, RARE_SHARE = 20, 0.2
MANY_LABELS = 50  # errors of other models on an example count if its class has more examples than this
MOST_SQUARE = 2.0  # the largest possible squared distance between a label and probabilities of classes


@dataclass(frozen=True, repr=False)
class Calibration:
    """Reference values for predictions: leave-one-out quantities of the training examples."""

    neighbours: Neighbours  # the s training examples that inputs are compared with
    squares: Tensor  # (s,) how often two labels differ at each of them, or the squared error of a regression
    nearby: IsotonicRegression  # squares expected for averages around an input
    # Squares expected for ambiguities of the network's answers; `None` if these do not count, because they are no
    # probabilities of classes, or those of trees, whose splits have learned the labels.
    answered: IsotonicRegression | None
    limit: float  # expected squares above which labels are called noisy
    noise_limit: float  # the same for `Explanation.noise`
    distances: Distances
    ordinary: Tensor  # scores of ordinary training examples by `Distances.excess`, ascending
    noisy: Tensor  # those of the training examples with noisy labels around them, ascending
    ambiguities: Tensor | None  # of the answers for ordinary training examples, ascending; `None` where `answered` is
    rare: Tensor | None  # (k,) whether hardly any training example has the label of a class; `None` without such labels
    codes: Codes
    unit: float  # unit of the residuals of a regression; squares are in its square
    notes: tuple[str, ...]  # what is approximated

    @property
    def classes(self) -> bool:
        """Whether squares measure how often two labels differ."""
        return self.codes is not None

    @classmethod
    def of(cls, fitted: Fitted) -> Calibration:
        """Compute it from the training data, within `using_model`."""
        codes = class_codes(fitted)
        neighbours, outputs, answers = Neighbours.of(fitted, codes)
        index, known = neighbours.index, int(fitted.counted.sum())
        unit = 1.0 if codes is not None else float(fitted.residuals[index].abs().max()) or 1.0
        squares, rare = label_squares(fitted, neighbours, codes, unit)

        # Labels around each training example, without its own: which of them contradict each other?
        itself = torch.arange(len(index), device=index.device)
        weights = neighbours.weights(neighbours.around.similarities(neighbours.around.known), itself).to(squares)
        average = weights @ squares if len(index) > 1 else squares
        nearby = IsotonicRegression.fit(average, squares)
        expected = nearby.predict(average)
        limit = limit_for_classes(squares) if codes is not None else NOISIER_TARGETS * float(squares.mean())
        noise_limit = limit if codes is not None else unit * limit**0.5
        agreeing = expected <= limit
        noisy = ~agreeing
        few = int(agreeing.sum()) < max(len(agreeing) / 2, LEAST_ORDINARY)
        ordinary = torch.ones_like(agreeing) if few else agreeing

        # Probabilities of classes are a second witness.
        answered = ambiguities = None
        if fitted.problem.likelihood.has_classes and not isinstance(fitted.problem.network.model, LeafSum):
            ambiguity = predicted_probability(fitted, outputs, codes, index)[1]
            answered, ambiguities = IsotonicRegression.fit(ambiguity, squares), ambiguity[ordinary].sort().values
            noise = (expected.clamp_max(1.0) * answered.predict(ambiguity).clamp_max(1.0)).sqrt()
            noise_limit = limit_for_classes(noise)
            noisy = noisy & (noise > noise_limit)

        # How far is each training example from the others?
        candidates = neighbours.nearest[:, :CANDIDATES]
        own = neighbours.apart.distances(neighbours.apart.known, candidates).to(squares)
        distances = Distances.of(own, candidates, answers, ordinary)
        remote = distances.excess(own, candidates, answers)
        some = f"Inputs are compared with {len(index):,} of {known:,} training examples."
        return cls(
            neighbours=neighbours,
            squares=squares,
            nearby=nearby,
            answered=answered,
            limit=limit,
            noise_limit=noise_limit,
            distances=distances,
            ordinary=remote[ordinary].sort().values,
            noisy=remote[noisy].sort().values,
            ambiguities=ambiguities,
            rare=rare,
            codes=codes,
            unit=unit,
            notes=(some,) if len(index) < known else (),
        )

    def expected_square(self, average: Tensor) -> Tensor:
        """(m,) squares expected for these averages; at most one for classes."""
        found = self.nearby.predict(average)
        return found.clamp_max(1.0) if self.classes else found

    def in_unit(self, square: Tensor) -> Tensor:
        """Squares as they are shown: how often two labels differ, or the standard deviation of targets."""
        return square if self.classes else self.unit * square.sqrt()

    def noise(self, square: Tensor, ambiguity: Tensor) -> Tensor:
        """(m,) noise, from expected squares (m,) and the ambiguity of the network's answers (m,)."""
        if self.answered is None:
            return self.in_unit(square)
        return (square * self.answered.predict(ambiguity).clamp_max(1.0)).sqrt()

    def noise_p(self, average: Tensor, effective: Tensor) -> Tensor:
        """(m,) how often shuffled squares would give an average at least as large, over effective numbers (m,)."""
        mean = float(self.squares.double().mean())
        if mean <= 0 or len(self.squares) < 2:
            return torch.ones_like(average)
        concentration = (1.0 / effective - 1.0 / len(self.squares)).clamp_min(0.0)
        spread = ((float(self.squares.double().std()) / mean) ** 2 * concentration).clamp_min(1e-8)
        chance: Tensor = torch.special.gammaincc(1.0 / spread, average / mean / spread)
        return chance

    def has_rare_answer(self, answers: Tensor | None, m: int) -> Tensor:
        """(m,) whether hardly any training example has the predicted class (m,) as its label."""
        if answers is None or self.rare is None:
            return torch.zeros(m, dtype=torch.bool, device=self.squares.device)
        return at_answers(self.rare, answers, torch.ones_like(self.rare[0]))

    def scarcity(self, remote: Tensor) -> Tensor:
        """(m,) scores (m,) of `Distances.excess` as factors: 1 is typical, twice the distance is 2 or more."""
        return (self.distances.typical.spread * remote).exp()

    def scarcity_limit(self, level: float) -> float:
        """The scarcity that this share of ordinary training examples does not exceed; with two tests, a larger one."""
        level = level if self.ambiguities is None else (1.0 + level) / 2.0
        return max(float(self.scarcity(self.ordinary.quantile(level))), LEAST_SCARCITY)

    def ambiguity_limit(self, level: float) -> float:
        """The same for ambiguities; one, which none reaches, if these do not count."""
        if self.ambiguities is None:
            return 1.0
        return max(float(self.ambiguities.quantile((1.0 + level) / 2.0)), LEAST_AMBIGUITY)

    def scarcity_p(self, remote: Tensor, ambiguity: Tensor, noisy: Tensor) -> Tensor:
        """(m,) share of training examples as unusual: of those with noisy labels around them where `noisy` (m,).

        Elsewhere of ordinary ones, by scores (m,) of `Distances.excess` or by the ambiguity of the answers (m,). These
        are two tests, so the smaller share counts twice (Bonferroni).
        """
        share = empirical_p_value(self.ordinary, remote).masked_fill(self.scarcity(remote) < LEAST_SCARCITY, 1.0)
        if self.ambiguities is not None:
            undecided = empirical_p_value(self.ambiguities, ambiguity).masked_fill(ambiguity < LEAST_AMBIGUITY, 1.0)
            share = (2.0 * torch.minimum(share, undecided)).clamp_max(1.0)
        return torch.where(noisy, empirical_p_value(self.noisy, remote), share)

    def source(self, noise: Tensor, remote: Tensor, level: float) -> Tensor:
        """(m,) how far noise is above its limit, minus half of how far scarcity is above its own."""
        beyond = remote - math.log(self.scarcity_limit(level)) / self.distances.typical.spread
        both = torch.stack([noise, torch.full_like(noise, self.noise_limit)]).clamp_min(torch.finfo(noise.dtype).tiny)
        scale = both.clamp_max(MOST_CERTAIN).logit() if self.classes else 2.0 * both.log()
        return scale[0] - scale[1] - BESIDE * beyond


def label_squares(fitted: Fitted, neighbours: Neighbours, codes: Codes, unit: float) -> tuple[Tensor, Tensor | None]:
    """(s,) how much the label of each training example contradicts the others; and (k,) which classes are rare.

    This is its squared leave-one-out residual (`squared_residuals`), which is too small for a label that the network
    has memorised. So the share of the nearest other examples that have another label replaces it if that is larger by
    two standard errors: both measure how often two labels differ. If other models predicted the example without having
    seen it (`Fitted.held_out`), and its class has more than 50 examples, the square is that of their error. A label
    that hardly any other example has does not count: the others cannot predict it.
    """
    index, labels = neighbours.index, class_labels(fitted, codes)
    squares = squared_residuals(fitted, codes, unit)[index]
    if labels is None:
        return squares, None
    own, known = labels[index], labels[fitted.counted]
    near = neighbours.nearest[:, : neighbours.count]
    shares, errors = (some.to(squares) for some in disagreement(near, own))
    squares = torch.where(shares - 2.0 * errors > squares, shares, squares)
    if fitted.held_out is not None:
        held_out = fitted.held_out.to(squares)[index]
        squares = torch.where(held_out.isfinite() & (torch.bincount(known)[own] > MANY_LABELS), held_out, squares)
    rare = rare_classes(known)
    return squares.masked_fill(rare[own], 0.0), rare


def squared_residuals(fitted: Fitted, codes: Codes, unit: float) -> Tensor:
    """(n,) squared leave-one-out residuals of each training example, the mean over its positions.

    For classes these are residuals at the prediction without the example. Summed over classes, their expectation is how
    often two labels differ. For yes and no, twice the square has the same meaning; with several such outputs, its mean.
    For regression those of HeC2, averaged over outputs, whose expectation is the noise. They are in units of `unit`, as
    their squares might underflow or overflow.
    """
    problem = fitted.problem
    residuals = fitted.adjusted.hec2 if codes is None else fitted.adjusted.hec3
    residuals = problem.unweighted(problem.isometric(residuals)) / unit
    if problem.units.weights is not None:
        positions = (problem.units.weights > 0).sum(1).clamp_min(1).to(residuals.dtype)
    else:
        positions = residuals.new_tensor(max(1.0, problem.counted_units / max(1, int(fitted.counted.sum()))))
    if codes is None:
        return residuals.square().sum(1) / (positions * problem.width)
    yes_or_no = problem.width == 1 or has_several_labels(fitted)
    scale = (codes[1] - codes[0]) ** 2 / (2.0 / problem.width if yes_or_no else 1.0)
    return (residuals.square().sum(1) / (scale * positions)).clamp_max(MOST_SQUARE)


def disagreement(near: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(s,) share of the nearest other examples (s, count) with another label, and its standard error.

    An example of a rare class is compared with only as many examples as its class has beside it, because no more could
    agree.

    Examples:
        >>> disagreement(torch.tensor([[1, 2], [0, 2], [0, 1], [1, 2]]), torch.tensor([0, 0, 1, 0]))[0]
        tensor([0.5000, 0.5000, 0.0000, 0.5000])
    """
    available = (torch.bincount(labels)[labels] - 1).clamp_max(near.shape[1]).unsqueeze(1)
    others = (labels[near] != labels.unsqueeze(1)) & (torch.arange(near.shape[1], device=near.device) < available)
    number = available.squeeze(1).clamp_min(1)
    share = others.sum(1) / number
    return share, (share * (1.0 - share) / number).sqrt()


def rare_classes(labels: Tensor) -> Tensor:
    """(k,) whether classes have few of the labels (n,), in number and beside the other classes.

    Examples:
        >>> rare_classes(torch.tensor([0] * 90 + [1] * 80 + [2] * 5))
        tensor([False, False,  True])
        >>> rare_classes(torch.tensor([0] * 1000 + [1] * 5))
        tensor([False,  True])
    """
    counts = torch.bincount(labels)
    usual = counts[counts > 0].double().quantile(0.5) if len(labels) else 0.0
    return (counts < RARE) & (counts < RARE_SHARE * usual)


def limit_for_classes(values: Tensor) -> float:
    """The disagreement above which labels of classes are called noisy, from values of training examples."""
    usual = float(values.mean()) if len(values) else 0.0
    return max(LEAST_DISAGREEMENT, min(NOISIER * usual, max(MOST_DISAGREEMENT, 1.0 - usual)))


@dataclass(frozen=True)
class IsotonicRegression:
    """Values that are expected at given places, increasing: a centered isotonic regression (Oron and Flournoy, 2017).

    Groups of equal values of an isotonic regression are replaced by their centers, and values between them are
    interpolated linearly.

    Examples:
        >>> places, values = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([3.0, 1.0, 4.0, 5.0])
        >>> expected = IsotonicRegression.fit(places, values)
        >>> expected.places, expected.values
        (tensor([0.5000, 2.0000, 5.0000]), tensor([2., 4., 5.]))
        >>> expected.predict(torch.tensor([0.0, 1.25, 9.0]))
        tensor([2., 3., 5.])
    """

    places: Tensor  # (g,) centers of the groups, ascending
    values: Tensor  # (g,) their values, ascending

    @classmethod
    def fit(cls, places: Tensor, values: Tensor) -> IsotonicRegression:
        """From observed values (n,) at places (n,)."""
        order = places.argsort(stable=True)
        places, values = places[order], isotonic(without_ties(places[order], values[order]))
        known, group, sizes = values.unique_consecutive(return_inverse=True, return_counts=True)
        return cls(places.new_zeros(len(known)).index_add_(0, group, places) / sizes, known)

    def predict(self, places: Tensor) -> Tensor:
        """(m,) expected values at places (m,), constant beyond the outer centers; the places themselves if none."""
        if not len(self.places):
            return places
        at, ends, found = (some.double().cpu().numpy() for some in (places, self.places, self.values))
        return torch.from_numpy(numpy.interp(at, ends, found)).to(places)


def without_ties(places: Tensor, values: Tensor) -> Tensor:
    """(s,) values, replaced by their mean where the ascending places (s,) are equal up to rounding.

    Examples:
        >>> without_ties(torch.tensor([0.0, 1.0, 1.0]), torch.tensor([5.0, 2.0, 4.0]))
        tensor([5., 3., 3.])
    """
    if len(places) < 2:
        return values
    apart = places.diff() > SAME_PLACE * places[1:].abs()
    group = torch.cat([apart.new_zeros(1), apart]).cumsum(0)
    sums = values.new_zeros(int(group[-1]) + 1).index_add_(0, group, values)
    means: Tensor = (sums / torch.bincount(group))[group]
    return means


def isotonic(values: Tensor) -> Tensor:
    """The increasing sequence nearest to values (s,), by pooling adjacent values that decrease.

    Examples:
        >>> isotonic(torch.tensor([0.0, 2.0, 1.0, 3.0]))
        tensor([0.0000, 1.5000, 1.5000, 3.0000])
    """
    means: list[float] = []
    sizes: list[int] = []
    for value in values.double().tolist():
        means.append(value)
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, size = means.pop(), sizes.pop()
            means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            sizes[-1] += size
    return torch.from_numpy(numpy.repeat(means, sizes)).to(values) if means else values


@dataclass(frozen=True)
class Typical:
    """Typical logarithms of a positive quantity for each answer, and their spread.

    What is typical for an answer is halfway between the median of all examples and that of the examples with the same
    answer; with few of them, closer to that of all.

    Examples:
        >>> values, answers = torch.tensor([1.0, 1.0, 1.0]).exp(), torch.tensor([0, 0, 1])
        >>> found = Typical.of(values, answers, torch.tensor([True, True, True]))
        >>> found.logs, found.spread, found.excess(values * 1.1, answers)
        (tensor([1., 1.]), 0.05, tensor([1.9062, 1.9062, 1.9062]))
    """

    logs: Tensor  # (k,) typical logarithm for each answer
    usual: Tensor  # the median of all examples, for answers that no training example has
    spread: float

    @classmethod
    def of(cls, values: Tensor, answers: Tensor, ordinary: Tensor) -> Typical:
        """From values (s,) of training examples, their predicted classes (s,), and which of them are ordinary (s,)."""
        logs = values.log()
        middle = logs[ordinary].median()
        typical = middle.repeat(int(answers.max()) + 1)
        for answer in range(len(typical)):
            some = logs[ordinary & (answers == answer)]
            if len(some):
                typical[answer] += 0.5 * len(some) / (len(some) + FEW) * (some.median() - middle)
        excess = cls(typical, middle, 1.0).excess(values, answers)[ordinary]
        return cls(typical, middle, max(float(excess.quantile(UPPER) - excess.median()), LEAST_SPREAD))

    def excess(self, values: Tensor, answers: Tensor) -> Tensor:
        """(m,) how many times the spread the logarithms of values (m,) are above the typical one of their answers.

        An answer that no training example has is compared with the median of all examples.
        """
        return (values.log() - at_answers(self.logs, answers, self.usual)) / self.spread


def at_answers(values: Tensor, answers: Tensor, unseen: Tensor) -> Tensor:
    """(m,) those of the values (k,) that belong to answers (m,); `unseen` for an answer beyond them."""
    return torch.where(answers < len(values), values[answers.clamp_max(len(values) - 1)], unseen)


@dataclass(frozen=True)
class Distances:
    """Distances of the training examples, each from the others, with which that of an input is compared."""

    known: Tensor  # (s,)
    typical: Typical  # for each answer
    local: Typical  # of distances relative to those of the nearest examples

    @classmethod
    def of(cls, known: Tensor, near: Tensor, answers: Tensor | None, ordinary: Tensor) -> Distances:
        """From distances (s,), the nearest examples (s, c), predicted classes (s,), and which are ordinary (s,)."""
        same = torch.zeros_like(known, dtype=torch.int64)
        typical = Typical.of(known, same if answers is None else answers, ordinary)
        return cls(known, typical, Typical.of(known / average_of(known, near), same, ordinary))

    def excess(self, distances: Tensor, near: Tensor, answers: Tensor | None) -> Tensor:
        """(m,) how far inputs are from the training examples, in standard deviations of ordinary examples.

        The distance (m,) counts, and half as much the distance relative to those of the nearest examples (m, c): how
        dense the examples are around the input, as in the local outlier factor (Breunig et al., 2000).
        """
        same = torch.zeros_like(distances, dtype=torch.int64)
        relative = distances / average_of(self.known, near).to(distances)
        found = self.typical.excess(distances, same if answers is None else answers)
        return found + BESIDE * self.local.excess(relative, same)


def average_of(values: Tensor, near: Tensor) -> Tensor:
    """(m,) means of the values (s,) of nearest examples (m, count); of all if there are none."""
    return values[near].mean(1) if near.shape[1] else values.mean().expand(len(near))


def empirical_p_value(known: Tensor, values: Tensor) -> Tensor:
    """(m,) share of known values (s,), ascending, that are at least as large as these (m,), counting each of these.

    Examples:
        >>> empirical_p_value(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.5]))
        tensor([1.0000, 0.5000])
    """
    below = torch.searchsorted(known, values.contiguous())
    return (1.0 + len(known) - below) / (1.0 + len(known))
