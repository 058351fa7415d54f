"""What is usual, told by the training set itself: each example as if it had been left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from whence.display import Column, Shown, Table, count, number, numbers

from .asking import borrowed_model
from .fitted import Fitted
from .surroundings import above_average, evenly, ratios

LARGEST = 1e150
"""Squared residuals over the noise are taken for at most this, so that their variance is a number: of a wrong label of
which the network is certain, noise is as small as its probability."""

SAMPLE = 1000
"""Training examples, evenly spaced, that are predicted to know what is usual."""


@dataclass(frozen=True)
class Calibration(Shown):
    """Yardsticks from leave-one-out quantities of the training examples.

    Scarcity: the leverage J F_lam^-1 J^T of a new input is set against the leverages that training examples have in
    fits without themselves, J_i F_(-i)^-1 J_i^T = (I - Q_i L_i)^-1 Q_i with Q_i = J_i F_lam^-1 J_i^T. A new input from
    the places the training inputs come from is as likely to rank anywhere among them.

    Noise: HeC3 / Ho is a mean of squared leave-one-out residuals around the input, v_i = |u_i|^2 / tr Sigma_i, weighted
    by shares of Ho. If noise were the same everywhere, the v_i could be shuffled among the examples. Shuffled, the mean
    has expectation mean(v) and variance var(v) (sum of squared shares - 1 / n), exactly for one output; a gamma
    distribution with these moments tells how rare the ratio found would be.

    That a difference is no chance does not make it large, and with many examples hardly any is chance. So the ratio
    must also be one at which training examples, each in the fit without it, have more noise of their own than the
    average: residual times leave-one-out residual, an unbiased estimate of noise in a linear model, as an increasing
    function of HeC3 / Ho (isotonic regression) exceeds its mean from `limit` on.

    Attributes:
        leverages: (n,) traces of the leave-one-out leverages, ascending.
        mean: of the v_i.
        variance: of the v_i.
        limit: HeC3 / Ho from which on training examples are noisier than average; zero where it was not looked at, as
            for networks that answer at several positions.
    """

    leverages: Tensor
    mean: float
    variance: float
    limit: float = 0.0

    @classmethod
    def of(cls, fitted: Fitted, sample: int = SAMPLE) -> Calibration:
        """From the leverage blocks, the leave-one-out residuals, and predictions for some training examples.

        Args:
            fitted: the fit.
            sample: how many training examples, evenly spaced, to predict.
        """
        counts = counted(fitted)
        blocks = leave_one_out_leverage(fitted)[counts]
        traces = torch.diagonal(blocks, dim1=1, dim2=2).sum(1).sort().values
        noise = fitted.meats.roots["ho"].square().sum((1, 2)).expand(fitted.problem.n)[counts].double()
        squares = fitted.left_out.hec3.double().square().sum(1)[counts]
        values = (squares[noise > 0] / noise[noise > 0]).clamp_max(LARGEST)
        if len(values) < 2:  # no noise to compare with
            return cls(traces, 1.0, 0.0)
        return cls(traces, float(values.mean()), float(values.var()), _limit(fitted, sample))

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
        title = f"What is usual among {count(len(self.leverages), 'training example')}"
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


def _limit(fitted: Fitted, sample: int) -> float:
    problem = fitted.problem
    if problem.sketch is not None or problem.dense:
        return 0.0
    usual = fitted.meats.roots["ho"].square().sum((1, 2)).expand(problem.n)
    index = evenly((counted(fitted) & (usual > 0)).nonzero().squeeze(1), sample)
    if len(index) < 3:
        return 0.0
    own = ((fitted.meats.roots["hec0"].sum(2) * fitted.left_out.hec3).sum(1).clamp_min(0.0) / usual).clamp_max(LARGEST)
    with borrowed_model(fitted):
        return above_average(ratios(fitted, index), own[index])


def leave_one_out_leverage(fitted: Fitted) -> Tensor:
    """(n, k, k) leverage of each training example in the fit without it.

    An approximate curvature behaves as if it did not contain the example, so that its blocks serve as they are.
    """
    hats, roots = fitted.bread.hats, fitted.problem.hessian_roots
    if fitted.weighing.policy != "exact":
        return hats
    inner = hats if roots is None else hats @ roots @ roots.transpose(1, 2)
    left = torch.eye(hats.shape[1], dtype=hats.dtype, device=hats.device) - inner
    # An example that decides its own prediction leaves nothing behind: rounding alone keeps this invertible.
    left.diagonal(dim1=1, dim2=2).clamp_min_(torch.finfo(hats.dtype).eps)
    solved: Tensor = torch.linalg.solve(left, hats)
    return solved


def counted(fitted: Fitted) -> Tensor:
    """(n,) examples that count in the loss."""
    weights = fitted.problem.sample_weights
    if weights is None:
        return torch.ones(fitted.problem.n, dtype=torch.bool, device=fitted.problem.device)
    return weights > 0
