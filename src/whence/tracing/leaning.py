"""Which way a doubt leans: to noisy labels, or to scarce data."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .calibration import counted, leave_one_out_leverage
from .fitted import Fitted
from .surroundings import evenly, examples

SAMPLE = 200
"""Training examples, evenly spaced, around which noise is looked at to know what is usual."""


WEIGHT = 0.5
"""How much leverage beyond the usual counts against noise; chosen on development draws of docs/tracing.md."""


@dataclass(frozen=True)
class Leaning:
    """Noise and scarcity on one scale: that of the training examples, each in the fit without it.

    Noise around an input: N(x) = sum_i w_i e_i^T u_i / sum_i w_i tr Sigma_i over the training examples. The product of
    residual and leave-one-out residual has the noise for its expectation, where the square of either has not. The
    weights w_i = |a_i|^2 / q_i are squared correlations of the predictions at x and at x_i, up to a factor that all
    share: alignments over leave-one-out leverages, so that examples of large leverage, which pull at everything, do not
    speak for places they are not near.

    Scarcity: the leverage q(x). Both as logarithms in standard deviations from the mean of the training examples, z_N
    and z_q. Where leverage and noise go together in the training set (correlation r, at least zero: a network that has
    learned noisy labels one by one has high leverage there), a high leverage tells less: what counts is by how much
    more than one standard deviation it exceeds what is usual at such noise, times the share of its variance that noise
    does not explain, and half as much as noise, which tells more.

        z_N - (1 - r^2) / 2 max(z_q - r z_N - 1, 0)

    Attributes:
        noise: (n,) e_i^T u_i.
        usual: (n,) tr Sigma_i.
        leverages: (n,) leave-one-out leverages, traces.
        centre: means of log N and log q.
        spread: their standard deviations.
        together: their correlation r, zero where it is negative.
    """

    noise: Tensor
    usual: Tensor
    leverages: Tensor
    centre: tuple[float, float]
    spread: tuple[float, float]
    together: float

    @classmethod
    def of(cls, fitted: Fitted) -> Leaning | None:
        """From the alignments of `SAMPLE` training examples with all; the model must be borrowed.

        `None` for fits of mixtures of outputs and for networks that answer at several positions, whose predictions are
        told of by some outputs only; and where there is no noise, or no leverage, to compare.
        """
        problem = fitted.problem
        if problem.sketch is not None or problem.dense or problem.n < 3:
            return None
        residuals, left_out = fitted.meats.roots["hec0"].sum(2), fitted.left_out.hec3
        noise = (residuals * left_out).sum(1).clamp_min(0.0)
        usual = fitted.meats.roots["ho"].square().sum((1, 2)).expand(problem.n)
        leverages = torch.diagonal(leave_one_out_leverage(fitted), dim1=1, dim2=2).sum(1)
        index = evenly((counted(fitted) & (leverages > 0)).nonzero().squeeze(1), SAMPLE)
        plain = cls(noise, usual, leverages, (0.0, 0.0), (1.0, 1.0), 0.0)
        return plain.scaled(around_examples(fitted, plain, index), leverages[index])

    def scaled(self, noise: Tensor, leverages: Tensor) -> Leaning | None:
        """The same with the scale of some examples: noise around them (s,) and their leverages (s,), each left out."""
        pair = torch.stack([noise, leverages])
        pair = pair[:, (pair > 0).all(0)].log()
        if pair.shape[1] < 3:
            return None
        spread = pair.std(1)
        if not bool((spread > 1e-6).all()):
            return None
        correlation = float(torch.corrcoef(pair)[0, 1].clamp(0.0, 1.0))
        first, second = pair.mean(1).tolist()
        return replace(self, centre=(first, second), spread=(float(spread[0]), float(spread[1])), together=correlation)

    def around(self, sizes: Tensor) -> Tensor:
        """(m,) noise around some inputs, over the usual.

        Args:
            sizes: (m, n) squared Frobenius norms of their alignments.
        """
        weights = sizes * torch.where(self.leverages > 0, 1.0 / self.leverages.clamp_min(_tiny(sizes)), 0.0)
        return (weights @ self.noise) / (weights @ self.usual).clamp_min(_tiny(sizes))

    def source(self, noise: Tensor, leverage: Tensor) -> Tensor:
        """(m,) above zero where noise stands out, below where scarcity does.

        Args:
            noise: (m,) around the inputs.
            leverage: (m,) of the inputs.
        """
        above, scarcity = (
            (value.clamp_min(_tiny(value)).log() - centre) / spread
            for value, centre, spread in zip((noise, leverage), self.centre, self.spread, strict=True)
        )
        beyond = (scarcity - self.together * above - 1.0).clamp_min(0.0)
        return above - WEIGHT * (1.0 - self.together**2) * beyond


def around_examples(fitted: Fitted, leaning: Leaning, index: Tensor) -> Tensor:
    """(s,) noise around some training examples, each in the fit without it; the model must be borrowed."""
    found = torch.zeros_like(leaning.leverages)
    for which, some in examples(fitted, index):
        for where, chunks in fitted.bread.alignments(some):
            sizes = torch.cat([aligned.square().sum((1, 3)).to(found.dtype) for _, aligned in chunks], dim=1)
            sizes[torch.arange(len(sizes), device=index.device), which[where]] = 0.0  # in the fit without it
            found[which[where]] = leaning.around(sizes)
    return found[index]


def _tiny(values: Tensor) -> float:
    return torch.finfo(values.dtype).tiny
