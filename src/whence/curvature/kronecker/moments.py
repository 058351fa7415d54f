"""Sums over the training set in one pass each: squares of gradients in a basis, scores, weighted squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import torch
from torch import Tensor

from whence.curvature.eigen import check_finite_sums
from whence.errors import SingularCurvatureError
from whence.tangents.eigh import eigh
from whence.tangents.forms import Tangent

from .basis import Basis
from .measure import combine, products_are_rounded
from .rotated import Factored, Full, Rotated
from .stream import LayerStream
from .view import View, dtype_of


@dataclass(frozen=True)
class Squares:
    """Sums of squares of a block's gradients: of each coordinate of its basis, and the mean of all directions outside.

    Attributes:
        inside: shaped as the coordinates, float64.
        outside: mean over the directions that the basis does not span; zero if it spans all.
    """

    inside: Tensor
    outside: float

    def times(self, factor: float) -> Squares:
        """All of them times a factor."""
        return Squares(factor * self.inside, factor * self.outside)


@dataclass(frozen=True)
class Spectrum:
    """Squares of the training gradients in a basis, one entry a block.

    Attributes:
        curvature: s* = sum over examples and outputs of squared gradients.
        noise: the same with outputs weighted by the noise covariance: Sigma for squared error, the loss's own Hessian
            L_i else.
        score: sum_i J_i^T r_i, shaped as the block's matrix.
    """

    curvature: list[Squares]
    noise: list[Squares]
    score: list[Tensor]


@dataclass(frozen=True)
class Mixture:
    """Combinations of the cotangents of one piece.

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


class Sums:
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

    def add(self, view: View, weights: Tensor, summed: Tensor | None = None) -> None:
        """Count one piece.

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

    def add_mixed(self, view: View, mixture: Mixture) -> None:
        """Count combinations of the cotangents of one piece."""
        weights, masks = mixture.weights, mixture.masks
        if weights.shape[1] == 1 and self._add_single(view, mixture):
            return
        for part, rotated in view.mixed(weights):
            self.inside += rotated.squares(masks.to(dtype_of(rotated)))
            if view.complete:
                rows = mixture.summed.to(dtype_of(rotated)).expand(part.stop - part.start, -1)
                self._total += rotated.total(rows)
        if not view.complete:
            energy = view.energy().double()
            lengths = (weights.double() * (energy @ weights.double())).sum((0, 1))  # (Q,)
            self.length += masks @ lengths
            self._total += view.total(mixture.total)

    def _add_single(self, view: View, mixture: Mixture) -> bool:
        """The same with a single cotangent; false where this form does not serve."""
        squared, total = mixture.squared, mixture.total
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

    def finish(self) -> list[Squares]:
        """The sums, one for each set of weights."""
        rest = self.basis.outside
        found = []
        for inside, length in zip(self.inside, self.length, strict=True):
            left = float(length if self.rounded else length - inside.sum())
            outside = max(left, 0.0) / rest if rest else 0.0
            found.append(Squares(inside, outside))
        return found


def has_single(rotated: Rotated) -> TypeGuard[Factored | Full]:
    """Whether squares of a single cotangent can be weighted example by example."""
    if isinstance(rotated, Factored):
        return rotated.a.shape[1] == 1 and rotated.a.shape[2] == 1
    return isinstance(rotated, Full)


def gather_squares(
    stream: LayerStream,
    bases: Sequence[Basis],
    noise: Tensor,
    observe: Callable[[int, Tangent], None] | None = None,
    observed: Mapping[str, Tensor] | None = None,
) -> Spectrum:
    """One pass: EKFAC's eigenvalues, those of the homoscedastic meat, and the score.

    With squared error the outputs are pulled back along the eigenvectors of the noise covariance (k, k), so that one
    set of gradients serves both sums. With other losses the two are the same, up to a dispersion. `observe` is shown
    the gradients J_i^T r_i of every piece of every block, and adds to what is `observed`.
    """
    problem = stream.problem
    roots = problem.hessian_roots
    frame = torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
    weights = torch.ones(1, problem.k, dtype=problem.dtype, device=problem.device)
    alone = problem.k == 1  # then the noise is one factor for all
    if roots is None and not alone:
        sizes, frame = eigh(noise)
        problem.passes.crew.share([sizes, frame], 0, "eigenvalues")
        weights = torch.cat([weights, sizes.clamp_min(0.0).unsqueeze(0)])
    elif roots is not None:  # the residuals are one more combination, which counts in the score only
        weights = weights.new_ones(1, roots.shape[2] + 1).double()
        weights[:, -1] = 0.0
    sums = [Sums(basis, len(weights), problem.device) for basis in bases]
    state = {**states(stream, sums), **(observed or {})}
    given = [frame, weights, *(one for basis in bases for one in basis.tensors)]
    for where, tangents in stream.read("eigenvalues", stream.constant(frame.T), problem.k, state, given):
        residuals = problem.residuals[where] @ frame
        ready = list(stream.views(tangents, bases))
        stream.spare(*ready)
        for at in range(len(bases)):
            view = ready.pop(0)  # the next one needs the room
            if roots is None:
                sums[at].add(view, weights, residuals)
            else:
                joined = torch.cat([roots[where], residuals.unsqueeze(2)], dim=2)
                sums[at].add_mixed(view, Mixture(joined, weights, 1.0 * (weights[0] == 0)))
            if observe is not None:
                observe(at, combine(view.tangent, residuals.unsqueeze(2)))
            else:
                view.settle()
            del view
        del tangents
    found = [one.finish() for one in sums]
    for basis, squares in zip(bases, found, strict=True):
        check_finite_sums(squares[0].inside, f"the squares of {basis.block.name}")
    curvature, noisy = [one[0] for one in found], [one[-1] for one in found]
    if roots is None and alone:
        noisy = [one.times(float(noise)) for one in curvature]
    return Spectrum(curvature, noisy, [one.total for one in sums])


def states(stream: LayerStream, sums: Sequence[Sums]) -> dict[str, Tensor]:
    """What the sums of this process's blocks are, by their places among all, and names."""
    pairs = zip(stream.mine, sums, strict=True)
    return {name: tensor for at, one in pairs for name, tensor in one.state(str(at)).items()}


def check_invertible(bases: Sequence[Basis], curvature: Sequence[Squares], ridge: float) -> None:
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
