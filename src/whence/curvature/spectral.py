"""Curvatures that are diagonal in a basis, F ~ U diag(s) U^T: leverages, meats, and the estimators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.accumulate import Accumulator, LayerGradients, pop_each, working_precision
from whence.curvature.alignments import PreconditionedGradients, contract, is_outer_product
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
from whence.curvature.kronecker import BlockSpectrum, MomentSums, by_block
from whence.curvature.rotation import Basis, BasisView, DiagonalMoments, Weights, directional_derivatives
from whence.curvature.two_bases import TwoBasisWeights
from whence.data.batches import Inputs, batch_size, take


class MeatSums(Accumulator):
    """Sums of squares of J_i^T W_i in the bases for each set of weights, and sum_i J_i^T u_i, from the "hec3" columns.

    If the weights W (n, k, q) or (1, k, q) are known beforehand, this is a pass of its own. Otherwise `roots` gives
    only their names and sizes, and each chunk brings its weights.
    """

    label = "meats"

    def __init__(self, gradients: LayerGradients, blocks: Sequence[BlockSpectrum], roots: Mapping[str, Tensor]) -> None:
        self.bases, self.roots, self.names = [block.basis for block in blocks], roots, list(roots)
        self.n = gradients.problem.n
        self.cotangents, self.count = gradients.identity(), gradients.problem.k
        sizes, device = [root.shape[2] for root in roots.values()], next(iter(roots.values())).device
        eye = torch.eye(sum(sizes), dtype=torch.float64, device=device)
        self.masks = torch.stack([part.sum(0) for part in eye.split(sizes)])  # (names, Q)
        self.sums = [MomentSums(block.basis, len(sizes), device, block.rotation) for block in blocks]
        self.state = by_block([one.state for one in self.sums])
        rotations = [block.rotation for block in blocks if block.rotation is not None]
        self.given = [*roots.values(), *(one for rotation in rotations for one in rotation.tensors)]

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Add gradients combined with the weights known beforehand."""
        self.add_weighted(views, {name: root.expand(self.n, -1, -1)[where] for name, root in self.roots.items()})

    def add_weighted(self, views: list[BasisView], roots: Mapping[str, Tensor]) -> None:
        """Add gradients combined with the weights W (n, k, q) of the same examples."""
        mixing = torch.cat(list(roots.values()), dim=2).double()
        summed = mixing @ self.masks[self.names.index("hec3")] if "hec3" in roots else None
        for sums, view in zip(self.sums, pop_each(views), strict=True):
            sums.add(view, self.masks, summed, mixing)


class Leverage(Accumulator):
    """Pass 3: leverage blocks Q_i = J_i F_lam^-1 J_i^T, the Newton step's change J_i Delta w, and the meats.

    `meat_roots` gives the weights of the examples in the meats, which follow from their leverages and changes.
    """

    label = "leverage"

    def __init__(
        self,
        gradients: LayerGradients,
        blocks: Sequence[BlockSpectrum],
        ridge: float,
        meat_roots: MeatRoots,
    ) -> None:
        problem = gradients.problem
        empty = sum(block.curvature.empty_directions(block.basis) for block in blocks)
        if ridge <= 0 and empty:
            raise singular(ridge, empty, sum(block.basis.block.numel for block in blocks))
        self.bases, self.meat_roots = [block.basis for block in blocks], meat_roots
        self.cotangents, self.count = gradients.identity(), problem.k
        self.leverage_blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        self.change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        self.step: list[Tensor] = []  # Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w) of each block
        self.inverse: list[Weights] = []
        selected, precision = problem.selection.parameters, working_precision(problem)
        for block in blocks:
            layer, inverse = block.basis.block, block.curvature.damped(ridge).inverse()
            weights = {name: selected[name].detach().double() for name in layer.parameters}
            self.step.append(block.solve(block.score - ridge * layer.to_matrix(weights), ridge))
            self.inverse.append(Weights.of(block.basis, [inverse], 1, precision))
            problem.passes.trim_memory()
        self.direction = [step.to(precision) for step in self.step]
        self.state = {"leverage_blocks": self.leverage_blocks, "change": self.change}
        self.given = [*(part for one in self.inverse for part in (one.inside, one.outside)), *self.direction]
        none = slice(0, 0)  # a call with no examples gives the number of weights
        roots = meat_roots(none, self.leverage_blocks[none], self.change[none])
        self.meats = MeatSums(gradients, blocks, roots)
        self.state |= self.meats.state
        self.given += self.meats.given

    def add(self, where: slice, views: list[BasisView]) -> None:
        """Sum leverages and changes over blocks; from these follow the examples' weights in the meats."""
        blocks, change = self.leverage_blocks[where], self.change[where]  # views, updated in place
        for inverse, direction, view in zip(self.inverse, self.direction, views, strict=True):
            blocks += inverse.grams(view)[0]
            change += directional_derivatives(view.tangent, direction)
        self.meats.add_weighted(views, self.meat_roots(where, blocks, change))


def jackknife_squares(squares: Tensor, total: Tensor, n: int) -> Tensor:
    """The centred jackknife, (n - 1) / n sum_i (v_i - mean)^2 along each direction, for v_i = J_i^T u_i.

    Computed from the sums of squares and the total sum_i v_i over n deletions. Centring in a basis keeps the variance
    above zero however the meat is approximated.
    """
    return (squares - total.square() / n).clamp_min(0.0) * ((n - 1) / n)


def jackknife_moments(basis: Basis, squares: DiagonalMoments, total: Tensor, n: int) -> DiagonalMoments:
    """`jackknife_squares` inside and outside a basis; the total has the shape of the block's matrix."""
    inside = basis.to(torch.float64).to_coordinates(total)
    rest = float(total.square().sum() - inside.square().sum()) / n / basis.missing if basis.missing else 0.0
    return DiagonalMoments(
        jackknife_squares(squares.inside, inside, n), max(squares.outside - rest, 0.0) * ((n - 1) / n)
    )


PLANNED_BATCH = 500  # training examples whose products with an input are held at once, when planning memory


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedSpectral(FittedCurvature):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi."""

    gradients: LayerGradients
    blocks: Sequence[BlockSpectrum]  # U and s of each block
    noise: Tensor  # (k, k) covariance of the residuals
    step: list[Tensor]  # Delta w of each block
    change: Tensor  # (n, k) J_i Delta w
    summed_meats: MeatSums | None = None  # of HeC0, HeC2 and HeC3; not saved

    @property
    def degrees_of_freedom(self) -> float:
        """Sum of s / (s + lambda)."""
        pairs = ((block.curvature, block.basis) for block in self.blocks)
        return sum(s.over(s.damped(self.ridge)).trace(basis) for s, basis in pairs)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), where F is this approximation."""
        size = math.hypot(*(float(step.norm()) for step in self.step))
        relative = size / self.problem.selection.norm()
        direction = self.gradients.flatten(self.step).to(self.problem.dtype) if with_direction else None
        return NewtonStep(self.change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of weighted gradients, in the meats' own basis where there is one, else in the curvature's."""
        assert self.summed_meats is not None  # a fit that was loaded has its sandwich
        summed, scale = [self.summed_meats], self._multiple_of_noise(meats.roots["ho"])
        if scale is None:
            ho = MeatSums(self.gradients, self.blocks, {"ho": meats.roots["ho"]})
            summed.append(self.gradients.accumulate(ho))
        names: tuple[str, ...] = ()
        weights, n = [], meats.deletions
        for at, block in enumerate(self.blocks):
            found = {} if scale is None else {"ho": block.noise.times(scale)}
            for sums in summed:
                found.update(zip(sums.names, sums.sums[at].finish(), strict=True))
            total = summed[0].sums[at].total  # from the sums with "hec3"
            found["jackknife"] = jackknife_moments(block.basis, found["hec3"], total, n)
            names = (*found, "laplace")
            one = self._weights(block, found)
            if block.rotation is not None:
                own = {name: d for sums in summed for name, d in zip(sums.names, sums.sums[at].rotated, strict=True)}
                own["jackknife"] = jackknife_squares(own["hec3"], block.into_rotated(total), n)
                inverse = 1.0 / (block.curvature.inside + self.ridge)
                by_position = {names.index(name): d for name, d in own.items() if name != "ho"}  # Ho keeps one basis
                one = TwoBasisWeights.add_to(one, block.rotation, by_position, inverse)
            weights.append(one)
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

    def _weights(self, block: BlockSpectrum, meats: Mapping[str, DiagonalMoments]) -> Weights:
        """Weights of a block: d / (s + lambda)^2 for each meat d, and 1 / (s + lambda) for Laplace."""
        damped = block.curvature.damped(self.ridge)
        # Divide twice: squares of very small or large ridges underflow or overflow.
        every = chain((meat.over(damped).over(damped) for meat in meats.values()), [damped.inverse()])
        return Weights.of(block.basis, every, len(meats) + 1, working_precision(self.problem))

    def alignments(self, inputs: Inputs) -> Alignments:
        """Precondition the inputs' gradients, then contract them with the training gradients, layer by layer."""
        k = self.problem.output_count(inputs)
        for where, directions in self._preconditioned(inputs):
            training = self.gradients.chunks("alignments")
            yield where, ((some, contract(tangents, directions, k)) for some, tangents in training)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """As `alignments`, with the gradients of other inputs."""
        k, j = self.problem.output_count(inputs), self.problem.output_count(others[0])
        found = []
        for _, directions in self._preconditioned(inputs):
            chunks = (chunk for batch in others for chunk in self.gradients.of(batch, self.gradients.identity(j), j))
            found.append(torch.cat([contract(chunk.tangents, directions, k) for chunk in chunks], dim=2))
        return torch.cat(found).to(self.problem.dtype)

    def precondition(self, vectors: Tensor) -> Tensor:
        """F_lam^-1 v, by the inverse of this curvature."""
        given = self.problem.selection.unflatten(vectors.double())
        solved = [block.solve(block.basis.block.to_matrix(given), self.ridge) for block in self.blocks]
        return self.gradients.flatten(solved, len(vectors)).to(vectors.dtype)

    def _preconditioned(self, inputs: Inputs) -> Iterator[tuple[slice, list[PreconditionedGradients]]]:
        """Yield F_lam^-1 J^T for each block, for as many inputs at a time as memory allows."""
        problem, precision = self.problem, working_precision(self.problem)
        k, size = problem.output_count(inputs), batch_size(inputs, "this batch")
        numbers = min(problem.n, PLANNED_BATCH) * problem.k * k  # for each input, with its gradients
        for chunk in self.gradients.of(take(inputs, slice(0, 1)), self.gradients.identity(k), k):
            for tangent, block in zip(chunk.tangents, self.blocks, strict=True):  # layers seen once stay factored
                numbers += math.prod(block.basis.shape) if is_outer_product(tangent) else k * tangent.block.numel
        most = max(1, int(0.05 * problem.budget.limit) // (numbers * precision.itemsize))
        for low in range(0, size, most):
            where = slice(low, min(low + most, size))
            chunks = self.gradients.of(take(inputs, where), self.gradients.identity(k), k)
            tangents = zip(*(chunk.tangents for chunk in chunks), strict=True)  # of each block, in all chunks
            yield (
                where,
                [
                    PreconditionedGradients(some, block.basis, block.curvature.damped(self.ridge), precision)
                    for some, block in zip(tangents, self.blocks, strict=True)
                ],
            )


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
        problem, gradients = self.fitted.problem, self.fitted.gradients
        bases = [block.basis for block in self.fitted.blocks]
        k = problem.output_count(inputs)
        outputs, sums = [], []
        with gradients.few_threads(batch_size(inputs, "this batch"), k):
            for chunk in gradients.of(inputs, gradients.identity(k), k):
                views = zip(self.weights, chunk.views(bases, problem), strict=True)
                sums.append(reduce(Tensor.add_, (of(weights, view) for weights, view in views)))
                outputs.append(chunk.outputs)
                del chunk, views  # the next chunk needs the memory
        if problem.half:  # only gradients are in half precision
            with torch.no_grad():
                outputs = [problem.network(inputs)]
        found = torch.cat(sums, dim=1).to(problem.dtype)
        return torch.cat(outputs).to(problem.dtype), dict(zip(self.names, found, strict=True))
