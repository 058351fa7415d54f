"""Explanation: whether to trust a prediction, and if not, whether noisy labels or scarce data are the cause.

Two numbers decide, the same for every loss and every structure. *Noise* is how much the labels of the training examples
behind a prediction contradict each other. *Scarcity* is its leverage, in a metric without labels, relative to that of
ordinary predictions. `Calibration` holds the reference values, from the training set alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from whence.data.batches import Inputs
from whence.display import Column, Shown, Table, count, number, numbers, percent, places, rows_shown
from whence.errors import InputError
from whence.influence.features import NEAREST_LABELS, FeatureDistance, LastFeatures, disagreement, has_several_labels
from whence.influence.fitted import Fitted, check_traced, divide, effective_number, evenly_spaced, join_batches
from whence.influence.neighbours import FEATURE_SHARE, Neighbours, predicted_probability
from whence.linalg import largest
from whence.results import frame

if TYPE_CHECKING:
    import pandas

CONFIDENT, NOISY, SCARCE, BOTH = "confident", "noisy labels nearby", "scarce data", "both"
VERDICTS = (CONFIDENT, NOISY, SCARCE, BOTH)
DOTS = dict(zip(VERDICTS, ("plain", "noise", "scarcity", "both"), strict=True))

CALIBRATION_EXAMPLES = 2000
"""Number of training examples, evenly spaced, whose neighbours are compared with their own labels."""

NAMED = 5
"""Number of training examples named by default, if that costs nothing."""

FEW_EXAMPLES = 5000
"""Up to this many training examples, all get weights for every prediction, so that verdicts do not depend on `top`."""

NOISIER, NOISIER_TARGETS = 2.0, 1.5
"""Labels, and targets of a regression, are called noisy if their squared leave-one-out error is this many times the
average of the data set. Half of all targets may be noisy: then they have at most twice the average."""

LEAST_DISAGREEMENT, MOST_DISAGREEMENT = 0.1, 0.5
"""For classes that limit is at least the first, and at most the second or one minus the average: labels are not called
noisy if two of them differ in less than a tenth of all pairs."""

USUAL = 0.8
"""For classes, where distances of features count too, leverages count only beyond this quantile of them."""

SAME_PLACE = 1e-5
"""Averages of squares with a smaller relative difference are the same up to rounding."""

MOST_CERTAIN = 0.999
"""Upper bound of the noise when odds are computed."""

UNDECIDED = 0.55
"""A network is not confident if the probability of its own answer is below this."""

UNSURE, UNEXPLAINED = 0.7, 2.0
"""It is not confident either if this probability is below the first number and below that of nearly all ordinary
training examples, and labels nearby do not explain the doubt: two labels drawn from its own probabilities differ more
often than labels nearby do, by more than the second number as a factor."""

UNSUPPORTED, SUPPORTED = 0.5, 0.95
"""The label of a training example does not count for the noise of classes if its leave-one-out leverage is above the
first number (less than one other example is like it) and above that of this share of all examples. The others fail to
predict it because they are unlike it, whether it is right or wrong."""

LEAST_EXCESS = 1.2
"""A leverage below this many times the ordinary one is not called scarce."""

BESIDE_NOISE = 2.0
"""If labels are noisy, data are called scarce only from this many times the limit on: contradicting labels scatter the
gradients of the examples, and raise leverages there."""

LEAST_ORDINARY = 19
"""Least number of examples around which labels agree, to compare scarcity with these alone: fewer could not show that
less than 5 % have a higher one."""

MOST_SQUARE = 2.0
"""The largest possible squared distance between a label and probabilities of classes."""


@dataclass(frozen=True)
class Explanation(Shown):
    """A verdict for each prediction, with the numbers behind it.

    Attributes:
        level: a prediction is called noisy, or scarce, only if its p-value is at most 1 - level.
        noise: (m,) how much labels of inputs like this one contradict each other. For classes, how often two of them
            would differ: 0 if all agree, .5 for a coin toss. It is the geometric mean of `disagreement`, and of how
            often labels differ where the network's answers are as ambiguous as this one. For trees, and for squared
            error on coded classes, whose outputs are no probabilities, it is the disagreement. For regression, the
            standard deviation of the targets around the prediction, in their unit.
        disagreement: (m,) for classes, how often two labels of training examples around the input differ; the mean over
            outputs if each has its own label. For regression the same as `noise`.
        scarcity: (m,) leverage, in a metric without labels, relative to that of an ordinary training example that was
            left out: 1 is ordinary, 3 means that a third as many training examples support the prediction. Training
            examples are ordinary if the labels around them agree. For classes, the leverage counts beyond that of four
            in five training examples, and it is multiplied by two distances of the input from the training examples in
            the input of the last layer: from those with the same answer, and from the nearest of all.
        noise_p: (m,) how often residuals as large would occur together around the input by chance, if the noise were
            the same everywhere.
        scarcity_p: (m,) share of ordinary training examples whose scarcity, each left out, is at least as large.
        probability: (m,) the network's probability for its own answer, the predicted class; `nan` for regression.
        ambiguity: (m,) how often two labels drawn from the network's own probabilities would differ; `nan` for
            regression.
        leverage: (m,) the leverage itself.
        ratio: (m,) HeC3 / Ho.
        ho: (m,) trace of Ho.
        hec3: (m,) trace of HeC3.
        effective: (m,) effective number of training examples in the average `disagreement`. With `top=0` and more than
            5,000 training examples, their median for all predictions.
        check: (m, t) training examples that add most to `disagreement`: labels to check first.
        near: (m, t) training examples with the largest weight in the prediction.
        source: (m,) the main cause of doubt: above zero noise, below zero scarcity. It is how far the disagreement is
            above its limit minus how far the scarcity is above its own, both as logarithms: of the odds for the
            disagreement of classes, of the variance for regression, of the leverage for scarcity.
        noise_limit: labels are called noisy if the noise is above this limit,
        disagreement_limit: and the disagreement above this one.
        scarcity_limit: scarcity above which data are called scarce.
        probability_limit: probability of its own answer below which the network is not sure: .7, or less if more than
            1 - level of the ordinary training examples have a lower probability.
        classes: whether `noise` is about classes.
        notes: what is approximated.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
        >>> net, y = torch.nn.Linear(1, 1, dtype=torch.float64), 2 * x + (99 * x).sin()
        >>> tracer = whence.fit(net, [(x, y)], ridge=0.1, recenter=True, progress=False)
        >>> tracer.explain(torch.tensor([[0.0], [30.0]], dtype=torch.float64)).verdicts
        ('confident', 'scarce data')
    """

    level: float
    noise: Tensor
    disagreement: Tensor
    scarcity: Tensor
    noise_p: Tensor
    scarcity_p: Tensor
    probability: Tensor
    ambiguity: Tensor
    leverage: Tensor
    ratio: Tensor
    ho: Tensor
    hec3: Tensor
    effective: Tensor
    check: Tensor
    near: Tensor
    source: Tensor
    noise_limit: float
    disagreement_limit: float
    scarcity_limit: float
    probability_limit: float
    classes: bool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.noise)

    @property
    def noisy(self) -> Tensor:
        """(m,) whether labels nearby contradict each other, more than elsewhere and by more than chance.

        False if scarcity stands out more: labels of examples unlike the input say little about it.
        """
        return self._noise_found & ~(self._scarcity_found & (self.source < 0))

    @property
    def undecided(self) -> Tensor:
        """(m,) whether the model itself is undecided, and labels nearby do not explain why."""
        unexplained = (self.probability < self.probability_limit) & (self.ambiguity > UNEXPLAINED * self.disagreement)
        return ((self.probability < UNDECIDED) | unexplained) & ~self.noisy

    @property
    def scarce(self) -> Tensor:
        """(m,) whether fewer training examples support the prediction than ordinary ones support each other.

        If labels are noisy too, scarcity must reach twice the limit. A prediction that the model itself is undecided
        about, although the labels nearby agree, is also scarce.
        """
        beside = ~self.noisy | (self.scarcity >= BESIDE_NOISE * self.scarcity_limit)
        return self._scarcity_found & beside | self.undecided

    @property
    def _noise_found(self) -> Tensor:
        above = (self.noise > self.noise_limit) & (self.disagreement > self.disagreement_limit)
        return above & (self.noise_p <= 1.0 - self.level)

    @property
    def _scarcity_found(self) -> Tensor:
        return (self.scarcity > self.scarcity_limit) & (self.scarcity_p <= 1.0 - self.level)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A verdict for each prediction, one of "confident", "noisy labels nearby", "scarce data" and "both"."""
        codes = self.noisy.long() + 2 * self.scarce.long()
        return tuple(VERDICTS[code] for code in codes.tolist())

    def reason(self, number: int) -> str:
        """The two numbers behind one verdict, in words."""
        scarcity = float(self.scarcity[number])
        chance, share = float(self.noise_p[number]), float(self.scarcity_p[number])
        further = ""
        if self.classes:
            differ = percent(float(self.disagreement[number]))
            around = f"two labels of examples like this one differ in {differ} of all pairs"
            limit = f"noisy from {percent(self.disagreement_limit)} on"
            if self.noise_limit != self.disagreement_limit:
                noise = percent(float(self.noise[number]))
                further = f"; with the model's own doubt, noise is {noise} (noisy from {percent(self.noise_limit)} on)"
        else:
            around = f"targets of examples like this one vary by {float(self.noise[number]):.3g}"
            limit = f"noisy from {self.noise_limit:.3g} on"
        words = (
            f"{around} ({limit}; by chance in {percent(chance)} of cases){further}; its scarcity is {scarcity:.2g} "
            f"(1 is ordinary), which {percent(share)} of ordinary training examples reach"
        )
        if bool(self.undecided[number]):
            words += (
                "; the model itself is undecided: it gives its answer a probability of "
                f"{percent(float(self.probability[number]))}, and labels nearby do not explain it"
            )
        return words

    def sentence(self, number: int) -> str:
        """Describe one prediction and what to do about it."""
        if not -len(self) <= number < len(self):
            raise InputError(f"expected the number of a prediction, 0 to {len(self) - 1}, got {number}.")
        noisy, scarce = bool(self.noisy[number]), bool(self.scarce[number])
        advice = []
        if noisy:
            named = f"of training examples {_listing(self.check[number])}" if self.check.shape[1] else "nearby"
            advice.append(f"Check the labels {named}.")
        if scarce:
            named = f"; the nearest now are {_listing(self.near[number])}" if self.near.shape[1] else ""
            advice.append(f"Collect examples near this input{named}.")
        return " ".join([f"{VERDICTS[noisy + 2 * scarce]}: {self.reason(number)}.", *advice])

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per prediction."""
        names = ["noise", "disagreement", "ambiguity", "scarcity", "noise_p", "scarcity_p", "probability", "leverage"]
        columns: dict[str, Sequence[Tensor | list[str]]] = {"verdict": [list(self.verdicts)]}
        names += ["ratio", "ho", "hec3", "effective", "source"]
        columns.update({name: [getattr(self, name)] for name in names})
        columns["check"] = [[_listing(row) for row in self.check]]
        columns["near"] = [[_listing(row) for row in self.near]]
        return frame(columns)

    def __repr__(self) -> str:
        """Count each verdict."""
        verdicts = self.verdicts
        counts = ", ".join(f"{verdict}: {verdicts.count(verdict)}" for verdict in VERDICTS)
        return f"Explanation({len(self)} predictions; {counts})"

    def _table(self) -> Table:
        m = len(self)
        rows, more = rows_shown(m, "sentence(number), to_frame()")
        verdicts = self.verdicts[:rows]
        actions = []
        for row, (noisy, scarce) in enumerate(
            zip(self.noisy[:rows].tolist(), self.scarce[:rows].tolist(), strict=True)
        ):
            check = f"check {_listing(self.check[row, :3]) or 'labels nearby'}" if noisy else ""
            near = f"near {_listing(self.near[row, :3]) or 'this input'}" if scarce else ""
            actions.append("; ".join(one for one in (check, near) if one))
        noise = self.noise[:rows].tolist()
        columns = (
            places(rows),
            Column("verdict", verdicts, left=True, dots=tuple(DOTS[verdict] for verdict in verdicts)),
            Column("noise", tuple(map(percent, noise)) if self.classes else numbers(noise)),
            Column("scarcity", tuple(f"{value:.2f}" for value in self.scarcity[:rows].tolist())),
            Column("HeC3/Ho", tuple(f"{value:.2f}" for value in self.ratio[:rows].tolist())),
            Column("check, collect near", tuple(actions), left=True),
        )
        counts = ", ".join(f"{self.verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
        limit = percent(self.noise_limit) if self.classes else number(self.noise_limit)
        words = (
            f"Noisy from {limit} on, scarce from {self.scarcity_limit:.2f} on, where chance makes that in at most "
            f"{percent(1 - self.level)} of cases. In words: sentence(number)."
        )
        return Table(
            f"{count(m, 'prediction')}: {counts}", columns, "\n".join([words, *self.notes, *([more] if more else [])])
        )


def _listing(examples: Tensor) -> str:
    return ", ".join(map(str, examples.tolist()))


def explain(
    fitted: Fitted, inputs: Inputs, calibration: Calibration, level: float, top: int, examples: Tensor | None = None
) -> Explanation:
    """Explain the predictions of one batch; see `Tracer.explain`."""
    ho, hec3 = _traces(fitted, inputs)
    whitened, outputs, given = calibration.neighbours.whitened(fitted, inputs)
    leverage = whitened.square().sum((1, 2)) / whitened.shape[1]
    remote = calibration.remoteness(leverage, LastFeatures.of(fitted, outputs, given, calibration.codes))
    probability, ambiguity = predicted_probability(fitted, outputs, calibration.codes)
    scarcity_limit = max(calibration.scarcity_limit(level), LEAST_EXCESS)
    found = []
    for which, local, effective, check, near in _surroundings(calibration, whitened, top, examples):
        square = calibration.calibrated(local)
        scarcity = remote[which] / calibration.ordinary
        found.append(
            Explanation(
                level=level,
                noise=calibration.noise(square, ambiguity[which]),
                disagreement=calibration.in_unit(square),
                scarcity=scarcity,
                noise_p=calibration.noise_p(local, effective),
                scarcity_p=calibration.scarcity_p(remote[which]),
                probability=probability[which],
                ambiguity=ambiguity[which],
                leverage=leverage[which],
                ratio=divide(hec3[which], ho[which], 1.0),
                ho=ho[which],
                hec3=hec3[which],
                effective=effective,
                check=check,
                near=near,
                source=calibration.excess(square) - _log(scarcity, scarcity_limit),
                noise_limit=calibration.noise_limit,
                disagreement_limit=float(calibration.in_unit(square.new_tensor(calibration.limit))),
                scarcity_limit=scarcity_limit,
                probability_limit=calibration.probability_limit(level),
                classes=calibration.classes,
                notes=calibration.notes,
            )
        )
    return join_batches(found)


def weighs_examples(top: int, n: int) -> bool:
    """Whether every prediction needs weights of all n training examples: to name some, or because n is small."""
    return top > 0 or n <= FEW_EXAMPLES


def _surroundings(
    calibration: Calibration, whitened: Tensor, top: int, examples: Tensor | None
) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """Yield (which predictions, average square around each, effective numbers, examples to check, nearest examples).

    If no examples are named (`top` is zero) and there are many, averages are ratios of two quadratic forms, at a cost
    independent of the number of training examples. Effective numbers are then the same for all predictions.
    """
    if not weighs_examples(top, len(calibration.squares)):
        local = calibration.average_around(whitened, examples)
        none = torch.empty(len(local), 0, dtype=torch.long, device=local.device)
        yield slice(0, len(local)), local, torch.full_like(local, calibration.effective), none, none
        return
    few = min(top, len(calibration.squares))
    for which, weights in calibration.neighbours.weights(whitened):
        if examples is not None:
            some = (examples[which] >= 0).nonzero().squeeze(1)
            weights[some, examples[which][some]] = 0.0
        kept = weights * calibration.supported
        shares = kept * divide(kept.new_ones(()), kept.sum(1, keepdim=True), 0.0)
        check, near = (largest(some, few)[1] for some in (weights * calibration.squares, weights))
        yield which, shares @ calibration.squares, effective_number(shares, 1.0), check, near


def _log(values: Tensor, limit: float) -> Tensor:
    tiny = torch.finfo(values.dtype).tiny
    return (values.clamp_min(tiny) / max(limit, tiny)).log()


def _traces(fitted: Fitted, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """(m,) traces of Ho and HeC3, checked for overflow."""
    if fitted.sandwich.variances_alone:
        variances = fitted.sandwich.variances(inputs)[1]
    else:
        covariances = fitted.sandwich.predict(inputs).covariances
        variances = {name: torch.diagonal(covariances[name], dim1=1, dim2=2) for name in ("ho", "hec3")}
    found = {name: variances[name].sum(1, keepdim=True) for name in ("ho", "hec3")}
    check_traced(fitted.problem, found, inputs)
    return found["ho"].squeeze(1), found["hec3"].squeeze(1)


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


@dataclass(frozen=True, repr=False)
class Calibration:
    """Reference values for predictions: leave-one-out quantities of the training examples.

    Scarcity: the leverage q of a new input (`whence.influence.neighbours`) is compared with those of training examples
    in fits without themselves, h / (1 - h). An input like the training inputs is equally likely to have any rank among
    them. Training examples whose neighbours' labels contradict each other are excluded, unless few are left: their
    gradients scatter, and their leverages would hide scarce data. For classes, leverages count only beyond those of
    four in five examples, and they are multiplied by the distance of an input from the training examples in the
    features of the last layer, in units of the usual one (`FeatureDistance`).

    Disagreement: the squared leave-one-out residuals of the training examples (see `squared_residuals`) estimate their
    noise if the network has not memorised their labels. Around an input they are averaged with weights a_i^2. An
    average over many examples is shrunk towards that of the whole data set. The shrinkage is corrected by a centered
    isotonic regression of the squares of training examples on the averages around them, each without itself. For
    memorised labels, the residuals of cross-entropy are too small. So the share of the 50 nearest training examples, by
    features of the last layer, that have another label replaces the square if it is larger by two standard errors
    (`disagreement`): both measure how often two labels differ. The splits of trees are kept, and they have learned
    labels too. If the example was predicted by other trees that did not see it (`Fitted.held_out`), and its class has
    more than 50 examples, the square is that of their error.

    If the noise were the same everywhere, the squares could be shuffled among the examples. The shuffled average has
    mean mean(v) and variance var(v) (sum of squared weights - 1 / n). A gamma distribution with these moments gives the
    p-value.

    Attributes:
        neighbours: gradients of the training examples' predictions.
        distance: distance of features of the last layer; `None` if there are none.
        squares: (n,) squared leave-one-out residuals; zero for examples that do not count.
        supported: (n,) one for examples whose squares count, zero for others: for classes, those unlike any other
            example do not count.
        usual: leverage above which leverages count, if distances of features count too.
        leverages: leverages of some training examples around which labels agree, each left out, as returned by
            `remoteness`, ascending.
        probabilities: the network's probabilities for its own answers to the same examples, each left out if all
            outputs were used, ascending; `nan` for regression.
        ordinary: the median of the leverages.
        mean: mean of the squares.
        variance: variance of the squares.
        examples: number of squares that count.
        nearby: squares expected for averages around an input.
        answered: squares expected for ambiguities of the network's answers; `None` if these do not count, because they
            are no probabilities of classes, or those of trees, whose splits have learned the labels.
        limit: squares above which labels are called noisy: 1.5 times the mean; for classes twice the mean of the
            expected squares, at least .1, and at most the larger of .5 and one minus that mean.
        noise_limit: the same limit for `Explanation.noise`; with probabilities of classes from its own mean.
        codes: target values for other classes and for the class itself; `None` without classes, where squares do not
            measure how often two labels differ.
        unit: unit of the residuals of a regression; squares are in its square.
        effective: median effective number of examples in the averages around training examples.
        notes: what is approximated, or left out.
    """

    neighbours: Neighbours
    distance: FeatureDistance | None
    squares: Tensor
    supported: Tensor
    usual: float
    leverages: Tensor
    probabilities: Tensor
    ordinary: float
    mean: float
    variance: float
    examples: int
    nearby: Expected
    answered: Expected | None
    limit: float
    noise_limit: float
    codes: tuple[float, float] | None
    unit: float = 1.0
    effective: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def classes(self) -> bool:
        """Whether squares measure how often two labels differ."""
        return self.codes is not None

    @classmethod
    def of(cls, fitted: Fitted, sample: int = CALIBRATION_EXAMPLES, quick: bool = False) -> Calibration:
        """Compute it in one pass over the training data, within `using_model`.

        Args:
            fitted: the fit.
            sample: how many training examples, evenly spaced, to compare with their surroundings.
            quick: as for `Neighbours.of`.
        """
        codes = class_codes(fitted)
        classes = codes is not None
        neighbours, answers, known = Neighbours.of(fitted, codes, quick)
        counted = fitted.counted
        largest_residual = float(fitted.residuals[counted].abs().max()) if bool(counted.any()) else 0.0
        unit = 1.0 if classes or largest_residual == 0 else largest_residual
        squares = torch.where(counted, squared_residuals(fitted, neighbours.leverages(), codes, unit), 0.0)
        alone, supported = neighbours.leverages_without().to(squares.dtype), counted
        if classes and bool(counted.any()):
            most = alone[counted].kthvalue(math.ceil(SUPPORTED * int(counted.sum()))).values
            supported = counted & (alone <= most.clamp_min(UNSUPPORTED))
        some = squares[supported].double()
        mean = float(some.mean()) if len(some) else 0.0
        index = evenly_spaced(counted.nonzero().squeeze(1), sample)
        averages, numbers = [squares[:0]], [squares[:0]]
        for which, weights in neighbours.weights(neighbours.gradients[index].to(squares.dtype)):
            weights = (weights * supported).scatter_(1, index[which].unsqueeze(1), 0.0)
            averages.append(divide(weights @ squares, weights.sum(1), mean))
            numbers.append(effective_number(divide(weights, weights.sum(1, keepdim=True), 0.0), 1.0))
        around, several = torch.cat(averages), torch.cat(numbers)
        own, labels = squares[index], class_labels(fitted, codes)
        if known is not None and labels is not None:
            shares, errors = (some.to(own.dtype) for some in disagreement(known.features, labels, index, counted))
            own = torch.where(shares - 2.0 * errors > own, shares, own)
        if fitted.held_out is not None and labels is not None:
            held_out = fitted.held_out.to(own)[index]
            many = torch.bincount(labels[counted])[labels[index]] > NEAREST_LABELS
            own = torch.where(held_out.isfinite() & many, held_out, own)
        usable = supported[index].nonzero().squeeze(1)
        nearby = Expected.of(around[usable], own[usable])
        disagree = nearby.at(around)
        limit = _limit_for_classes(own[usable]) if classes else NOISIER_TARGETS * mean
        noise_limit, answered = limit if classes else unit * limit**0.5, None
        if fitted.problem.likelihood.has_classes and not neighbours.of_trees:
            ambiguous = answers[index, 1].to(own)
            answered = Expected.of(ambiguous[usable], own[usable])
            both = disagree.clamp_max(1.0) * answered.at(ambiguous).clamp_max(1.0)
            noise_limit = _limit_for_classes(both[usable].sqrt())
        agreeing = disagree <= limit
        agree = int(agreeing.sum())
        compared = index[agreeing] if agree >= max(len(agreeing) / 2, LEAST_ORDINARY) else index
        leverages, usual, distance, notes = alone[compared], 0.0, None, neighbours.notes
        if known is not None and bool(counted.any()):
            k, d = max(2, fitted.problem.width), known.features.shape[1]
            if 8 * k * d * d <= FEATURE_SHARE * fitted.problem.budget.limit:
                distance = FeatureDistance.of(known, counted, compared, k)
                these = LastFeatures(known.features[compared], known.predicted[compared])
                usual = float(leverages.quantile(USUAL)) if len(leverages) else 0.0
                leverages = leverages.clamp_min(usual) * distance.beyond_usual(these, compared).to(leverages)
            else:
                notes += ("Inputs are not compared with those of the same answer: that would take too much memory.",)
        leverages = leverages.sort().values
        return cls(
            neighbours=neighbours,
            distance=distance,
            squares=squares,
            supported=supported.to(squares.dtype),
            usual=usual,
            leverages=leverages,
            probabilities=answers[compared, 0].sort().values,
            ordinary=max(float(leverages.median()), torch.finfo(leverages.dtype).tiny) if len(leverages) else 1.0,
            mean=mean,
            variance=float(some.var()) if len(some) > 1 else 0.0,
            examples=len(some),
            nearby=nearby,
            answered=answered,
            limit=limit,
            noise_limit=noise_limit,
            codes=codes,
            unit=unit,
            effective=float(several.median()) if len(several) else 1.0,
            notes=notes,
        )

    def in_unit(self, square: Tensor) -> Tensor:
        """Squares as they are shown: how often two labels differ, or the standard deviation of targets."""
        return square if self.classes else self.unit * square.sqrt()

    def noise(self, square: Tensor, ambiguity: Tensor) -> Tensor:
        """(m,) noise, from expected squares (m,) and the ambiguity of the network's answers (m,)."""
        if self.answered is None:
            return self.in_unit(square)
        return (square * self.answered.at(ambiguity).clamp_max(1.0)).sqrt()

    @cached_property
    def _forms(self) -> Tensor:
        """(r, 2 r) moments of the training examples whose squares count, unweighted and weighted by the squares."""
        return torch.cat([self.neighbours.moments(one * self.supported) for one in (1.0, self.squares)], 1)

    def average_around(self, whitened: Tensor, examples: Tensor | None) -> Tensor:
        """(m,) average square around inputs with whitened gradients (m, c, r), without training examples (m,) if given.

        The sum over training examples of v_i a_i^2, with alignments a_i = w^T w_i, is w^T (sum_i v_i w_i w_i^T) w.
        """
        gradients, r = self.neighbours.gradients, len(self.neighbours.whitening)
        rows = whitened[..., :r].to(self._forms.dtype)
        moved = (rows.flatten(0, 1) @ self._forms).reshape(*rows.shape[:2], 2, r)
        total, weighted = (moved * rows.unsqueeze(2)).sum((1, 3)).to(whitened.dtype).unbind(1)
        if examples is not None:
            own = (rows @ gradients[examples.clamp_min(0), :, :r].mT).square().sum((1, 2)).to(whitened.dtype)
            own = own * self.supported[examples] * (examples >= 0)
            total, weighted = total - own, weighted - own * self.squares[examples]
        return divide(weighted.clamp_min(0.0), total, 0.0)

    def remoteness(self, leverage: Tensor, last: LastFeatures | None) -> Tensor:
        """(m,) leverages times the inputs' distances from the training examples, in units of the usual distance."""
        if self.distance is None or last is None:
            return leverage
        return leverage.clamp_min(self.usual) * self.distance.beyond_usual(last).to(leverage)

    def scarcity_limit(self, level: float) -> float:
        """The quantile of the training examples' scarcity at this level."""
        return float(self.leverages.quantile(level)) / self.ordinary if len(self.leverages) else float("inf")

    def probability_limit(self, level: float) -> float:
        """The probability that this share of the ordinary training examples exceeds; at most `UNSURE`."""
        known = self.probabilities
        return min(UNSURE, float(known.quantile(1.0 - level))) if self.classes and len(known) else UNSURE

    def scarcity_p(self, leverage: Tensor) -> Tensor:
        """(m,) share of ordinary training examples, counting the input itself, with at least this leverage."""
        below = torch.searchsorted(self.leverages, leverage.contiguous())
        return (1.0 + len(self.leverages) - below) / (1.0 + len(self.leverages))

    def noise_p(self, average: Tensor, effective: Tensor) -> Tensor:
        """(m,) how often shuffled squares would give an average at least as large.

        Args:
            average: (m,) weighted averages of the squares.
            effective: (m,) effective numbers of examples in them.
        """
        if self.mean <= 0:
            return torch.ones_like(average)
        concentration = (1.0 / effective.clamp_min(1.0) - 1.0 / max(self.examples, 1)).clamp_min(0.0)
        variation = (self.variance**0.5 / self.mean) ** 2  # the squares of these two numbers may overflow
        spread = (variation * concentration).clamp_min(1e-8)
        chance: Tensor = torch.special.gammaincc(1.0 / spread, average / self.mean / spread)
        return chance

    def excess(self, square: Tensor) -> Tensor:
        """(m,) how far squared noise is above its limit: log-odds for classes, else the logarithm of the square."""
        if not self.classes:
            return _log(square, self.limit)
        both = torch.stack([square, torch.full_like(square, self.limit)])
        tiny = torch.finfo(square.dtype).tiny
        odds = both.clamp(tiny, MOST_CERTAIN).logit()
        return odds[0] - odds[1]

    def calibrated(self, average: Tensor) -> Tensor:
        """(m,) squares expected for these averages; at most one for classes."""
        found = self.nearby.at(average)
        return found.clamp_max(1.0) if self.classes else found


def _limit_for_classes(values: Tensor) -> float:
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
    if problem.sketch is not None or not likelihood.squared_error:
        return None
    targets = (problem.outputs + problem.unweighted(problem.residuals)).reshape(-1, problem.width)
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
    targets = problem.likelihood.targets_of(problem.unweighted(problem.residuals), problem.outputs)
    if targets is None:
        return None
    return (targets[:, 0] > sum(codes) / 2).long() if targets.shape[1] == 1 else targets.argmax(1)


def squared_residuals(fitted: Fitted, leverages: Tensor, codes: tuple[float, float] | None, unit: float) -> Tensor:
    """(n,) squared leave-one-out residuals of each training example, the mean over its positions.

    For classes these are residuals at the prediction without the example, which reveal labels that the network has
    memorised. Summed over classes, their expectation is how often two labels differ. For yes and no, twice the square
    has the same meaning; with several such outputs, its mean. For regression e^2 / (1 - h), averaged over outputs,
    whose expectation is the noise, as in HC2.

    Args:
        fitted: the fit.
        leverages: (n,) of the examples, in the metric without labels.
        codes: target values for other classes and for the class itself; `None` without classes.
        unit: unit of the residuals of a regression, as their squares might underflow or overflow.
    """
    problem = fitted.problem
    if problem.units is not None and problem.units.weights is not None:
        positions = (problem.units.weights > 0).sum(1).clamp_min(1).to(leverages.dtype)
    else:
        positions = leverages.new_tensor(max(1.0, problem.counted_units / max(1, int(fitted.counted.sum()))))
    if codes is not None:
        yes_or_no = problem.width == 1 or has_several_labels(fitted)
        scale = (codes[1] - codes[0]) ** 2 / (2.0 / problem.width if yes_or_no else 1.0)
        return (fitted.loo_residuals.square().sum(1) / (scale * positions)).clamp_max(MOST_SQUARE)
    return (fitted.residuals / unit).square().sum(1) / (positions * problem.width) / (1.0 - leverages).clamp_min(1e-6)


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
