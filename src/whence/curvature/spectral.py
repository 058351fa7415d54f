"""Curvatures that are diagonal in a basis, F ~ U diag(s) U^T: leverages, meats, and the estimators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.accumulate import Accumulator, LayerGradients, drained, working_precision
from whence.curvature.base import (
    Alignments,
    FittedCurvature,
    MeatRoots,
    Meats,
    NewtonStep,
    Predicted,
    Sandwich,
    multiple_of_hessians,
    singular,
)
from whence.curvature.kronecker import MomentSums, Spectrum, numbered
from whence.curvature.rotation import Basis, BasisView, DiagonalMoments, Weights, along, outer, raised, slices
from whence.curvature.two_bases import TwoBasisWeights, last
from whence.data.batches import Inputs, batch_size, take
from whence.jacobian.gradients import Dense, Kronecker, Tangent


class MeatSums(Accumulator):
    """Sums of squares of J_i^T W_i in the bases for each set of weights, and sum_i J_i^T u_i, from the "hec3" columns.

    If the weights W (n, k, q) or (1, k, q) are known beforehand, this is a pass of its own. Otherwise `roots` gives
    only their names and sizes, and each chunk brings its weights. `rotations` lead to the meats' own bases.
    """

    label = "meats"
    bases: Sequence[Basis]

    def __init__(
        self,
        gradients: LayerGradients,
        bases: Sequence[Basis],
        rotations: Sequence[Basis | None],
        roots: Mapping[str, Tensor],
    ) -> None:
        self.bases, self.roots, self.names, self.n = bases, roots, list(roots), gradients.problem.n
        self.cotangents, self.count = gradients.identity(), gradients.problem.k
        sizes, device = [root.shape[2] for root in roots.values()], next(iter(roots.values())).device
        eye = torch.eye(sum(sizes), dtype=torch.float64, device=device)
        self.masks = torch.stack([part.sum(0) for part in eye.split(sizes)])  # (names, Q)
        self.sums = [
            MomentSums(basis, len(sizes), device, rotation=rotation)
            for basis, rotation in zip(bases, rotations, strict=True)
        ]
        self.state = numbered([one.state for one in self.sums])
        self.given = [*roots.values(), *(one for basis in rotations if basis is not None for one in basis.tensors)]

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Add gradients combined with the weights known beforehand."""
        self.add_weighted(views, {name: root.expand(self.n, -1, -1)[where] for name, root in self.roots.items()})

    def add_weighted(self, views: list[BasisView], roots: Mapping[str, Tensor]) -> None:
        """Add gradients combined with the weights W (n, k, q) of the same examples."""
        mixing = torch.cat(list(roots.values()), dim=2).double()
        summed = mixing @ self.masks[self.names.index("hec3")] if "hec3" in roots else None
        for sums, view in zip(self.sums, drained(views), strict=True):
            sums.add(view, self.masks, summed, mixing)


class Leverage(Accumulator):
    """Pass 3: leverage blocks Q_i = J_i F_lam^-1 J_i^T, the Newton step's change J_i Delta w, and the meats.

    The curvature is given by the basis U and the eigenvalues s of each block. `meat_roots` gives the weights of the
    examples in the meats; without it, the meats need a pass of their own. `rotations` lead to the meats' own bases.
    """

    label = "leverage"
    bases: Sequence[Basis]

    def __init__(
        self,
        gradients: LayerGradients,
        bases: Sequence[Basis],
        spectrum: Spectrum,
        ridge: float,
        meat_roots: MeatRoots | None,
        rotations: Sequence[Basis | None] | None = None,
    ) -> None:
        problem, blocks = gradients.problem, list(zip(bases, spectrum.curvature, spectrum.score, strict=True))
        pairs = ((s.inside <= 0).sum() + basis.outside * (s.outside <= 0) for basis, s, _ in blocks)
        if ridge <= 0 and (empty := sum(map(int, pairs))):  # no curvature along these directions
            raise singular(ridge, empty, sum(basis.block.numel for basis in bases))
        self.bases, self.rotations, self.meat_roots = bases, rotations or [None] * len(bases), meat_roots
        self.cotangents, self.count = gradients.identity(), problem.k
        self.leverage_blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        self.change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        self.step: list[Tensor] = []  # Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w) of each block
        self.inverse: list[Weights] = []
        selected, precision = problem.selection.parameters, working_precision(problem)
        for basis, s, score in blocks:
            damped = s.damped(ridge)
            weights = {name: selected[name].detach().double() for name in basis.block.parameters}
            step = basis.solve(damped, score - ridge * basis.block.to_matrix(weights))
            self.step.append(step)
            self.inverse.append(Weights.of(basis, [(1.0 / damped.inside, 1.0 / damped.outside)], 1, precision))
            problem.passes.trim_memory()
        self.direction = [step.to(precision) for step in self.step]
        self.state = {"leverage_blocks": self.leverage_blocks, "change": self.change}
        self.given = [*(part for one in self.inverse for part in (one.inside, one.outside)), *self.direction]
        self.meats: MeatSums | None = None
        if meat_roots is not None:
            none = slice(0, 0)  # a call with no examples gives the number of weights
            roots = meat_roots(none, self.leverage_blocks[none], self.change[none])
            self.meats = MeatSums(gradients, bases, self.rotations, roots)
            self.state |= self.meats.state
            self.given += self.meats.given

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Sum leverages and changes over blocks; from these follow the examples' weights in the meats."""
        blocks, change = self.leverage_blocks[where], self.change[where]  # views, updated in place
        read = drained(views) if self.meats is None else views
        for inverse, direction, view in zip(self.inverse, self.direction, read, strict=True):
            blocks += inverse.grams(view)[0]
            change += along(view.tangent, direction)
        if self.meats is not None and self.meat_roots is not None:
            self.meats.add_weighted(views, self.meat_roots(where, blocks, change))


def centre(squares: Tensor, total: Tensor, n: int) -> Tensor:
    """The centred jackknife, (n - 1) / n sum_i (v_i - mean)^2 along each direction, for v_i = J_i^T u_i.

    Computed from the sums of squares and the total sum_i v_i over n deletions. Centring in a basis keeps the variance
    above zero however the meat is approximated.
    """
    return (squares - total.square() / n).clamp_min(0.0) * ((n - 1) / n)


def centred(basis: Basis, squares: DiagonalMoments, total: Tensor, n: int) -> DiagonalMoments:
    """`centre` inside and outside a basis; the total has the shape of the block's matrix."""
    inside = basis.to(torch.float64).into(total)
    rest = float(total.square().sum() - inside.square().sum()) / n / basis.outside if basis.outside else 0.0
    return DiagonalMoments(centre(squares.inside, inside, n), max(squares.outside - rest, 0.0) * ((n - 1) / n))


PLANNED_BATCH = 500  # training examples whose products with an input are held at once, when planning memory


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedSpectral(FittedCurvature):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi."""

    stream: LayerGradients
    bases: Sequence[Basis]  # U of each block
    spectrum: Spectrum  # s of each block, and the sums from the same pass
    noise: Tensor  # (k, k) covariance of the residuals
    step: list[Tensor]  # Delta w of each block
    change: Tensor  # (n, k) J_i Delta w
    rotations: Sequence[Basis | None]  # from each block's basis to the meats' own, where there is one
    summed_meats: MeatSums | None = None  # of HeC0, HeC2 and HeC3, where summed with the leverages

    @property
    def degrees_of_freedom(self) -> float:
        """Sum of s / (s + lambda)."""
        zipped = zip(self.bases, self.spectrum.curvature, strict=True)
        return sum(
            float((s.inside / damped.inside).sum()) + basis.outside * s.outside / damped.outside
            for basis, s, damped in ((basis, s, s.damped(self.ridge)) for basis, s in zipped)
        )

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), where F is this approximation."""
        size = math.hypot(*(float(step.norm()) for step in self.step))
        relative = size / self.problem.selection.norm()
        direction = self.stream.flatten(self.step).to(self.problem.dtype) if with_direction else None
        return NewtonStep(self.change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of weighted gradients, in the meats' own basis where there is one, else in the curvature's."""
        roots = dict(meats.roots)
        scale = self._multiple_of_noise(roots["ho"])
        if scale is not None:
            del roots["ho"]
        summed = [] if self.summed_meats is None else [self.summed_meats]
        rest = {name: root for name, root in roots.items() if not any(name in one.names for one in summed)}
        if rest:
            summed.append(self.stream.accumulate(MeatSums(self.stream, self.bases, self.rotations, rest)))
        names: tuple[str, ...] = ()
        weights, n = [], meats.deletions
        for at, (basis, rotation) in enumerate(zip(self.bases, self.rotations, strict=True)):
            found = {} if scale is None else {"ho": self.spectrum.noise[at].times(scale)}
            for sums in summed:
                found.update(zip(sums.names, sums.sums[at].finish(), strict=True))
            total = summed[0].sums[at].total  # from the sums with "hec3"
            found["jackknife"] = centred(basis, found["hec3"], total, n)
            names = (*found, "laplace")
            weights.append(self._weights(at, found))
            if rotation is not None:
                pairs = (zip(sums.names, sums.sums[at].state["rotated"], strict=True) for sums in summed)
                own = {name: one for some in pairs for name, one in some if name != "ho"}  # Ho keeps one basis
                leading = basis.to(torch.float64).into(total)[last(rotation.shape)]
                own["jackknife"] = centre(own["hec3"], rotation.to(torch.float64).into(leading), n)
                by_position = {names.index(name): one for name, one in own.items()}
                inverse = 1.0 / (self.spectrum.curvature[at].inside + self.ridge)
                weights[at] = TwoBasisWeights.add_to(weights[at], rotation, by_position, inverse)
        return SpectralSandwich(self, names, weights)

    def _multiple_of_noise(self, root: Tensor) -> float | None:
        """The factor c if these weights give c times the noise of the spectrum, else `None`."""
        if not self.problem.identity_hessians:
            return multiple_of_hessians(root, self.problem)
        if len(root) > 1:
            return None
        wanted, size = (root @ root.mT)[0], float(self.noise.diagonal().sum())
        scale = float(wanted.diagonal().sum()) / size if size > 0 else 1.0
        return scale if torch.allclose(wanted, scale * self.noise, rtol=1e-9, atol=1e-12 * size) else None

    def _weights(self, at: int, meats: Mapping[str, DiagonalMoments]) -> Weights:
        """Weights of a block: d / (s + lambda)^2 for each meat d, and 1 / (s + lambda) for Laplace."""
        damped = self.spectrum.curvature[at].damped(self.ridge)
        inside, outside = damped.inside, damped.outside
        # Divide twice: squares of very small or large ridges underflow or overflow.
        pairs = ((one.inside / inside / inside, one.outside / outside / outside) for one in meats.values())
        every = chain(pairs, [(1.0 / inside, 1.0 / outside)])
        return Weights.of(self.bases[at], every, len(meats) + 1, working_precision(self.problem))

    def alignments(self, inputs: Inputs) -> Alignments:
        """Precondition the inputs' gradients, then contract them with the training gradients, layer by layer."""
        k = self.problem.output_count(inputs)
        for where, directions in self._preconditioned(inputs):
            training = self.stream.chunks("alignments")
            yield where, ((some, contract(tangents, directions, k)) for some, tangents in training)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """As `alignments`, with the gradients of other inputs."""
        k, j = self.problem.output_count(inputs), self.problem.output_count(others[0])
        found = []
        for _, directions in self._preconditioned(inputs):
            chunks = (chunk for batch in others for chunk in self.stream.of(batch, self.stream.identity(j), j))
            found.append(torch.cat([contract(chunk.tangents, directions, k) for chunk in chunks], dim=2))
        return torch.cat(found).to(self.problem.dtype)

    def precondition(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v, by the inverse of this curvature."""
        given = self.problem.selection.unflatten(vectors.double())
        pairs = zip(self.bases, self.spectrum.curvature, strict=True)
        solved = [basis.solve(s.damped(self.ridge), basis.block.to_matrix(given)) for basis, s in pairs]
        return self.stream.flatten(solved, len(vectors)).to(vectors.dtype)

    def _preconditioned(self, inputs: Inputs) -> Iterator[tuple[slice, list[Directions]]]:
        """Yield F_lam^-1 J^T for each block, for as many inputs at a time as memory allows."""
        problem, precision = self.problem, working_precision(self.problem)
        k, size = problem.output_count(inputs), batch_size(inputs, "this batch")
        numbers = min(problem.n, PLANNED_BATCH) * problem.k * k  # for each input, with its gradients
        for chunk in self.stream.of(take(inputs, slice(0, 1)), self.stream.identity(k), k):
            for tangent, basis in zip(chunk.tangents, self.bases, strict=True):  # layers seen once stay factored
                numbers += math.prod(basis.shape) if is_outer_product(tangent) else k * basis.block.numel
        most = max(1, int(0.05 * problem.budget.limit) // (numbers * precision.itemsize))
        for low in range(0, size, most):
            where = slice(low, min(low + most, size))
            parts: list[list[Tangent]] = [[] for _ in self.bases]
            for chunk in self.stream.of(take(inputs, where), self.stream.identity(k), k):
                for at, tangent in enumerate(chunk.tangents):
                    parts[at].append(tangent)
            zipped = zip(parts, self.bases, self.spectrum.curvature, strict=True)
            yield where, [Directions(some, basis, s.damped(self.ridge), precision) for some, basis, s in zipped]


# --- Inner products with preconditioned gradients, kept factored where layers are used once --------------------------


PRODUCT_NUMBERS = {"cpu": 2**18, "cuda": 2**26}  # scaled gradients held at once


def align(tangent: Tangent, directions: Tensor) -> Tensor:
    """<J_i^T u_c, v_q> for every example, cotangent and direction v (q, *matrix shape of the block): (n, c, q)."""
    if isinstance(tangent, Dense):
        return raised(tangent.values).to(directions.dtype) @ directions.T
    if isinstance(tangent, Kronecker):
        a, g = tangent.inputs().to(directions.dtype), tangent.grads().to(directions.dtype)
        parts = slices(len(g), math.prod((g.shape[1], *directions.shape[1:])), g)
        return torch.cat([outer(a[some], g[some]).flatten(2) @ directions.flatten(1).T for some in parts])
    rows, examples, values = tangent.aggregate()
    values = raised(values).to(directions.dtype)  # (u, c, d)
    found = values.new_zeros(len(tangent.index), values.shape[1], len(directions))
    for some in slices(len(rows), len(directions) * values.shape[2], values):
        products = torch.einsum("ucd,qud->ucq", values[some], directions[:, rows[some]])
        found.index_add_(0, examples[some], products)
    return found


def is_outer_product(tangent: Tangent) -> bool:
    """Whether the gradients of a block are outer products of two vectors."""
    return isinstance(tangent, Kronecker) and tangent.positions == 1 and tangent.g.shape[2] == 1


@dataclass(frozen=True)
class OuterProducts:
    """Outer products g a^T of n examples for c cotangents, split into the parts inside and outside a basis."""

    a: Tensor  # (n, i)
    a_inside: Tensor  # (n, x) coordinates
    a_outside: Tensor  # (n, i)
    g_inside: Tensor  # (n, c, y) coordinates
    g_outside: Tensor  # (n, c, o)

    @classmethod
    def of(cls, tangents: Sequence[Tangent], basis: Basis, dtype: torch.dtype) -> OuterProducts:
        """Split several chunks of gradients."""
        outer = [one for one in tangents if isinstance(one, Kronecker)]
        a = torch.cat([raised(one.inputs()).flatten(1) for one in outer]).to(dtype)
        g = torch.cat([raised(one.grads()).flatten(2) for one in outer]).to(dtype)
        return cls(a, *_split(a, basis.inputs), *_split(g, basis.outputs))


def _split(rows: Tensor, basis: Tensor | None) -> tuple[Tensor, Tensor]:
    """Coordinates of rows (..., i) in a basis (1, i, x), and the part outside it."""
    if basis is None:
        return rows, torch.zeros_like(rows)
    columns = basis[0].to(rows.dtype)
    inside = rows @ columns
    return inside, rows - inside @ columns.T


@dataclass(frozen=True)
class Directions:
    """F_lam^-1 times the gradients of m inputs for k cotangents each, in one block."""

    tangents: Sequence[Tangent]
    basis: Basis
    damped: DiagonalMoments  # s + lambda
    dtype: torch.dtype

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents: (n, c, m k)."""
        if self._own is None or not is_outer_product(tangent):
            return align(tangent, self._matrices)
        return self._align_outer(OuterProducts.of([tangent], self.basis, self.dtype), self._own)

    @cached_property
    def _own(self) -> OuterProducts | None:
        """The gradients, if all of them are outer products."""
        factored = all(is_outer_product(tangent) for tangent in self.tangents)
        return OuterProducts.of(self.tangents, self.basis, self.dtype) if factored else None

    @cached_property
    def _matrices(self) -> Tensor:
        """(m k, *matrix shape of the block)."""
        matrices = torch.cat([one.materialize().flatten(0, 1).to(self.dtype) for one in self.tangents])
        return self.basis.solve(self.damped, matrices)

    @cached_property
    def _solved(self) -> Tensor:
        """(m y, x) layer inputs in the basis, divided by s + lambda."""
        assert self._own is not None
        return (self._own.a_inside.unsqueeze(1) / self.damped.inside[0].to(self.dtype)).flatten(0, 1)

    def _align_outer(self, others: OuterProducts, own: OuterProducts) -> Tensor:
        """For every pair, sum_y g_y g'_y B_y with B = sum_x a_x a'_x / (s + lambda); one weight for the part outside.

        B is one large product for many examples; scaled gradients are held for a few examples at once.
        """
        m, k, y = own.g_inside.shape
        n, c = others.g_inside.shape[:2]
        weight = 1.0 / self.damped.outside if self.basis.outside else 0.0
        numbers = PRODUCT_NUMBERS["cuda" if own.a.is_cuda else "cpu"]
        many, few = (max(1, room // (m * max(y, 1))) for room in (16 * numbers, numbers // k))
        found = own.a.new_empty(n, c, m * k)
        for low in range(0, n, many):
            here = slice(low, min(low + many, n))
            scales = (others.a_inside[here] @ self._solved.T).unflatten(1, (m, y))
            if weight:
                scales += (weight * others.a_outside[here] @ own.a_outside.T).unsqueeze(2)
            pieces = zip(*(one.split(few) for one in (scales, others.g_inside[here], found[here])), strict=True)
            for scale, left, into in pieces:
                scaled = (scale.unsqueeze(2) * own.g_inside).view(len(scale), m * k, y)
                torch.bmm(left, scaled.mT, out=into)
            if weight:
                alike = weight * others.a[here] @ own.a.T  # (n, m)
                products = others.g_outside[here].flatten(0, 1) @ own.g_outside.flatten(0, 1).T
                shaped = found[here].unflatten(2, (m, k))
                shaped.addcmul_(products.view_as(shaped), alike[:, None, :, None])
        return found


def contract(tangents: Sequence[Tangent], directions: Sequence[Directions], k: int) -> Tensor:
    """(m, k, n, c) inner products of the gradients of n examples with the directions of m inputs, over all blocks."""
    parts = (one.align(tangent) for tangent, one in zip(tangents, directions, strict=True))
    found = reduce(Tensor.add_, parts)  # (n, c, m k)
    return found.reshape(*found.shape[:2], -1, k).permute(2, 3, 0, 1)


@dataclass(frozen=True)
class SpectralSandwich(Sandwich):
    """Weighted sums of squares of U^T phi: d / (s + lambda)^2 for each meat, 1 / (s + lambda) for Laplace."""

    variances_alone: ClassVar[bool] = True

    fitted: FittedSpectral
    names: tuple[str, ...]  # of the estimators, in the order of the weights
    weights: list[Weights]  # of each block

    def predict(self, inputs: Inputs) -> Predicted:
        """One forward pass, k backward passes, and a few products."""
        return Predicted(*self._sum(inputs, Weights.grams), None)

    def variances(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """As `predict`, without covariances between outputs: gradients are read once for all estimators."""
        return self._sum(inputs, Weights.variances)

    def _sum(self, inputs: Inputs, of: Callable[[Weights, BasisView], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Outputs, and for each estimator the sum over blocks of `of`, (n, k) or (n, k, k)."""
        problem, stream = self.fitted.problem, self.fitted.stream
        k = problem.output_count(inputs)
        outputs, sums = [], []
        with stream.few_threads(batch_size(inputs, "this batch"), k):
            for chunk in stream.of(inputs, stream.identity(k), k):
                views = zip(self.weights, chunk.views(self.fitted.bases, problem), strict=True)
                sums.append(reduce(Tensor.add_, (of(weights, view) for weights, view in views)))
                outputs.append(chunk.outputs)
                del chunk, views  # the next chunk needs the memory
        if problem.half:  # only gradients are in half precision
            with torch.no_grad():
                outputs = [problem.network(inputs)]
        found = torch.cat(sums, dim=1).to(problem.dtype)
        return torch.cat(outputs).to(problem.dtype), dict(zip(self.names, found, strict=True))
