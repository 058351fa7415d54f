"""HeC3 in two parts: one that new labels would change (noise), one that new inputs would change (design).

Leave-one-out residuals are u_i = b(x_i) + noise. Neighbours share b, what the model cannot represent, but not the
noise. Each u_i is predicted from those of its neighbours as a weighted mean; the product of the two then estimates
b b^T without the noise, and their difference times u_i the noise without b. This is difference-based variance
estimation. The weights are those of Gaussian process regression with heteroscedastic noise: its variance is taken to
be proportional to the squared residuals around the example, or else regions with little noise would look smooth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from whence.data.batches import Inputs, take
from whence.display import Column, Shown, Table, count, numbers, places, rows_shown
from whence.errors import InputError
from whence.estimators import POLICIES, hat_blocks, hat_roots
from whence.influence.fitted import (
    Fitted,
    alignments,
    divide,
    evenly_spaced,
    training_examples,
    whole_alignments,
    within_memory,
)
from whence.results import frame

if TYPE_CHECKING:
    import pandas

LENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Squared length scales of the kernel that are tried, in medians of the squared distances."""

NOISE_RATIOS = (*(10.0 ** (step / 2) for step in range(-12, 7)), 1e9)
"""Noise variances over signal variances that are tried; the last one means: no signal."""

LOCAL = 20
"""Neighbours from whose residuals the size of the noise around an example is estimated."""

ROUNDS = 3
"""Fixed-point iterations of the noise and its share in the products of neighbours' residuals."""


@dataclass(frozen=True)
class Sources:
    """Where each training example's leave-one-out residual comes from, on average.

    Attributes:
        noise: (n, k, k) estimates of the noise covariance, without sample weights. Each is made of a single residual:
            only sums over many examples mean something, and single ones may be negative.
        design: (n, k, k) estimates of b_i b_i^T, the same.
        anchors: how many examples served as neighbours.
        lengths: squared length over which b varies, for each output, in medians of the squared distances in tangent
            space; `nan` for plain means of neighbours.
        nuggets: noise variance over the variance of b; 1e9 where neighbours have nothing in common.

    Examples:
        >>> noise, design = torch.tensor([[[2.0]], [[-1.0]], [[2.0]]]), torch.zeros(3, 1, 1)
        >>> Sources(noise, design, anchors=3, lengths=(1.0,), nuggets=(1e9,)).noise.mean().item()
        1.0
    """

    noise: Tensor
    design: Tensor
    anchors: int
    lengths: tuple[float, ...]
    nuggets: tuple[float, ...]


@dataclass(frozen=True)
class Split(Shown):
    """Parts of HeC3, which they sum to.

    Experimental: right on average only where what the model cannot represent is smooth over the distances between
    training examples (anything rougher counts as noise), and different from training set to training set. See
    docs/sources.md for how far off the parts were on simulations.

    Attributes:
        hec3: (m, k) summed over training examples.
        noise: (m, k) variance over new labels at the same inputs.
        design: (m, k) variance over new inputs: what the model cannot represent pulls it elsewhere for each draw of
            inputs. Below zero by chance where there is none.
        sources: what was found for each training example.

    Examples:
        >>> of_examples = Sources(torch.ones(3, 1, 1), torch.zeros(3, 1, 1), anchors=3, lengths=(1.0,), nuggets=(1e9,))
        >>> one = torch.ones(1, 1)
        >>> Split(hec3=5 * one, noise=3 * one, design=one, sources=of_examples).design_share.tolist()
        [0.25]
    """

    experimental: ClassVar[bool] = True
    shared: ClassVar = ("sources",)

    hec3: Tensor
    noise: Tensor
    design: Tensor
    sources: Sources

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.hec3)

    @property
    def remainder(self) -> Tensor:
        """(m, k) what HeC3 has beside the parts: leave-one-out residuals are larger than noise, and not centred."""
        return self.hec3 - self.noise - self.design

    @property
    def design_share(self) -> Tensor:
        """(m,) design part over noise part plus design part, summed over outputs; between zero and one."""
        design, noise = self.design.sum(1).clamp_min(0.0), self.noise.sum(1).clamp_min(0.0)
        return divide(design, design + noise, 0.0)

    def to_frame(self) -> pandas.DataFrame:
        """One row a prediction, summed over outputs."""
        names = ("hec3", "noise", "design", "remainder")
        columns: dict[str, list[Tensor | list[str]]] = {name: [getattr(self, name).sum(1)] for name in names}
        return frame({**columns, "design_share": [self.design_share]})

    def __repr__(self) -> str:
        """Sizes and shares."""
        whole = max(float(self.hec3.sum()), torch.finfo(self.hec3.dtype).tiny)
        names = ("noise", "design", "remainder")
        shares = {name: round(100 * float(getattr(self, name).sum()) / whole) for name in names}
        listed = ", ".join(f"{name} {share}%" for name, share in shares.items())
        return f"Split({len(self)} predictions; of their HeC3 {listed}; experimental)"

    def _table(self) -> Table:
        rows, more = rows_shown(len(self), "to_frame()")
        named = {"HeC3": "hec3", "noise": "noise", "design": "design", "remainder": "remainder"}
        columns = [places(rows)]
        columns += [Column(name, numbers(getattr(self, key).sum(1)[:rows].tolist())) for name, key in named.items()]
        shares = self.design_share[:rows].tolist()
        columns.append(Column("design share", tuple(f"{share:.0%}" for share in shares), bars=tuple(shares)))
        note = "Noise: new labels would change it. Design: new inputs would. Experimental: see docs/sources.md."
        return Table(f"{count(len(self), 'prediction')}: HeC3 in parts", tuple(columns), f"{note}\n{more}".strip())


def split(fitted: Fitted, inputs: Inputs, sources: Sources) -> Split:
    """Split the HeC3 of one batch; see `Tracer.split`."""
    problem, sums = fitted.problem, []
    weights = problem.outputs.new_ones(problem.n) if problem.sample_weights is None else problem.sample_weights
    squared = weights.to(problem.outputs).square().reshape(-1, 1, 1)
    for _, some in within_memory(fitted, inputs, 8 * problem.n * problem.k**2):
        for which, chunks in alignments(fitted, some):
            total = problem.outputs.new_zeros(4, which.stop - which.start, problem.output_count(inputs))
            for rows, aligned in chunks:
                pulls = torch.einsum("mkni,niq->mknq", aligned, fitted.meats.roots["hec3"][rows])
                total[0] += pulls.square().sum((2, 3))
                for part, matrices in ((1, sources.noise), (2, sources.design)):
                    weighted = squared[rows] * matrices[rows]
                    total[part] += torch.einsum("mkni,nij,mknj->mk", aligned, weighted, aligned)
                total[3] += torch.einsum("mkni,ni->mk", aligned, fitted.meats.total[rows])  # sum_i a_i u_i
            sums.append(total)
    hec3, noise, design, shift = torch.cat(sums, 1)
    return Split(hec3, noise, design - shift.square() / fitted.meats.deletions, sources)


def estimate_sources(fitted: Fitted, neighbours: int | None, anchors: int) -> Sources:
    """Estimate noise and design of every training example; see `Tracer.split` for the arguments. In `using_model`."""
    problem = fitted.problem
    if problem.sketch is not None:
        raise InputError(
            "expected a fit that looks at all outputs to separate noise from design, got one of some mixtures, which "
            'differ from example to example. Fit with hessian_columns="all".'
        )
    index = fitted.counted.nonzero().squeeze(1)
    if len(index) < 3:
        raise InputError(f"expected three training examples or more to separate noise from design, got {len(index)}.")
    index = evenly_spaced(index, anchors)
    problem.budget.require(
        (4.0 + 2.0 * problem.k) * len(index) * problem.n * problem.outputs.element_size(),
        f"the distances of {len(index)} training examples to all",
        "Pass a smaller number of anchors.",
    )
    rows = _AnchorRows(fitted, index)
    distances, repeat = _distances(fitted, rows)
    if neighbours is None:
        found = gaussian_process_weights(distances, index, fitted.loo_residuals)
    else:
        found = nearest_neighbour_weights(distances, index, fitted.loo_residuals, min(neighbours, len(index) - 1))
    return _separate(fitted, rows, found, repeat)


class _AnchorRows:
    """J_a F_lam^-1 J_i^T of some training examples (anchors) with all, cached where memory allows."""

    def __init__(self, fitted: Fitted, index: Tensor) -> None:
        self.fitted, self.index = fitted, index
        self._cache: list[tuple[slice, Tensor]] = []

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which anchors, rows (m, k, n, k)), as many at once as memory allows."""
        if self._cache:
            yield from self._cache
            return
        problem = self.fitted.problem
        limit, row_bytes = problem.budget.limit, problem.n * problem.k**2 * problem.outputs.element_size()
        most = max(1, int(0.05 * limit) // row_bytes)
        found: list[tuple[slice, Tensor]] = []
        done = 0
        for which, inputs, _ in training_examples(self.fitted, self.index, "neighbours"):
            for low in range(0, len(which), most):
                for _, rows in whole_alignments(self.fitted, take(inputs, slice(low, low + most))):
                    chunk = slice(done, done + len(rows)), rows
                    done += len(rows)
                    if len(self.index) * row_bytes <= 0.2 * limit:
                        found.append(chunk)
                    yield chunk
        self._cache = found


def _distances(fitted: Fitted, rows: _AnchorRows) -> tuple[Tensor, Tensor]:
    """Squared distances |J_a - J_i|^2 in the metric of the inverse curvature (r, n), and r_i (n,).

    r_i = tr (H L H)_ii / tr H_ii is one without a ridge and less with one; an example that is no anchor has that of the
    nearest.
    """
    index, roots = rows.index, fitted.problem.hessian_roots
    traces = fitted.bread.leverage_blocks.diagonal(dim1=1, dim2=2).sum(1)
    products = traces.new_empty(len(index), fitted.problem.n)
    squares = traces.new_empty(len(index))
    for which, aligned in rows:
        products[which] = torch.einsum("mknk->mn", aligned)
        curved = aligned if roots is None else torch.einsum("mkni,niq->mknq", aligned, roots)
        squares[which] = curved.square().sum((1, 2, 3))
    distances = traces[index].unsqueeze(1) + traces - 2.0 * products
    distances[torch.arange(len(index), device=index.device), index] = 0.0
    if fitted.loo.policy != "exact":
        return distances.clamp_min(0.0), torch.ones_like(traces)
    repeat = (squares / traces[index].clamp_min(torch.finfo(squares.dtype).tiny)).clamp(0.0, 1.0)
    return distances.clamp_min(0.0), repeat[distances.argmin(0)]


@dataclass(frozen=True)
class NeighbourWeights:
    """Weights with which the residuals of some examples (anchors) predict those of all."""

    weights: Tensor  # (k, n, r) of the anchors for each output; an anchor has none in its own prediction
    variance: Tensor  # (n, k) posterior variance of b given the anchors' residuals; zero for plain means
    # squared length scale of the kernel for each output, in medians of the squared distances; `nan` for plain means
    lengths: tuple[float, ...]
    nuggets: tuple[float, ...]  # noise variance over the variance of b for each output; `nan` for plain means


def nearest_neighbour_weights(distances: Tensor, anchors: Tensor, values: Tensor, count: int) -> NeighbourWeights:
    """Plain means over the nearest anchors, from the same arguments as `gaussian_process_weights`."""
    nearest = _nearest(distances, anchors, count)
    weights = torch.zeros_like(distances.T).scatter_(1, nearest, 1.0 / count)
    k = values.shape[1]
    none = (float("nan"),) * k
    return NeighbourWeights(weights.expand(k, -1, -1), torch.zeros_like(values), none, none)


def _nearest(distances: Tensor, anchors: Tensor, count: int) -> Tensor:
    """(n, count) the nearest anchors of each example, itself excluded."""
    others = distances.T.clone()
    others[anchors, torch.arange(len(anchors), device=anchors.device)] = torch.inf
    return others.topk(count, dim=1, largest=False).indices


def gaussian_process_weights(distances: Tensor, anchors: Tensor, values: Tensor) -> NeighbourWeights:
    """Weights of Gaussian processes with kernel exp(-distance / length) and heteroscedastic noise.

    From squared distances (r, n) of the anchors (r,) to all examples, whose leave-one-out residuals are (n, k).
    """
    within = distances[:, anchors]
    unit = float(within[within > 0].median()) if bool((within > 0).any()) else 1.0
    scales = _noise_scales(distances, anchors, values)  # (n,)
    scaled = values[anchors] / scales[anchors].unsqueeze(1)
    weights = values.new_zeros(values.shape[1], *distances.T.shape)
    variance = torch.zeros_like(values)
    chosen = _maximize_evidence(within / unit, scales[anchors], scaled)
    for length in {length for length, _ in chosen}:
        spectrum, vectors = _eigh_kernel(within / unit, length, scales[anchors])
        cross = torch.exp(-distances / (length * unit)).T / scales[anchors]  # (n, r)
        for output, (ours, nugget) in enumerate(chosen):
            if ours != length or nugget == NOISE_RATIOS[-1]:
                continue
            inverse = (vectors / (spectrum + nugget)) @ vectors.T
            weights[output], unknown = _posterior(inverse, cross, anchors, scales, nugget)
            signal = scaled[:, output] @ inverse @ scaled[:, output] / len(scaled)
            # No more than the share of b in the residuals around the example.
            local = scales.square()
            most = local * values[anchors, output].square().mean() / (unknown + nugget * local)
            variance[:, output] = torch.minimum(signal, most) * unknown
    lengths, nuggets = zip(*chosen, strict=True)
    return NeighbourWeights(weights, variance, lengths, nuggets)


def _noise_scales(distances: Tensor, anchors: Tensor, values: Tensor) -> Tensor:
    """(n,) root mean square of the residuals of the nearest anchors over that of all, shrunk towards one."""
    squares = values[anchors].square().sum(1)
    mean = squares.mean().clamp_min(torch.finfo(values.dtype).tiny)
    few = min(LOCAL, len(anchors) - 1)
    near = squares[_nearest(distances, anchors, few)]
    return ((near.sum(1) / mean + 1.0) / (few + 1)).sqrt()


def _maximize_evidence(distances: Tensor, scales: Tensor, scaled: Tensor) -> list[tuple[float, float]]:
    """Length and noise ratio of the largest marginal likelihood for each output, the signal variance maximized out."""
    best = [(float("inf"), LENGTHS[0], NOISE_RATIOS[-1])] * scaled.shape[1]
    for length in LENGTHS:
        spectrum, vectors = _eigh_kernel(distances, length, scales)
        squares = (vectors.T @ scaled).square()  # (r, k)
        for nugget in NOISE_RATIOS:
            variances = spectrum + nugget
            means = (squares / variances.unsqueeze(1)).mean(0).clamp_min(torch.finfo(squares.dtype).tiny)
            losses = 0.5 * (len(scaled) * means.log() + variances.log().sum())
            best = [min(old, (new, length, nugget)) for old, new in zip(best, losses.tolist(), strict=True)]
    return [(length, nugget) for _, length, nugget in best]


def _eigh_kernel(distances: Tensor, length: float, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the kernel, in units in which the noise is homoscedastic."""
    kernel = torch.exp(-distances / length) / scales / scales.unsqueeze(1)
    spectrum, vectors = torch.linalg.eigh(kernel)
    return spectrum.clamp_min(0.0), vectors


def _posterior(inverse: Tensor, cross: Tensor, anchors: Tensor, scales: Tensor, nugget: float) -> tuple[Tensor, Tensor]:
    """Weights (n, r) of the posterior mean of b, and its variance (n,); anchors as if left out."""
    scaled = cross @ inverse
    variance = 1.0 - (scaled * cross).sum(1)
    weights = scaled / scales[anchors]
    diagonal = inverse.diagonal()
    without = -inverse / diagonal.unsqueeze(1) * scales[anchors].unsqueeze(1) / scales[anchors]
    without.diagonal().zero_()
    weights[anchors] = without
    variance[anchors] = (1.0 / diagonal - nugget) * scales[anchors].square()
    return weights, variance.clamp_min(0.0)


def _separate(fitted: Fitted, rows: _AnchorRows, found: NeighbourWeights, repeat: Tensor) -> Sources:
    """Split u_i u_i^T into noise and design with the neighbours' predictions."""
    values, weights = fitted.loo_residuals, fitted.problem.sample_weights
    predicted = torch.einsum("kna,ak->nk", found.weights, values[rows.index])
    whole = values.unsqueeze(2) * values.unsqueeze(1)
    unit = values / values.norm(dim=0).clamp_min(torch.finfo(values.dtype).tiny)
    root = found.variance.sqrt()
    unknown = root.unsqueeze(2) * root.unsqueeze(1) * (unit.T @ unit)  # outputs as correlated as their residuals are
    product = _symmetric(values.unsqueeze(2) * predicted.unsqueeze(1)) + unknown
    shrinkage = _noise_shrinkage(fitted, repeat)
    design, noise = product, shrinkage @ (whole - product) @ shrinkage.mT
    if bool(found.weights.any()):
        share = 1.0 if weights is None else weights.to(values.dtype).reshape(-1, 1, 1)
        for _ in range(ROUNDS):
            correlated = _shared_noise(fitted, rows, found.weights, share * noise)
            design = product + (1.0 - repeat / 2.0).reshape(-1, 1, 1) * correlated
            noise = shrinkage @ (whole - design) @ shrinkage.mT
    noise, design = (fitted.loo.within_units(one) for one in (noise, design))
    return Sources(noise, design, len(rows.index), found.lengths, found.nuggets)


def _shared_noise(fitted: Fitted, rows: _AnchorRows, weights: Tensor, noise: Tensor) -> Tensor:
    """(n, k, k) sum_j P_i (L_i H_ij S_j + S_i H_ij L_j) P_j^T w_ij, made symmetric; S times the sample weights.

    Noise that leave-one-out residuals of neighbours have in common, since each is in the fit of the other.
    """
    inflation, hessians = _inflation(fitted), _hessians(fitted)
    anchors = rows.index
    ours = torch.stack([noise[anchors], hessians[anchors]], 1) @ inflation[anchors].mT.unsqueeze(1)
    sums = noise.new_zeros(2, *noise.shape)
    for which, aligned in rows:  # H_aj as (a, k of a, n, k of n)
        sums += torch.einsum("ina,alnj,asij->snli", weights[:, :, which], aligned.permute(0, 3, 2, 1), ours[which].mT)
    return _symmetric(inflation @ (hessians @ sums[0] + noise @ sums[1]))


def _inflation(fitted: Fitted) -> Tensor:
    """(n, k, k) P_i with u_i = P_i e_i; the identity for approximate curvatures, whose products need none."""
    if fitted.loo.policy != "exact":
        eye = torch.eye(fitted.problem.k, dtype=fitted.problem.dtype, device=fitted.problem.device)
        return eye.expand(fitted.problem.n, -1, -1)
    return _function_of_hat(fitted, POLICIES["exact"].inflation)


def _noise_shrinkage(fitted: Fitted, repeat: Tensor) -> Tensor:
    """(n, k, k) T_i with noise = T_i E[u_i u_i^T] T_i^T where there is no b."""
    if fitted.loo.policy != "exact":
        return _function_of_hat(fitted, lambda q: (1.0 + q).rsqrt())

    def factor(h: Tensor) -> Tensor:
        left = (1.0 - h).clamp_min(torch.finfo(h.dtype).eps)
        return left / torch.maximum(1.0 - (2.0 - repeat.unsqueeze(1)) * h, left.square()).sqrt()

    return _function_of_hat(fitted, factor)


def _function_of_hat(fitted: Fitted, function: Callable[[Tensor], Tensor]) -> Tensor:
    """(n, k, k) function of L_i Q_i, or of its blocks where positions or outputs are left out singly."""
    blocks = fitted.loo.within_units(fitted.bread.leverage_blocks)
    roots = fitted.problem.hessian_roots
    roots, values = hat_roots(hat_blocks(blocks, roots), roots)
    values = values.clamp_min(1e-12)
    eye = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
    found: Tensor = eye + roots * ((function(values) - 1.0) / values).unsqueeze(1) @ roots.mT @ blocks
    return found


def _hessians(fitted: Fitted) -> Tensor:
    """(n, k, k) L_i without sample weights."""
    problem = fitted.problem
    roots = problem.hessian_roots
    if roots is None:
        return torch.eye(problem.k, dtype=problem.dtype, device=problem.device).expand(problem.n, -1, -1)
    found = roots @ roots.mT
    if problem.sample_weights is None:
        return found
    weights = problem.sample_weights.to(found.dtype)
    return torch.where(weights > 0, 1.0 / weights, 0.0).reshape(-1, 1, 1) * found


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.mT) / 2
