"""Reference values for explanations: what the training examples, each left out, say about noise and scarcity.

Noise: every training example has a square that says how much its label contradicts the others (`label_squares`). Around
an input squares are averaged, with the weights of `Neighbours.weights`. This blurs: an average lies closer to that of
the whole data set than it should. An isotonic regression of the training examples' squares on the averages around them
corrects it (`IsotonicRegression`). If the noise were the same everywhere, the squares v could be shuffled among the
examples. The shuffled average has mean mean(v) and variance var(v) (sum w^2 - 1 / n). A gamma distribution with these
moments gives the p-value.

Scarcity: the distance of an input from the training examples is compared with those of training examples, each from the
others (`DistanceScale`). An input is unusual if few ordinary examples are as scarce, or have as ambiguous answers.
Examples around which labels contradict each other are not ordinary, unless fewer than half are left.

Contradicting labels scatter inputs in the network, and an input that is far from everything may lie between examples
with different labels. So an input with noisy labels around it is compared with the training examples of which this is
also true, by the main cause of doubt (`Calibration.source`), which weighs the two numbers against each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from whence.influence.classes import (
    Codes,
    class_codes,
    class_labels,
    has_yes_or_no,
    number_of_classes,
    positions_of_batches,
)
from whence.influence.fitted import Fitted
from whence.influence.frequency import Pool
from whence.influence.neighbours import WEIGHT_POWER, Neighbours
from whence.jacobian.leaves import LeafSum

# Labels, and targets of a regression (the second number), are called noisy if the square expected around them is this
# many times the average of the data set. If half of all targets are noisy, theirs is at most twice the average.
NOISIER, NOISIER_TARGETS = 2.5, 1.5
# For classes that limit is at least the first: labels are not called noisy if two of them differ in less than a tenth
# of all pairs. It is at most the second or one minus the average, for nine classes and more. With fewer, labels can
# differ in fewer pairs: two labels of two classes in a half of them.
LEAST_DISAGREEMENT, MOST_DISAGREEMENT, MANY_CLASSES = 0.1, 2 / 3, 9
# A square of a regression counts at most so many times as much as this quantile of all, so that one wrong target does
# not hide all other noise; and at least as much as rounding may have made: so many units of the outputs' last digit.
OUTLIER, OUTLIER_QUANTILE, ROUNDING = 3.0, 0.99, 16.0
TIE = 1e-5  # averages of squares with a smaller relative difference are the same up to rounding
MOST_NOISE = 0.999  # upper bound of the noise when odds are computed
# A scarcity below the first is not unusual, and neither is an answer if two labels drawn from the network's own
# probabilities differ in a smaller share of cases than the second.
LEAST_SCARCITY, LEAST_AMBIGUITY = 1.05, 0.1
# A model is undecided if the probability of its own answer is below the first, and often so if this is true of a larger
# share of the ordinary examples than the second.
UNDECIDED, OFTEN = 0.55, 0.2
PRIOR_EXAMPLES = 20  # the median of so many examples with an answer has a weight of a quarter; of very many, a half
# Labels around an input count as the cause of its doubt if they stand out as much, beside its scarcity, as for all but
# this share of the training examples with noisy labels around them.
LEAST_NOISY = 0.1
# The spread of logarithms is the distance from their median to this quantile, which is one standard deviation for a
# normal distribution. It is at least the second number.
SPREAD_QUANTILE, LEAST_SPREAD = 0.84, 0.05
# Scarcity is compared with the examples around which labels agree if these are at least so many, and half of all.
LEAST_ORDINARY = 19
# A class is rare if fewer training examples have its label than the first number, and than this share of the median of
# the classes. So is a class with a single label, whatever the others have: no other label can contradict it.
RARE, RARE_SHARE = 20, 0.2
LEAST_AVAILABLE = 5  # fewer examples with the same label are too few to tell how often others have another one
LEAST_EXPLAINED = 0.01  # smaller shares of the variance that are explained count as this one
MANY_LABELS = 50  # errors of other models on an example count if its class has more examples than this
MOST_SQUARE = 2.0  # the largest possible squared distance between a label and probabilities of classes


@dataclass(frozen=True, repr=False)
class Calibration:
    """Reference values for predictions: leave-one-out quantities of the training examples."""

    neighbours: Neighbours  # the s training examples that inputs are compared with
    squares: Tensor  # (s,) how often two labels differ at each of them, or the squared error of a regression
    square_by_average: IsotonicRegression  # squares expected for averages around an input
    # Squares expected for ambiguities of the network's answers; `None` if these do not count, because they are no
    # probabilities of classes, or those of trees, whose splits have learned the labels.
    square_by_ambiguity: IsotonicRegression | None
    ambiguity_weight: float  # of the second in the geometric mean of both
    noise_limit: float  # labels are called noisy if `Explanation.noise` and
    disagreement_limit: float  # `Explanation.disagreement` are above these
    distances: DistanceScale
    example_z: Tensor  # (s,) z-scores of the distances of the training examples; beside a pool those of `joint_z`
    ordinary: Tensor  # (s,) which of them are ordinary
    noisy: Tensor  # (s,) which of them have noisy labels around them
    example_disagreement: Tensor  # (s,) of the labels around them
    pool: Pool | None  # inputs of use, which say how frequent inputs like one are
    ambiguities: Tensor | None  # of the answers for ordinary training examples, ascending; `None` if they do not count
    noisy_everywhere: bool  # whether labels of classes contradict each other so much on average that none can stand out
    often_undecided: bool  # whether the model is undecided about many of the ordinary training examples
    rare: Tensor  # (k + 1,) whether hardly any training example has the label of a class; the last for all others
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
        neighbours, said = Neighbours.of(fitted, codes)
        index, known = neighbours.index, int(fitted.counted.sum())
        unit = 1.0 if codes is not None else float(fitted.residuals[index].abs().max()) or 1.0
        labels = class_labels(fitted, codes)
        squares, rare = label_squares(fitted, neighbours, codes, labels, unit)

        # Labels around each training example, without its own: which of them contradict each other?
        average = neighbours.training_averages(squares) if len(index) > 1 else squares
        by_average = IsotonicRegression.fit(average, squares)
        expected = by_average.predict(average)
        if codes is None:
            rounding = ROUNDING * torch.finfo(said.outputs.dtype).eps * float(said.outputs.abs().max()) / unit
            squares = without_outliers(squares).clamp_min(rounding**2)
        limit, classes = NOISIER_TARGETS * float(squares.mean()), number_of_classes(fitted, labels)
        if codes is not None:
            limit = limit_for_classes(squares, classes)
        noisy_everywhere = codes is not None and len(squares) > 0 and float(squares.mean()) > limit
        disagreement_limit = noise_limit = limit if codes is not None else unit * limit**0.5
        agreeing = expected <= limit
        noisy = ~agreeing
        few = int(agreeing.sum()) < max(len(agreeing) / 2, LEAST_ORDINARY)
        ordinary = torch.ones_like(agreeing) if few else agreeing

        # Probabilities of classes are a second witness.
        ambiguity = said.ambiguity
        often_undecided = float((said.probability[ordinary] < UNDECIDED).double().mean()) > OFTEN
        by_ambiguity, ambiguities, weight = None, None, 0.0
        if fitted.problem.likelihood.has_classes and not isinstance(fitted.problem.network.model, LeafSum):
            by_ambiguity, ambiguities = IsotonicRegression.fit(ambiguity, squares), ambiguity[ordinary].sort().values
            both = expected.clamp_max(1.0), by_ambiguity.predict(ambiguity).clamp_max(1.0)
            weight = weight_of_second(*both, squares)
            noise = geometric_mean(*both, weight)
            noise_limit = limit_for_classes(noise, classes)
            noisy = noisy & (noise > noise_limit)

        # How far is each training example from the others?
        answers = torch.zeros_like(index) if said.classes is None else said.classes
        lengths, near = neighbours.training_distances()
        lengths, here = lengths.to(squares), neighbours.distinct
        distances = DistanceScale.of(lengths, lengths[here], near[here], answers, ordinary)
        distance_z = distances.z_scores(lengths[here], near[here], answers)
        disagreement = unit * expected.sqrt() if codes is None else expected
        number = f"{len(index):,} of {known:,}"
        return cls(
            neighbours=neighbours,
            squares=squares,
            square_by_average=by_average,
            square_by_ambiguity=by_ambiguity,
            ambiguity_weight=weight,
            noise_limit=noise_limit,
            disagreement_limit=disagreement_limit,
            distances=distances,
            example_z=distance_z,
            ordinary=ordinary,
            noisy=noisy,
            example_disagreement=disagreement,
            pool=None,
            ambiguities=ambiguities,
            noisy_everywhere=noisy_everywhere,
            often_undecided=often_undecided,
            rare=rare,
            codes=codes,
            unit=unit,
            notes=(f"Noise and scarcity are measured with {number} training examples.",) if len(index) < known else (),
        )

    def beside_pool(self, vectors: Tensor) -> Calibration:
        """This calibration where z-scores of distances are joined with those of frequencies beside a pool.

        Vectors (p, d) are those of the pool's inputs.
        """
        neighbours = self.neighbours
        pool, itself = Pool.of(neighbours, vectors), torch.arange(len(self.example_z), device=vectors.device)
        in_use = pool.frequency(neighbours.distance_embedding.known[neighbours.distinct], itself)
        z = joint_z(self.example_z, in_use.z.to(self.example_z))
        return replace(self, pool=pool, example_z=z, notes=(*self.notes, *pool.notes))

    @cached_property
    def ordinary_z(self) -> Tensor:
        """`example_z` of the ordinary training examples, ascending."""
        return self.example_z[self.ordinary].sort().values

    @cached_property
    def noisy_sources(self) -> Tensor:
        """`main_cause` of the training examples with noisy labels around them, ascending."""
        disagreement, z = self.example_disagreement[self.noisy], self.example_z[self.noisy]
        return main_cause(disagreement, self.disagreement_limit, z, self.classes).sort().values

    def disagreement(self, average: Tensor) -> Tensor:
        """(m,) how often two labels differ, or the standard deviation of targets, from averages of squares (m,)."""
        expected = self.square_by_average.predict(average)
        return expected.clamp_max(1.0) if self.classes else self.unit * expected.sqrt()

    def noise(self, disagreement: Tensor, ambiguity: Tensor) -> Tensor:
        """(m,) noise, from the disagreement (m,) and the ambiguity of the network's answers (m,)."""
        if self.square_by_ambiguity is None:
            return disagreement
        second = self.square_by_ambiguity.predict(ambiguity).clamp_max(1.0)
        return geometric_mean(disagreement, second, self.ambiguity_weight)

    def noise_p(self, average: Tensor, effective: Tensor) -> Tensor:
        """(m,) how often shuffled squares would give an average at least as large, over effective numbers (m,)."""
        mean = float(self.squares.double().mean())
        if mean <= 0 or len(self.squares) < 2:
            return torch.ones_like(average)
        concentration = (1.0 / effective - 1.0 / len(self.squares)).clamp_min(0.0)
        spread = ((float(self.squares.double().std()) / mean) ** 2 * concentration).clamp_min(1e-8)
        chance: Tensor = torch.special.gammaincc(1.0 / spread, average / mean / spread)
        return chance

    def has_rare_answer(self, answers: Tensor) -> Tensor:
        """(m,) whether hardly any training example has the predicted class (m,) as its label."""
        return self.rare[answers.clamp_max(len(self.rare) - 1)]

    def scarcity(self, distance_z: Tensor) -> Tensor:
        """(m,) z-scores of distances (m,) as factors: 1 is typical, 2 is as unusual as twice the typical distance."""
        return (self.distances.by_class.spread * distance_z).exp()

    def scarcity_limit(self, level: float) -> float:
        """The scarcity that this share of ordinary training examples does not exceed; with two tests, a larger one."""
        level = level if self.ambiguities is None else (1.0 + level) / 2.0
        return max(float(self.scarcity(self.ordinary_z.quantile(level))), LEAST_SCARCITY)

    def ambiguity_limit(self, level: float) -> float:
        """The same for ambiguities; one, which none reaches, if these do not count."""
        if self.ambiguities is None:
            return 1.0
        return max(float(self.ambiguities.quantile((1.0 + level) / 2.0)), LEAST_AMBIGUITY)

    def scarcity_p(self, distance_z: Tensor, ambiguity: Tensor) -> Tensor:
        """(m,) share of ordinary examples as unusual, by z-scores of distances (m,) or by ambiguity of answers (m,).

        These are two tests, so the smaller share counts twice (Bonferroni).
        """
        usual = self.scarcity(distance_z) < LEAST_SCARCITY
        share = empirical_p_value(self.ordinary_z, distance_z).masked_fill(usual, 1.0)
        if self.ambiguities is None:
            return share
        undecided = empirical_p_value(self.ambiguities, ambiguity).masked_fill(ambiguity < LEAST_AMBIGUITY, 1.0)
        return (2.0 * torch.minimum(share, undecided)).clamp_max(1.0)

    def source(self, disagreement: Tensor, distance_z: Tensor, level: float) -> Tensor:
        """(m,) how far disagreement (m,) is above its limit, minus half of how far scarcity is above its own.

        The network's own doubt does not enter: it has it where labels are noisy, and where data are scarce.
        """
        return main_cause(disagreement, self.disagreement_limit, distance_z, self.classes) + 0.5 * self._limit_z(level)

    def source_limit(self, level: float) -> float:
        """The source that all but a tenth of the training examples with noisy labels around them reach.

        Minus infinity if there are fewer than nine.
        """
        below = int(LEAST_NOISY * (len(self.noisy_sources) + 1))
        return float(self.noisy_sources[below - 1]) + 0.5 * self._limit_z(level) if below else -math.inf

    def doubt(self, noise: Tensor, distance_z: Tensor, ambiguity: Tensor, level: float) -> Tensor:
        """(m,) how far noise, scarcity and ambiguity are above their limits: the log of the sum of their exponentials.

        This is close to the largest of them.
        """
        signs = [above(noise, self.noise_limit, self.classes), distance_z - self._limit_z(level)]
        if self.ambiguities is not None:
            signs.append(log_odds_above(ambiguity, self.ambiguity_limit(level)))
        return torch.stack(signs).logsumexp(0)

    def _limit_z(self, level: float) -> float:
        """The limit of scarcity as a z-score of distances."""
        return math.log(self.scarcity_limit(level)) / self.distances.by_class.spread


def joint_z(distance_z: Tensor, frequency_z: Tensor) -> Tensor:
    """(m,) the z-scores of distances (m,) and of frequencies (m,) as one: their sum over the root of two (Stouffer).

    Never less than the first: that a pool has none like an input does not bring training examples nearer.

    Examples:
        >>> joint_z(torch.tensor([0.0, 3.0, 3.0]), torch.tensor([2.0, 2.0, -2.0]))
        tensor([1.4142, 3.5355, 3.0000])
    """
    return torch.maximum(distance_z, (distance_z + frequency_z) / math.sqrt(2.0))


def main_cause(disagreement: Tensor, limit: float, distance_z: Tensor, classes: bool) -> Tensor:
    """(m,) how far the disagreement of labels (m,) is above its limit, less half of the z-scores of distances (m,).

    Large where labels contradict each other, small where training examples are far away.
    """
    return above(disagreement, limit, classes) - 0.5 * distance_z


def above(noise: Tensor, limit: float, classes: bool) -> Tensor:
    """(m,) log-odds of noise (m,) above those of its limit; for a regression, logarithms of the variance."""
    return (log_odds_above if classes else log_variance_above)(noise, limit)


def log_odds_above(shares: Tensor, limit: float) -> Tensor:
    """(m,) log-odds of shares (m,) less those of a limit.

    Examples:
        >>> log_odds_above(torch.tensor([0.5, 0.8]), 0.5)
        tensor([0.0000, 1.3863])
    """
    least = torch.finfo(shares.dtype).tiny
    return shares.clamp(least, MOST_NOISE).logit() - shares.new_tensor(limit).clamp(least, MOST_NOISE).logit()


def log_variance_above(deviations: Tensor, limit: float) -> Tensor:
    """(m,) logarithm of the squares of standard deviations (m,) less that of a limit."""
    least = torch.finfo(deviations.dtype).tiny
    return 2.0 * (deviations.clamp_min(least).log() - math.log(max(limit, least)))


def geometric_mean(first: Tensor, second: Tensor, weight: float) -> Tensor:
    """(m,) weighted geometric mean, in which the second has this weight."""
    return first ** (1.0 - weight) * second**weight


def weight_of_second(first: Tensor, second: Tensor, squares: Tensor) -> float:
    """The weight of the second of two expectations (s,) of squares (s,): a half, or more if it explains them better.

    Then weights are a power of the shares of the squares' variance that they explain.

    Examples:
        >>> squares = torch.tensor([0.0, 1.0, 0.0, 1.0])
        >>> worse, better = torch.tensor([0.5, 0.6, 0.4, 0.5]), torch.tensor([0.0, 0.9, 0.1, 1.0])
        >>> weight_of_second(better, worse, squares), round(weight_of_second(worse, better, squares), 3)
        (0.5, 0.999)
    """
    varied, shares = float((squares - squares.mean()).square().sum()), []
    for expected in (first, second):
        missed = float((squares - expected).square().sum())
        shares.append(max(LEAST_EXPLAINED, 1.0 - missed / varied if varied > 0 else 0.0) ** WEIGHT_POWER)
    return max(0.5, shares[1] / sum(shares))


def label_squares(
    fitted: Fitted, neighbours: Neighbours, codes: Codes, labels: Tensor | None, unit: float
) -> tuple[Tensor, Tensor]:
    """(s,) how much the label of each training example contradicts the others; and (k + 1,) which classes are rare.

    With the labels (n,) of classes, if there are any.

    This is its squared leave-one-out residual (`squared_residuals`), which is too small for a label that the network
    has memorised. So the share of the nearest other examples that have another label replaces it if that is larger by
    two standard errors: both measure how often two labels differ. If other models predicted the example without having
    seen it (`Fitted.held_out`), and its class has more than 50 examples, the square is that of their error. A label
    that hardly any other example has does not count: the others cannot predict it.
    """
    index = neighbours.index
    squares = squared_residuals(fitted, codes, unit)[index]
    if labels is None:
        return squares, torch.zeros(1, dtype=torch.bool, device=squares.device)
    own, known = labels[index], labels[fitted.counted]
    shares, errors = (some.to(squares) for some in share_with_another_label(neighbours.nearest, own))
    squares = torch.where(shares - 2.0 * errors > squares, shares, squares)
    if fitted.held_out is not None:
        held_out = fitted.held_out.to(squares)[index]
        squares = torch.where(held_out.isfinite() & (torch.bincount(known)[own] > MANY_LABELS), held_out, squares)
    rare = rare_classes(known)
    return squares.masked_fill(rare[own], 0.0), torch.cat([rare, torch.ones_like(rare[:1])])


def without_outliers(squares: Tensor) -> Tensor:
    """Squares (s,) of a regression, the largest of which may come from wrong targets.

    Examples:
        >>> without_outliers(torch.tensor([1.0] * 200 + [1e9])).max()
        tensor(3.)
    """
    if not len(squares):
        return squares
    return squares.clamp_max(OUTLIER * float(squares.quantile(OUTLIER_QUANTILE)))


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
    else:  # a sketch of many outputs
        counts = None if fitted.all_outputs else positions_of_batches(fitted)
        mean = max(1.0, problem.counted_units / max(1, int(fitted.counted.sum())))
        positions = residuals.new_tensor(mean) if counts is None else counts.clamp_min(1).to(residuals)
    if codes is None:
        return residuals.square().sum(1) / (positions * problem.width)
    scale = (codes[1] - codes[0]) ** 2 / (2.0 / problem.width if has_yes_or_no(fitted) else 1.0)
    return (residuals.square().sum(1) / (scale * positions)).clamp_max(MOST_SQUARE)


def share_with_another_label(near: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(s,) share of the nearest other examples (s, count) with another label, and its standard error.

    An example of a rare class is compared with only as many examples as its class has beside it, because no more could
    agree; with none if these are fewer than five, which say too little.

    Examples:
        >>> labels = torch.tensor([0] * 6 + [1])
        >>> near = torch.tensor([[at for at in reversed(range(7)) if at != one] for one in range(7)])
        >>> share_with_another_label(near, labels)[0]
        tensor([0.2000, 0.2000, 0.2000, 0.2000, 0.2000, 0.2000, 0.0000])
    """
    available = (torch.bincount(labels)[labels] - 1).clamp_max(near.shape[1]).unsqueeze(1)
    others = (labels[near] != labels.unsqueeze(1)) & (torch.arange(near.shape[1], device=near.device) < available)
    number = available.squeeze(1).clamp_min(1)
    share = (others.sum(1) / number).masked_fill(number < LEAST_AVAILABLE, 0.0)
    return share, (share * (1.0 - share) / number).sqrt()


def rare_classes(labels: Tensor) -> Tensor:
    """(k,) whether classes have few of the labels (n,), in number and beside the other classes, or a single one.

    Examples:
        >>> rare_classes(torch.tensor([0] * 90 + [1] * 80 + [2] * 5))
        tensor([False, False,  True])
        >>> rare_classes(torch.tensor([0] * 1000 + [1] * 5))
        tensor([False,  True])
        >>> rare_classes(torch.tensor([0, 1, 1]))
        tensor([ True, False])
    """
    counts = torch.bincount(labels)
    usual = counts[counts > 0].double().quantile(0.5) if len(labels) else 0.0
    return ((counts < RARE) & (counts < RARE_SHARE * usual)) | (counts == 1)


def limit_for_classes(values: Tensor, classes: int) -> float:
    """The disagreement above which labels of classes are called noisy, from values of training examples.

    Examples:
        >>> a_tenth, a_half = torch.tensor([0.1]), torch.tensor([0.5])
        >>> [round(limit_for_classes(values, classes), 2) for values in (a_tenth, a_half) for classes in (2, 10)]
        [0.25, 0.25, 0.38, 0.67]
    """
    usual = float(values.mean()) if len(values) else 0.0
    possible = min(1.0, (1.0 - 1.0 / classes) / (1.0 - 1.0 / MANY_CLASSES))  # beside many classes
    return max(LEAST_DISAGREEMENT, min(NOISIER * usual, max(MOST_DISAGREEMENT * possible, possible - usual)))


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
        """From observed values (n,) at places (n,), by pooling adjacent ones that decrease."""
        order = places.argsort(stable=True)
        x, y = (some[order].double().cpu().numpy() for some in (places, values))
        first = numpy.flatnonzero(numpy.diff(x, prepend=-numpy.inf) > TIE * numpy.abs(x))  # of each tie
        pools: list[Any] = []  # sums of places and values, and the number of examples
        for pool in numpy.add.reduceat(numpy.stack([x, y, numpy.ones_like(x)]), first, axis=1).T if len(x) else ():
            while pools and pools[-1][1] * pool[2] >= pool[1] * pools[-1][2]:
                pool = pool + pools.pop()
            pools.append(pool)
        sums = torch.from_numpy(numpy.array(pools).reshape(-1, 3)).to(values)
        return cls(sums[:, 0] / sums[:, 2], sums[:, 1] / sums[:, 2])

    def predict(self, places: Tensor) -> Tensor:
        """(m,) expected values at places (m,), constant beyond the outer centers; the places themselves if none."""
        if not len(self.places):
            return places
        at, ends, found = (some.double().cpu().numpy() for some in (places, self.places, self.values))
        return torch.from_numpy(numpy.interp(at, ends, found)).to(places)


@dataclass(frozen=True)
class LogScale:
    """The typical logarithm of a positive quantity for each predicted class, and the spread of these logarithms.

    What is typical for a class is halfway between the median of all ordinary examples and that of those with the same
    prediction; with few of them, closer to that of all.

    Examples:
        >>> values, answers = torch.tensor([1.0, 1.0, 1.0]).exp(), torch.tensor([0, 0, 1])
        >>> found = LogScale.of(values, answers, torch.tensor([True, True, True]))
        >>> found.logs, found.spread, found.z_scores(values * 1.1, answers)
        (tensor([1., 1., 1.]), 0.05, tensor([1.9062, 1.9062, 1.9062]))
    """

    logs: Tensor  # (k + 1,) typical logarithm for each class; the last for classes that no training example has
    spread: float

    @classmethod
    def of(cls, values: Tensor, answers: Tensor, ordinary: Tensor) -> LogScale:
        """From values (s,) of training examples, their predicted classes (s,), and which of them are ordinary (s,)."""
        logs = values.log()
        middle = logs[ordinary].median()
        typical = middle.repeat(int(answers.max()) + 2)
        for answer in range(len(typical) - 1):
            some = logs[ordinary & (answers == answer)]
            if len(some):
                typical[answer] += 0.5 * len(some) / (len(some) + PRIOR_EXAMPLES) * (some.median() - middle)
        above = (logs - typical[answers])[ordinary]
        return cls(typical, max(float(above.quantile(SPREAD_QUANTILE) - above.median()), LEAST_SPREAD))

    def z_scores(self, values: Tensor, answers: Tensor) -> Tensor:
        """(m,) how many spreads the logarithms of values (m,) are above the typical one of their answers (m,)."""
        return (values.log() - self.logs[answers.clamp_max(len(self.logs) - 1)]) / self.spread


@dataclass(frozen=True)
class DistanceScale:
    """Distances of the training examples, each from the others, with which that of an input is compared."""

    known: Tensor  # (l,) of all examples that distances are measured from
    by_class: LogScale
    local: LogScale  # of distances relative to those of the nearest examples

    @classmethod
    def of(cls, known: Tensor, own: Tensor, near: Tensor, answers: Tensor, ordinary: Tensor) -> DistanceScale:
        """From all distances (l,), and what is known of s examples.

        These are distances (s,), nearest examples (s, c), predicted classes (s,), and which are ordinary (s,).
        """
        local = LogScale.of(own / average_of(known, near), torch.zeros_like(answers), ordinary)
        return cls(known, LogScale.of(own, answers, ordinary), local)

    def z_scores(self, distances: Tensor, near: Tensor, answers: Tensor) -> Tensor:
        """(m,) how far inputs are from the training examples, in standard deviations of ordinary examples.

        The mean of two: of the distance (m,), and of the distance relative to those of the examples around the input
        (m, c), which says how dense they are, as in the local outlier factor (Breunig et al., 2000).
        """
        relative = distances / average_of(self.known, near).to(distances)
        local = self.local.z_scores(relative, torch.zeros_like(answers))
        return (self.by_class.z_scores(distances, answers) + local) / 2.0


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
