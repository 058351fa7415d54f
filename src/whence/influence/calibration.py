"""What is around training examples, each in the fit without it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from whence.data.batches import Inputs, batch_size, take, tensors_of
from whence.display import Column, Shown, Table, count, number, numbers
from whence.influence.fitted import Fitted, using_model

TOGETHER = 100
"""Training examples that are predicted in one go."""


def evenly(index: Tensor, most: int) -> Tensor:
    """At most so many of some examples, evenly spaced.

    Examples:
        >>> evenly(torch.arange(10), 4)
        tensor([0, 3, 6, 9])
    """
    if len(index) <= most:
        return index
    return index[torch.linspace(0, len(index) - 1, most, device=index.device).round().long()]


def examples(fitted: Fitted, index: Tensor) -> Iterator[tuple[Tensor, Inputs]]:
    """Yield (which training examples, their inputs): as many together as have the same shapes."""
    groups: dict[tuple[torch.Size, ...], list[tuple[Tensor, Inputs]]] = {}
    for batch in fitted.problem.read("what is usual"):
        here = index[(index >= batch.start) & (index < batch.start + batch.size)]
        if len(here):
            some = take(batch.inputs, here - batch.start)  # type: ignore[arg-type]  # rows by number
            shapes = tuple(leaf.shape[1:] for leaf in tensors_of(some))
            groups.setdefault(shapes, []).append((here, some))
    for parts in groups.values():
        joined = tree_map(
            lambda *leaves: torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0],
            *(some for _, some in parts),
        )
        yield torch.cat([here for here, _ in parts]), joined


def ratios(fitted: Fitted, index: Tensor) -> Tensor:
    """(s,) HeC3 / Ho at some training examples, each in the fit without it; the model must be borrowed.

    With H_i = J_i F_lam^-1 J_i^T and the Hessian L_i of its loss, an example adds H_i W_i W_i^T H_i^T to the variance
    C_i of its own prediction; in the fit without it what is left of C_i is (I - H_i L_i)^-1 C_i (I - L_i H_i)^-1. An
    approximate curvature behaves as if it did not contain the example: there nothing is taken away.
    """
    found = torch.ones(len(index), dtype=fitted.problem.dtype, device=index.device)
    places = torch.empty(fitted.problem.n, dtype=torch.long, device=index.device)
    places[index] = torch.arange(len(index), device=index.device)
    for which, inputs in examples(fitted, index):
        for low in range(0, batch_size(inputs, "what is usual"), TOGETHER):
            some = which[low : low + TOGETHER]
            covariances = fitted.sandwich.predict(take(inputs, slice(low, low + len(some)))).covariances
            ho, hec3 = (_without(fitted, some, covariances[name], name) for name in ("ho", "hec3"))
            found[places[some]] = torch.where(ho > 0, hec3 / ho.clamp_min(torch.finfo(ho.dtype).tiny), 1.0)
    return found


def _without(fitted: Fitted, index: Tensor, covariances: Tensor, name: str) -> Tensor:
    """(s,) traces of the covariances at training examples in the fits without them."""
    if fitted.weighing.policy != "exact":
        return torch.diagonal(covariances, dim1=1, dim2=2).sum(1).clamp_min(0.0)
    leverage_blocks, roots = fitted.bread.leverage_blocks[index], fitted.problem.hessian_roots
    weights = fitted.meats.roots[name]
    own = leverage_blocks @ (weights if len(weights) == 1 else weights[index])
    inner = leverage_blocks if roots is None else leverage_blocks @ roots[index] @ roots[index].transpose(1, 2)
    left = torch.eye(leverage_blocks.shape[1], dtype=leverage_blocks.dtype, device=leverage_blocks.device) - inner
    # As for its leverage: rounding alone keeps this invertible where an example decides its own prediction.
    left.diagonal(dim1=1, dim2=2).clamp_min_(torch.finfo(leverage_blocks.dtype).eps)
    grown = torch.linalg.solve(left, covariances.to(leverage_blocks.dtype) - own @ own.transpose(1, 2))
    both = torch.linalg.solve(left, grown.transpose(1, 2))
    return torch.diagonal(both, dim1=1, dim2=2).sum(1).clamp_min(0.0)


def above_average(around: Tensor, own: Tensor) -> float:
    """From which value around them on examples have more noise of their own than the average.

    The isotonic regression of the one on the other exceeds the mean from here on: no other value gathers as much noise
    above the average beyond it. Where examples with high values have no more noise than others, the largest value.

    Args:
        around: (s,) what is around the examples.
        own: (s,) their own noise.

    Examples:
        >>> around = torch.tensor([1.0, 2.0, 3.0, 4.0, 8.0, 9.0])
        >>> above_average(around, torch.tensor([0.0, 1.0, 0.0, 1.0, 6.0, 4.0]))
        6.0
    """
    order = around.argsort(stable=True)
    values = around[order]
    gathered = (own - own.mean())[order].cumsum(0)[:-1]
    least = int(gathered.argmin())
    if float(gathered[least]) >= 0.0:
        return float(values[-1])
    return float(values[least] + values[least + 1]) / 2


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
    with using_model(fitted):
        return above_average(ratios(fitted, index), own[index])


def leave_one_out_leverage(fitted: Fitted) -> Tensor:
    """(n, k, k) leverage of each training example in the fit without it.

    An approximate curvature behaves as if it did not contain the example, so that its blocks serve as they are.
    """
    leverage_blocks, roots = fitted.bread.leverage_blocks, fitted.problem.hessian_roots
    if fitted.weighing.policy != "exact":
        return leverage_blocks
    inner = leverage_blocks if roots is None else leverage_blocks @ roots @ roots.transpose(1, 2)
    left = torch.eye(leverage_blocks.shape[1], dtype=leverage_blocks.dtype, device=leverage_blocks.device) - inner
    # An example that decides its own prediction leaves nothing behind: rounding alone keeps this invertible.
    left.diagonal(dim1=1, dim2=2).clamp_min_(torch.finfo(leverage_blocks.dtype).eps)
    solved: Tensor = torch.linalg.solve(left, leverage_blocks)
    return solved


def counted(fitted: Fitted) -> Tensor:
    """(n,) examples that count in the loss."""
    weights = fitted.problem.sample_weights
    if weights is None:
        return torch.ones(fitted.problem.n, dtype=torch.bool, device=fitted.problem.device)
    return weights > 0


REFERENCE_EXAMPLES = 200
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
        index = evenly((counted(fitted) & (leverages > 0)).nonzero().squeeze(1), REFERENCE_EXAMPLES)
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
