"""Explanation: whether a prediction is to be trusted, and if not, whether noisy labels or scarce data are the cause.

Predictions are set against the training examples, each in the fit without it. `Calibration` turns leverage and
HeC3 / Ho into p-values, from which `Explanation` makes its verdicts; `SourceScore` says which of the two causes stands
out more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.data.batches import Inputs, concatenate, take, tensors_of
from whence.display import Column, Shown, Table, count, number, numbers, places, rows_shown
from whence.influence.fitted import (
    Fitted,
    divide,
    effective_number,
    evenly_spaced,
    frame,
    identity_minus_hat,
    join_batches,
    leave_one_out_leverage,
    training_examples,
    using_model,
    variance_terms,
)
from whence.linalg import largest

if TYPE_CHECKING:
    import pandas

CONFIDENT, NOISY, SCARCE, BOTH = "confident", "noisy labels nearby", "scarce data", "both"
VERDICTS = (CONFIDENT, NOISY, SCARCE, BOTH)
DOTS = dict(zip(VERDICTS, ("plain", "noise", "scarcity", "both"), strict=True))

CALIBRATION_EXAMPLES = 1000
"""Training examples, evenly spaced, that are predicted for `Calibration.limit`."""

SOURCE_EXAMPLES = 200
"""Training examples, evenly spaced, that give `SourceScore` its scale."""

PREDICTED_AT_ONCE = 100
"""Training examples that are predicted in one go."""

LARGEST = 1e150
"""Squared residuals over the noise are taken for at most this, so that their variance is finite: where the network is
certain of a wrong label, the noise is as small as the label's probability."""

SCARCITY_WEIGHT = 0.5
"""How much excess leverage counts against noise in `SourceScore`; chosen on development draws of docs/tracing.md."""


@dataclass(frozen=True)
class Explanation(Shown):
    """A verdict for each prediction, with the numbers behind it.

    Attributes:
        level: a prediction is called noisy, or scarce, where its p-value is at most 1 - level, and noisy only where it
            is `noisier` too. Of predictions like the training examples, with noise like everywhere, at most that share
            is called so by chance.
        noise_p: (m,) how often leave-one-out residuals as large would gather around the input by chance, if noise were
            the same everywhere.
        scarcity_p: (m,) share of training examples whose leave-one-out leverage is at least as large.
        noise: (m,) leave-one-out residuals around the input, squared, over their mean in the training set.
        leverage: (m,) trace of J F_lam^-1 J^T.
        ratio: (m,) HeC3 / Ho, summed over training examples.
        ho: (m,) trace of Ho.
        hec3: (m,) trace of HeC3.
        effective: (m,) effective number of training examples in Ho.
        check: (m, t) training examples with the largest shares of HeC3: labels to check first.
        near: (m, t) training examples with the largest shares of Ho: what the prediction rests on.
        source: (m,) which way the doubt leans, above zero to noise, below to scarcity; see `SourceScore`.
            `nan` where it was not computed.
        noisier: (m,) whether training examples with as large a HeC3 / Ho have more noise than the average one: that of
            `predict`, which differs from `ratio` where a structure is approximate.
        limit: the HeC3 / Ho at which that begins, see `Calibration`.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
        >>> net, y = torch.nn.Linear(1, 1, dtype=torch.float64), 2 * x + (99 * x).sin()
        >>> tracer = whence.fit(net, [(x, y)], ridge=0.1, recenter=True, progress=False)
        >>> tracer.explain(torch.tensor([[0.0], [30.0]], dtype=torch.float64)).verdicts
        ('confident', 'scarce data')
    """

    level: float
    noise_p: Tensor
    scarcity_p: Tensor
    noise: Tensor
    leverage: Tensor
    ratio: Tensor
    ho: Tensor
    hec3: Tensor
    effective: Tensor
    check: Tensor
    near: Tensor
    source: Tensor
    noisier: Tensor
    limit: float

    @classmethod
    def of(
        cls,
        calibration: Calibration,
        level: float,
        leverage: Tensor,
        variances: tuple[Tensor, Tensor, Tensor],
        effective: Tensor,
        listed: tuple[Tensor, Tensor],
    ) -> Explanation:
        """Set predictions against the training examples.

        Args:
            calibration: of the fit.
            level: one minus the share of false alarms.
            leverage: (m,) of the predictions.
            variances: (m,) Ho, HeC3 and their ratio.
            effective: (m,) effective number of training examples in Ho.
            listed: (m, top) examples whose labels to check, and those nearest.
        """
        ho, hec3, ratio = variances
        check, near = listed
        return cls(
            level=level,
            noise_p=calibration.noise(ratio, effective),
            scarcity_p=calibration.scarcity(leverage),
            noise=ratio / calibration.mean if calibration.mean > 0 else ratio,
            leverage=leverage,
            ratio=ratio,
            ho=ho,
            hec3=hec3,
            effective=effective,
            check=check,
            near=near,
            source=torch.full_like(ratio, float("nan")),
            noisier=ratio > calibration.limit,
            limit=calibration.limit,
        )

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.noise_p)

    @property
    def noisy(self) -> Tensor:
        """(m,) whether labels nearby are noisier than the average, by more than chance."""
        return (self.noise_p <= 1.0 - self.level) & self.noisier

    @property
    def scarce(self) -> Tensor:
        """(m,) whether there are fewer training examples nearby than around training examples."""
        return self.scarcity_p <= 1.0 - self.level

    @property
    def verdicts(self) -> tuple[str, ...]:
        """A verdict for each prediction, one of "confident", "noisy labels nearby", "scarce data" and "both"."""
        codes = self.noisy.long() + 2 * self.scarce.long()
        return tuple(VERDICTS[code] for code in codes.tolist())

    def sentence(self, number: int) -> str:
        """What to make of one prediction."""
        verdict = VERDICTS[int(self.noisy[number]) + 2 * int(self.scarce[number])]
        numbers = (
            f"leave-one-out residuals around it are {float(self.noise[number]):.2g} times the mean square "
            f"(p = {float(self.noise_p[number]):.2g}), its leverage {float(self.leverage[number]):.2g} is reached by "
            f"{float(self.scarcity_p[number]):.1%} of the training examples"
        )
        if float(self.noise_p[number]) <= 1.0 - self.level and not bool(self.noisier[number]):
            numbers += "; training examples in places like this are no noisier than the average"
        advice = []
        if verdict in (NOISY, BOTH):
            advice.append(f"check the labels of training examples {_listing(self.check[number])}")
        if verdict in (SCARCE, BOTH):
            advice.append(f"collect examples near this input; the nearest now are {_listing(self.near[number])}")
        return f"{verdict}: {numbers}." + "".join(f" {one[0].upper()}{one[1:]}." for one in advice)

    def to_frame(self) -> pandas.DataFrame:
        """One row a prediction."""
        names = ("noise_p", "scarcity_p", "noise", "leverage", "ratio", "ho", "hec3", "effective", "source")
        columns: dict[str, Sequence[Tensor | list[str]]] = {"verdict": [list(self.verdicts)]}
        columns.update({name: [getattr(self, name)] for name in names})
        columns["check"] = [[_listing(row) for row in self.check]]
        columns["near"] = [[_listing(row) for row in self.near]]
        return frame(columns)

    def __repr__(self) -> str:
        """How many of each."""
        verdicts = self.verdicts
        counts = ", ".join(f"{verdict}: {verdicts.count(verdict)}" for verdict in VERDICTS)
        return f"Explanation({len(self)} predictions; {counts})"

    def _table(self) -> Table:
        m = len(self)
        rows, more = rows_shown(m, "sentence(number), to_frame()")
        verdicts = self.verdicts[:rows]
        actions = []
        for row, verdict in enumerate(verdicts):
            check = f"check {_listing(self.check[row, :3])}" if verdict in (NOISY, BOTH) else ""
            near = f"near {_listing(self.near[row, :3])}" if verdict in (SCARCE, BOTH) else ""
            actions.append("; ".join(one for one in (check, near) if one))
        columns = (
            places(rows),
            Column("verdict", verdicts, left=True, dots=tuple(DOTS[verdict] for verdict in verdicts)),
            Column("noise p", tuple(f"{value:.2g}" for value in self.noise_p[:rows].tolist())),
            Column("scarcity p", tuple(f"{value:.2g}" for value in self.scarcity_p[:rows].tolist())),
            Column("HeC3/Ho", tuple(f"{value:.2f}" for value in self.ratio[:rows].tolist())),
            Column("check, collect near", tuple(actions), left=True),
        )
        counts = ", ".join(f"{self.verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
        words = (
            f"A p of at most {1 - self.level:.2g} makes a verdict, noise where HeC3/Ho of predict exceeds "
            f"{self.limit:.2f} too. In words: sentence(number)."
        )
        return Table(f"{count(m, 'prediction')}: {counts}", columns, f"{words}\n{more}".strip())


def _listing(examples: Tensor) -> str:
    return ", ".join(map(str, examples.tolist()))


def explain(
    fitted: Fitted,
    inputs: Inputs,
    calibration: Calibration,
    level: float,
    top: int,
    source_score: SourceScore | None = None,
) -> Explanation:
    """Explain the predictions of one batch; see `Tracer.explain`."""
    covariances = fitted.sandwich.predict(inputs).covariances
    leverage = _traces(covariances["laplace"])
    noisier = _traces(covariances["hec3"]) > calibration.limit * _traces(covariances["ho"])
    few = min(top, fitted.problem.n)
    found = []
    for which, terms in variance_terms(fitted, inputs):
        ho, hec3 = terms.ho.sum(1), terms.hec3.sum(1)
        effective = effective_number(divide(terms.ho, ho.unsqueeze(1), 0.0), 1.0)
        listed = largest(terms.hec3, few)[1], largest(terms.ho, few)[1]
        variances = ho, hec3, divide(hec3, ho, 1.0)
        one = Explanation.of(calibration, level, leverage[which], variances, effective, listed)
        if source_score is not None:
            local_noise = source_score.local_noise(terms.alignment.square())
            one = replace(one, source=source_score.score(local_noise, leverage[which]))
        found.append(replace(one, noisier=noisier[which]))
    return join_batches(found)


def _traces(matrices: Tensor) -> Tensor:
    return torch.diagonal(matrices, dim1=1, dim2=2).sum(1)


@dataclass(frozen=True)
class Calibration(Shown):
    """Reference distributions of leverage and of HeC3 / Ho, from leave-one-out quantities of the training examples.

    Scarcity: the leverage J F_lam^-1 J^T of a new input is set against the leverages that training examples have in
    fits without themselves, J_i F_(-i)^-1 J_i^T = (I - Q_i L_i)^-1 Q_i with Q_i = J_i F_lam^-1 J_i^T. A new input from
    the distribution of the training inputs is as likely to rank anywhere among them.

    Noise: HeC3 / Ho is a mean of squared leave-one-out residuals around the input, v_i = |u_i|^2 / tr Sigma_i, weighted
    by shares of Ho. If noise were the same everywhere, the v_i could be shuffled among the examples. Shuffled, the mean
    has expectation mean(v) and variance var(v) (sum of squared shares - 1 / n), exactly for one output; a gamma
    distribution with these moments gives the p-value of the ratio.

    A significant difference need not be large, and with many examples hardly any is insignificant. So the ratio must
    also be one at which training examples, each in the fit without it, have more noise of their own than the average:
    residual times leave-one-out residual, an unbiased estimate of noise in a linear model, as an increasing function of
    HeC3 / Ho (isotonic regression) exceeds its mean from `limit` on.

    Attributes:
        leverages: (n,) traces of the leave-one-out leverages, ascending.
        mean: of the v_i.
        variance: of the v_i.
        limit: HeC3 / Ho from which on training examples are noisier than average; zero where it was not computed, as
            for networks that answer at several positions.
    """

    leverages: Tensor
    mean: float
    variance: float
    limit: float = 0.0

    @classmethod
    def of(cls, fitted: Fitted, sample: int = CALIBRATION_EXAMPLES) -> Calibration:
        """From the leverage blocks, the leave-one-out residuals, and predictions for some training examples.

        Args:
            fitted: the fit.
            sample: how many training examples, evenly spaced, to predict.
        """
        counted = fitted.counted
        leverages = _traces(leave_one_out_leverage(fitted)[counted]).sort().values
        noise = fitted.noise_variance[counted].double()
        squares = fitted.adjusted.hec3.double().square().sum(1)[counted]
        values = (squares[noise > 0] / noise[noise > 0]).clamp_max(LARGEST)
        if len(values) < 2:  # no noise to compare with
            return cls(leverages, 1.0, 0.0)
        return cls(leverages, float(values.mean()), float(values.var()), _noise_limit(fitted, sample))

    def __repr__(self) -> str:
        """Sizes."""
        return (
            f"Calibration({count(len(self.leverages), 'leave-one-out leverage')}; squared residuals over noise: mean "
            f"{number(self.mean)}, variance {number(self.variance)})"
        )

    def _table(self) -> Table:
        shares = (0.05, 0.25, 0.5, 0.75, 0.95)
        at = torch.tensor(shares, dtype=self.leverages.dtype, device=self.leverages.device)
        found = torch.quantile(self.leverages, at).tolist() if len(self.leverages) else [float("nan")] * len(shares)
        columns = (
            Column("training examples below", tuple(f"{share:.0%}" for share in shares)),
            Column("leave-one-out leverage", numbers(found)),
        )
        words = f"Squared leave-one-out residuals over the noise: mean {number(self.mean)}, variance "
        title = f"Leave-one-out leverages of {count(len(self.leverages), 'training example')}"
        return Table(title, columns, f"{words}{number(self.variance)}.")

    def scarcity(self, leverage: Tensor) -> Tensor:
        """(m,) share of training examples, the input counted among them, whose leverage is at least as large."""
        below = torch.searchsorted(self.leverages, leverage)
        return (1.0 + len(self.leverages) - below) / (1.0 + len(self.leverages))

    def noise(self, ratio: Tensor, effective: Tensor) -> Tensor:
        """(m,) how often shuffled residuals would give a ratio HeC3 / Ho at least as large.

        Args:
            ratio: (m,) HeC3 / Ho.
            effective: (m,) effective numbers of examples in Ho.
        """
        if self.mean <= 0:
            return torch.ones_like(ratio)
        concentration = (1.0 / effective.clamp_min(1.0) - 1.0 / len(self.leverages)).clamp_min(0.0)
        variation = (self.variance**0.5 / self.mean) ** 2  # squares of these numbers may be too large
        spread = (variation * concentration).clamp_min(1e-8)
        chance: Tensor = torch.special.gammaincc(1.0 / spread, ratio / self.mean / spread)
        return chance


def _noise_limit(fitted: Fitted, sample: int) -> float:
    """`Calibration.limit` from some training examples."""
    if not fitted.all_outputs:
        return 0.0
    index = evenly_spaced((fitted.counted & (fitted.noise_variance > 0)).nonzero().squeeze(1), sample)
    if len(index) < 3:
        return 0.0
    own = (own_noise(fitted) / fitted.noise_variance).clamp_max(LARGEST)
    with using_model(fitted):
        return isotonic_threshold(leave_one_out_ratios(fitted, index), own[index])


def own_noise(fitted: Fitted) -> Tensor:
    """(n,) e_i^T u_i, residual times leave-one-out residual: its expectation is the noise, in a linear model."""
    return (fitted.weighted_residuals * fitted.adjusted.hec3).sum(1).clamp_min(0.0)


def isotonic_threshold(x: Tensor, y: Tensor) -> float:
    """The x (s,) from which on the isotonic regression of y (s,) on x exceeds the mean of y.

    No other threshold gathers as much of y above its mean beyond it. The largest x, where y does not increase.

    Examples:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0, 9.0])
        >>> isotonic_threshold(x, torch.tensor([0.0, 1.0, 0.0, 1.0, 6.0, 4.0]))
        6.0
    """
    order = x.argsort(stable=True)
    values = x[order]
    gathered = (y - y.mean())[order].cumsum(0)[:-1]
    least = int(gathered.argmin())
    if float(gathered[least]) >= 0.0:
        return float(values[-1])
    return float(values[least] + values[least + 1]) / 2


def leave_one_out_ratios(fitted: Fitted, index: Tensor) -> Tensor:
    """(s,) HeC3 / Ho at some training examples, each in the fit without it; within `using_model`."""
    found = torch.ones(fitted.problem.n, dtype=fitted.problem.dtype, device=index.device)
    for which, inputs in _by_shape(fitted, index):
        for low in range(0, len(which), PREDICTED_AT_ONCE):
            some = which[low : low + PREDICTED_AT_ONCE]
            covariances = fitted.sandwich.predict(take(inputs, slice(low, low + len(some)))).covariances
            ho, hec3 = (_variance_without(fitted, some, covariances[name], name) for name in ("ho", "hec3"))
            found[some] = divide(hec3, ho, 1.0)
    return found[index]


def _variance_without(fitted: Fitted, index: Tensor, covariances: Tensor, name: str) -> Tensor:
    """(s,) traces of the covariances C_i (s, k, k) of training examples' predictions in the fits without them.

    With Q_i = J_i F_lam^-1 J_i^T and the Hessian L_i of its loss, an example adds Q_i W_i W_i^T Q_i^T to C_i; in the
    fit without it what is left of C_i is (I - Q_i L_i)^-1 C_i (I - L_i Q_i)^-1. An approximate curvature behaves as if
    it did not contain the example: there nothing is taken away.
    """
    if fitted.loo.policy != "exact":
        return _traces(covariances).clamp_min(0.0)
    blocks, roots = fitted.bread.leverage_blocks[index], fitted.meats.roots[name]
    own = blocks @ (roots if len(roots) == 1 else roots[index])
    left = identity_minus_hat(fitted, index)
    half = torch.linalg.solve(left, covariances.to(blocks.dtype) - own @ own.mT)
    return _traces(torch.linalg.solve(left, half.mT)).clamp_min(0.0)


def _by_shape(fitted: Fitted, index: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """Yield (which training examples, their inputs): as many together as have the same shapes."""
    groups: dict[tuple[torch.Size, ...], list[tuple[Tensor, Inputs]]] = {}
    for which, inputs, _ in training_examples(fitted, index, "calibration"):
        shapes = tuple(leaf.shape[1:] for leaf in tensors_of(inputs))
        groups.setdefault(shapes, []).append((which, inputs))
    for group in groups.values():
        yield torch.cat([which for which, _ in group]), concatenate([inputs for _, inputs in group])


@dataclass(frozen=True)
class SourceScore:
    """Noise against scarcity on one scale: that of the training examples, each in the fit without it.

    Local noise: N(x) = sum_i w_i e_i^T u_i / sum_i w_i tr Sigma_i over the training examples. The product of residual
    and leave-one-out residual has the noise for its expectation, where the square of either has not. The weights
    w_i = |a_i|^2 / q_i are squared correlations of the predictions at x and at x_i, up to a factor that all share:
    alignments over leave-one-out leverages, so that examples of large leverage, which pull at everything, have no
    weight where they are not near.

    Scarcity: the leverage q(x). Both as logarithms in standard deviations from the mean of the training examples, z_N
    and z_q. Where leverage and noise go together in the training set (correlation r, at least zero: a network that has
    learned noisy labels one by one has high leverage there), a high leverage says less: what counts is by how much
    more than one standard deviation it exceeds its regression on the noise, times the share of its variance that noise
    does not explain, and half as much as noise.

        z_N - (1 - r^2) / 2 max(z_q - r z_N - 1, 0)

    Attributes:
        own_noise: (n,) e_i^T u_i.
        noise_variance: (n,) tr Sigma_i.
        leverages: (n,) leave-one-out leverages, traces.
        means: of log N and log q.
        deviations: their standard deviations.
        correlation: r, zero where it is negative.
    """

    own_noise: Tensor
    noise_variance: Tensor
    leverages: Tensor
    means: tuple[float, float] = (0.0, 0.0)
    deviations: tuple[float, float] = (1.0, 1.0)
    correlation: float = 0.0

    @classmethod
    def of(cls, fitted: Fitted) -> SourceScore | None:
        """From the alignments of some training examples with all; within `using_model`.

        `None` for sketched fits and networks that answer at several positions, where only some outputs are looked at;
        and where there is no noise, or no leverage, to compare.
        """
        if not fitted.all_outputs or fitted.problem.n < 3:
            return None
        leverages = _traces(leave_one_out_leverage(fitted))
        index = evenly_spaced((fitted.counted & (leverages > 0)).nonzero().squeeze(1), SOURCE_EXAMPLES)
        plain = cls(own_noise(fitted), fitted.noise_variance, leverages)
        return plain.standardized(plain.local_noise_without(fitted, index), leverages[index])

    def standardized(self, noise: Tensor, leverages: Tensor) -> SourceScore | None:
        """The same with the scale of some examples: their local noise (s,) and leverages (s,), each left out."""
        pair = torch.stack([noise, leverages])
        pair = pair[:, (pair > 0).all(0)].log()
        if pair.shape[1] < 3:
            return None
        deviations = pair.std(1)
        if not bool((deviations > 1e-6).all()):
            return None
        (noise_mean, leverage_mean), (noise_std, leverage_std) = pair.mean(1).tolist(), deviations.tolist()
        correlation = float(torch.corrcoef(pair)[0, 1].clamp(0.0, 1.0))
        return replace(
            self, means=(noise_mean, leverage_mean), deviations=(noise_std, leverage_std), correlation=correlation
        )

    def local_noise(self, squared_alignments: Tensor) -> Tensor:
        """(m,) N(x) of some inputs, from the squared Frobenius norms (m, n) of their alignments."""
        weights = squared_alignments * divide(torch.ones_like(self.leverages), self.leverages, 0.0)
        variance = (weights @ self.noise_variance).clamp_min(torch.finfo(weights.dtype).tiny)
        return (weights @ self.own_noise) / variance

    def local_noise_without(self, fitted: Fitted, index: Tensor) -> Tensor:
        """(s,) N(x_i) of some training examples, each in the fit without it; within `using_model`."""
        found = torch.zeros_like(self.leverages)
        for which, inputs in _by_shape(fitted, index):
            for rows, chunks in fitted.bread.alignments(inputs):
                squares = torch.cat([aligned.square().sum((1, 3)).to(found.dtype) for _, aligned in chunks], dim=1)
                squares[torch.arange(len(squares), device=index.device), which[rows]] = 0.0
                found[which[rows]] = self.local_noise(squares)
        return found[index]

    def score(self, noise: Tensor, leverage: Tensor) -> Tensor:
        """(m,) above zero where noise stands out, below where scarcity does, from local noise and leverage (m,)."""
        z_noise, z_leverage = (
            (value.clamp_min(torch.finfo(value.dtype).tiny).log() - mean) / deviation
            for value, mean, deviation in zip((noise, leverage), self.means, self.deviations, strict=True)
        )
        excess = (z_leverage - self.correlation * z_noise - 1.0).clamp_min(0.0)
        return z_noise - SCARCITY_WEIGHT * (1.0 - self.correlation**2) * excess
