"""Sums over the training set in one pass each: squares of gradients in a basis, scores, weighted squares."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.eigen import check_finite_sums
from whence.tangents.forms import Dense, Kronecker, Rows, Tangent

from .basis import Basis
from .factors import combine
from .rotate import beyond, energy, lengths, products_are_rounded, raised, rotate, settled
from .rotated import Factored, Rotated, Sparse
from .stream import LayerStream


@dataclass(frozen=True)
class Squares:
    """Sums of squares of a block's gradients: of each coordinate of its basis, and the mean of all directions outside.

    Attributes:
        inside: shaped as the coordinates, float64.
        outside: mean over the directions that the basis does not span; zero if it spans all.
    """

    inside: Tensor
    outside: float


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


class Sums:
    """Accumulates weighted squares of one block."""

    def __init__(self, basis: Basis, count: int, device: torch.device) -> None:
        """Zeros for `count` sets of weights."""
        self.basis = basis
        self.rounded = products_are_rounded(device)
        self.inside = torch.zeros(count, *basis.shape, dtype=torch.float64, device=device)
        self.length = torch.zeros(count, dtype=torch.float64, device=device)

    def add(self, tangent: Tangent, weights: Tensor) -> None:
        """Count one piece: weights (q, c) of the cotangents."""
        for _, rotated in rotate(tangent, self.basis):
            self.inside += rotated.squares(weights.to(dtype_of(rotated)))
        if self.basis.outside:
            for measured in self._measured(tangent):
                self.length += weights.double() @ lengths(measured).double().sum(0)

    def add_single(self, tangent: Tangent, weights: Tensor) -> bool:
        """Count one piece with a single cotangent, weighted by example (n, q); false where this form does not serve."""
        one_position = isinstance(tangent, Kronecker) and tangent.positions == 1 and tangent.block.groups == 1
        if not (one_position or isinstance(tangent, Dense)):
            return False
        for part, rotated in rotate(tangent, self.basis):
            assert not isinstance(rotated, Sparse)
            self.inside += rotated.single(weights[part].to(dtype_of(rotated)))
        if self.basis.outside:
            for measured in self._measured(tangent):
                self.length += weights.double().T @ energy(measured).double().reshape(-1)
        return True

    def _measured(self, tangent: Tangent) -> list[Tangent]:
        return beyond(tangent, self.basis) if self.rounded else [tangent]

    def finish(self) -> list[Squares]:
        """The sums, one for each set of weights."""
        rest = self.basis.outside
        found = []
        for inside, length in zip(self.inside, self.length, strict=True):
            left = float(length if self.rounded else length - inside.sum())
            outside = max(left, 0.0) / rest if rest else 0.0
            found.append(Squares(inside, outside))
        return found


def gather_squares(
    stream: LayerStream,
    bases: Sequence[Basis],
    noise: Tensor,
    observe: Callable[[int, Tangent], None] | None = None,
) -> Spectrum:
    """One pass: EKFAC's eigenvalues, those of the homoscedastic meat, and the score.

    With squared error the outputs are pulled back along the eigenvectors of the noise covariance (k, k), so that one
    set of gradients serves both sums. With other losses the two are the same, up to a dispersion. `observe` is shown
    the gradients J_i^T r_i of every piece of every block.
    """
    problem = stream.problem
    roots = problem.hessian_roots
    frame = torch.eye(problem.k, dtype=problem.dtype, device=problem.device)
    weights = torch.ones(1, problem.k if roots is None else roots.shape[2], dtype=problem.dtype, device=problem.device)
    if roots is None:
        sizes, frame = torch.linalg.eigh(noise)
        weights = torch.cat([weights, sizes.clamp_min(0.0).unsqueeze(0)])
    sums = [Sums(basis, len(weights), problem.device) for basis in bases]
    score = [torch.zeros(b.block.matrix_shape, dtype=torch.float64, device=problem.device) for b in bases]
    for where, tangents in stream.read("eigenvalues", stream.constant(frame.T), problem.k):
        residuals = (problem.residuals[where] @ frame).unsqueeze(2)
        for at, lazy in enumerate(tangents):
            tangent = settled(lazy, bases[at])
            pulled = combine(tangent, residuals)
            score[at] += total(pulled)
            if observe is not None:
                observe(at, pulled)
            sums[at].add(tangent if roots is None else combine(tangent, roots[where]), weights)
    found = [one.finish() for one in sums]
    for basis, squares in zip(bases, found, strict=True):
        check_finite_sums(squares[0].inside, f"the squares of {basis.block.name}")
    return Spectrum([one[0] for one in found], [one[-1] for one in found], score)


class MeatSums:
    """Squares of J_i^T W_i in the basis for each set of weights, and sum_i J_i^T u_i, the columns of "hec3".

    Args:
        bases: coordinates of each block.
        roots: weights W (n, k, q) by name, of which names and sizes are kept.
        device: where to sum.
    """

    def __init__(self, bases: Sequence[Basis], roots: Mapping[str, Tensor], device: torch.device) -> None:
        """Zeros."""
        self.bases = bases
        self.names = list(roots)
        sizes = [root.shape[2] for root in roots.values()]
        eye = torch.eye(sum(sizes), dtype=torch.float64, device=device)
        self.masks = torch.stack([part.sum(0) for part in eye.split(sizes)])  # (names, Q)
        self.sums = [Sums(basis, len(roots), device) for basis in bases]
        self.centre = [torch.zeros(b.block.matrix_shape, dtype=torch.float64, device=device) for b in bases]

    def add(self, tangents: Sequence[Tangent], roots: Mapping[str, Tensor]) -> None:
        """Count one piece, with the outputs pulled back: they are combined by the weights."""
        joined = torch.cat(list(roots.values()), dim=2).double()  # (n, k, Q)
        for at, tangent in enumerate(tangents):
            if joined.shape[1] == 1 and self.sums[at].add_single(tangent, joined[:, 0].square() @ self.masks.T):
                if "hec3" in roots:
                    self.centre[at] += total(combine(tangent, roots["hec3"].sum(2, keepdim=True)))
            else:
                self.add_pulled(at, combine(tangent, joined))

    def add_pulled(self, at: int, mixed: Tangent) -> None:
        """Count one piece of one block, with the weights themselves pulled back."""
        self.sums[at].add(mixed, self.masks)
        if "hec3" in self.names:
            last = self.masks[self.names.index("hec3")].unsqueeze(1)  # (Q, 1)
            self.centre[at] += total(combine(mixed, last.expand(examples_of(mixed), -1, -1)))

    def finish(self) -> tuple[dict[str, list[Squares]], list[Tensor]]:
        """The squares by name, and the totals."""
        found = [one.finish() for one in self.sums]
        return {name: [one[at] for one in found] for at, name in enumerate(self.names)}, self.centre


def gather_meats(stream: LayerStream, sums: MeatSums, roots: Mapping[str, Tensor]) -> MeatSums:
    """One pass for weights W (n, k, q) or (1, k, q); fewer of them than outputs are pulled back themselves."""
    problem = stream.problem
    whole = {name: root.expand(problem.n, -1, -1) for name, root in roots.items()}
    joined = torch.cat(list(whole.values()), dim=2)  # (n, k, Q)

    def pulled(where: slice, _: int) -> Tensor:
        return joined[where].permute(2, 0, 1)

    directly = joined.shape[2] <= problem.k
    reading = (pulled, joined.shape[2]) if directly else (stream.identity(), problem.k)
    for where, tangents in stream.read("meats", *reading):
        ready = [settled(lazy, basis) for lazy, basis in zip(tangents, sums.bases, strict=True)]
        if directly:
            for at, tangent in enumerate(ready):
                sums.add_pulled(at, tangent)
        else:
            sums.add(ready, {name: root[where] for name, root in whole.items()})
    return sums


def total(tangent: Tangent) -> Tensor:
    """The gradients of all examples and cotangents together, shaped as the block's matrix."""
    if isinstance(tangent, Kronecker):
        a, g = raised(tangent.inputs()), raised(tangent.grads())
        return torch.einsum("neto,neti->eoi", g.sum(1), a)
    if isinstance(tangent, Rows):
        rows, _, values = tangent.aggregate()
        summed = raised(values).sum(1)
        return summed.new_zeros(tangent.block.matrix_shape).index_add_(0, rows, summed)
    return raised(tangent.values).sum((0, 1))


def along(tangent: Tangent, direction: Tensor) -> Tensor:
    """Inner products of the gradients with a direction shaped as the block's matrix: (n, c)."""
    if isinstance(tangent, Kronecker):
        a, g = raised(tangent.inputs()), raised(tangent.grads())
        turned = direction.to(a.dtype).transpose(-1, -2)
        moved = (a.squeeze(1) @ turned[0]).unsqueeze(1) if len(turned) == 1 else a @ turned
        return (g * moved.unsqueeze(1)).sum((2, 3, 4))
    if isinstance(tangent, Rows):
        at = direction[tangent.index].to(tangent.grads.dtype)  # (n, t, d)
        found = (tangent.grads * at.unsqueeze(1)).sum(3)
        return found.sum(2) if tangent.weights is None else (found * tangent.weights.unsqueeze(1)).sum(2)
    return raised(tangent.values) @ direction.to(raised(tangent.values).dtype)


def examples_of(tangent: Tangent) -> int:
    """Number of examples."""
    if isinstance(tangent, Kronecker):
        return tangent.examples
    return len(tangent.index) if isinstance(tangent, Rows) else len(tangent.values)


def dtype_of(rotated: Rotated) -> torch.dtype:
    """The precision of the gradients."""
    return rotated.g.dtype if isinstance(rotated, Factored) else rotated.values.dtype
