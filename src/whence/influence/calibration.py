"""Reference values for explanations: what the training examples, each left out, say about noise and scarcity."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy
import torch
from torch import Tensor

from whence.influence.fitted import Fitted, has_several_labels
from whence.influence.neighbours import CANDIDATES, Neighbours
from whence.jacobian.leaves import LeafSum

NOISIER, NOISIER_TARGETS = 2.5, 1.5
"""Labels, and targets of a regression, are called noisy if their squared leave-one-out error is this many times the
average of the data set. Half of all targets may be noisy: then they have at most twice the average."""

LEAST_DISAGREEMENT, MOST_DISAGREEMENT = 0.1, 2 / 3
"""For classes that limit is at least the first, and at most the second or one minus the average: labels are not called
noisy if two of them differ in less than a tenth of all pairs."""

SAME_PLACE = 1e-5
"""Averages of squares with a smaller relative difference are the same up to rounding."""

MOST_CERTAIN = 0.999
"""Upper bound of the noise when odds are computed."""

LEAST_EXCESS, LEAST_AMBIGUITY = 1.05, 0.1
"""A scarcity below the first is not unusual, and neither is an answer if two labels drawn from the network's own
probabilities differ in a smaller share of cases than the second."""

BESIDE = 0.5
"""Weight in the scarcity, beside the distance, of the distance relative to that of the examples around; and of scarcity
beside noise in the source. All are in standard deviations, but noise in log-odds."""

FEW = 20
"""The median of so many examples with the same answer counts as much as that of all examples."""

UPPER, LEAST_SPREAD = 0.84, 0.05
"""The spread of logarithms is the distance of this quantile from their median, and at least the second number: one
standard deviation of a normal distribution."""

LEAST_ORDINARY = 19
"""Least number of examples around which labels agree, to compare scarcity with these alone: fewer could not show that
less than 5 % have a higher one."""

RARE, RARE_SHARE = 20, 0.2
"""A class is rare if fewer training examples have its label than the first number, and than this share of the median of
the classes."""

MANY_LABELS = 50
"""Errors of other models on an example count if its class has more examples than this."""

MOST_SQUARE = 2.0
"""The largest possible squared distance between a label and probabilities of classes."""


@dataclass(frozen=True)
class Expected:
    """Values that are expected at given places, increasing: a centered isotonic regression (Oron and Flournoy, 2017).

    Groups of equal values of an isotonic regression are replaced by their centers, and values between them are
    interpolated linearly.

    Examples:
        >>> expected = Expected.of(torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([3.0, 1.0, 4.0, 5.0]))
        >>> expected.places, expected.values
        (tensor([0.5000, 2.0000, 5.0000]), tensor([2., 4., 5.]))
        >>> expected.at(torch.tensor([0.0, 1.25, 9.0]))
        tensor([2., 3., 5.])
    """

    places: Tensor  # (s,) ascending
    values: Tensor  # (s,) ascending

    @classmethod
    def of(cls, places: Tensor, values: Tensor) -> Expected:
        """From observed values (n,) at places (n,)."""
        order = places.argsort(stable=True)
        places, values = places[order], isotonic(without_ties(places[order], values[order]))
        known, group, sizes = values.unique_consecutive(return_inverse=True, return_counts=True)
        return cls(places.new_zeros(len(known)).index_add_(0, group, places) / sizes, known)

    def at(self, places: Tensor) -> Tensor:
        """(m,) expected values at places (m,), constant beyond the outer centers; the places themselves if none."""
        if not len(self.places):
            return places
        at, ends, found = (some.double().cpu().numpy() for some in (places, self.places, self.values))
        return torch.from_numpy(numpy.interp(at, ends, found)).to(places)


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
    spread: float

    @classmethod
    def of(cls, values: Tensor, answers: Tensor | None, ordinary: Tensor) -> Typical:
        """From values (s,) of training examples, their predicted classes (s,), and which of them are ordinary (s,)."""
        logs = values.log()
        middle = logs[ordinary].median()
        typical = middle.repeat(1 if answers is None else int(answers.max()) + 1)
        for answer in range(len(typical)) if answers is not None else ():
            some = logs[ordinary & (answers == answer)]
            if len(some):
                typical[answer] += 0.5 * len(some) / (len(some) + FEW) * (some.median() - middle)
        found = cls(typical, 1.0)
        excess = found.excess(values, answers)[ordinary]
        spread = float(excess.quantile(UPPER) - excess.median())
        return cls(typical, max(spread, LEAST_SPREAD))

    def excess(self, values: Tensor, answers: Tensor | None) -> Tensor:
        """(m,) how many times the spread the logarithms of values (m,) are above the typical one of their answers."""
        known = self.logs[:1].expand(len(values)) if answers is None else self._of(answers)
        return (values.log() - known) / self.spread

    def _of(self, answers: Tensor) -> Tensor:
        """(m,) typical logarithms; the median of all answers for one that no training example has."""
        missing = self.logs.median().repeat(max(0, int(answers.max()) + 1 - len(self.logs)) if len(answers) else 0)
        return torch.cat([self.logs, missing])[answers]


@dataclass(frozen=True, repr=False)
class Calibration:
    """Reference values for predictions: leave-one-out quantities of the training examples.

    Disagreement: the squared leave-one-out residuals of the training examples (see `squared_residuals`) estimate their
    noise if the network has not memorised their labels. For memorised labels they are too small. So the share of the
    nearest other examples that have another label replaces the square if it is larger by two standard errors: both
    measure how often two labels differ. If other models predicted the example without having seen it
    (`Fitted.held_out`), and its class has more than 50 examples, the square is that of their error. A label that hardly
    any other example has does not count: the others cannot predict it. Around an input the squares are averaged with
    the weights w of `Neighbours.weights`. An average is shrunk towards that of the whole data
    set. This is corrected by a centered isotonic regression of the squares of training examples on the averages around
    them.

    If the noise were the same everywhere, the squares v could be shuffled among the examples. The shuffled average has
    mean mean(v) and variance var(v) (sum w^2 - 1 / n). A gamma distribution with these moments gives the p-value.

    Scarcity: the distance of an input from the training examples (`View.distances`) is compared with those of training
    examples, each from the others, and with the same answer (`Typical`). Half of a second excess is added: that of the
    distance relative to the distances of the nearest training examples from others, as in the local outlier factor
    (Breunig et al., 2000). It counts how dense the examples are around the input. Examples around which labels
    contradict each other are not compared with, unless few are left: the others are ordinary. Labels do not enter.

    An input is unusual if few ordinary examples, each without itself, are as scarce, or have as ambiguous answers.
    These are two tests, so the smaller share counts twice (Bonferroni). An input with noisy labels around it is
    compared with the training examples of which this is also true, by its scarcity alone, because contradicting labels
    scatter inputs in the network and make its answers ambiguous.

    Attributes:
        neighbours: the training examples that inputs are compared with.
        squares: (s,) how often two labels differ at each of them, or the squared error of a regression.
        nearby: squares expected for averages around an input.
        answered: squares expected for ambiguities of the network's answers; `None` if these do not count, because they
            are no probabilities of classes, or those of trees, whose splits have learned the labels.
        limit: squares above which labels are called noisy: 1.5 times the mean; for classes 2.5 times the mean of the
            squares, at least .1, and at most the larger of 2/3 and one minus that mean.
        noise_limit: the same limit for `Explanation.noise`; with probabilities of classes from its own mean.
        distances: (s,) of the training examples from others.
        distance: typical distances.
        local: typical distances relative to those of the nearest training examples.
        ordinary: scores of ordinary training examples, as returned by `remoteness`, ascending.
        noisy: those of the training examples with noisy labels around them, ascending.
        ambiguities: of the network's answers for ordinary training examples, ascending; `None` where `answered` is.
        rare: (k,) whether hardly any training example has the label of a class; `None` without such labels.
        codes: target values for other classes and for the class itself; `None` without classes, where squares do not
            measure how often two labels differ.
        unit: unit of the residuals of a regression; squares are in its square.
        notes: what is approximated.
    """

    neighbours: Neighbours
    squares: Tensor
    nearby: Expected
    answered: Expected | None
    limit: float
    noise_limit: float
    distances: Tensor
    distance: Typical
    local: Typical
    ordinary: Tensor
    noisy: Tensor
    ambiguities: Tensor | None
    rare: Tensor | None
    codes: tuple[float, float] | None
    unit: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> bool:
        """Whether squares measure how often two labels differ."""
        return self.codes is not None

    @classmethod
    def of(cls, fitted: Fitted) -> Calibration:
        """Compute it from the training data, within `using_model`."""
        codes, problem = class_codes(fitted), fitted.problem
        neighbours, outputs, answers = Neighbours.of(fitted, codes)
        index = neighbours.index
        largest_residual = float(fitted.residuals[index].abs().max())
        unit = 1.0 if codes is not None or largest_residual == 0 else largest_residual
        squares = squared_residuals(fitted, codes, unit)[index]
        near = neighbours.nearest[:, : neighbours.count]
        labels, rare = class_labels(fitted, codes), None
        if labels is not None:
            shares, errors = (some.to(squares) for some in disagreement(near, labels[index]))
            squares = torch.where(shares - 2.0 * errors > squares, shares, squares)
            if fitted.held_out is not None:
                held_out = fitted.held_out.to(squares)[index]
                many = torch.bincount(labels[fitted.counted])[labels[index]] > MANY_LABELS
                squares = torch.where(held_out.isfinite() & many, held_out, squares)
            rare = rare_classes(labels[fitted.counted])
            squares = squares.masked_fill(rare[labels[index]], 0.0)
        itself = torch.arange(len(index), device=index.device)
        weights = neighbours.weights(neighbours.around.similarities(neighbours.around.known), itself).to(squares)
        average = weights @ squares if len(index) > 1 else squares
        nearby = Expected.of(average, squares)
        expected = nearby.at(average)
        limit = limit_for_classes(squares) if codes is not None else NOISIER_TARGETS * float(squares.mean())
        noise_limit, answered, ambiguities = limit if codes is not None else unit * limit**0.5, None, None
        agreeing = expected <= limit
        noisy = ~agreeing
        few = int(agreeing.sum()) < max(len(agreeing) / 2, LEAST_ORDINARY)
        ordinary = torch.ones_like(agreeing) if few else agreeing
        candidates = neighbours.nearest[:, :CANDIDATES]
        distances = neighbours.apart.distances(neighbours.apart.known, candidates).to(squares)
        distance = Typical.of(distances, answers, ordinary)
        local = Typical.of(distances / average_of(distances, candidates), None, ordinary)
        if problem.likelihood.has_classes and not isinstance(problem.network.model, LeafSum):
            _, ambiguity = predicted_probability(fitted, outputs, codes, index)
            answered, ambiguities = Expected.of(ambiguity, squares), ambiguity[ordinary].sort().values
            both = (expected.clamp_max(1.0) * answered.at(ambiguity).clamp_max(1.0)).sqrt()
            noise_limit = limit_for_classes(both)
            noisy = noisy & (both > noise_limit)
        notes: tuple[str, ...] = ()
        if len(index) < int(fitted.counted.sum()):
            notes = (f"Inputs are compared with {len(index):,} of {int(fitted.counted.sum()):,} training examples.",)
        found = cls(
            neighbours=neighbours,
            squares=squares,
            nearby=nearby,
            answered=answered,
            limit=limit,
            noise_limit=noise_limit,
            distances=distances,
            distance=distance,
            local=local,
            ordinary=squares,
            noisy=squares,
            ambiguities=ambiguities,
            rare=rare,
            codes=codes,
            unit=unit,
            notes=notes,
        )
        remote = found.remoteness(distances, candidates, answers)
        return replace(found, ordinary=remote[ordinary].sort().values, noisy=remote[noisy].sort().values)

    def calibrated(self, average: Tensor) -> Tensor:
        """(m,) squares expected for these averages; at most one for classes."""
        found = self.nearby.at(average)
        return found.clamp_max(1.0) if self.classes else found

    def in_unit(self, square: Tensor) -> Tensor:
        """Squares as they are shown: how often two labels differ, or the standard deviation of targets."""
        return square if self.classes else self.unit * square.sqrt()

    def noise(self, square: Tensor, ambiguity: Tensor) -> Tensor:
        """(m,) noise, from expected squares (m,) and the ambiguity of the network's answers (m,)."""
        if self.answered is None:
            return self.in_unit(square)
        return (square * self.answered.at(ambiguity).clamp_max(1.0)).sqrt()

    def noise_p(self, average: Tensor, effective: Tensor) -> Tensor:
        """(m,) how often shuffled squares would give an average at least as large, over effective numbers (m,)."""
        mean = float(self.squares.double().mean())
        if mean <= 0 or len(self.squares) < 2:
            return torch.ones_like(average)
        concentration = (1.0 / effective - 1.0 / len(self.squares)).clamp_min(0.0)
        spread = ((float(self.squares.double().std()) / mean) ** 2 * concentration).clamp_min(1e-8)
        chance: Tensor = torch.special.gammaincc(1.0 / spread, average / mean / spread)
        return chance

    def remoteness(self, distances: Tensor, near: Tensor, answers: Tensor | None) -> Tensor:
        """(m,) how far inputs are from the training examples, in standard deviations of ordinary examples.

        Args:
            distances: (m,) from the nearest training examples.
            near: (m, c) which these are.
            answers: (m,) predicted classes; `None` if there are none.
        """
        found = self.distance.excess(distances, answers)
        relative = distances / average_of(self.distances, near).to(distances)
        return found + BESIDE * self.local.excess(relative, None)

    def has_rare_answer(self, answers: Tensor | None, m: int) -> Tensor:
        """(m,) whether hardly any training example has the predicted class (m,) as its label."""
        if answers is None or self.rare is None:
            return torch.zeros(m, dtype=torch.bool, device=self.squares.device)
        unseen = self.rare.new_ones(max(0, int(answers.max()) + 1 - len(self.rare)) if m else 0)
        return torch.cat([self.rare, unseen])[answers]

    def scarcity(self, remote: Tensor) -> Tensor:
        """(m,) the same in units of the typical distance."""
        return (self.distance.spread * remote).exp()

    def scarcity_limit(self, level: float) -> float:
        """The scarcity that this share of ordinary training examples does not exceed; with two tests, a larger one."""
        level = level if self.ambiguities is None else (1.0 + level) / 2.0
        return max(float(self.scarcity(self.ordinary.quantile(level))), LEAST_EXCESS)

    def ambiguity_limit(self, level: float) -> float:
        """The same for ambiguities; one, which none reaches, if these do not count."""
        if self.ambiguities is None:
            return 1.0
        return max(float(self.ambiguities.quantile((1.0 + level) / 2.0)), LEAST_AMBIGUITY)

    def scarcity_p(self, remote: Tensor, ambiguity: Tensor, noisy: Tensor) -> Tensor:
        """(m,) share of training examples as unusual: of ordinary ones, or of those with noisy labels around them.

        Args:
            remote: (m,) as returned by `remoteness`.
            ambiguity: (m,) of the network's answers.
            noisy: (m,) whether inputs have noisy labels around them.
        """
        share = share_as_large(self.ordinary, remote).masked_fill(self.scarcity(remote) < LEAST_EXCESS, 1.0)
        if self.ambiguities is not None:
            undecided = share_as_large(self.ambiguities, ambiguity).masked_fill(ambiguity < LEAST_AMBIGUITY, 1.0)
            share = (2.0 * torch.minimum(share, undecided)).clamp_max(1.0)
        return torch.where(noisy, share_as_large(self.noisy, remote), share)

    def source(self, noise: Tensor, remote: Tensor, level: float) -> Tensor:
        """(m,) how far noise is above its limit, minus how far scarcity is above its own."""
        beyond = remote - math.log(self.scarcity_limit(level)) / self.distance.spread
        both = torch.stack([noise, torch.full_like(noise, self.noise_limit)]).clamp_min(torch.finfo(noise.dtype).tiny)
        scale = both.clamp_max(MOST_CERTAIN).logit() if self.classes else 2.0 * both.log()
        return scale[0] - scale[1] - BESIDE * beyond


def share_as_large(known: Tensor, values: Tensor) -> Tensor:
    """(m,) share of known values (s,), ascending, that are at least as large as these (m,), counting each of these.

    Examples:
        >>> share_as_large(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 2.5]))
        tensor([1.0000, 0.5000])
    """
    below = torch.searchsorted(known, values.contiguous())
    return (1.0 + len(known) - below) / (1.0 + len(known))


def average_of(squares: Tensor, near: Tensor) -> Tensor:
    """(m,) means of the squares (s,) of nearest examples (m, count); of all if there are none."""
    return squares[near].mean(1) if near.shape[1] else squares.mean().expand(len(near))


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
    """
    counts = torch.bincount(labels)
    usual = counts[counts > 0].double().median() if len(labels) else 0.0
    return (counts < RARE) & (counts < RARE_SHARE * usual)


def limit_for_classes(values: Tensor) -> float:
    """The disagreement above which labels of classes are called noisy, from values of training examples."""
    usual = float(values.mean()) if len(values) else 0.0
    return max(LEAST_DISAGREEMENT, min(NOISIER * usual, max(MOST_DISAGREEMENT, 1.0 - usual)))


def class_codes(fitted: Fitted) -> tuple[float, float] | None:
    """The target values for other classes and for the class itself; `None` if targets are not classes.

    Zero and one for one choice among classes, or for yes and no with one or more outputs. Squared error on coded
    classes, such as zeros and a one, counts as classes too: two values, the larger one once in every row, or a single
    output with two values.
    """
    problem = fitted.problem
    likelihood = problem.likelihood
    if likelihood.has_classes:
        return (0.0, 1.0)
    if problem.sketch is not None or problem.targets is None:
        return None
    targets = problem.targets.reshape(-1, problem.width)
    counted = fitted.counted.repeat_interleave(len(targets) // problem.n)
    targets = targets[counted].double()
    if not len(targets):
        return None
    low, high = float(targets.min()), float(targets.max())
    near = 1e-3 * (high - low)  # outputs may be in single precision
    own, others = (targets - high).abs() <= near, (targets - low).abs() <= near
    once = own.sum(1) == 1 if problem.width > 1 else own.sum(1) <= 1
    coded = bool((once & (own | others).all(1)).all())
    return (round(low, 6), round(high, 6)) if coded and high > low else None


def class_labels(fitted: Fitted, codes: tuple[float, float] | None) -> Tensor | None:
    """(n,) the class of each training example; `None` unless each has exactly one that is known."""
    problem = fitted.problem
    if codes is None or not fitted.all_outputs or has_several_labels(fitted):
        return None
    targets = problem.targets
    if targets is None:
        return None
    return (targets[:, 0] > sum(codes) / 2).long() if targets.shape[1] == 1 else targets.argmax(1)


def squared_residuals(fitted: Fitted, codes: tuple[float, float] | None, unit: float) -> Tensor:
    """(n,) squared leave-one-out residuals of each training example, the mean over its positions.

    For classes these are residuals at the prediction without the example, which reveal labels that the network has
    memorised. Summed over classes, their expectation is how often two labels differ. For yes and no, twice the square
    has the same meaning; with several such outputs, its mean. For regression those of HeC2, averaged over outputs,
    whose expectation is the noise.

    Args:
        fitted: the fit.
        codes: target values for other classes and for the class itself; `None` without classes.
        unit: unit of the residuals of a regression, as their squares might underflow or overflow.
    """
    problem = fitted.problem
    residuals = fitted.adjusted.hec2 if codes is None else fitted.adjusted.hec3
    residuals = problem.unweighted(problem.isometric(residuals)) / unit
    if problem.units is not None and problem.units.weights is not None:
        positions = (problem.units.weights > 0).sum(1).clamp_min(1).to(residuals.dtype)
    else:
        positions = residuals.new_tensor(max(1.0, problem.counted_units / max(1, int(fitted.counted.sum()))))
    if codes is None:
        return residuals.square().sum(1) / (positions * problem.width)
    yes_or_no = problem.width == 1 or has_several_labels(fitted)
    scale = (codes[1] - codes[0]) ** 2 / (2.0 / problem.width if yes_or_no else 1.0)
    return (residuals.square().sum(1) / (scale * positions)).clamp_max(MOST_SQUARE)


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


def predicted_probability(
    fitted: Fitted, outputs: Tensor, codes: tuple[float, float] | None, examples: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(m,) probability of the predicted class, and how often two labels drawn from the network's probabilities differ.

    For outputs (m, ..., k); `nan` without classes. The mean over positions, and over outputs with their own labels.

    Args:
        fitted: the fit.
        outputs: outputs of the network.
        codes: target values for other classes and for the class itself; `None` without classes.
        examples: training examples that these are. Each is predicted by the fit without it, if that is known.
    """
    if codes is None:
        none = torch.full((len(outputs),), float("nan"), dtype=fitted.problem.dtype, device=outputs.device)
        return none, none
    likelihood = fitted.problem.likelihood
    flat = outputs.reshape(-1, outputs.shape[-1]).double()
    p = likelihood.probabilities(flat) if likelihood.has_classes else (flat - codes[0]) / (codes[1] - codes[0])
    if examples is not None and fitted.problem.sketch is None:
        change = (fitted.residuals[examples] - fitted.loo_residuals[examples]) / (codes[1] - codes[0])
        p = p + change.reshape(p.shape)
    if likelihood.has_classes and not likelihood.couples_outputs:
        p = p.clamp(0.0, 1.0)
        best, differ = torch.maximum(p, 1 - p).mean(1), (2 * p * (1 - p)).mean(1)
    else:
        p = nearest_probabilities(torch.cat([p, 1 - p], 1) if p.shape[1] == 1 else p)
        best, differ = p.amax(1), 1 - p.square().sum(1)
    both = torch.stack([best, differ]).reshape(2, len(outputs), -1).mean(2).to(fitted.problem.dtype)
    return both[0], both[1]


def nearest_probabilities(values: Tensor) -> Tensor:
    """(m, k) probabilities nearest to values (m, k): not negative, with sum one.

    Examples:
        >>> nearest_probabilities(torch.tensor([[1.2, 0.1, -0.1], [0.6, 0.5, 0.2]]))
        tensor([[1.0000, 0.0000, 0.0000],
                [0.5000, 0.4000, 0.1000]])
    """
    ordered = values.sort(dim=1, descending=True).values
    places = torch.arange(1, values.shape[1] + 1, device=values.device)
    excess = (ordered.cumsum(1) - 1.0) / places
    last = (ordered > excess).sum(1, keepdim=True) - 1
    found: Tensor = (values - excess.gather(1, last)).clamp_min(0.0)
    return found
