"""Explanation: whether to trust a prediction, and if not, whether noisy labels or scarce data are the cause.

Two numbers decide, the same for every loss and every structure. *Noise* is how much the labels of the training examples
around an input contradict each other. *Scarcity* is how far the input is from the training examples, as the model sees
them, relative to an ordinary training example; where inputs of use are given (a pool), also how frequent inputs like
this one are there, beside the training examples. For classes an answer that is unusually ambiguous, although the labels
around the input agree, is a sign of scarce data too, and so is a class that hardly any example has. `Calibration` holds
the reference values, from the training set, and from the pool if there is one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.data.batches import Inputs
from whence.display import Column, Shown, Table, count, number, numbers, percent, places, rows_shown
from whence.errors import InputError
from whence.influence.calibration import UNDECIDED, Calibration, joint_z
from whence.influence.fitted import Fitted, check_traced, divide
from whence.influence.neighbours import Answers, outputs_and_layers
from whence.results import frame

if TYPE_CHECKING:
    import pandas

CONFIDENT, NOISY, SCARCE, BOTH = "confident", "noisy labels nearby", "scarce data", "both"
VERDICTS = (CONFIDENT, NOISY, SCARCE, BOTH)
TONES = dict(zip(VERDICTS, ("plain", "noise", "scarcity", "both"), strict=True))

# Labels are the cause of an undecided answer if the model often gives such answers, the input is not far from the
# examples, and two labels nearby differ in this part, or more, of the pairs that two labels drawn from the model do.
EXPLAINED = 0.8
# If labels are noisy, data are called scarce only from this many times the limit on: a network that has fitted
# contradicting labels moves their inputs apart, so that all distances there are larger.
BESIDE_NOISE = 2.0


@dataclass(frozen=True)
class Explanation(Shown):
    """A verdict for each prediction, with the numbers behind it.

    Attributes:
        level: labels are called noisy only if `noise_p` is at most 1 - level, and an input unusual only if `scarcity_p`
            is.
        noise: (m,) how much labels of inputs like this one contradict each other. For classes, how often two of them
            would differ, 0 if all agree and .5 for a coin toss: the geometric mean of `disagreement`, and of how often
            labels differ where the network's answers are as ambiguous as this one. The second has more weight than the
            first if it explains the training labels better. The disagreement alone for trees, and for squared error on
            coded classes, whose outputs are no probabilities. For regression, the standard deviation of the targets
            around the prediction, in their unit.
        disagreement: (m,) for classes, how often two labels of training examples around the input differ; the mean over
            outputs if each has its own label. For regression the same as `noise`.
        scarcity: (m,) how far the input is from the nearest training examples, as the model sees them. Two distances
            count alike, in standard deviations of their logarithms: the distance beside that of an ordinary example
            with the same answer, and the distance beside those of the examples around. 1 is ordinary, 2 is as unusual
            as twice the ordinary distance. Ordinary are examples around which labels agree, or all if these are few.
            With a pool of inputs of use, how frequent inputs like this one are there counts as much as both distances,
            if that makes it larger (1 is then slightly below ordinary).
        noise_p: (m,) how often residuals as large would occur together around the input by chance, if the noise were
            the same everywhere.
        scarcity_p: (m,) p-value: the share of ordinary training examples, each left out, with at least this scarcity.
            Where ambiguities count too, twice the smaller of this share and that of answers at least as ambiguous.
        probability: (m,) the network's probability for its own answer, the predicted class; `nan` for regression.
        rare: (m,) whether hardly any training example has the predicted class as its label: fewer than 20, and fewer
            than a fifth of the median of the classes, or a single one.
        ambiguity: (m,) how often two labels drawn from the network's own probabilities would differ, for training
            `examples` from those of the fit without them; `nan` for regression.
        frequency: (m,) how many times as frequent inputs like this one are in the pool as among the training examples;
            `nan` without a pool.
        ho, hec3: (m,) traces of Ho and HeC3.
        check: (m, t) training examples with the largest terms in `disagreement`: labels to check first.
        near: (m, t) training examples with the largest weights in `disagreement`.
        source: (m,) the main cause of doubt: above zero noise, below zero scarcity. It is how far the disagreement is
            above its limit, in log-odds (in logarithms of the variance for regression), minus half of how far the
            scarcity is above its own, in standard deviations of ordinary examples.
        doubt: (m,) how doubtful the prediction is for any reason, to order predictions by: a soft maximum of how far
            noise, scarcity and, where it counts, ambiguity are above their limits, in the same units. About zero where
            one of them is at its limit.
        noise_limit, disagreement_limit: labels are called noisy if both numbers are above these limits.
        scarcity_limit: scarcity above which data are called scarce.
        source_limit: labels are called noisy only if `source` is at least this, which nine in ten training examples
            with noisy labels around them reach. Minus infinity if these are fewer than nine.
        ambiguity_limit: the model is called undecided if its answer is more ambiguous, or has a probability below .55,
            and labels nearby are not noisy. It is 1, which no ambiguity reaches, for regression, trees, and squared
            error on coded classes.
        noisy_everywhere: whether labels of classes contradict each other so much on average that none can stand out:
            then chance (`noise_p`) is not asked.
        often_undecided: whether the model gives its own answer a probability below .55 for more than one in five
            ordinary training examples.
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
    rare: Tensor
    ambiguity: Tensor
    frequency: Tensor
    ho: Tensor
    hec3: Tensor
    check: Tensor
    near: Tensor
    source: Tensor
    doubt: Tensor
    noise_limit: float
    disagreement_limit: float
    scarcity_limit: float
    source_limit: float
    ambiguity_limit: float
    noisy_everywhere: bool
    often_undecided: bool
    classes: bool
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.noise)

    @property
    def has_pool(self) -> bool:
        """Whether inputs were compared with a pool of those in use."""
        return not bool(self.frequency.isnan().all())

    @property
    def ratio(self) -> Tensor:
        """(m,) HeC3 / Ho."""
        return divide(self.hec3, self.ho, 1.0)

    @property
    def noisy(self) -> Tensor:
        """(m,) whether labels nearby contradict each other, more than elsewhere and by more than chance.

        False if nearly all training examples with noisy labels around them have a larger `source`: labels of examples
        unlike the input say little about it. True also if the model gives its own answer a probability below .55, does
        so often (`often_undecided`), labels nearby contradict each other about as much, and they are not far away.
        """
        explained = (self.probability < UNDECIDED) & (self.disagreement >= EXPLAINED * self.ambiguity)
        explained &= ~self._noise_found & self.often_undecided & (self.scarcity <= self.scarcity_limit)
        return self._noise_found & (self.source >= self.source_limit) | explained

    @property
    def undecided(self) -> Tensor:
        """(m,) whether the model itself is undecided, and labels nearby do not explain why."""
        return ((self.ambiguity > self.ambiguity_limit) | (self.probability < UNDECIDED)) & ~self.noisy

    @property
    def scarce(self) -> Tensor:
        """(m,) whether the input is more unusual than nearly all training examples.

        If labels are noisy too, scarcity must reach twice the limit, and nothing else counts. Otherwise a prediction is
        also scarce if its probability is below .55, if its class is rare, or if labels around it contradict each other
        but are not the cause.
        """
        far = (self.scarcity > self.scarcity_limit) | (self.scarcity_p <= 1.0 - self.level)
        unusual = far | (self.probability < UNDECIDED) | self.rare | self._noise_found
        return torch.where(self.noisy, self.scarcity >= BESIDE_NOISE * self.scarcity_limit, unusual)

    @property
    def _noise_found(self) -> Tensor:
        above = (self.noise > self.noise_limit) & (self.disagreement > self.disagreement_limit)
        return above & ((self.noise_p <= 1.0 - self.level) | self.noisy_everywhere)

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A verdict for each prediction, one of "confident", "noisy labels nearby", "scarce data" and "both"."""
        codes = self.noisy.long() + 2 * self.scarce.long()
        return tuple(VERDICTS[code] for code in codes.tolist())

    def reason(self, number: int) -> str:
        """The two numbers behind one verdict, in words."""
        noise, limit = numbers([float(self.noise[number]), self.noise_limit])
        around, further = f"targets of examples like this one vary by {noise}", ""
        if self.classes:
            differ = percent(float(self.disagreement[number]))
            around = (
                f"labels of examples like this one contradict each other as if two differed in {differ} of all pairs"
            )
            limit = percent(self.disagreement_limit)
            if self.noise_limit != self.disagreement_limit:
                noise = percent(float(self.noise[number]))
                further = f"; with the model's own doubt, noise is {noise} (noisy from {percent(self.noise_limit)} on)"
        scarce_from = self.scarcity_limit * (BESIDE_NOISE if bool(self.noisy[number]) else 1.0)
        share = float(self.scarcity_p[number])
        some = f"at most {percent(share)} of" if share < 0.5 else "most"
        some = some.removeprefix("at most ") if some.startswith("at most less than") else some
        near = bool(self.scarcity[number] <= self.scarcity_limit)
        so = "answered as ambiguously" if share <= 1.0 - self.level and near else "as unusual"
        words = (
            f"{around} (noisy from {limit} on, if chance alone does so in at most {percent(1.0 - self.level)} of "
            f"cases; here in {percent(float(self.noise_p[number]))}){further}; "
            f"its scarcity is {float(self.scarcity[number]):.2g} (1 is ordinary, scarce from {scarce_from:.2g} "
            f"on); {some} ordinary training examples are {so}"
        )
        if self.has_pool:
            often = float(self.frequency[number])
            words += f"; inputs like it are {often:.2g} times as frequent in the pool as among the training examples"
        if bool(self._noise_found[number] & ~self.noisy[number]):
            words += (
                "; beside its scarcity these labels stand out less than those of nine in ten examples with noisy ones"
            )
        if bool(self.noisy[number] & ~self._noise_found[number]):
            words += "; the model itself is undecided, as it often is, and these labels explain it"
        if bool(self.rare[number]):
            words += "; hardly any training example has this label"
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
            named = f"; now it leans on training examples {_listing(self.near[number])}" if self.near.shape[1] else ""
            advice.append(f"Collect examples near this input{named}.")
        return " ".join([f"{VERDICTS[noisy + 2 * scarce]}: {self.reason(number)}.", *advice])

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per prediction."""
        names = ["noise", "disagreement", "ambiguity", "scarcity", "noise_p", "scarcity_p", "probability"]
        if self.has_pool:
            names.append("frequency")
        columns = {name: getattr(self, name) for name in (*names, "ratio", "ho", "hec3", "source", "doubt")}
        named = {name: [_listing(row) for row in getattr(self, name)] for name in ("check", "near")}
        return frame({"verdict": self.verdicts, **columns, **named})

    def __repr__(self) -> str:
        """Count each verdict."""
        verdicts = self.verdicts
        counts = ", ".join(f"{verdict}: {verdicts.count(verdict)}" for verdict in VERDICTS)
        return f"Explanation({len(self)} predictions; {counts})"

    def _table(self) -> Table:
        rows, more = rows_shown(len(self), "sentence(number), to_frame()")
        verdicts, noise, actions = self.verdicts, self.noise[:rows].tolist(), []
        for row, verdict in enumerate(verdicts[:rows]):
            check = f"check {_listing(self.check[row, :3]) or 'labels nearby'}" * (verdict in (NOISY, BOTH))
            near = f"near {_listing(self.near[row, :3]) or 'this input'}" * (verdict in (SCARCE, BOTH))
            actions.append("; ".join(one for one in (check, near) if one))
        columns = (
            places(rows),
            Column("verdict", verdicts[:rows], left=True, dots=tuple(TONES[verdict] for verdict in verdicts[:rows])),
            Column("noise", tuple(map(percent, noise)) if self.classes else numbers(noise)),
            Column("scarcity", tuple(f"{value:.2f}" for value in self.scarcity[:rows].tolist())),
            Column("HeC3/Ho", tuple(f"{value:.2f}" for value in self.ratio[:rows].tolist())),
            Column("check, collect near", tuple(actions), left=True),
        )
        counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
        limit = percent(self.noise_limit) if self.classes else number(self.noise_limit)
        words = (
            f"Noisy from {limit} on, scarce from {self.scarcity_limit:.2f} on, where chance makes that in at most "
            f"{percent(1 - self.level)} of cases. In words: sentence(number)."
        )
        note = "\n".join([words, *self.notes, *([more] if more else [])])
        return Table(f"{count(len(self), 'prediction')}: {counts}", columns, note)


def _listing(examples: Tensor) -> str:
    return ", ".join(map(str, examples.tolist()))


def explain(
    fitted: Fitted, inputs: Inputs, calibration: Calibration, level: float, top: int, examples: Tensor | None = None
) -> Explanation:
    """Explain the predictions of one batch; see `Tracer.explain`."""
    ho, hec3 = _traces(fitted, inputs)
    neighbours = calibration.neighbours
    # What the model answers and how sure it is, and the training examples that look like the input to it.
    outputs, layers = outputs_and_layers(fitted, inputs, neighbours.names)
    said = Answers.of(fitted, inputs, outputs, calibration.codes, examples)
    ambiguity, answers = said.ambiguity, said.classes
    answers = torch.zeros(len(outputs), dtype=torch.int64, device=outputs.device) if answers is None else answers
    around = neighbours.surroundings(layers, calibration.squares, top, examples)
    # How much the labels of these examples contradict each other, and how far away they are.
    disagreement = calibration.disagreement(around.average)
    noise = calibration.noise(disagreement, ambiguity)
    distance_z = calibration.distances.z_scores(around.distances, around.nearest, answers)
    frequency = torch.full_like(distance_z, torch.nan)
    if calibration.pool is not None:
        vectors = neighbours.distance_embedding(layers)
        own = None if examples is None else neighbours.positions(examples)
        in_use = calibration.pool.frequency(vectors, own)
        frequency = in_use.ratio.to(distance_z)
        distance_z = joint_z(distance_z, in_use.z.to(distance_z))
    return Explanation(
        level=level,
        noise=noise,
        disagreement=disagreement,
        scarcity=calibration.scarcity(distance_z),
        noise_p=calibration.noise_p(around.average, around.effective),
        scarcity_p=calibration.scarcity_p(distance_z, ambiguity),
        probability=said.probability,
        rare=calibration.has_rare_answer(answers),
        ambiguity=ambiguity,
        frequency=frequency,
        ho=ho,
        hec3=hec3,
        check=around.check,
        near=around.near,
        source=calibration.source(disagreement, distance_z, level),
        doubt=calibration.doubt(noise, distance_z, ambiguity, level),
        noise_limit=calibration.noise_limit,
        disagreement_limit=calibration.disagreement_limit,
        scarcity_limit=calibration.scarcity_limit(level),
        source_limit=calibration.source_limit(level),
        ambiguity_limit=calibration.ambiguity_limit(level),
        noisy_everywhere=calibration.noisy_everywhere,
        often_undecided=calibration.often_undecided,
        classes=calibration.classes,
        notes=calibration.notes,
    )


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
