"""Which training examples carry the variance of a prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from whence.display import Column, Shown, Table, count, number, numbers, places, rows_shown
from whence.errors import InputError
from whence.ordering import largest
from whence.tangents.batches import Inputs

from .by_group import GroupShares, by_group
from .fitted import Fitted
from .tables import frame
from .terms import Terms, terms_of

if TYPE_CHECKING:
    import pandas

ESTIMATORS = ("hec3", "ho")


@dataclass(frozen=True)
class Shares:
    """The training examples with the largest shares of one estimator's variance, largest first.

    Attributes:
        variance: (m,) trace of the estimator's covariance, as `Tracer.predict` gives it.
        total: (m,) sum over all training examples. It is the variance itself for exact structures, the core and the
            sketch; EKFAC, KFAC and the diagonal approximate the meat too, and `gap` tells by how much.
        index: (m, t) position of the example in the training set.
        share: (m, t) of the total.
        alignment: (m, t) Frobenius norm of a_i = J F_lam^-1 J_i^T.
        pull: (m, t, k) f(x) - f_(-i)(x), how far the example holds the prediction from where it would be without it.
        effective: (m,) effective number of examples, 1 / sum of squared shares of all examples.
        matrix: (m, n) shares of all examples, if asked for.

    Examples:
        >>> one = torch.ones(1)
        >>> listed = {"index": torch.tensor([[4, 2]]), "share": torch.tensor([[0.5, 0.25]])}
        >>> rest = {"alignment": torch.ones(1, 2), "pull": torch.ones(1, 2, 1), "effective": 3 * one, "matrix": None}
        >>> found = Shares(variance=one, total=2 * one, **listed, **rest)
        >>> found.explained.tolist(), found.gap.tolist()
        ([0.75], [1.0])
    """

    variance: Tensor
    total: Tensor
    index: Tensor
    share: Tensor
    alignment: Tensor
    pull: Tensor
    effective: Tensor
    matrix: Tensor | None

    def rows(self, which: Tensor) -> Shares:
        """Those of some predictions."""
        parts = {name: value[which] for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **parts)

    @property
    def explained(self) -> Tensor:
        """(m,) share of the total that the listed examples carry together."""
        return self.share.sum(1)

    @property
    def gap(self) -> Tensor:
        """(m,) total / variance - 1: what the structure's quadratic form and the sum over examples disagree by."""
        return torch.where(self.variance > 0, self.total / self.variance.clamp_min(_tiny(self.variance)) - 1.0, 0.0)


@dataclass(frozen=True)
class Attribution(Shown):
    """For each prediction, the training examples that carry its variance.

    Attributes:
        hec3: by leave-one-out variance: examples whose absence would move the prediction.
        ho: by homoscedastic variance: examples the prediction rests on, whatever their labels.
        residuals: (n, k) residuals of the training examples.
        loo_residuals: (n, k) the same after leaving each out.
        leverage: (n, k) leverages.
        where: (m, 2) input and position of each prediction, where positions were chosen.
        alignments: (m, n) Frobenius norms of a_i = J F_lam^-1 J_i^T for all training examples, if asked for.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 40, dtype=torch.float64).unsqueeze(1)
        >>> net, y = torch.nn.Linear(1, 1, dtype=torch.float64), 2 * x + (99 * x).sin()
        >>> tracer = whence.fit(net, [(x, y)], ridge=0.1, recenter=True, progress=False)
        >>> found = tracer.attribute(30 * x[-1:], top=2)  # far to the right: the two ends hold it
        >>> sorted(found.hec3.index[0].tolist()), len(found)
        ([0, 39], 1)
    """

    hec3: Shares
    ho: Shares
    residuals: Tensor
    loo_residuals: Tensor
    leverage: Tensor
    where: Tensor | None = None
    alignments: Tensor | None = None

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.hec3.index)

    def shares(self, estimator: str = "hec3") -> Shares:
        """By the name of the estimator, "hec3" or "ho"."""
        if estimator not in ESTIMATORS:
            raise InputError(f"expected one of {', '.join(ESTIMATORS)}, got {estimator!r}.")
        return self.hec3 if estimator == "hec3" else self.ho

    def by(self, groups: Sequence[Any] | Tensor, estimator: str = "hec3") -> GroupShares:
        """Shares summed over groups of training examples; needs `tracer.attribute(x, matrix=True)`.

        Args:
            groups: n labels, sources, batches or the like, in the order of the training set.
            estimator: "hec3" for the groups whose labels move the prediction, "ho" for those it rests on.
        """
        return by_group(self.shares(estimator).matrix, groups)

    def rows(self, which: Tensor) -> Attribution:
        """Some of the predictions."""
        where, sizes = (None if one is None else one[which] for one in (self.where, self.alignments))
        return replace(self, hec3=self.hec3.rows(which), ho=self.ho.rows(which), where=where, alignments=sizes)

    def to_frame(self) -> pandas.DataFrame:
        """One row for each prediction, estimator and listed example; residuals and leverages as norms and traces."""
        columns: dict[str, list[Tensor | list[str]]] = {}
        for name in ESTIMATORS:
            shares = self.shares(name)
            m, t = shares.index.shape
            at = shares.index.reshape(-1)
            device = at.device
            rows: dict[str, Tensor | list[str]] = {
                "prediction": torch.arange(m, device=device).repeat_interleave(t),
                "estimator": [name] * (m * t),
                "rank": torch.arange(1, t + 1, device=device).repeat(m),
                "index": at,
                "share": shares.share.reshape(-1),
                "alignment": shares.alignment.reshape(-1),
                "pull": shares.pull.norm(dim=2).reshape(-1),
                "residual": self.residuals.norm(dim=1)[at],
                "loo_residual": self.loo_residuals.norm(dim=1)[at],
                "leverage": self.leverage.sum(1)[at],
            }
            if self.where is not None:
                rows["input"], rows["position"] = self.where.repeat_interleave(t, dim=0).unbind(1)
            for key, value in rows.items():
                columns.setdefault(key, []).append(value)
        return frame(columns)

    def __repr__(self) -> str:
        """Sizes and medians."""
        m, t = self.hec3.index.shape
        explained, effective, gap = (
            float(values.median()) for values in (self.hec3.explained, self.hec3.effective, self.hec3.gap.abs())
        )
        return (
            f"Attribution({m} predictions, {t} of {len(self.residuals)} training examples each; the listed carry "
            f"{explained:.0%} of HeC3, effective number {effective:.3g}, gap {gap:.2g}; medians)"
        )

    def _table(self) -> Table:
        m, t = self.hec3.index.shape
        rows, more = rows_shown(m, "to_frame()")
        effective = self.hec3.effective[:rows].tolist()
        explained = self.hec3.explained[:rows].tolist()
        columns = (
            places(rows),
            Column("HeC3", numbers(self.hec3.total[:rows].tolist())),
            Column("effective", numbers(effective)),
            Column("listed", tuple(f"{share:.0%}" for share in explained), bars=tuple(explained)),
            Column("largest shares of HeC3 (training example: share)", _largest_shares(self.hec3, rows), left=True),
        )
        title = f"{count(m, 'prediction')}, the {t} largest shares of {count(len(self.residuals), 'training example')}"
        gap = float(self.hec3.gap.abs().max()) if m else 0.0
        off = f" The shares add up to the variance within {number(gap)}." if gap > 1e-3 else ""
        note = f"effective: number of examples that carry HeC3; listed: what the {t} carry.{off}\n{more}"
        return Table(title, columns, note.strip())


def attribute(fitted: Fitted, inputs: Inputs, top: int, matrix: bool, apart: bool = False) -> Attribution:
    """Attribute the variances of one batch; see `Tracer.attribute`.

    Args:
        fitted: what was fitted.
        inputs: the batch, or a view of its outputs.
        top: how many examples to list.
        matrix: keep all shares and alignments.
        apart: each output that is seen is a prediction of its own, one input's after the other's.
    """
    covariances = fitted.sandwich.predict(inputs).covariances
    single = {name: torch.diagonal(covariances[name], dim1=1, dim2=2) for name in ESTIMATORS}
    variances = {name: value.reshape(-1) if apart else value.sum(1) for name, value in single.items()}
    parts: dict[str, list[Shares]] = {name: [] for name in ESTIMATORS}
    sizes: list[Tensor] = []
    for where, terms in terms_of(fitted, inputs, apart):
        for name in ESTIMATORS:
            parts[name].append(_largest(terms, name, variances[name][where], top, matrix))
        sizes += [terms.size] if matrix else []
    joined = {name: _join(parts[name]) for name in ESTIMATORS}
    known = fitted.residuals, fitted.loo_residuals, fitted.leverage
    return Attribution(joined["hec3"], joined["ho"], *known, alignments=torch.cat(sizes) if sizes else None)


def join(parts: Sequence[Attribution]) -> Attribution:
    """Several batches as one."""
    first = parts[0]
    hec3, ho = _join([part.hec3 for part in parts]), _join([part.ho for part in parts])
    places = [part.where for part in parts if part.where is not None]
    sizes = [part.alignments for part in parts if part.alignments is not None]
    where, joined = (torch.cat(some) if some else None for some in (places, sizes))
    return replace(first, hec3=hec3, ho=ho, where=where, alignments=joined)


def _largest(terms: Terms, name: str, variance: Tensor, top: int, matrix: bool) -> Shares:
    values: Tensor = getattr(terms, name)
    total = values.sum(1)
    shares = values / total.clamp_min(_tiny(total)).unsqueeze(1)
    share, index = largest(shares, min(top, shares.shape[1]))
    squares = shares.square().sum(1)
    return Shares(
        variance=variance,
        total=total,
        index=index,
        share=share,
        alignment=terms.size.gather(1, index),
        pull=terms.pull.gather(1, index.unsqueeze(2).expand(-1, -1, terms.pull.shape[2])),
        effective=torch.where(squares > 0, 1.0 / squares.clamp_min(_tiny(squares)), 0.0),
        matrix=shares if matrix else None,
    )


def _largest_shares(shares: Shares, rows: int, most: int = 4) -> tuple[str, ...]:
    pairs = zip(shares.index[:rows, :most].tolist(), shares.share[:rows, :most].tolist(), strict=True)
    return tuple(", ".join(f"{at}: {share:.0%}" for at, share in zip(*row, strict=True)) for row in pairs)


def _join(parts: Sequence[Shares]) -> Shares:
    if len(parts) == 1:
        return parts[0]

    def cat(name: str) -> Tensor:
        return torch.cat([getattr(part, name) for part in parts])

    names = ("variance", "total", "index", "share", "alignment", "pull", "effective")
    joined = {name: cat(name) for name in names}
    return Shares(**joined, matrix=None if parts[0].matrix is None else cat("matrix"))


def _tiny(values: Tensor) -> float:
    return torch.finfo(values.dtype).tiny
