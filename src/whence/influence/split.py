"""What a training example's neighbours say about it: a prediction of its residual that its own noise does not enter.

Leave-one-out residuals are u_i = b(x_i) + noise, where b, what the model cannot represent, is shared by neighbours and
the noise is not. Each u_i is predicted from the others as a weighted mean; the product of the two then estimates
b b^T without the noise, and their difference times u_i the noise without b. This is difference-based variance
estimation; with weights from a Gaussian process it is kriging, whose nugget is the noise. The noise may be uneven: it
is taken to be as large as the residuals around an example are, or else quiet places would pass for smooth ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from whence.data.batches import Inputs, batch_size, take
from whence.display import Column, Shown, Table, count, numbers, places, rows_shown
from whence.errors import InputError
from whence.influence.fitted import Fitted, alignments, frame

if TYPE_CHECKING:
    import pandas


LENGTHS = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Squared lengths of the kernel that are tried, in medians of the squared distances."""

LOCAL = 20
"""Neighbours that tell how large residuals are around an example."""

NUGGETS = (*(10.0 ** (step / 2) for step in range(-12, 7)), 1e9)
"""Noise variances over signal variances that are tried; the last one means: no signal."""


@dataclass(frozen=True)
class Neighbours:
    """Weights with which the residuals of some examples (anchors) predict those of all.

    Attributes:
        weights: (k, n, r) of the anchors for each output; an anchor has none in its own prediction.
        doubt: (n, k) variance of b given the anchors' residuals; zero for plain means.
        lengths: squared length of the kernel for each output, in medians of the squared distances; `nan` for plain
            means.
        nuggets: noise variance over the variance of b for each output; `nan` for plain means.
    """

    weights: Tensor
    doubt: Tensor
    lengths: tuple[float, ...]
    nuggets: tuple[float, ...]


def nearest(distances: Tensor, anchors: Tensor, values: Tensor, count: int) -> Neighbours:
    """Plain means over the nearest anchors.

    Args:
        distances: (r, n) squared distances of the anchors to all examples.
        anchors: (r,) which examples the anchors are.
        values: (n, k) leave-one-out residuals.
        count: how many neighbours.
    """
    k = values.shape[1]
    others = distances.T.clone()
    others[anchors, torch.arange(len(anchors), device=anchors.device)] = torch.inf
    chosen = others.topk(count, dim=1, largest=False).indices
    weights = torch.zeros_like(others).scatter_(1, chosen, 1.0 / count)
    nothing = (float("nan"),) * k
    return Neighbours(weights.expand(k, -1, -1), torch.zeros_like(values), nothing, nothing)


def krige(distances: Tensor, anchors: Tensor, values: Tensor) -> Neighbours:
    """Weights of Gaussian processes with kernel exp(-distance / length) and noise as uneven as the residuals are.

    Args:
        distances: (r, n) squared distances of the anchors to all examples.
        anchors: (r,) which examples the anchors are.
        values: (n, k) leave-one-out residuals.
    """
    within = distances[:, anchors]
    unit = float(within[within > 0].median()) if bool((within > 0).any()) else 1.0
    sizes = _sizes(distances, anchors, values)  # (n,)
    scaled = values[anchors] / sizes[anchors].unsqueeze(1)
    weights = values.new_zeros(values.shape[1], *distances.T.shape)
    doubt = torch.zeros_like(values)
    chosen = _by_evidence(within / unit, sizes[anchors], scaled)
    for length in {length for length, _ in chosen}:
        spectrum, vectors = _decompose(within / unit, length, sizes[anchors])
        cross = torch.exp(-distances / (length * unit)).T / sizes[anchors]  # (n, r)
        for output, (ours, nugget) in enumerate(chosen):
            if ours != length or nugget == NUGGETS[-1]:
                continue
            inverse = (vectors / (spectrum + nugget)) @ vectors.T
            weights[output], unknown = _weights(inverse, cross, anchors, sizes, nugget)
            scale = scaled[:, output] @ inverse @ scaled[:, output] / len(scaled)
            # No more than the share of b in the residuals around the example.
            here = sizes.square()
            most = here * values[anchors, output].square().mean() / (unknown + nugget * here)
            doubt[:, output] = torch.minimum(scale, most) * unknown
    return Neighbours(weights, doubt, tuple(length for length, _ in chosen), tuple(nugget for _, nugget in chosen))


def _sizes(distances: Tensor, anchors: Tensor, values: Tensor) -> Tensor:
    """(n,) root mean square of the residuals of the nearest anchors and of one like all, over that of all."""
    squares = values[anchors].square().sum(1)
    usual = squares.mean().clamp_min(torch.finfo(values.dtype).tiny)
    others = distances.T.clone()  # (n, r)
    others[anchors, torch.arange(len(anchors), device=anchors.device)] = torch.inf
    few = min(LOCAL, len(anchors) - 1)
    near = squares[others.topk(few, dim=1, largest=False).indices]
    return ((near.sum(1) / usual + 1.0) / (few + 1)).sqrt()


def _decompose(distances: Tensor, length: float, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of the kernel, in units in which the noise is even."""
    kernel = torch.exp(-distances / length) / sizes / sizes.unsqueeze(1)
    spectrum, vectors = torch.linalg.eigh(kernel)
    return spectrum.clamp_min(0.0), vectors


def _weights(inverse: Tensor, cross: Tensor, anchors: Tensor, sizes: Tensor, nugget: float) -> tuple[Tensor, Tensor]:
    """Weights (n, r) and what they leave unknown of b (n,); anchors as if left out."""
    scaled = cross @ inverse
    unknown = 1.0 - (scaled * cross).sum(1)
    weights = scaled / sizes[anchors]
    own = inverse.diagonal()
    left_out = -inverse / own.unsqueeze(1) * sizes[anchors].unsqueeze(1) / sizes[anchors]
    left_out.diagonal().zero_()
    weights[anchors] = left_out
    unknown[anchors] = (1.0 / own - nugget) * sizes[anchors].square()
    return weights, unknown.clamp_min(0.0)


def _by_evidence(distances: Tensor, sizes: Tensor, scaled: Tensor) -> list[tuple[float, float]]:
    """Length and nugget of the largest evidence for each output, with the variance that suits it best."""
    best = [(float("inf"), LENGTHS[0], NUGGETS[-1])] * scaled.shape[1]
    for length in LENGTHS:
        spectrum, vectors = _decompose(distances, length, sizes)
        squares = (vectors.T @ scaled).square()  # (r, k)
        for nugget in NUGGETS:
            variances = spectrum + nugget
            means = (squares / variances.unsqueeze(1)).mean(0).clamp_min(torch.finfo(squares.dtype).tiny)
            surprises = 0.5 * (len(scaled) * means.log() + variances.log().sum())
            best = [min(old, (new, length, nugget)) for old, new in zip(best, surprises.tolist(), strict=True)]
    return [(length, nugget) for _, length, nugget in best]


ROUNDS = 3
"""How often noise and its share in the products of neighbours are found from each other."""


@dataclass(frozen=True)
class Sources:
    """Where each training example's leave-one-out residual comes from, on average.

    Attributes:
        noise: (n, k, k) estimates of the noise covariance, without sample weights. Each rests on one residual: they
            mean something in sums over many examples only, and may be negative.
        design: (n, k, k) estimates of b_i b_i^T, the same.
        anchors: how many examples served as neighbours.
        lengths: squared length over which b varies, for each output, in medians of the squared distances in tangent
            space; `nan` where plain means of neighbours were asked for.
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


def sources_of(fitted: Fitted, neighbours: int | None, anchors: int) -> Sources:
    """Estimate both sources; see `Tracer.split` for the arguments. The model must be borrowed."""
    problem = fitted.problem
    if problem.sketch is not None:
        raise InputError(
            "expected a fit that looks at all outputs to tell noise from design, got one of some mixtures, which "
            'differ from example to example. Fit with hessian_columns="all".'
        )
    counts = torch.ones(problem.n, dtype=problem.dtype, device=problem.device)
    if problem.sample_weights is not None:
        counts = problem.sample_weights.to(problem.dtype)
    index = (counts > 0).nonzero().squeeze(1)
    if len(index) < 3:
        raise InputError(f"expected three training examples or more to tell noise from design, got {len(index)}.")
    if len(index) > anchors:
        index = index[torch.linspace(0, len(index) - 1, anchors, device=index.device).round().long()]
    problem.budget.require(
        (4.0 + 2.0 * problem.k) * len(index) * problem.n * problem.outputs.element_size(),
        f"the distances of {len(index)} training examples to all",
        "Pass a smaller number of anchors.",
    )
    rows = _Rows(fitted, index)
    distances, repeat = _distances(fitted, rows)
    values = fitted.loo_residuals
    if neighbours is None:
        found = krige(distances, index, values)
    else:
        found = nearest(distances, index, values, min(neighbours, len(index) - 1))
    return _apart(fitted, rows, found, counts, repeat)


class _Rows:
    """J_a F_lam^-1 J_i^T of some training examples (anchors) with all, kept where memory allows."""

    def __init__(self, fitted: Fitted, index: Tensor) -> None:
        self.fitted, self.index = fitted, index
        problem = fitted.problem
        self.size = problem.n * problem.k**2 * problem.outputs.element_size()  # bytes of one anchor
        self.kept: list[tuple[slice, Tensor]] | None = None

    def __iter__(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which anchors, rows (m, k, n, k)), as many as memory allows."""
        if self.kept is not None:
            yield from self.kept
            return
        limit = self.fitted.problem.budget.limit
        seen: list[tuple[slice, Tensor]] | None = [] if len(self.index) * self.size <= 0.2 * limit else None
        for part in self._read(max(1, int(0.05 * limit) // self.size)):
            if seen is not None:
                seen.append(part)
            yield part
        self.kept = seen

    def _read(self, most: int) -> Iterator[tuple[slice, Tensor]]:
        done = 0
        for batch in self.fitted.problem.read("neighbours"):
            here = self.index[(self.index >= batch.start) & (self.index < batch.start + batch.size)] - batch.start
            for part in here.split(most):
                if not len(part):
                    continue
                some = take(batch.inputs, part)
                for _, chunks in alignments(self.fitted, some):
                    rows = torch.cat([aligned for _, aligned in chunks], dim=2)
                    yield slice(done, done + len(rows)), rows
                    done += len(rows)


def _distances(fitted: Fitted, rows: _Rows) -> tuple[Tensor, Tensor]:
    """Squared distances |J_a - J_i|^2 in the metric of the inverse curvature (r, n), and r_i (n,).

    r_i = tr (H L H)_ii / tr H_ii is one without a ridge and less with one; an example that is no anchor has that of the
    nearest.
    """
    index, roots = rows.index, fitted.problem.hessian_roots
    traces = fitted.bread.leverage_blocks.diagonal(dim1=1, dim2=2).sum(1)
    found = traces.new_empty(len(index), fitted.problem.n)
    twice = traces.new_empty(len(index))
    for where, part in rows:
        found[where] = torch.einsum("mknk->mn", part)
        curved = part if roots is None else torch.einsum("mkni,niq->mknq", part, roots)
        twice[where] = curved.square().sum((1, 2, 3))
    found = traces[index].unsqueeze(1) + traces - 2.0 * found
    found[torch.arange(len(index), device=index.device), index] = 0.0
    if fitted.weighing.policy != "exact":
        return found.clamp_min(0.0), torch.ones_like(traces)
    repeat = (twice / traces[index].clamp_min(torch.finfo(twice.dtype).tiny)).clamp(0.0, 1.0)
    return found.clamp_min(0.0), repeat[found.argmin(0)]


def _apart(fitted: Fitted, rows: _Rows, found: Neighbours, counts: Tensor, repeat: Tensor) -> Sources:
    """Split u_i u_i^T into noise and design with the neighbours' predictions."""
    values = fitted.loo_residuals
    predicted = torch.einsum("kna,ak->nk", found.weights, values[rows.index])
    whole = values.unsqueeze(2) * values.unsqueeze(1)
    plain = _symmetric(values.unsqueeze(2) * predicted.unsqueeze(1)) + _doubt(found, values)
    shrink = _shrink(fitted, repeat)
    design, noise = plain, _congruent(shrink, whole - plain)
    if bool(found.weights.any()):
        share = counts.reshape(-1, 1, 1)
        for _ in range(ROUNDS):
            tied = _tied(fitted, rows, found.weights, share * noise)
            design = plain + (1.0 - repeat / 2.0).reshape(-1, 1, 1) * tied
            noise = _congruent(shrink, whole - design)
    noise, design = (fitted.weighing.within(part) for part in (noise, design))
    return Sources(noise, design, len(rows.index), found.lengths, found.nuggets)


def _doubt(found: Neighbours, values: Tensor) -> Tensor:
    """(n, k, k) covariance of b given the neighbours; outputs as correlated as their residuals are."""
    sizes = values.norm(dim=0)
    unit = values / sizes.clamp_min(torch.finfo(values.dtype).tiny)
    root = found.doubt.sqrt()
    correlated: Tensor = unit.T @ unit
    return root.unsqueeze(2) * root.unsqueeze(1) * correlated


def _tied(fitted: Fitted, rows: _Rows, weights: Tensor, noise: Tensor) -> Tensor:
    """(n, k, k) sum_j P_i (L_i H_ij S_j + S_i H_ij L_j) P_j^T w_ij, made symmetric; S times the sample weights."""
    grow, hessians = _growth(fitted), _hessians(fitted)
    anchors = rows.index
    ours = torch.stack([noise[anchors], hessians[anchors]], 1) @ grow[anchors].transpose(1, 2).unsqueeze(1)
    sums = noise.new_zeros(2, *noise.shape)
    for where, part in rows:  # H_aj as (a, k of a, n, k of n)
        sums += torch.einsum("ina,alnj,asij->snli", weights[:, :, where], part.permute(0, 3, 2, 1), ours[where].mT)
    total = grow @ (hessians @ sums[0] + noise @ sums[1])
    return _symmetric(total)


def _growth(fitted: Fitted) -> Tensor:
    """(n, k, k) P_i with u_i = P_i e_i. The products of an approximate curvature are those of fits without: no P."""
    if fitted.weighing.policy != "exact":
        eye = torch.eye(fitted.problem.k, dtype=fitted.problem.dtype, device=fitted.problem.device)
        return eye.expand(fitted.problem.n, -1, -1)
    return _spectral(fitted, lambda h: 1.0 / (1.0 - h).clamp_min(torch.finfo(h.dtype).eps))


def _shrink(fitted: Fitted, repeat: Tensor) -> Tensor:
    """(n, k, k) T_i with noise = T_i E[u_i u_i^T] T_i^T where there is no b."""
    if fitted.weighing.policy != "exact":
        return _spectral(fitted, lambda q: (1.0 + q).rsqrt())

    def factor(h: Tensor) -> Tensor:
        left = (1.0 - h).clamp_min(torch.finfo(h.dtype).eps)
        return left / torch.maximum(1.0 - (2.0 - repeat.unsqueeze(1)) * h, left.square()).sqrt()

    return _spectral(fitted, factor)


def _spectral(fitted: Fitted, function: Callable[[Tensor], Tensor]) -> Tensor:
    """(n, k, k) function of L_i H_ii, or of its blocks where positions or outputs are left out singly."""
    leverage_blocks, roots = fitted.weighing.within(fitted.bread.leverage_blocks), fitted.problem.hessian_roots
    eye = torch.eye(leverage_blocks.shape[1], dtype=leverage_blocks.dtype, device=leverage_blocks.device)
    inner = leverage_blocks if roots is None else roots.transpose(1, 2) @ leverage_blocks @ roots
    if fitted.weighing.by_output:
        return function(inner.diagonal(dim1=1, dim2=2).clamp_min(0.0)).diag_embed()
    values, vectors = torch.linalg.eigh(_symmetric(inner))
    values = values.clamp_min(1e-12)
    change = vectors * ((function(values) - 1.0) / values).unsqueeze(1) @ vectors.transpose(1, 2)
    found: Tensor = eye + (change if roots is None else roots @ change @ roots.transpose(1, 2)) @ leverage_blocks
    return found


def _hessians(fitted: Fitted) -> Tensor:
    """(n, k, k) L_i without sample weights."""
    problem = fitted.problem
    roots = problem.hessian_roots
    if roots is None:
        return torch.eye(problem.k, dtype=problem.dtype, device=problem.device).expand(problem.n, -1, -1)
    found = roots @ roots.transpose(1, 2)
    if problem.sample_weights is None:
        return found
    weights = problem.sample_weights.to(found.dtype)
    return torch.where(weights > 0, 1.0 / weights, 0.0).reshape(-1, 1, 1) * found


def _congruent(factors: Tensor, matrices: Tensor) -> Tensor:
    return factors @ matrices @ factors.transpose(1, 2)


def _symmetric(matrices: Tensor) -> Tensor:
    return (matrices + matrices.transpose(1, 2)) / 2


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
        both = design + noise
        return torch.where(both > 0, design / both.clamp_min(torch.finfo(both.dtype).tiny), 0.0)

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
        parts = ", ".join(f"{name} {share}%" for name, share in shares.items())
        return f"Split({len(self)} predictions; of their HeC3 {parts}; experimental)"

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
    problem = fitted.problem
    most = max(1, int(0.1 * problem.budget.limit) // (8 * problem.n * problem.k**2))
    size = batch_size(inputs, "this batch")
    parts = []
    for low in range(0, size, most):
        some = take(inputs, slice(low, min(low + most, size)))
        for where, chunks in alignments(fitted, some):
            sums = problem.outputs.new_zeros(4, where.stop - where.start, problem.output_count(inputs))
            for there, aligned in chunks:
                sums += _sums(fitted, aligned, there, sources)
            parts.append(sums)
    hec3, noise, design, shift = torch.cat(parts, 1)
    return Split(hec3, noise, design - shift.square() / fitted.meats.deletions, sources)


def join(parts: Sequence[Split]) -> Split:
    """Several batches as one."""
    hec3, noise, design = (torch.cat([getattr(part, name) for part in parts]) for name in ("hec3", "noise", "design"))
    return Split(hec3, noise, design, parts[0].sources)


def _sums(fitted: Fitted, aligned: Tensor, there: slice, sources: Sources) -> Tensor:
    """HeC3, noise, design and sum_i a_i u_i over some training examples, (4, m, k)."""
    weights = fitted.problem.sample_weights
    counts = 1.0 if weights is None else weights[there].to(aligned.dtype).square().reshape(-1, 1, 1)
    left_out = fitted.meats.roots["hec3"][there]
    hec3 = torch.einsum("mkni,niq->mknq", aligned, left_out).square().sum((2, 3))
    shift = torch.einsum("mkni,ni->mk", aligned, fitted.meats.total[there])
    quadratic = [
        torch.einsum("mkni,nij,mknj->mk", aligned, counts * matrices[there], aligned)
        for matrices in (sources.noise, sources.design)
    ]
    return torch.stack([hec3, *quadratic, shift])
