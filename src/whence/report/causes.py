"""Which predictions to trace, and what tracing them tells: verdicts, causes, and what each training example does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from whence.errors import LoaderError
from whence.ordering import largest, largest_first
from whence.results import Uncertainty
from whence.tangents.batches import Inputs
from whence.tracing import Calibration, Explanation
from whence.tracing.asking import each
from whence.tracing.terms import Terms, terms_of
from whence.tracing.verdicts import judge

from .fitted import Reportable
from .reading import Source

OUTPUTS = 50
"""Covariances between more outputs are not computed for the ranges of beliefs alone."""
CAUSES = 6
"""Training examples that are named for each traced prediction and estimator."""


@dataclass(frozen=True)
class Causes:
    """The training examples behind some predictions, largest share first.

    Attributes:
        index: (t, c) positions in the training set.
        share: (t, c) of the variance.
    """

    index: Tensor
    share: Tensor


@dataclass(frozen=True)
class Traced:
    """What tracing told.

    Attributes:
        chosen: (t,) the predictions that were traced, ascending.
        inputs: of these.
        uncertainty: of these, with covariances.
        explanation: of all m predictions; for those not traced, the effective number of examples is estimated.
        check: by shares of HeC3.
        near: by shares of Ho.
        excess: (n,) what each training example adds to HeC3 of the traced predictions beyond usual noise.
        total: HeC3 of the traced predictions, summed.
        agreement: share of traced predictions whose verdict the estimate gives too; `None` if all were traced.
        gap: median over the traced of |sum over training examples / HeC3 - 1|.
    """

    chosen: Tensor
    inputs: Source
    uncertainty: Uncertainty
    explanation: Explanation
    check: Causes
    near: Causes
    excess: Tensor
    total: float
    agreement: float | None
    gap: float


def choose(uncertainty: Uncertainty, count: int) -> Tensor:
    """(t,) which predictions to trace, ascending: a quarter each by Ho, HeC3 and ratio, the rest evenly by rank.

    Examples:
        >>> values = {name: torch.rand(50, 1, 1) for name in ("ho", "hec3")}
        >>> len(choose(Uncertainty(torch.zeros(50, 1), values), 20))
        20
    """
    m = len(uncertainty)
    if m <= count:
        return torch.arange(m, device="cpu")
    scores = (uncertainty.ho.sum(1), uncertainty.hec3.sum(1), uncertainty.ratio)
    orders = [largest_first(score.cpu()) for score in scores]
    taken = torch.cat([order[: count // 4] for order in orders]).unique()
    rest = orders[0][~torch.isin(orders[0], taken)]
    places = torch.linspace(0, len(rest) - 1, count - len(taken), device="cpu").round().long()
    found: Tensor = torch.cat([taken, rest[places]]).sort().values
    return found


def trace(fitted: Reportable, source: Source, uncertainty: Uncertainty, level: float, count: int) -> Traced:
    """Trace some predictions, and judge all of them."""
    usual = Calibration.of(fitted)
    chosen = choose(uncertainty, count)
    inputs = Source(list(source.pick(chosen.tolist())), source.positional)
    excess = torch.zeros(fitted.problem.n, dtype=fitted.problem.dtype, device=fitted.problem.device)
    pieces = [
        piece
        for found in each(fitted, inputs.batches, lambda batch, _: list(_pieces(fitted, batch)))
        for piece in found
    ]
    for piece in pieces:
        excess += piece.hec3_of_each - usual.mean * piece.ho_of_each
    again = fitted.predict(inputs.batches, covariance=fitted.problem.k <= OUTPUTS or None)
    _check_same(again, uncertainty, chosen)
    effective = torch.cat([piece.effective for piece in pieces]).cpu()
    check, near = _causes(pieces, "check"), _causes(pieces, "near")
    explanation, agreement = _explain(fitted, uncertainty, usual, level, chosen, effective, check, near)
    total, sums = again.hec3.sum(1).cpu(), torch.cat([piece.hec3 for piece in pieces]).cpu()
    gap = torch.where(total > 0, sums / total.clamp_min(torch.finfo(total.dtype).tiny) - 1.0, 0.0).abs()
    return Traced(
        chosen,
        inputs,
        again,
        explanation,
        check,
        near,
        excess.cpu(),
        float(total.sum()),
        agreement,
        float(gap.median()),
    )


@dataclass(frozen=True)
class _Piece:
    """Of some traced predictions."""

    check: Causes
    near: Causes
    hec3: Tensor  # (t,) summed over training examples
    effective: Tensor  # (t,)
    hec3_of_each: Tensor  # (n,) summed over predictions
    ho_of_each: Tensor


def _pieces(fitted: Reportable, inputs: Inputs) -> Iterator[_Piece]:
    for _, terms in terms_of(fitted, inputs):
        yield _piece(terms)


def _piece(terms: Terms) -> _Piece:
    tiny = torch.finfo(terms.ho.dtype).tiny
    few = min(CAUSES, terms.ho.shape[1])
    found = []
    for values in (terms.hec3, terms.ho):
        shares = values / values.sum(1, keepdim=True).clamp_min(tiny)
        share, index = largest(shares, few)
        found.append(Causes(index.cpu(), share.cpu()))
    squares = (terms.ho / terms.ho.sum(1, keepdim=True).clamp_min(tiny)).square().sum(1)
    effective = torch.where(squares > 0, 1.0 / squares.clamp_min(tiny), 1.0)
    return _Piece(found[0], found[1], terms.hec3.sum(1), effective, terms.hec3.sum(0), terms.ho.sum(0))


def _causes(pieces: Sequence[_Piece], name: str) -> Causes:
    parts: list[Causes] = [getattr(piece, name) for piece in pieces]
    return Causes(torch.cat([part.index for part in parts]), torch.cat([part.share for part in parts]))


def _explain(
    fitted: Reportable,
    uncertainty: Uncertainty,
    usual: Calibration,
    level: float,
    chosen: Tensor,
    effective: Tensor,
    check: Causes,
    near: Causes,
) -> tuple[Explanation, float | None]:
    """Verdicts for all predictions; how often the estimate for those not traced agrees where it can be compared."""
    scale = fitted.noise_scale
    leverage = uncertainty.laplace.sum(1).cpu() / (scale if scale > 0 else 1.0)
    estimate = _smoothed(leverage[chosen], effective, leverage)
    exact = estimate.clone()
    exact[chosen] = effective

    every = torch.full((len(uncertainty), check.index.shape[1]), -1, device="cpu")
    checks, nears = every.clone(), every
    checks[chosen], nears[chosen] = check.index, near.index
    calm = replace(usual, leverages=usual.leverages.cpu())
    variances = uncertainty.ho.sum(1).cpu(), uncertainty.hec3.sum(1).cpu(), uncertainty.ratio.cpu()

    def judged(numbers: Tensor) -> Explanation:
        return judge(calm, level, leverage, variances, numbers, (checks, nears))

    found = judged(exact)
    if len(chosen) == len(uncertainty):
        return found, None
    same = judged(estimate).noisy[chosen] == found.noisy[chosen]
    return found, float(same.double().mean())


def _smoothed(known: Tensor, values: Tensor, wanted: Tensor, window: int = 15) -> Tensor:
    """Values as a function of leverage: medians of a window over those known, and straight lines between them."""
    order = known.argsort(stable=True)
    x, y = known[order].double().numpy(), values[order].double().numpy()
    padded = np.pad(y, window // 2, mode="edge")
    medians = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    return torch.from_numpy(np.interp(wanted.double().numpy(), x, medians)).to(values.dtype)


def _check_same(again: Uncertainty, before: Uncertainty, chosen: Tensor) -> None:
    first, second = before.mean.cpu()[chosen].double(), again.mean.cpu().double()
    if not torch.allclose(first, second, rtol=1e-3, atol=1e-3 * float(first.abs().max())):
        raise LoaderError(
            "expected the same test inputs in every pass, got other predictions for the same places the second time. "
            "Use shuffle=False and switch random augmentation off, or pass the inputs as one tensor."
        )
