"""Where the doubt of a prediction comes from, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.data.batches import Inputs
from whence.display import Column, Shown, Table, count, places, rows_shown
from whence.influence.attribution import Terms, terms_of
from whence.influence.calibration import Calibration, Leaning
from whence.influence.fitted import Fitted, frame
from whence.linalg import largest

if TYPE_CHECKING:
    import pandas


CONFIDENT, NOISY, SCARCE, BOTH = "confident", "noisy labels nearby", "scarce data", "both"
VERDICTS = (CONFIDENT, NOISY, SCARCE, BOTH)
DOTS = dict(zip(VERDICTS, ("plain", "noise", "scarcity", "both"), strict=True))


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
        source: (m,) which way the doubt leans, above zero to noise, below to scarcity; see `Leaning`. `nan` where it
            was not looked at.
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
        usual = (
            f"leave-one-out residuals around it are {float(self.noise[number]):.2g} times the mean square "
            f"(p = {float(self.noise_p[number]):.2g}), its leverage {float(self.leverage[number]):.2g} is reached by "
            f"{float(self.scarcity_p[number]):.1%} of the training examples"
        )
        if float(self.noise_p[number]) <= 1.0 - self.level and not bool(self.noisier[number]):
            usual += "; training examples in places like this are no noisier than the average"
        advice = []
        if verdict in (NOISY, BOTH):
            advice.append(f"check the labels of training examples {_listing(self.check[number])}")
        if verdict in (SCARCE, BOTH):
            advice.append(f"collect examples near this input; the nearest now are {_listing(self.near[number])}")
        return f"{verdict}: {usual}." + "".join(f" {one[0].upper()}{one[1:]}." for one in advice)

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
        looks = []
        for row, verdict in enumerate(verdicts):
            check = f"check {_listing(self.check[row, :3])}" if verdict in (NOISY, BOTH) else ""
            near = f"near {_listing(self.near[row, :3])}" if verdict in (SCARCE, BOTH) else ""
            looks.append("; ".join(part for part in (check, near) if part))
        columns = (
            places(rows),
            Column("verdict", verdicts, left=True, dots=tuple(DOTS[verdict] for verdict in verdicts)),
            Column("noise p", tuple(f"{value:.2g}" for value in self.noise_p[:rows].tolist())),
            Column("scarcity p", tuple(f"{value:.2g}" for value in self.scarcity_p[:rows].tolist())),
            Column("HeC3/Ho", tuple(f"{value:.2f}" for value in self.ratio[:rows].tolist())),
            Column("check, collect near", tuple(looks), left=True),
        )
        counts = ", ".join(f"{self.verdicts.count(verdict)} {verdict}" for verdict in VERDICTS)
        words = (
            f"A p of at most {1 - self.level:.2g} makes a verdict, noise where HeC3/Ho of predict exceeds "
            f"{self.limit:.2f} too. In words: sentence(number)."
        )
        return Table(f"{count(m, 'prediction')}: {counts}", columns, f"{words}\n{more}".strip())


def explain(
    fitted: Fitted, inputs: Inputs, usual: Calibration, level: float, top: int, leaning: Leaning | None = None
) -> Explanation:
    """Explain the predictions of one batch; see `Tracer.explain`."""
    covariances = fitted.sandwich.predict(inputs).covariances
    leverage, ho, hec3 = (
        torch.diagonal(covariances[name], dim1=1, dim2=2).sum(1) for name in ("laplace", "ho", "hec3")
    )
    noisier = hec3 > usual.limit * ho
    parts = []
    for where, terms in terms_of(fitted, inputs):
        found = replace(_explain(terms, leverage[where], usual, level, top), noisier=noisier[where])
        if leaning is not None:
            found = replace(found, source=leaning.source(leaning.around(terms.size.square()), leverage[where]))
        parts.append(found)
    return join(parts)


def join(parts: Sequence[Explanation]) -> Explanation:
    """Several batches as one."""
    names = [name for name in parts[0].__dataclass_fields__ if name not in ("level", "limit")]
    joined: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
    return replace(parts[0], **joined)


def _explain(terms: Terms, leverage: Tensor, usual: Calibration, level: float, top: int) -> Explanation:
    ho, hec3 = terms.ho.sum(1), terms.hec3.sum(1)
    tiny = torch.finfo(ho.dtype).tiny
    ratio = torch.where(ho > 0, hec3 / ho.clamp_min(tiny), torch.ones_like(ho))
    squares = (terms.ho / ho.clamp_min(tiny).unsqueeze(1)).square().sum(1)
    effective = torch.where(squares > 0, 1.0 / squares.clamp_min(tiny), 1.0)
    few = min(top, terms.ho.shape[1])
    listed = largest(terms.hec3, few)[1], largest(terms.ho, few)[1]
    return judge(usual, level, leverage, (ho, hec3, ratio), effective, listed)


def judge(
    usual: Calibration,
    level: float,
    leverage: Tensor,
    variances: tuple[Tensor, Tensor, Tensor],
    effective: Tensor,
    listed: tuple[Tensor, Tensor],
) -> Explanation:
    """Set predictions against what is usual.

    Args:
        usual: what the training set says.
        level: one minus the share of false alarms.
        leverage: (m,) of the predictions.
        variances: (m,) Ho, HeC3 and their ratio.
        effective: (m,) number of training examples that carry Ho.
        listed: (m, top) examples whose labels to check, and those nearest.
    """
    ho, hec3, ratio = variances
    check, near = listed
    return Explanation(
        level=level,
        noise_p=usual.noise(ratio, effective),
        scarcity_p=usual.scarcity(leverage),
        noise=ratio / usual.mean if usual.mean > 0 else ratio,
        leverage=leverage,
        ratio=ratio,
        ho=ho,
        hec3=hec3,
        effective=effective,
        check=check,
        near=near,
        source=torch.full_like(ratio, float("nan")),
        noisier=ratio > usual.limit,
        limit=usual.limit,
    )


def _listing(examples: Tensor) -> str:
    return ", ".join(map(str, examples.tolist()))
