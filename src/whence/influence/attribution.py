"""Attribution: which training examples carry the variance of a prediction.

Ho and HeC3 are sums over training examples, so each term is that example's share; see `variance_terms`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from whence.data.batches import Batches, Inputs, batches_of, combine
from whence.data.targets import targets_at
from whence.display import Column, Shown, Table, count, number, numbers, places, rows_shown
from whence.errors import InputError, ShapeError
from whence.influence.fitted import (
    Fitted,
    Terms,
    divide,
    for_each_batch,
    join_batches,
    predicted_outputs,
    read_numbers,
    using_model,
    variance_terms,
)
from whence.jacobian.functionals import OutputMixtures, SelectedOutputs
from whence.jacobian.leaves import LeafSum
from whence.linalg import largest
from whence.results import frame, mask_of_outputs

if TYPE_CHECKING:
    import pandas

ESTIMATORS = ("hec3", "ho")

Positions = Literal["each"] | Sequence[int] | Tensor  # every position; or some, from 0, or from the end if negative
POSITIONS_AT_ONCE = 64  # positions of an input that are processed together, each with a backward pass


@dataclass(frozen=True)
class Shares:
    """The training examples with the largest shares of one estimator's variance, largest first.

    Attributes:
        variance: (m,) trace of the estimator's covariance, as in `Tracer.predict`.
        total: (m,) sum over all training examples. For exact structures, the core and the sketch it is the variance
            itself. EKFAC, KFAC and the diagonal approximate the meat too, and `gap` says by how much.
        index: (m, t) position of the example in the training set.
        share: (m, t) share of the total.
        pull: (m, t, k) f(x) - f_(-i)(x), how far the example moves the prediction from where it would be without it.
        effective: (m,) effective number of examples, 1 / sum of squared shares of all examples.
        matrix: (m, n) shares of all examples, if requested.

    Examples:
        >>> one = torch.ones(1)
        >>> listed = {"index": torch.tensor([[4, 2]]), "share": torch.tensor([[0.5, 0.25]])}
        >>> rest = {"pull": torch.ones(1, 2, 1), "effective": 3 * one, "matrix": None}
        >>> found = Shares(variance=one, total=2 * one, **listed, **rest)
        >>> found.explained.tolist(), found.gap.tolist()
        ([0.75], [1.0])
    """

    variance: Tensor
    total: Tensor
    index: Tensor
    share: Tensor
    pull: Tensor
    effective: Tensor
    matrix: Tensor | None

    @property
    def explained(self) -> Tensor:
        """(m,) share of the total that the listed examples carry together."""
        return self.share.sum(1)

    @property
    def gap(self) -> Tensor:
        """(m,) total / variance - 1: how much the sum over examples differs from the structure's quadratic form."""
        return divide(self.total, self.variance, 1.0) - 1.0


@dataclass(frozen=True)
class Attribution(Shown):
    """For each prediction, the training examples that carry its variance.

    Attributes:
        hec3: by leave-one-out variance: examples whose absence would move the prediction.
        ho: by homoscedastic variance: examples that support the prediction, whatever their labels.
        examples: number of training examples.
        where: (m, 2) input and position of each prediction, if positions were chosen.

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
    examples: int
    where: Tensor | None = None

    def __len__(self) -> int:
        return len(self.hec3.index)

    def shares(self, estimator: str = "hec3") -> Shares:
        """The shares for an estimator, "hec3" or "ho"."""
        if estimator not in ESTIMATORS:
            raise InputError(f"expected one of {', '.join(ESTIMATORS)}, got {estimator!r}.")
        return self.hec3 if estimator == "hec3" else self.ho

    def by(self, groups: Iterable[Any], estimator: str = "hec3") -> pandas.DataFrame:
        """Sum shares over groups of training examples: one row per prediction, one column per group.

        Groups are sorted if possible. Needs `tracer.attribute(x, matrix=True)`.

        Args:
            groups: n labels, sources, batches or the like, in the order of the training set.
            estimator: "hec3" for the groups whose labels move the prediction, "ho" for those that support it.
        """
        shares = self.shares(estimator).matrix
        if shares is None:
            raise InputError(
                "expected the shares of all training examples to sum over groups, got the largest ones only. Compute "
                "them: tracer.attribute(x, matrix=True)."
            )
        listed = groups.tolist() if hasattr(groups, "tolist") else list(groups)  # tensors, arrays, columns of tables
        if hasattr(groups, "tolist") and (not isinstance(listed, list) or any(isinstance(one, list) for one in listed)):
            raise ShapeError("expected groups in one dimension, one for each training example.")
        if len(listed) != (n := shares.shape[1]):
            raise ShapeError(f"expected a group for each of the {n} training examples, in order, got {len(listed)}.")
        names = list(dict.fromkeys(listed))
        with suppress(TypeError):  # names of mixed types cannot be sorted: keep their order
            names = sorted(names)
        place = {name: at for at, name in enumerate(names)}
        members = torch.tensor([place[name] for name in listed], device=shares.device)
        summed = shares.new_zeros(len(shares), len(names)).index_add_(1, members, shares)
        return frame(dict(zip(names, summed.T, strict=True)))

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per prediction, estimator and listed example; more about these: `Tracer.training_frame`."""
        parts = []
        for name in ESTIMATORS:
            shares = self.shares(name)
            (m, t), at = shares.index.shape, shares.index.flatten()
            rows = {
                "prediction": torch.arange(m, device=at.device).repeat_interleave(t),
                "rank": torch.arange(1, t + 1, device=at.device).repeat(m),
                "index": at,
                "share": shares.share.flatten(),
                "pull": shares.pull.norm(dim=2).flatten(),
            }
            if self.where is not None:
                rows["input"], rows["position"] = self.where.repeat_interleave(t, dim=0).unbind(1)
            parts.append(rows)
        table = frame(join_batches(parts))
        table.insert(1, "estimator", [name for name in ESTIMATORS for _ in parts[0]["index"]])
        return table

    def __repr__(self) -> str:
        (m, t), hec3 = self.hec3.index.shape, self.hec3
        explained, effective, gap = (float(one.median()) for one in (hec3.explained, hec3.effective, hec3.gap.abs()))
        return (
            f"Attribution({m} predictions, {t} of {self.examples} training examples each; the listed carry "
            f"{explained:.0%} of HeC3, effective number {effective:.3g}, gap {gap:.2g}; medians)"
        )

    def _table(self) -> Table:
        (m, t), hec3 = self.hec3.index.shape, self.hec3
        rows, more = rows_shown(m, "to_frame()")
        explained = hec3.explained[:rows].tolist()
        pairs = zip(hec3.index[:rows, :4].tolist(), hec3.share[:rows, :4].tolist(), strict=True)
        shares = tuple(", ".join(f"{at}: {share:.0%}" for at, share in zip(*row, strict=True)) for row in pairs)
        columns = (
            places(rows),
            Column("HeC3", numbers(hec3.total[:rows].tolist())),
            Column("effective", numbers(hec3.effective[:rows].tolist())),
            Column("listed", tuple(f"{share:.0%}" for share in explained), bars=tuple(explained)),
            Column("largest shares of HeC3 (training example: share)", shares, left=True),
        )
        title = f"{count(m, 'prediction')}, the {t} largest shares of {count(self.examples, 'training example')}"
        gap = float(hec3.gap.abs().max()) if m else 0.0
        off = f" The shares add up to the variance within {number(gap)}." if gap > 1e-3 else ""
        note = f"effective: number of examples that carry HeC3; listed: what the {t} carry.{off}\n{more}"
        return Table(title, columns, note.strip())


def attribute(fitted: Fitted, inputs: Inputs, top: int, matrix: bool, per_output: bool = False) -> Attribution:
    """Attribute the variances of one batch, or of functionals of its outputs; see `Tracer.attribute`.

    With `per_output`, each visible output is a prediction of its own, ordered by input.
    """
    covariances = fitted.sandwich.predict(inputs).covariances
    diagonals = {name: torch.diagonal(covariances[name], dim1=1, dim2=2) for name in ESTIMATORS}
    variances = {name: one.reshape(-1) if per_output else one.sum(1) for name, one in diagonals.items()}
    found = []
    for which, terms in variance_terms(fitted, inputs, per_output):
        hec3, ho = (_largest_shares(terms, name, variances[name][which], top, matrix) for name in ESTIMATORS)
        found.append(Attribution(hec3, ho, fitted.problem.n))
    return join_batches(found)


def _largest_shares(terms: Terms, name: str, variance: Tensor, top: int, matrix: bool) -> Shares:
    values: Tensor = getattr(terms, name)
    total = values.sum(1)
    shares = divide(values, total.unsqueeze(1), 0.0)
    share, index = largest(shares, min(top, shares.shape[1]))
    return Shares(
        variance=variance,
        total=total,
        index=index,
        share=share,
        pull=terms.pull.gather(1, index.unsqueeze(2).expand(-1, -1, terms.pull.shape[2])),
        effective=divide(torch.ones_like(total), shares.square().sum(1), 0.0),
        matrix=shares if matrix else None,
    )


def attribute_positions(fitted: Fitted, x: Any, top: int, matrix: bool, positions: Positions) -> Attribution:
    """Attribute the variances of predicted classes position by position; see `Tracer.attribute`."""
    if not fitted.problem.dense:
        raise InputError(
            "expected a network with outputs at several positions, (n, positions, k), for positions=..., got one row "
            f"of {fitted.problem.k} outputs for each example. Leave positions out."
        )

    def of_batch(inputs: Inputs, _: str) -> tuple[Attribution, Tensor, int]:
        """An input's positions in the order requested, without padding, and their numbers."""
        with torch.no_grad():
            outputs = fitted.problem.network.shaped(inputs)
        m, classes = len(outputs), predicted_outputs(fitted, outputs)
        if classes is None:
            raise InputError(
                "expected a network that predicts one class at each position for positions=..., got "
                f"likelihood {fitted.problem.likelihood.name!r}. Leave positions out."
            )
        found, where = [], []
        listed = read_positions(positions, classes.shape[1])
        for some in torch.tensor(listed, device=classes.device).split(POSITIONS_AT_ONCE):
            found.append(attribute(fitted, SelectedOutputs(inputs, classes[:, some]), top, matrix, per_output=True))
            where.append(torch.cartesian_prod(torch.arange(m, device=some.device), some))
        places = torch.cat(where)
        order = places[:, 0].argsort(stable=True)
        mask = mask_of_outputs(inputs) if isinstance(inputs, Mapping) else None
        if isinstance(mask, Tensor) and mask.ndim == 2:
            order = order[mask[places[order, 0], places[order, 1]] != 0]
        return combine([join_batches(found)], lambda values: values[0][order]), places[order], m

    found, start = [], 0
    for one, where, size in for_each_batch(fitted, x, of_batch, plain=True):
        found.append(replace(one, where=where + where.new_tensor([start, 0])))
        start += size
    return join_batches(found)


def attribute_loss(fitted: Fitted, x: Any, top: int, matrix: bool) -> Attribution:
    """Attribute the losses of inputs with targets, to first order in the outputs; see `Tracer.attribute`."""
    problem = fitted.problem
    if isinstance(problem.network.model, LeafSum):
        raise InputError("expected a network for loss=True, got trees. Leave loss out.")
    loader, found = batches_of(x, "with targets to attribute"), []
    with using_model(fitted):
        shift = problem.batches.target_transform
        for at, batch in enumerate(Batches(loader, problem.device, problem.progress, target_transform=shift)):
            where = f"batch {at} of the losses to attribute"
            with torch.no_grad():
                outputs = problem.network.shaped(batch.inputs)
            flat = outputs.double().reshape(-1, outputs.shape[-1])
            targets = problem.likelihood.check_targets(targets_at(batch.targets, outputs, where), flat, where)
            slope = -problem.likelihood.residuals(flat, targets).reshape(batch.size, -1, 1).to(outputs.dtype)
            found.append(attribute(fitted, OutputMixtures(batch.inputs, slope), top, matrix))
    return join_batches(found)


def read_positions(positions: Any, count: int) -> list[int]:
    """The positions among `count`, as numbers from 0.

    Examples:
        >>> read_positions("each", 3), read_positions([0, -1], 3)
        ([0, 1, 2], [0, 2])
    """
    if isinstance(positions, str) and positions == "each":
        return list(range(count))
    return [one % count for one in read_numbers(positions, 'positions to be "each"', -count, count - 1)]
