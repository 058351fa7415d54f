"""Curvatures that are diagonal in a basis, F ~ U diag(s) U^T: leverages, meats, and the estimators."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.accumulate import Accumulator, ChunkGradients, LayerGradients, working_precision
from whence.curvature.base import (
    Alignments,
    FittedCurvature,
    MeatRoots,
    Meats,
    NewtonStep,
    Predicted,
    Sandwich,
    singular,
    times_noise,
)
from whence.curvature.kronecker import MomentSums, Spectrum, numbered
from whence.curvature.preconditioned import Directions, is_outer_product
from whence.curvature.rotation import Basis, BasisView, DiagonalMoments, Weights
from whence.curvature.two_bases import TwoBasisWeights, last
from whence.data.batches import Inputs, batch_size, take
from whence.jacobian.gradients import Tangent
from whence.jacobian.linearization import Linearization


class MeatSums(Accumulator):
    """Squares of J_i^T W_i in the bases for each set of weights, and sum_i J_i^T u_i, the columns of "hec3".

    A pass of its own where the weights W (n, k, q), or (1, k, q), are known beforehand. Else it takes their names and
    sizes alone, and chunks come with their weights. Rotations lead to the meats' own bases.
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
        self.last = self.masks[self.names.index("hec3")] if "hec3" in roots else torch.zeros_like(self.masks[0])
        self.sums = [
            MomentSums(basis, len(sizes), device, rotation=rotation)
            for basis, rotation in zip(bases, rotations, strict=True)
        ]
        self.state = numbered([one.state for one in self.sums])
        every = [*bases, *(one for one in rotations if one is not None)]
        self.given = [*roots.values(), *(one for basis in every for one in basis.tensors)]

    def add(self, where: slice, chunk: ChunkGradients) -> None:
        """Add gradients combined by the weights that are known."""
        self.add_weighted(chunk, {name: root.expand(self.n, -1, -1)[where] for name, root in self.roots.items()})

    def add_weighted(self, views: Iterable[BasisView], roots: Mapping[str, Tensor]) -> None:
        """Add gradients combined by the weights W (n, k, q) of the same examples."""
        mixing = torch.cat(list(roots.values()), dim=2).double()
        for sums, view in zip(self.sums, views, strict=True):
            sums.add(view, self.masks, self.last.expand(len(mixing), -1), mixing)

    def moments(self, at: int) -> dict[str, DiagonalMoments]:
        """The squares of one block, by name."""
        return dict(zip(self.names, self.sums[at].finish(), strict=True))

    def rotated(self, at: int) -> dict[str, Tensor]:
        """The squares of one block in the meats' own basis, by name, but for those of homoscedastic noise."""
        named = zip(self.names, self.sums[at].state["rotated"], strict=True)
        return {name: one for name, one in named if name != "ho"}


class Leverage(Accumulator):
    """Pass 3: leverage blocks Q_i = J_i F_lam^-1 J_i^T, the Newton step's change J_i Delta w, and the meats.

    The curvature is given by the bases U and eigenvalues s of each block. Without the weights of the examples in the
    meats, these take a pass of their own; rotations lead to a basis of their own, for the blocks that have one.
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
        check_invertible(bases, spectrum.curvature, ridge)
        problem = gradients.problem
        self.gradients, self.bases, self.spectrum, self.ridge = gradients, bases, spectrum, ridge
        self.rotations, self.meat_roots = rotations or [None] * len(bases), meat_roots
        self.cotangents, self.count = gradients.identity(), problem.k
        self.leverage_blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        self.change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        self.step = newton_steps(problem, bases, spectrum, ridge)
        precision, damped = working_precision(problem), [s.damped(ridge) for s in spectrum.curvature]
        self.inverse = [
            Weights.of(basis, [(1.0 / one.inside, 1.0 / one.outside)], 1, precision)
            for basis, one in zip(bases, damped, strict=True)
        ]
        self.along = [
            (step if basis.outside else basis.to(step.dtype).into(step)).to(precision)
            for step, basis in zip(self.step, bases, strict=True)
        ]
        self.state = {"leverage_blocks": self.leverage_blocks, "change": self.change}
        self.given = [*(one for weights in self.inverse for one in (weights.inside, weights.outside)), *self.along]
        self.meats: MeatSums | None = None
        if meat_roots is not None:
            none = slice(0, 0)  # no examples say how many weights each will have
            roots = meat_roots(none, self.leverage_blocks[none], self.change[none])
            self.meats, self.reads = MeatSums(gradients, bases, self.rotations, roots), 2
            self.state |= self.meats.state
            self.given += self.meats.given

    def add(self, where: slice, chunk: ChunkGradients) -> None:
        """Sum leverages and changes over blocks; then the weights of these examples in the meats are known."""
        blocks, change = self.leverage_blocks[where], self.change[where]  # views, which are added to
        for at, view in enumerate(chunk):
            blocks += self.inverse[at].grams(view)[0]
            change += view.along(self.along[at])
        if self.meats is not None and self.meat_roots is not None:
            self.meats.add_weighted(chunk, self.meat_roots(where, blocks, change))


def check_invertible(bases: Sequence[Basis], curvature: Sequence[DiagonalMoments], ridge: float) -> None:
    """Raise where nothing is known along some direction, and there is no ridge."""
    if ridge > 0:
        return
    empty = sum(
        int((s.inside <= 0).sum()) + (basis.outside if s.outside <= 0 else 0)
        for s, basis in zip(curvature, bases, strict=True)
    )
    if empty:
        raise singular(ridge, empty, sum(basis.block.numel for basis in bases))


def newton_steps(problem: Linearization, bases: Sequence[Basis], spectrum: Spectrum, ridge: float) -> list[Tensor]:
    """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w) of each block."""
    selected, steps = problem.selection.parameters, []
    for basis, moments, score in zip(bases, spectrum.curvature, spectrum.score, strict=True):
        weights = basis.block.to_matrix({name: selected[name].detach().double() for name in basis.block.parameters})
        steps.append(basis.solve(moments.damped(ridge), score - ridge * weights))
        problem.passes.trim_memory()
    return steps


def centre(squares: Tensor, total: Tensor, n: int) -> Tensor:
    """The centred jackknife, (n - 1) / n sum_i (v_i - mean)^2 along each direction, for v_i = J_i^T u_i.

    From sums of squares and the total sum_i v_i of n deletions. Centred in a basis, so that the variance stays above
    zero however the meat is approximated.
    """
    return (squares - total.square() / n).clamp_min(0.0) * ((n - 1) / n)


def centred(basis: Basis, squares: DiagonalMoments, total: Tensor, n: int) -> DiagonalMoments:
    """The same inside and outside of a basis, with the total shaped as the block's matrix."""
    along = basis.to(torch.float64).into(total)
    rest = float(total.square().sum() - along.square().sum()) / n / basis.outside if basis.outside else 0.0
    return DiagonalMoments(centre(squares.inside, along, n), max(squares.outside - rest, 0.0) * ((n - 1) / n))


PLANNED_BATCH = 500  # training examples whose products with an input are planned to be held at once


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedSpectral(FittedCurvature):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi."""

    stream: LayerGradients
    bases: Sequence[Basis]  # U of each block
    spectrum: Spectrum  # s of each block, and what was summed along with it
    noise: Tensor  # (k, k) covariance of the residuals
    step: list[Tensor]  # Delta w of each block
    change: Tensor  # (n, k) J_i Delta w
    rotations: Sequence[Basis | None]  # of each block to the meats' own basis, where they have one
    summed_meats: MeatSums | None = None  # of HeC0, HeC2 and HeC3, where they were summed along with the leverages

    @classmethod
    def of(cls, leverage: Leverage, noise: Tensor, notes: list[str]) -> FittedSpectral:
        """What the last pass found."""
        pairs = [(s, s.damped(leverage.ridge)) for s in leverage.spectrum.curvature]
        freedom = sum(
            float((s.inside / damped.inside).sum()) + basis.outside * s.outside / damped.outside
            for (s, damped), basis in zip(pairs, leverage.bases, strict=True)
        )
        return FittedSpectral(
            problem=leverage.gradients.problem,
            ridge=leverage.ridge,
            leverage_blocks=leverage.leverage_blocks,
            degrees_of_freedom=freedom,
            notes=notes,
            stream=leverage.gradients,
            bases=leverage.bases,
            spectrum=leverage.spectrum,
            noise=noise,
            step=leverage.step,
            change=leverage.change,
            rotations=leverage.rotations,
            summed_meats=leverage.meats,
        )

    def at(self, ridge: float, meat_roots: MeatRoots | None) -> FittedSpectral:
        """The same bases and eigenvalues: one pass, for the leverages and the meats."""
        leverage = Leverage(self.stream, self.bases, self.spectrum, ridge, meat_roots, self.rotations)
        return FittedSpectral.of(self.stream.accumulate(leverage, last=True), self.noise, [])

    def solve(self, at: int, matrix: Tensor) -> Tensor:
        """F_lam^-1 times something shaped as the matrix of block `at`."""
        return self.bases[at].solve(self.spectrum.curvature[at].damped(self.ridge), matrix)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), with this curvature for F."""
        size = math.hypot(*(float(step.norm()) for step in self.step))
        relative = size / self.problem.selection.norm()
        direction = self.stream.flatten(self.step).to(self.problem.dtype) if with_direction else None
        return NewtonStep(self.change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the basis of the meats where there is one, else in the curvature's."""
        roots = dict(meats.roots)
        scale = times_noise(roots.get("ho"), self.problem.hessian_roots, self.noise)
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
                found.update(sums.moments(at))
            total = summed[0].sums[at].total  # of the sums that hold "hec3"
            found["jackknife"] = centred(basis, found["hec3"], total, n)
            names = (*found, "laplace")
            weights.append(self._weights(at, found))
            if rotation is not None:
                own = {name: one for sums in summed for name, one in sums.rotated(at).items()}
                along = basis.to(torch.float64).into(total)[last(rotation.shape)]
                own["jackknife"] = centre(own["hec3"], rotation.to(torch.float64).into(along), n)
                by_position = {names.index(name): one for name, one in own.items()}
                inverse = 1.0 / (self.spectrum.curvature[at].inside + self.ridge)
                weights[at] = TwoBasisWeights.add_to(weights[at], rotation, by_position, inverse)
        return SpectralSandwich(self, names, weights)

    def _weights(self, at: int, meats: Mapping[str, DiagonalMoments]) -> Weights:
        """Of a block: d / (s + lambda)^2 for each meat d, and 1 / (s + lambda) for Laplace."""
        damped = self.spectrum.curvature[at].damped(self.ridge)
        inside, outside = damped.inside, damped.outside
        # One division after the other: squares of small and large ridges are no numbers.
        pairs = ((one.inside / inside / inside, one.outside / outside / outside) for one in meats.values())
        every = chain(pairs, [(1.0 / inside, 1.0 / outside)])
        return Weights.of(self.bases[at], every, len(meats) + 1, working_precision(self.problem))

    def alignments(self, inputs: Inputs) -> Alignments:
        """Precondition the gradients of the inputs, then contract them with the layers of the training examples."""
        k = self.problem.output_count(inputs)
        for where, directions in self._preconditioned(inputs):
            yield where, self._align(directions, where.stop - where.start, k)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """The same with the layers of other inputs."""
        k, j = self.problem.output_count(inputs), self.problem.output_count(others[0])
        found = []
        for where, directions in self._preconditioned(inputs):
            chunks = (chunk for batch in others for chunk in self.stream.of(batch, self.stream.identity(j), j))
            parts = [contract(chunk.tangents, directions, where.stop - where.start, k) for chunk in chunks]
            found.append(torch.cat(parts, dim=2))
        return torch.cat(found).to(self.problem.dtype)

    def precondition(self, vectors: Tensor) -> Tensor:
        """The inverse of this curvature."""
        given = self.problem.selection.unflatten(vectors.double())
        solved = [self.solve(at, basis.block.to_matrix(given)) for at, basis in enumerate(self.bases)]
        return self.stream.flatten(solved, len(vectors)).to(vectors.dtype)

    def _preconditioned(self, inputs: Inputs) -> Iterator[tuple[slice, list[Directions]]]:
        """F_lam^-1 J^T of as many inputs at a time as memory allows, for each block."""
        precision = working_precision(self.problem)
        k = self.problem.output_count(inputs)
        size = batch_size(inputs, "this batch")
        most = max(1, int(0.05 * self.problem.budget.limit) // self._row(inputs, k, precision))
        for low in range(0, size, most):
            where = slice(low, min(low + most, size))
            parts: list[list[Tangent]] = [[] for _ in self.bases]
            for chunk in self.stream.of(take(inputs, where), self.stream.identity(k), k):
                for at, tangent in enumerate(chunk.tangents):
                    parts[at].append(tangent)
            zipped = zip(parts, self.bases, self.spectrum.curvature, strict=True)
            yield where, [Directions.of(some, basis, s.damped(self.ridge), precision) for some, basis, s in zipped]

    def _row(self, inputs: Inputs, k: int, precision: torch.dtype) -> int:
        """Bytes that the preconditioned gradients of one input take, and its products with a batch of examples."""
        numbers = min(self.problem.n, PLANNED_BATCH) * self.problem.k * k
        for chunk in self.stream.of(take(inputs, slice(0, 1)), self.stream.identity(k), k):
            for tangent, basis in zip(chunk.tangents, self.bases, strict=True):  # one seen once is kept factored
                numbers += math.prod(basis.shape) if is_outer_product(tangent) else k * basis.block.numel
        return numbers * torch.finfo(precision).bits // 8

    def _align(self, directions: list[Directions], m: int, k: int) -> Iterator[tuple[slice, Tensor]]:
        for where, tangents in self.stream.chunks("alignments"):
            yield where, contract(tangents, directions, m, k)


def contract(tangents: Sequence[Tangent], directions: Sequence[Directions], m: int, k: int) -> Tensor:
    """(m, k, n, c) inner products of the gradients of n examples with the directions of m inputs, over all blocks."""
    found = sum_of([one.align(tangent) for tangent, one in zip(tangents, directions, strict=True)])  # (n, c, m k)
    return found.reshape(*found.shape[:2], m, k).permute(2, 3, 0, 1)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors of one shape up, the first one in place."""
    first, *rest = parts
    for part in rest:
        first += part
    return first


@dataclass(frozen=True)
class SpectralSandwich(Sandwich):
    """Weighted sums of squares of U^T phi: d / (s + lambda)^2 for each meat, 1 / (s + lambda) for Laplace."""

    variances_alone: ClassVar[bool] = True

    fitted: FittedSpectral
    names: tuple[str, ...]  # of the estimators, in the order of the weights
    weights: list[Weights]  # of each block

    def predict(self, inputs: Inputs) -> Predicted:
        """One forward pass, k backward passes, and a few products."""
        dtype = self.fitted.problem.dtype
        outputs, grams = self._sum(inputs, lambda weights, view: weights.grams(view))
        return Predicted(outputs.to(dtype), dict(zip(self.names, grams.to(dtype), strict=True)), None)

    def variances(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The same without the covariances between outputs: gradients are read once for all estimators."""
        dtype = self.fitted.problem.dtype
        outputs, found = self._sum(inputs, lambda weights, view: weights.variances(view))
        return outputs.to(dtype), dict(zip(self.names, found.to(dtype), strict=True))

    def share_chosen_by_rounding(self) -> float:
        """Share of HeC3 of the weights, by its trace, along directions of the eigenbasis that rounding chooses."""
        open_, total, precision = 0.0, 0.0, working_precision(self.fitted.problem)
        for weights, s in zip(self.weights, self.fitted.spectrum.curvature, strict=True):
            if isinstance(weights, TwoBasisWeights):  # its meats have a basis of their own
                continue
            at, basis = self.names.index("hec3"), weights.basis
            outside = float(weights.outside[at])
            inside = weights.inside[at].double() + (0.0 if weights.rounded or not basis.outside else outside)
            total += float(inside.sum()) + basis.outside * outside
            open_ += float(inside[chosen_by_rounding(basis, s.inside, precision)].sum())
        return open_ / total if total > 0 else 0.0

    def _sum(self, inputs: Inputs, of: Callable[[Weights, BasisView], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and sums over blocks of something (w, n, k) or (w, n, k, k)."""
        stream, k = self.fitted.stream, self.fitted.problem.output_count(inputs)
        outputs, sums = [], []
        with stream.few_threads(batch_size(inputs, "this batch"), k):
            for chunk in stream.of(inputs, stream.identity(k), k):
                views = zip(self.weights, chunk.views(self.fitted.bases, self.fitted.problem), strict=True)
                sums.append(sum_of([of(weights, view) for weights, view in views]))
                outputs.append(chunk.outputs)
                del chunk, views  # the next chunk needs the memory
        if self.fitted.problem.half:  # their gradients alone are in half precision
            with torch.no_grad():
                outputs = [self.fitted.problem.network(inputs)]
        return torch.cat(outputs), torch.cat(sums, dim=1)


def chosen_by_rounding(basis: Basis, eigenvalues: Tensor, precision: torch.dtype) -> Tensor:
    """Which coordinates of a basis (*shape) lie along eigenvectors of a factor that are anything within a null space.

    Two or more eigenvectors with next to no curvature, over the largest, are an arbitrary basis of the space they span.
    """
    grouped = eigenvalues if basis.block.kind == "kronecker" else eigenvalues.unsqueeze(0)  # (e, o, i), (1, ..., i)
    found = torch.zeros_like(grouped, dtype=torch.bool)
    limit = torch.finfo(precision).eps * grouped.flatten(1).amax(1)
    outputs_axis = 1 if basis.block.kind == "kronecker" else grouped.dim() - 1
    for matrix, axis in ((basis.inputs, grouped.dim() - 1), (basis.outputs, outputs_axis)):
        if matrix is not None:
            others = [one for one in range(1, grouped.dim()) if one != axis]
            flat = (grouped.amax(others) if others else grouped) <= limit.unsqueeze(1)  # (e, side)
            several = flat & (flat.sum(1, keepdim=True) > 1)
            found |= several.reshape(*(grouped.shape[one] if one in (0, axis) else 1 for one in range(grouped.dim())))
    return found.reshape(eigenvalues.shape)
