"""Curvatures that are diagonal in a basis, F ~ U diag(s) U^T: passes for s, leverages and meats, and the estimators.

A basis may span a part of a block's directions, the leading ones. Coordinates in it are "inside" and have an
eigenvalue each; the directions that it does not span are "outside" and share one, the mean of theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from whence.curvature.accumulate import (
    Accumulator,
    ChunkGradients,
    ConstantCotangents,
    LayerGradients,
    working_precision,
)
from whence.curvature.base import Alignments, FittedCurvature, MeatRoots, Meats, NewtonStep, Predicted, Sandwich
from whence.curvature.preconditioned import FactorParts, Preconditioned, align, as_outer_product, complement_of
from whence.curvature.rotation import (
    Basis,
    BasisView,
    Factored,
    Full,
    Rotated,
    dtype_of,
    products_are_rounded,
)
from whence.data.batches import Inputs, batch_size, take
from whence.errors import SingularCurvatureError
from whence.jacobian.gradients import Tangent
from whence.jacobian.linearization import Linearization
from whence.linalg import check_finite_sums, eigh


@dataclass(frozen=True)
class DiagonalMoments:
    """The diagonal of a second moment of a block's gradients in its basis.

    Attributes:
        inside: sums of squares of each coordinate, float64.
        outside: mean over the directions that the basis does not span; zero if it spans all.
    """

    inside: Tensor
    outside: float

    def times(self, factor: float) -> DiagonalMoments:
        """All of them times a factor."""
        return DiagonalMoments(factor * self.inside, factor * self.outside)


@dataclass(frozen=True)
class Spectrum:
    """DiagonalMoments of the training gradients in a basis, one entry a block.

    Attributes:
        curvature: s* = sum over examples and outputs of squared gradients.
        noise: the same with outputs weighted by the noise covariance: Sigma for squared error, the loss's own Hessian
            L_i else.
        score: sum_i J_i^T r_i, shaped as the block's matrix.
    """

    curvature: list[DiagonalMoments]
    noise: list[DiagonalMoments]
    score: list[Tensor]


@dataclass(frozen=True)
class Combinations:
    """Linear combinations of the cotangents of a chunk.

    Attributes:
        weights: (n, c, Q) of the combinations.
        masks: (q, Q) which combinations make up each sum of squares.
        summed: (Q,) which of them make up the total.
    """

    weights: Tensor
    masks: Tensor
    summed: Tensor

    @cached_property
    def squared(self) -> Tensor:
        """(n, q) weights of the squares of a single cotangent."""
        return self.weights[:, 0].double().square() @ self.masks.T

    @cached_property
    def total(self) -> Tensor:
        """(n, c) weights of the cotangents in the total."""
        return self.weights @ self.summed.to(self.weights.dtype)


class MomentSums:
    """Accumulates weighted squares of one block, and a weighted sum of its gradients."""

    def __init__(self, basis: Basis, count: int, device: torch.device) -> None:
        """Zeros for `count` sets of weights."""
        self.basis = basis
        self.rounded = products_are_rounded(device)
        self.inside = torch.zeros(count, *basis.shape, dtype=torch.float64, device=device)
        self.length = torch.zeros(count, dtype=torch.float64, device=device)
        shape = basis.block.matrix_shape if basis.outside else basis.shape
        self._total = torch.zeros(shape, dtype=torch.float64, device=device)

    def state(self, name: str) -> dict[str, Tensor]:
        """What is summed up, by name."""
        return {f"{name}.inside": self.inside, f"{name}.length": self.length, f"{name}.total": self._total}

    @property
    def total(self) -> Tensor:
        """The weighted sum of gradients, shaped as the block's matrix."""
        return self._total if self.basis.outside else self.basis.to(torch.float64).out_of(self._total)

    def add(self, view: BasisView, weights: Tensor, summed: Tensor | None = None) -> None:
        """Add a chunk.

        Args:
            view: the gradients.
            weights: (q, c) of the squares of the cotangents.
            summed: (n, c) of the gradients in the total.
        """
        for part, rotated in view.chunks():
            self.inside += rotated.squares(weights.to(dtype_of(rotated)))
            if summed is not None and view.complete:
                self._total += rotated.total(summed[part].to(dtype_of(rotated)))
        if not view.complete:
            self.length += weights.double() @ view.lengths().double().sum(0)
            if summed is not None:
                self._total += view.total(summed)

    def add_combined(self, view: BasisView, combinations: Combinations) -> None:
        """Add combinations of the cotangents of a chunk."""
        weights, masks = combinations.weights, combinations.masks
        if weights.shape[1] == 1 and self._add_single(view, combinations):
            return
        for part, rotated in view.mixed(weights):
            self.inside += rotated.squares(masks.to(dtype_of(rotated)))
            if view.complete:
                rows = combinations.summed.to(dtype_of(rotated)).expand(part.stop - part.start, -1)
                self._total += rotated.total(rows)
        if not view.complete:
            energy = view.energy().double()
            lengths = (weights.double() * (energy @ weights.double())).sum((0, 1))  # (Q,)
            self.length += masks @ lengths
            self._total += view.total(combinations.total)

    def _add_single(self, view: BasisView, combinations: Combinations) -> bool:
        """The same with a single cotangent; false where this form does not serve."""
        squared, total = combinations.squared, combinations.total
        for part, rotated in view.chunks():
            if not has_single(rotated):
                return False
            self.inside += rotated.single(squared[part].to(dtype_of(rotated)))
            if view.complete:
                self._total += rotated.total(total[part].to(dtype_of(rotated)))
        if not view.complete:
            self.length += squared.T @ view.lengths().double().squeeze(1)
            self._total += view.total(total)
        return True

    def finish(self) -> list[DiagonalMoments]:
        """The sums, one for each set of weights."""
        rest = self.basis.outside
        found = []
        for inside, length in zip(self.inside, self.length, strict=True):
            left = float(length if self.rounded else length - inside.sum())
            outside = max(left, 0.0) / rest if rest else 0.0
            found.append(DiagonalMoments(inside, outside))
        return found


def has_single(rotated: Rotated) -> TypeGuard[Factored | Full]:
    """Whether squares of a single cotangent can be weighted example by example."""
    if isinstance(rotated, Factored):
        return rotated.a.shape[1] == 1 and rotated.a.shape[2] == 1
    return isinstance(rotated, Full)


class SpectrumSums(Accumulator):
    """Pass 2: EKFAC's eigenvalues, those of the homoscedastic meat, and the score.

    With squared error the outputs are pulled back along the eigenvectors of the noise covariance (k, k), so that one
    set of gradients serves both sums. With other losses the two are the same, up to a dispersion.

    Args:
        gradients: of the training set.
        bases: U of each block.
        noise: (k, k) covariance of the residuals; `None` where the homoscedastic meat is not wanted.
    """

    label = "eigenvalues"
    bases: Sequence[Basis]

    def __init__(self, gradients: LayerGradients, bases: Sequence[Basis], noise: Tensor | None = None) -> None:
        """Zeros."""
        problem = gradients.problem
        self.problem, self.bases, self.count = problem, bases, problem.k
        self.noise = noise
        frame = torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
        weights = torch.ones(1, problem.k, dtype=problem.dtype, device=problem.device)
        roots = problem.hessian_roots
        if roots is not None:  # the residuals are one more combination, which counts in the score only
            weights = weights.new_ones(1, roots.shape[2] + 1).double()
            weights[:, -1] = 0.0
        elif noise is not None and problem.k > 1:  # with one output the noise is a factor
            sizes, frame = eigh(noise)
            problem.passes.process_group.share([sizes, frame], 0, "eigenvalues")
            weights = torch.cat([weights, sizes.clamp_min(0.0).unsqueeze(0)])
        self.frame, self.weights = frame, weights
        self.cotangents = ConstantCotangents(frame.T)
        self.sums = [MomentSums(basis, len(weights), problem.device) for basis in bases]

    def state(self) -> dict[str, Tensor]:
        """Squares and scores of every block."""
        return states(self.sums)

    def given(self) -> list[Tensor]:
        """The cotangents, their weights, and the bases."""
        return [self.frame, self.weights, *(one for basis in self.bases for one in basis.tensors)]

    def add(self, where: slice, gradients: ChunkGradients) -> None:
        """Add squares in the basis, and J_i^T r_i."""
        residuals = self.problem.residuals[where] @ self.frame
        for at, view in enumerate(gradients):
            self.add_block(at, view, where, residuals)

    def add_block(self, at: int, view: BasisView, where: slice, residuals: Tensor) -> None:
        """The same for one block; residuals (n, k) along the cotangents."""
        roots = self.problem.hessian_roots
        if roots is None:
            self.sums[at].add(view, self.weights, residuals)
        else:
            joined = torch.cat([roots[where], residuals.unsqueeze(2)], dim=2)
            self.sums[at].add_combined(view, Combinations(joined, self.weights, 1.0 * (self.weights[0] == 0)))

    def spectrum(self) -> Spectrum:
        """The eigenvalues."""
        found = [one.finish() for one in self.sums]
        for basis, moments in zip(self.bases, found, strict=True):
            check_finite_sums(moments[0].inside, f"the squares of {basis.block.name}")
        curvature, noise = [one[0] for one in found], [one[-1] for one in found]
        if self.noise is not None and self.problem.hessian_roots is None and self.problem.k == 1:
            noise = [one.times(float(self.noise)) for one in curvature]
        return Spectrum(curvature, noise, [one.total for one in self.sums])


def noise_covariance(problem: Linearization) -> Tensor:
    """(k, k) covariance of the residuals, for squared error; other losses bring their own for each example."""
    if problem.hessian_roots is not None:
        return torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
    found = problem.noise(problem.residuals, None)
    if problem.units is None:
        return found.covariance
    root = found.roots[0]
    return root @ root.T  # the same at every position


def states(sums: Sequence[MomentSums]) -> dict[str, Tensor]:
    """The tensors of all blocks' sums, by name."""
    return {name: tensor for at, one in enumerate(sums) for name, tensor in one.state(str(at)).items()}


def check_invertible(bases: Sequence[Basis], curvature: Sequence[DiagonalMoments], ridge: float) -> None:
    """Raise where nothing is known along some direction, and there is no ridge."""
    if ridge > 0:
        return
    empty = sum(
        int((s.inside <= 0).sum()) + (basis.outside if s.outside <= 0 else 0)
        for s, basis in zip(curvature, bases, strict=True)
    )
    if empty:
        raise SingularCurvatureError(
            f"expected an invertible curvature, got {empty} directions without information at ridge={ridge:g}. "
            "Raise `ridge` (for example to n times the weight decay)."
        )


class MeatSums:
    """Squares of J_i^T W_i in the basis for each set of weights, and sum_i J_i^T u_i, the columns of "hec3".

    Args:
        bases: coordinates of each block.
        roots: weights W (n, k, q) by name, of which names and sizes are kept.
        device: where to sum.

    Attributes:
        needs_captured: whether the gradients as they were captured are read, and not only those in the bases.
    """

    needs_captured: ClassVar[bool] = False

    def __init__(self, bases: Sequence[Basis], roots: Mapping[str, Tensor], device: torch.device) -> None:
        """Zeros."""
        self.bases = bases
        self.names = list(roots)
        sizes = [root.shape[2] for root in roots.values()]
        eye = torch.eye(sum(sizes), dtype=torch.float64, device=device)
        self.masks = torch.stack([part.sum(0) for part in eye.split(sizes)])  # (names, Q)
        self.last = self.masks[self.names.index("hec3")] if "hec3" in roots else torch.zeros_like(self.masks[0])
        self.sums = [MomentSums(basis, len(roots), device) for basis in bases]

    def state(self) -> dict[str, Tensor]:
        """Squares and totals of every block."""
        return states(self.sums)

    def given(self) -> list[Tensor]:
        """What the sums depend on beside the gradients and their weights."""
        return [one for basis in self.bases for one in basis.tensors]

    def add(self, gradients: Iterable[BasisView], roots: Mapping[str, Tensor]) -> None:
        """Add a chunk, with the outputs pulled back: they are combined by the weights."""
        combinations = Combinations(torch.cat(list(roots.values()), dim=2).double(), self.masks, self.last)
        for sums, view in zip(self.sums, gradients, strict=True):
            sums.add_combined(view, combinations)

    def add_pulled(self, gradients: Iterable[BasisView], n: int) -> None:
        """Add a chunk of n examples, with the weights themselves pulled back."""
        for sums, view in zip(self.sums, gradients, strict=True):
            sums.add(view, self.masks, self.last.expand(n, -1))

    def finish(self) -> tuple[dict[str, list[DiagonalMoments]], list[Tensor]]:
        """The squares by name, and the totals."""
        found = [one.finish() for one in self.sums]
        squares = {name: [one[at] for one in found] for at, name in enumerate(self.names)}
        return squares, [one.total for one in self.sums]


class MeatPass(Accumulator):
    """A pass for weights W (n, k, q) or (1, k, q); fewer of them than outputs are pulled back themselves."""

    label = "meats"

    def __init__(self, gradients: LayerGradients, meats: MeatSums, roots: Mapping[str, Tensor]) -> None:
        """Choose what to pull back."""
        problem = gradients.problem
        self.meats, self.bases, self.needs_captured = meats, meats.bases, meats.needs_captured
        self.roots = {name: root.expand(problem.n, -1, -1) for name, root in roots.items()}
        self.joined = torch.cat(list(self.roots.values()), dim=2)  # (n, k, Q)
        self.pulled = self.joined.shape[2] <= problem.k
        self.cotangents = self._weights if self.pulled else gradients.identity()
        self.count = self.joined.shape[2] if self.pulled else problem.k

    def _weights(self, where: slice, _: int) -> Tensor:
        return self.joined[where].permute(2, 0, 1)

    def state(self) -> dict[str, Tensor]:
        """Those of the meats."""
        return self.meats.state()

    def given(self) -> list[Tensor]:
        """The weights, and what the meats depend on."""
        return [self.joined, *self.meats.given()]

    def add(self, where: slice, gradients: ChunkGradients) -> None:
        """Add the weighted gradients."""
        if self.pulled:
            self.meats.add_pulled(gradients, where.stop - where.start)
        else:
            self.meats.add(gradients, {name: root[where] for name, root in self.roots.items()})


class Leverage(Accumulator):
    """Pass 3: leverage blocks Q_i = J_i F_lam^-1 J_i^T, the Newton step's change J_i Delta w, and the meats.

    Args:
        gradients: of the training set.
        bases: U of each block.
        spectrum: the eigenvalues s.
        ridge: lambda.
        meat_roots: weights of the examples in the meats; without them the meats take a pass of their own.
        meat_sums: zeros of the meats for weights W by name; in the same bases when not given.

    Attributes:
        leverage_blocks: (n, k, k) Q.
        change: (n, k) J_i Delta w.
        step: Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), shaped as the matrix of each block.
        meats: sums of the meats.
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
        meat_sums: Callable[[Mapping[str, Tensor]], MeatSums] | None = None,
    ) -> None:
        """Zeros."""
        check_invertible(bases, spectrum.curvature, ridge)
        problem = gradients.problem
        self.gradients, self.bases, self.spectrum, self.ridge = gradients, bases, spectrum, ridge
        self.cotangents, self.count = gradients.identity(), problem.k
        self.leverage_blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        self.change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        self.step = newton_steps(problem, bases, spectrum, ridge)
        precision = working_precision(problem)
        self.inverse = [
            Weights.of(basis, [(1.0 / (s.inside + ridge), 1.0 / (s.outside + ridge or 1.0))], 1, precision)
            for basis, s in zip(bases, spectrum.curvature, strict=True)
        ]
        self.along = [
            (step if basis.outside else basis.to(step.dtype).into(step)).to(precision)
            for step, basis in zip(self.step, bases, strict=True)
        ]
        self.meat_roots = meat_roots
        self.meats: MeatSums | None = None
        if meat_roots is not None:
            none = slice(0, 0)  # no examples say how many weights each will have
            roots = meat_roots(none, self.leverage_blocks[none], self.change[none])
            self.meats = MeatSums(bases, roots, problem.device) if meat_sums is None else meat_sums(roots)
            self.reads, self.needs_captured = 2, self.meats.needs_captured

    def state(self) -> dict[str, Tensor]:
        """Leverages, changes and meats."""
        meats = {} if self.meats is None else self.meats.state()
        return {"leverage_blocks": self.leverage_blocks, "change": self.change, **meats}

    def given(self) -> list[Tensor]:
        """The inverse curvature, the step, and what the meats depend on."""
        inverse = [one for weights in self.inverse for one in (weights.inside, weights.outside)]
        return [*inverse, *self.along, *([] if self.meats is None else self.meats.given())]

    def add(self, where: slice, gradients: ChunkGradients) -> None:
        """Sum leverages and changes over blocks; then the weights of these examples in the meats are known."""
        for at, view in enumerate(gradients):
            self.leverage_blocks[where] += self.inverse[at].grams(view)[0]
            self.change[where] += view.along(self.along[at])
        if self.meats is not None and self.meat_roots is not None:
            self.meats.add(gradients, self.meat_roots(where, self.leverage_blocks[where], self.change[where]))


def inverse_times(basis: Basis, moments: DiagonalMoments, ridge: float, matrix: Tensor) -> Tensor:
    """F_lam^-1 times something shaped as the matrix of a block."""
    basis = basis.to(matrix.dtype)
    weights = 1.0 / (moments.inside + ridge)
    if not basis.outside:
        return basis.out_of(basis.into(matrix) * weights.to(matrix.dtype))
    outside = 1.0 / (moments.outside + ridge)  # inside too, and less of it there: nothing as large in between
    solved = basis.out_of(basis.into(matrix) * (weights - outside).to(matrix.dtype))
    return solved.add_(matrix, alpha=outside)


def newton_steps(problem: Linearization, bases: Sequence[Basis], spectrum: Spectrum, ridge: float) -> list[Tensor]:
    """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w) of each block."""
    selected, steps = problem.selection.parameters, []
    for basis, moments, score in zip(bases, spectrum.curvature, spectrum.score, strict=True):
        weights = basis.block.to_matrix({name: selected[name].detach().double() for name in basis.block.parameters})
        steps.append(inverse_times(basis, moments, ridge, score - ridge * weights))
        problem.passes.trim_memory()
    return steps


def centre(basis: Basis, squares: DiagonalMoments, total: Tensor, n: int) -> DiagonalMoments:
    """DiagonalMoments of the centred jackknife, (n - 1) / n sum_i (v_i - mean)^2 along each direction.

    Centred in the basis, so that the variance stays above zero however the meat is approximated.

    Args:
        basis: of the block.
        squares: sum_i v_i^2 of v_i = J_i^T u_i.
        total: sum_i v_i, shaped as the block's matrix.
        n: how many are left out, one after the other.
    """
    means = basis.to(torch.float64).into(total).square() / n
    rest = float(total.square().sum() / n - means.sum()) / basis.outside if basis.outside else 0.0
    share = (n - 1) / n
    return DiagonalMoments((squares.inside - means).clamp_min(0.0) * share, max(squares.outside - rest, 0.0) * share)


@dataclass(frozen=True)
class Weights:
    """Weights of a block's directions in sums of squares.

    Attributes:
        basis: of the block.
        inside: (w, *shape) for each estimator and coordinate; less the weight outside, unless products are rounded.
        outside: (w, 1, 1, 1) for the squared length, which adds the weight outside everywhere; for the squared length
            of what lies outside, if products are rounded.
        rounded: whether products are rounded to TF32, in which differences of squared lengths mean nothing.
    """

    basis: Basis
    inside: Tensor
    outside: Tensor
    rounded: bool

    @classmethod
    def of(cls, basis: Basis, pairs: Iterable[tuple[Tensor, float]], count: int, dtype: torch.dtype) -> Weights:
        """One set of weights for each of so many estimators, inside and outside; one in float64 at a time."""
        inside, outside, rounded = torch.empty(0, device="cpu"), [], False
        for at, (inner, outer) in enumerate(pairs):
            if at == 0:
                rounded = products_are_rounded(inner.device)
                inside = torch.empty(count, *inner.shape, dtype=dtype, device=inner.device)
            inside[at] = inner if rounded or not basis.outside else inner - outer
            outside.append(outer)
        return cls(basis, inside, inside.new_tensor(outside).reshape(-1, 1, 1, 1), rounded)

    @cached_property
    def positive(self) -> bool:
        """Whether no weight inside is negative, so that gradients may be scaled by their roots."""
        return bool((self.inside >= 0).all())

    def variances(self, view: BasisView) -> Tensor:
        """Weighted squared lengths of the gradients alone, (w, n, c)."""
        parts = [self.squared(rotated) for _, rotated in view.chunks()]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found if view.complete else found + self.outside.squeeze(-1) * view.lengths()

    def grams(self, view: BasisView) -> Tensor:
        """Weighted inner products of the gradients of every example's cotangents, (w, n, c, c)."""
        parts = [self.crossed(rotated) for _, rotated in view.chunks()]
        found = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return found if view.complete else found.add_(self.outside * view.energy())

    def squared(self, rotated: Rotated) -> Tensor:
        """Weighted squared lengths inside the basis, (w, n, c)."""
        return rotated.variances(self.inside)

    def crossed(self, rotated: Rotated) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c)."""
        return rotated.grams(self.inside, self.positive)


def sum_of(parts: Sequence[Tensor]) -> Tensor:
    """Add tensors of one shape up, the first one in place."""
    first, *rest = parts
    for part in rest:
        first += part
    return first


def times_noise(root: Tensor | None, given: Tensor | None, noise: Tensor) -> float | None:
    """How many times the noise of a spectrum these weights of the examples are; `None` if they are not.

    Args:
        root: the weights.
        given: roots of the Hessians of the loss, where these are the noise.
        noise: (k, k) covariance of the residuals, where it is that.
    """
    if root is not None and given is not None and root.shape == given.shape:
        times = float(root.norm() / given.norm().clamp_min(torch.finfo(root.dtype).tiny))
        near = max(1e-9, 16 * torch.finfo(root.dtype).eps)
        return times**2 if torch.allclose(root, times * given, rtol=near, atol=1e-3 * near * times) else None
    if root is None or given is not None or len(root) != 1:
        return None
    wanted = (root @ root.transpose(1, 2))[0]
    size = float(noise.diagonal().sum())
    scale = float(wanted.diagonal().sum()) / size if size > 0 else 1.0
    return scale if torch.allclose(wanted, scale * noise, rtol=1e-9, atol=1e-12 * size) else None


PLANNED_BATCH = 500
"""Training examples whose products with an input are planned to be held at once."""


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedSpectral(FittedCurvature):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi.

    Attributes:
        stream: gradients of all layers.
        bases: U of each block.
        spectrum: s of each block, and what was summed along with it.
        noise: (k, k) covariance of the residuals.
        step: Delta w of each block.
        change: (n, k) J_i Delta w.
        summed_meats: the meats of HeC0, HeC2 and HeC3, where they were summed along with the leverages.
    """

    stream: LayerGradients
    bases: Sequence[Basis]
    spectrum: Spectrum
    noise: Tensor
    step: list[Tensor]
    change: Tensor
    summed_meats: MeatSums | None = None

    @classmethod
    def of(cls, leverage: Leverage, noise: Tensor, notes: list[str]) -> FittedSpectral:
        """What the last pass found."""
        return FittedSpectral(
            problem=leverage.gradients.problem,
            ridge=leverage.ridge,
            leverage_blocks=leverage.leverage_blocks,
            degrees_of_freedom=degrees_of_freedom(leverage.bases, leverage.spectrum.curvature, leverage.ridge),
            notes=notes,
            stream=leverage.gradients,
            bases=leverage.bases,
            spectrum=leverage.spectrum,
            noise=noise,
            step=leverage.step,
            change=leverage.change,
            summed_meats=leverage.meats,
        )

    def at(self, ridge: float, meat_roots: MeatRoots | None) -> FittedSpectral:
        """The same bases and eigenvalues: one pass, for the leverages and the meats."""
        leverage = Leverage(self.stream, self.bases, self.spectrum, ridge, meat_roots)
        return FittedSpectral.of(self.stream.accumulate(leverage, last=True), self.noise, [])

    def solve(self, at: int, matrix: Tensor) -> Tensor:
        """F_lam^-1 times something shaped as the matrix of block `at`."""
        return inverse_times(self.bases[at], self.spectrum.curvature[at], self.ridge, matrix)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), with this curvature for F."""
        size = math.hypot(*(float(step.norm()) for step in self.step))
        relative = size / max(float(self.problem.weights().norm()), torch.finfo(torch.float64).tiny)
        direction = self.stream.flatten(self.step).to(self.problem.dtype) if with_direction else None
        return NewtonStep(self.change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the same basis."""
        return self.sandwich_of(meats)[0]

    def sandwich_of(self, meats: Meats) -> tuple[SpectralSandwich, list[MeatSums]]:
        """The same, and the sums of its meats."""
        roots = dict(meats.roots)
        scale = times_noise(roots.get("ho"), self.problem.hessian_roots, self.noise)
        if scale is not None:
            del roots["ho"]
        summed = [] if self.summed_meats is None else [self.summed_meats]
        rest = {name: root for name, root in roots.items() if not any(name in one.names for one in summed)}
        if rest:
            more = self.meat_sums(rest)
            self.stream.accumulate(MeatPass(self.stream, more, rest))
            summed.append(more)
        found = [one.finish() for one in summed]
        squares = {name: one for each, _ in found for name, one in each.items()}
        total = found[0][1]  # of the sums that hold "hec3"

        def moments(at: int) -> Iterator[DiagonalMoments]:
            if scale is not None:
                yield self.spectrum.noise[at].times(scale)
            yield from (one[at] for one in squares.values())
            yield centre(self.bases[at], squares["hec3"][at], total[at], meats.deletions)

        names = [*["ho"] * (scale is not None), *squares, "jackknife"]
        return SpectralSandwich.make(self, names, moments), summed

    def meat_sums(self, roots: Mapping[str, Tensor]) -> MeatSums:
        """Zeros of meats for these weights."""
        return MeatSums(self.bases, roots, self.problem.device)

    def alignments(self, inputs: Inputs) -> Alignments:
        """Precondition the gradients of the inputs, then contract them with the layers of the training examples."""
        for where, directions in self._preconditioned(inputs):
            yield where, self._align(directions, where.stop - where.start, self.problem.output_count(inputs))

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """The same with the layers of other inputs."""
        k, j = self.problem.output_count(inputs), self.problem.output_count(others[0])
        found = []
        for where, directions in self._preconditioned(inputs):
            m = where.stop - where.start
            parts = [
                self._contract(tangents, directions, (len(out), j, m, k))
                for batch in others
                for _, tangents, out in self.stream.of(batch, 0, self.stream.identity(j), j)
            ]
            found.append(torch.cat(parts, dim=2))
        return torch.cat(found).to(self.problem.dtype)

    def precondition(self, vectors: Tensor) -> Tensor:
        """The inverse of this curvature."""
        given = self.problem.selection.unflatten(vectors.double())
        solved = [self.solve(at, basis.block.to_matrix(given)) for at, basis in enumerate(self.bases)]
        return self.stream.flatten(solved, len(vectors)).to(vectors.dtype)

    def _preconditioned(self, inputs: Inputs) -> Iterator[tuple[slice, list[Tensor | Preconditioned]]]:
        """F_lam^-1 J^T of some inputs at a time, (m k, *shape) for each block, or factored where that serves."""
        problem, precision = self.problem, working_precision(self.problem)
        k = problem.output_count(inputs)
        size = batch_size(inputs, "this batch")
        most = max(1, int(0.05 * problem.budget.limit) // self._row(inputs, k, precision))
        outside = [complement_of(basis, precision) for basis in self.bases]
        for low in range(0, size, most):
            where = slice(low, min(low + most, size))
            chunks: list[list[Tensor | FactorParts]] = [[] for _ in self.bases]
            for _, tangents, _ in self.stream.of(take(inputs, where), 0, self.stream.identity(k), k):
                for at, (tangent, basis) in enumerate(zip(tangents, self.bases, strict=True)):
                    factored = as_outer_product(tangent)
                    if factored is not None:
                        chunks[at].append(FactorParts.of(factored, basis, precision, outside[at]))
                    else:
                        chunks[at].append(self.solve(at, tangent.materialize().flatten(0, 1).to(precision)))
            yield where, [self._joined(at, parts, outside[at]) for at, parts in enumerate(chunks)]

    def _joined(
        self, at: int, chunks: Sequence[Tensor | FactorParts], complement: Tensor | None
    ) -> Tensor | Preconditioned:
        """The preconditioned gradients of one block; factored where all of them are seen once."""
        basis, parts = self.bases[at], [one for one in chunks if isinstance(one, FactorParts)]
        if len(parts) == len(chunks):
            s = self.spectrum.curvature[at]
            outside = 1.0 / (s.outside + self.ridge or 1.0)
            return Preconditioned.of(parts, basis, s.inside + self.ridge, outside, complement)
        whole = [
            self.solve(at, one.matrices(basis, complement)) if isinstance(one, FactorParts) else one for one in chunks
        ]
        return torch.cat(whole)

    def _row(self, inputs: Inputs, k: int, precision: torch.dtype) -> int:
        """Bytes that the preconditioned gradients of one input take, and its products with a batch of examples."""
        numbers = min(self.problem.n, PLANNED_BATCH) * self.problem.k * k
        for _, tangents, _ in self.stream.of(take(inputs, slice(0, 1)), 0, self.stream.identity(k), k):
            for tangent, basis in zip(tangents, self.bases, strict=True):  # one seen once is kept factored
                numbers += k * basis.block.numel if as_outer_product(tangent) is None else math.prod(basis.shape)
        return numbers * torch.finfo(precision).bits // 8

    def _align(self, directions: list[Tensor | Preconditioned], m: int, k: int) -> Iterator[tuple[slice, Tensor]]:
        c = self.problem.k
        for where, tangents in self.stream.chunks("alignments"):
            yield where, self._contract(tangents, directions, (where.stop - where.start, c, m, k))

    def _fitting(self, at: int, tangent: Tangent, one: Tensor | Preconditioned) -> Tensor | Preconditioned:
        """Directions as matrices where gradients that they are multiplied with are not seen once, as they are."""
        if not isinstance(one, Preconditioned) or as_outer_product(tangent) is not None:
            return one
        return self.solve(at, one.parts.matrices(self.bases[at], one.complement))

    def _contract(
        self, tangents: Sequence[Tangent], directions: list[Tensor | Preconditioned], shape: tuple[int, int, int, int]
    ) -> Tensor:
        """(m, k, n, c) inner products of all gradients with all directions (m k, ...), summed over blocks."""
        n, c, m, k = shape
        for at, (tangent, one) in enumerate(zip(tangents, directions, strict=True)):
            directions[at] = self._fitting(at, tangent, one)
        summed = [  # (n, c, m k)
            one.align(tangent) if isinstance(one, Preconditioned) else align(tangent, one)
            for tangent, one in zip(tangents, directions, strict=True)
        ]
        return sum_of(summed).reshape(n, c, m, k).permute(2, 3, 0, 1)


def degrees_of_freedom(bases: Sequence[Basis], curvature: Sequence[DiagonalMoments], ridge: float) -> float:
    """Sum s / (s + lambda)."""
    return sum(
        float((s.inside / (s.inside + ridge)).sum()) + basis.outside * s.outside / (s.outside + ridge or 1.0)
        for s, basis in zip(curvature, bases, strict=True)
    )


@dataclass(frozen=True)
class SpectralSandwich(Sandwich):
    """Weighted sums of squares of U^T phi.

    Attributes:
        names: estimators, in the order of the weights.
        weights: of each block: d / (s + lambda)^2 for each meat, 1 / (s + lambda) for Laplace.
    """

    variances_alone: ClassVar[bool] = True

    fitted: FittedSpectral
    names: tuple[str, ...]
    weights: list[Weights]

    @classmethod
    def make(
        cls, fitted: FittedSpectral, meats: Sequence[str], of: Callable[[int], Iterator[DiagonalMoments]]
    ) -> SpectralSandwich:
        """Divide by the curvature on both sides, one block and one meat at a time."""
        precision = working_precision(fitted.problem)
        names = (*meats, "laplace")
        weights = []
        for at, curvature in enumerate(fitted.spectrum.curvature):
            inside, outside = curvature.inside + fitted.ridge, curvature.outside + fitted.ridge or 1.0
            # One division after the other: squares of small and large ridges are no numbers.
            pairs = ((one.inside / inside / inside, one.outside / outside / outside) for one in of(at))
            each = chain(pairs, [(1.0 / inside, 1.0 / outside)])
            weights.append(Weights.of(fitted.bases[at], each, len(names), precision))
        return cls(fitted, names, weights)

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

    def _sum(self, inputs: Inputs, of: Callable[[Weights, BasisView], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and sums over blocks of something (w, n, k) or (w, n, k, k)."""
        stream, k = self.fitted.stream, self.fitted.problem.output_count(inputs)
        outputs, sums = [], []
        with stream.few_threads(batch_size(inputs, "this batch"), k):
            for views, out in stream.views_of(inputs, self.fitted.bases, k):
                sums.append(sum_of([of(weights, one) for weights, one in zip(self.weights, views, strict=True)]))
                outputs.append(out)
                del views  # the next chunk needs the memory
        return torch.cat(outputs), torch.cat(sums, dim=1)
