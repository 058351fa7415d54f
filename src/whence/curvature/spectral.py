"""Sums over the training set in one pass each: squares of gradients in a basis, scores, weighted squares."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import ClassVar, TypeGuard

import torch
from torch import Tensor

from whence.curvature.base import Alignments, FittedCurvature, Meats, NewtonStep, Predicted, RidgePath, Sandwich, Weigh
from whence.curvature.rotation import (
    CHUNK_NUMBERS,
    Basis,
    BasisView,
    Factored,
    Full,
    Rotated,
    basis_views,
    combine,
    dtype_of,
    products_are_rounded,
    raised,
)
from whence.curvature.stream import LayerGradients, working_precision
from whence.data.batches import Inputs, batch_size, take
from whence.errors import SingularCurvatureError
from whence.jacobian.gradients import Dense, Kronecker, Rows, Tangent
from whence.linalg import check_finite_sums, eigh


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

    def add(self, view: BasisView, weights: Tensor, summed: Tensor | None = None) -> None:
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

    def add_mixed(self, view: BasisView, mixture: Mixture) -> None:
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

    def _add_single(self, view: BasisView, mixture: Mixture) -> bool:
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
    stream: LayerGradients,
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
        problem.passes.process_group.share([sizes, frame], 0, "eigenvalues")
        weights = torch.cat([weights, sizes.clamp_min(0.0).unsqueeze(0)])
    elif roots is not None:  # the residuals are one more combination, which counts in the score only
        weights = weights.new_ones(1, roots.shape[2] + 1).double()
        weights[:, -1] = 0.0
    sums = [Sums(basis, len(weights), problem.device) for basis in bases]
    state = {**states(sums), **(observed or {})}
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


def states(sums: Sequence[Sums]) -> dict[str, Tensor]:
    """The tensors of all blocks' sums, by name."""
    return {name: tensor for at, one in enumerate(sums) for name, tensor in one.state(str(at)).items()}


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


class MeatSums:
    """Squares of J_i^T W_i in the basis for each set of weights, and sum_i J_i^T u_i, the columns of "hec3".

    Args:
        bases: coordinates of each block.
        roots: weights W (n, k, q) by name, of which names and sizes are kept.
        device: where to sum.

    Attributes:
        in_views_alone: whether the gradients are wanted in the bases and no other way.
    """

    in_views_alone: ClassVar[bool] = True

    def __init__(self, bases: Sequence[Basis], roots: Mapping[str, Tensor], device: torch.device) -> None:
        """Zeros."""
        self.bases = bases
        self.names = list(roots)
        sizes = [root.shape[2] for root in roots.values()]
        eye = torch.eye(sum(sizes), dtype=torch.float64, device=device)
        self.masks = torch.stack([part.sum(0) for part in eye.split(sizes)])  # (names, Q)
        self.last = self.masks[self.names.index("hec3")] if "hec3" in roots else torch.zeros_like(self.masks[0])
        self.sums = [Sums(basis, len(roots), device) for basis in bases]

    @property
    def given(self) -> list[Tensor]:
        """What the sums depend on beside the gradients and their weights."""
        return [one for basis in self.bases for one in basis.tensors]

    def add(self, basis_views: Sequence[BasisView], roots: Mapping[str, Tensor]) -> None:
        """Count one piece, with the outputs pulled back: they are combined by the weights."""
        mixture = Mixture(torch.cat(list(roots.values()), dim=2).double(), self.masks, self.last)
        for sums, view in zip(self.sums, basis_views, strict=True):
            sums.add_mixed(view, mixture)

    def add_pulled(self, basis_views: Sequence[BasisView], n: int) -> None:
        """Count one piece of n examples, with the weights themselves pulled back."""
        for sums, view in zip(self.sums, basis_views, strict=True):
            sums.add(view, self.masks, self.last.expand(n, -1))

    def finish(self) -> tuple[dict[str, list[Squares]], list[Tensor]]:
        """The squares by name, and the totals."""
        found = [one.finish() for one in self.sums]
        squares = {name: [one[at] for one in found] for at, name in enumerate(self.names)}
        return squares, [one.total for one in self.sums]


def gather_meats(stream: LayerGradients, sums: MeatSums, roots: Mapping[str, Tensor]) -> MeatSums:
    """One pass for weights W (n, k, q) or (1, k, q); fewer of them than outputs are pulled back themselves."""
    problem = stream.problem
    whole = {name: root.expand(problem.n, -1, -1) for name, root in roots.items()}
    joined = torch.cat(list(whole.values()), dim=2)  # (n, k, Q)

    def pulled(where: slice, _: int) -> Tensor:
        return joined[where].permute(2, 0, 1)

    directly = joined.shape[2] <= problem.k
    reading = (pulled, joined.shape[2]) if directly else (stream.identity(), problem.k)
    for where, tangents in stream.read("meats", *reading, states(sums.sums), [joined, *sums.given]):
        ready = basis_views(tangents, sums.bases, problem.device)
        if directly:
            sums.add_pulled(ready, where.stop - where.start)
        else:
            sums.add(ready, {name: root[where] for name, root in whole.items()})
        del ready, tangents  # the next piece needs the room
    return sums


def centre(basis: Basis, squares: Squares, total: Tensor, n: int) -> Squares:
    """Squares of the centred jackknife, (n - 1) / n sum_i (v_i - mean)^2 along each direction.

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
    return Squares((squares.inside - means).clamp_min(0.0) * share, max(squares.outside - rest, 0.0) * share)


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
        for at, (within, beyond) in enumerate(pairs):
            if at == 0:
                rounded = products_are_rounded(within.device)
                inside = torch.empty(count, *within.shape, dtype=dtype, device=within.device)
            inside[at] = within if rounded or not basis.outside else within - beyond
            outside.append(beyond)
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


def align(tangent: Tangent, directions: Tensor) -> Tensor:
    """<J_i^T u_c, v_q> for every example, cotangent and direction.

    A layer seen at one position never has its gradient matrices formed: g^T V a takes one matrix product for each
    direction. Layers with shared weights take that way too, unless forming the matrices first is cheaper.

    Args:
        tangent: gradients of n examples for c cotangents.
        directions: V (q, *matrix shape of the block).

    Returns:
        (n, c, q).
    """
    if isinstance(tangent, Dense):
        return raised(tangent.values).to(directions.dtype) @ directions.T
    if isinstance(tangent, Rows):
        return _align_rows(tangent, directions)
    return _align_kronecker(tangent, directions)


def _align_kronecker(tangent: Kronecker, directions: Tensor) -> Tensor:
    a, g = tangent.inputs().to(directions.dtype), tangent.grads().to(directions.dtype)
    n, c, e, t, o = g.shape
    i, q = a.shape[3], len(directions)
    if not t:  # no example of this batch uses the layer
        return directions.new_zeros(n, c, q)
    factored = q * t * o * (i + c)
    formed = c * o * i * (t + q)
    numbers = q * t * o * e if factored <= formed else c * e * o * i
    step = max(1, CHUNK_NUMBERS["cuda" if g.is_cuda else "cpu"] // numbers)
    parts = []
    for low in range(0, n, step):
        some_a, some_g = a[low : low + step], g[low : low + step]
        if factored <= formed:
            moved = _times_inputs(some_a, directions)  # (n, e, t, q, o)
            left = some_g.permute(0, 2, 3, 1, 4).reshape(len(some_g), e * t, c, o)
            parts.append(torch.einsum("nsco,nsqo->ncq", left, moved.flatten(1, 2)))
        else:
            matrices = torch.einsum("nceto,neti->nceoi", some_g, some_a)
            parts.append(matrices.flatten(2) @ directions.flatten(1).T)
    return torch.cat(parts)


def _times_inputs(a: Tensor, directions: Tensor) -> Tensor:
    """V a: (n, e, t, i) with (q, e, o, i) to (n, e, t, q, o); one large product where there is one group."""
    n, e, t, i = a.shape
    q, _, o, _ = directions.shape
    if e == 1:
        return (a.reshape(-1, i) @ directions.reshape(-1, i).T).reshape(n, e, t, q, o)
    return torch.einsum("neti,qeoi->netqo", a, directions)


def _align_rows(tangent: Rows, directions: Tensor) -> Tensor:
    rows, examples, values = tangent.aggregate()
    n, c = tangent.index.shape[0], tangent.grads.shape[1]
    values = raised(values).to(directions.dtype)  # (u, c, d)
    found = values.new_zeros(n, c, len(directions))
    step = max(1, CHUNK_NUMBERS["cuda" if values.is_cuda else "cpu"] // (len(directions) * values.shape[2]))
    for low in range(0, len(rows), step):
        part = slice(low, low + step)
        products = torch.einsum("ucd,qud->ucq", values[part], directions[:, rows[part]])
        found.index_add_(0, examples[part], products)
    return found


HELD = {"cpu": 2**18, "cuda": 2**26}
"""Numbers that are multiplied one by one in one go: on a CPU as many as stay in its cache."""

LARGEST = 2048
"""Outputs of a layer of which the complement of a corner is worked out, which takes their cube."""


@dataclass(frozen=True)
class FactorParts:
    """Factors of gradients g a^T, turned into a basis and split at its corner.

    Attributes:
        inputs: a (n, i).
        inputs_inside: ua (n, x).
        inputs_beyond: b (n, i), without columns where the basis spans all.
        grads_inside: vg (n, c, y).
        grads_beyond: h, likewise: (n, c, o - y) in a basis of what the corner does not span, or (n, c, o).
    """

    inputs: Tensor
    inputs_inside: Tensor
    inputs_beyond: Tensor
    grads_inside: Tensor
    grads_beyond: Tensor

    @classmethod
    def of(cls, tangent: Kronecker, basis: Basis, dtype: torch.dtype, complement: Tensor | None = None) -> FactorParts:
        """Split what was captured; a basis of the output directions outside the corner makes h shorter."""
        a, g = tangent.inputs()[:, 0, 0].to(dtype), tangent.grads()[:, :, 0, 0].to(dtype)
        into, out = (None if one is None else one[0].to(dtype) for one in (basis.inputs, basis.outputs))
        inside, turned = a if into is None else a @ into, g if out is None else g @ out
        if not basis.outside or into is None or out is None:
            return cls(a, inside, a[:, :0], turned, g[:, :, :0])
        beyond = g - turned @ out.T if complement is None else g @ complement
        return cls(a, inside, a - inside @ into.T, turned, beyond)

    def matrices(self, basis: Basis, complement: Tensor | None = None) -> Tensor:
        """The gradients that were split, as matrices (n c, 1, o, i)."""
        g = self.grads_inside
        if basis.outputs is not None:
            g = g @ basis.outputs[0].to(g.dtype).T
        if self.grads_beyond.shape[2]:
            g = g + (self.grads_beyond if complement is None else self.grads_beyond @ complement.T)
        return torch.einsum("nco,ni->ncoi", g, self.inputs).flatten(0, 1).unsqueeze(1)

    @classmethod
    def join(cls, pieces: Sequence[FactorParts]) -> FactorParts:
        """Several pieces of a batch as one."""
        return cls(*(torch.cat([getattr(piece, name) for piece in pieces]) for name in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Preconditioned:
    """F_lam^-1 times the gradients of m inputs for k cotangents each.

    Attributes:
        basis: of the block.
        parts: the factors of the gradients themselves.
        complement: (o, o - y) output directions that the corner does not span, where they were worked out.
        inside: (m, y, x) turned inputs, divided by s + lambda.
        weight: 1 / (s_outside + lambda), zero where the basis spans all.
    """

    basis: Basis
    parts: FactorParts
    complement: Tensor | None
    inside: Tensor
    weight: float

    @classmethod
    def of(
        cls, pieces: Sequence[FactorParts], basis: Basis, squares: Squares, ridge: float, complement: Tensor | None
    ) -> Preconditioned:
        """Divide by the curvature."""
        parts = FactorParts.join(pieces)
        inside = parts.inputs_inside.unsqueeze(1) / (squares.inside[0] + ridge).to(parts.inputs.dtype)
        return cls(basis, parts, complement, inside, 1.0 / (squares.outside + ridge) if basis.outside else 0.0)

    def align(self, tangent: Tangent) -> Tensor:
        """Inner products with the gradients of n examples for c cotangents, seen once as well, (n, c, m k)."""
        assert isinstance(tangent, Kronecker)
        others = FactorParts.of(tangent, self.basis, self.inside.dtype, self.complement)
        theirs, ours = others.grads_inside, self.parts.grads_inside
        n, c, y = theirs.shape
        m, k = ours.shape[:2]
        found = self.inside.new_empty(n, c, m * k)
        held = HELD["cuda" if self.inside.is_cuda else "cpu"]
        many, few = (max(1, room // (m * max(y, 1))) for room in (16 * held, held // k))
        weights, room = self.inside.new_empty(min(many, n), m, y), self.inside.new_empty(min(few, n), m, k, y)
        for low in range(0, n, many):
            some = slice(low, min(low + many, n))
            here = self._weights(others, some, weights[: some.stop - low]).unsqueeze(2)  # (some, m, 1, y)
            for scale, left, into in zip(*(one.split(few) for one in (here, theirs[some], found[some])), strict=True):
                space = room if few == 1 else room[: len(scale)]
                torch.mul(scale, ours, out=space)
                torch.bmm(left, space.view(-1, m * k, y).mT, out=into)
            if self.weight:
                self._add_beyond(others, some, found[some].unflatten(2, (m, k)))
        return found

    def _weights(self, others: FactorParts, some: slice, into: Tensor) -> Tensor:
        """B of every pair of examples, (some, m, y), written where it is told to."""
        torch.mm(others.inputs_inside[some], self.inside.flatten(0, 1).T, out=into.flatten(1))
        if self.weight:
            into += (self.weight * others.inputs_beyond[some] @ self.parts.inputs_beyond.T).unsqueeze(2)
        return into

    def _add_beyond(self, others: FactorParts, some: slice, found: Tensor) -> None:
        """Add what output directions outside the corner say to (some, c, m, k): one weight for all of them."""
        alike = self.weight * others.inputs[some] @ self.parts.inputs.T  # (some, m)
        products = others.grads_beyond[some].flatten(0, 1) @ self.parts.grads_beyond.flatten(0, 1).T
        found.addcmul_(products.view_as(found), alike[:, None, :, None])


def complement_of(basis: Basis, dtype: torch.dtype) -> Tensor | None:
    """Orthonormal output directions (o, o - y) that a corner does not span; nothing where that would take long."""
    if not basis.outside or basis.inputs is None or basis.outputs is None or basis.outputs.shape[1] > LARGEST:
        return None
    kept = basis.outputs[0].double()
    whole: Tensor = torch.linalg.qr(kept, mode="complete").Q
    return whole[:, kept.shape[1] :].to(dtype)


def seen_once(tangent: Tangent) -> Kronecker | None:
    """The gradients of a block, if they are outer products of two vectors."""
    if not isinstance(tangent, Kronecker) or tangent.positions != 1 or tangent.g.shape[2] > 1:
        return None
    return tangent


BATCH = 500
"""Training examples that are taken to be multiplied with at once, where memory is planned."""


class FittedSpectral(FittedCurvature):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi.

    Attributes:
        bases: U of each block.
        spectrum: s of each block, and what was summed along with it.
    """

    def __init__(
        self,
        stream: LayerGradients,
        bases: Sequence[Basis],
        spectrum: Spectrum,
        ridge: float,
        noise: Tensor,
        facts: list[str],
        weigh: Weigh | None,
    ) -> None:
        """Take leverage blocks, the Newton step's effect and, where the weights are known, the meats in one pass."""
        self.stream = stream
        self.problem = stream.problem
        self.bases = bases
        self.spectrum = spectrum
        self.ridge = ridge
        self.noise = noise
        self.path: RidgePath | None = None
        self.facts = facts
        check_invertible(bases, spectrum.curvature, ridge)
        freedom = sum(
            float((s.inside / (s.inside + ridge)).sum()) + basis.outside * s.outside / (s.outside + ridge or 1.0)
            for s, basis in zip(spectrum.curvature, bases, strict=True)
        )
        self.degrees_of_freedom = freedom
        selected = self.problem.selection.parameters
        self._step = []
        for at, (score, basis) in enumerate(zip(spectrum.score, bases, strict=True)):
            here = {name: selected[name].detach().double() for name in basis.block.parameters}
            self._step.append(self.solve(at, score - ridge * basis.block.to_matrix(here)))
            self.problem.passes.trim_memory()
        self._meats: MeatSums | None = None
        self.leverage_blocks, self._change = self._leverage(weigh)

    def solve(self, at: int, matrix: Tensor) -> Tensor:
        """F_lam^-1 times something shaped as the matrix of block `at`."""
        basis = self.bases[at].to(matrix.dtype)
        squares = self.spectrum.curvature[at]
        weights = 1.0 / (squares.inside + self.ridge)
        if not basis.outside:
            return basis.out_of(basis.into(matrix) * weights.to(matrix.dtype))
        beyond = 1.0 / (squares.outside + self.ridge)  # inside too, and less of it there: nothing as large in between
        solved = basis.out_of(basis.into(matrix) * (weights - beyond).to(matrix.dtype))
        return solved.add_(matrix, alpha=beyond)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), with this curvature for F."""
        size = math.hypot(*(float(step.norm()) for step in self._step))
        weights = self.problem.weights()
        relative = size / max(float(weights.norm()), torch.finfo(torch.float64).tiny)
        direction = None
        if with_direction:
            direction = self.stream.flatten(self._step).to(self.problem.dtype)
        return NewtonStep(self._change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the same basis."""
        roots = dict(meats.roots)
        scale = times_noise(roots.get("ho"), self.problem.hessian_roots, self.noise)
        if scale is not None:
            del roots["ho"]
        if self._meats is not None:
            squares, total = self._meats.finish()
            rest = {name: root for name, root in roots.items() if name not in squares}
            if rest:
                squares.update(gather_meats(self.stream, self.open_meats(rest), rest).finish()[0])
        else:
            squares, total = gather_meats(self.stream, self.open_meats(roots), roots).finish()

        def of(at: int) -> Iterator[Squares]:
            if scale is not None:
                yield self.spectrum.noise[at].times(scale)
            yield from (one[at] for one in squares.values())
            yield centre(self.bases[at], squares["hec3"][at], total[at], meats.deletions)

        return SpectralSandwich.make(self, [*["ho"] * (scale is not None), *squares, "jackknife"], of)

    def open_meats(self, roots: Mapping[str, Tensor]) -> MeatSums:
        """Where the squares of the weighted gradients are summed."""
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

    def at(self, ridge: float, weigh: Weigh | None) -> FittedSpectral:
        """The same bases and eigenvalues: one pass, for the leverages and the meats."""
        return FittedSpectral(self.stream, self.bases, self.spectrum, ridge, self.noise, [], weigh)

    def _preconditioned(self, inputs: Inputs) -> Iterator[tuple[slice, list[Tensor | Preconditioned]]]:
        """F_lam^-1 J^T of some inputs at a time, (m k, *shape) for each block, or factored where that serves."""
        problem, precision = self.problem, working_precision(self.problem)
        k = problem.output_count(inputs)
        size = batch_size(inputs, "this batch")
        most = max(1, int(0.05 * problem.budget.limit) // self._row(inputs, k, precision))
        outside = [complement_of(basis, precision) for basis in self.bases]
        for low in range(0, size, most):
            where = slice(low, min(low + most, size))
            pieces: list[list[Tensor | FactorParts]] = [[] for _ in self.bases]
            for _, tangents, _ in self.stream.of(take(inputs, where), 0, self.stream.identity(k), k):
                for at, (tangent, basis) in enumerate(zip(tangents, self.bases, strict=True)):
                    once = seen_once(tangent)
                    if once is not None:
                        pieces[at].append(FactorParts.of(once, basis, precision, outside[at]))
                    else:
                        pieces[at].append(self.solve(at, tangent.materialize().flatten(0, 1).to(precision)))
            yield where, [self._joined(at, piece, outside[at]) for at, piece in enumerate(pieces)]

    def _joined(
        self, at: int, pieces: Sequence[Tensor | FactorParts], complement: Tensor | None
    ) -> Tensor | Preconditioned:
        """The preconditioned gradients of one block; factored where all of them are seen once."""
        basis, parts = self.bases[at], [one for one in pieces if isinstance(one, FactorParts)]
        if len(parts) == len(pieces):
            return Preconditioned.of(parts, basis, self.spectrum.curvature[at], self.ridge, complement)
        whole = [
            self.solve(at, one.matrices(basis, complement)) if isinstance(one, FactorParts) else one for one in pieces
        ]
        return torch.cat(whole)

    def _row(self, inputs: Inputs, k: int, precision: torch.dtype) -> int:
        """Bytes that the preconditioned gradients of one input take, and its products with a batch of examples."""
        numbers = min(self.problem.n, BATCH) * self.problem.k * k
        for _, tangents, _ in self.stream.of(take(inputs, slice(0, 1)), 0, self.stream.identity(k), k):
            for tangent, basis in zip(tangents, self.bases, strict=True):  # one seen once is kept factored
                numbers += k * basis.block.numel if seen_once(tangent) is None else math.prod(basis.shape)
        return numbers * torch.finfo(precision).bits // 8

    def _align(self, directions: list[Tensor | Preconditioned], m: int, k: int) -> Iterator[tuple[slice, Tensor]]:
        c = self.problem.k
        for where, tangents in self.stream.read("alignments", self.stream.identity(), c):
            yield where, self._contract(tangents, directions, (where.stop - where.start, c, m, k))

    def _fitting(self, at: int, tangent: Tangent, one: Tensor | Preconditioned) -> Tensor | Preconditioned:
        """Directions as matrices where gradients that they are multiplied with are not seen once, as they are."""
        if not isinstance(one, Preconditioned) or seen_once(tangent) is not None:
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

    def _leverage(self, weigh: Weigh | None) -> tuple[Tensor, Tensor]:
        problem = self.problem
        leverage_blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        precision = working_precision(problem)
        weights = [
            Weights.of(basis, [(1.0 / (s.inside + self.ridge), 1.0 / (s.outside + self.ridge or 1.0))], 1, precision)
            for basis, s in zip(self.bases, self.spectrum.curvature, strict=True)
        ]
        steps = [
            (step if basis.outside else basis.to(step.dtype).into(step)).to(precision)
            for step, basis in zip(self._step, self.bases, strict=True)
        ]
        state, given = (
            {"leverage_blocks": leverage_blocks, "change": change},
            [one for w in weights for one in (w.inside, w.outside)] + steps,
        )
        if weigh is not None:  # no examples tell how many weights each will have
            none = slice(0, 0)
            self._meats = self.open_meats(weigh(none, leverage_blocks[none], change[none]))
            state.update(states(self._meats.sums))
            given += self._meats.given
        for where, tangents in self.stream.read("leverage", self.stream.identity(), problem.k, state, given):
            ready = self.stream.views(tangents, self.bases)
            for at, view in enumerate(ready):
                leverage_blocks[where] += weights[at].grams(view)[0]
                change[where] += view.along(steps[at])
                if self._meats is None or self._meats.in_views_alone:
                    view.let_go()
                del view
            if weigh is not None and self._meats is not None:
                self._meats.add(ready, weigh(where, leverage_blocks[where], change[where]))
            self.stream.forget(where)
            self.stream.spare(ready)
            del ready, tangents  # the next piece needs the room
        return leverage_blocks, change


@dataclass(frozen=True)
class SpectralSandwich(Sandwich):
    """Weighted sums of squares of U^T phi.

    Attributes:
        names: estimators, in the order of the weights.
        weights: of each block: d / (s + lambda)^2 for each meat, 1 / (s + lambda) for Laplace.
    """

    variances_alone: ClassVar[bool] = True

    bread: FittedSpectral
    names: tuple[str, ...]
    weights: list[Weights]

    @classmethod
    def make(
        cls, bread: FittedSpectral, meats: Sequence[str], of: Callable[[int], Iterator[Squares]]
    ) -> SpectralSandwich:
        """Divide by the bread on both sides, one block and one meat at a time."""
        precision = working_precision(bread.problem)
        names = (*meats, "laplace")
        weights = []
        for at, curvature in enumerate(bread.spectrum.curvature):
            inside, outside = curvature.inside + bread.ridge, curvature.outside + bread.ridge or 1.0
            # One division after the other: squares of small and large ridges are no numbers.
            pairs = ((one.inside / inside / inside, one.outside / outside / outside) for one in of(at))
            each = chain(pairs, [(1.0 / inside, 1.0 / outside)])
            weights.append(Weights.of(bread.bases[at], each, len(names), precision))
        return cls(bread, names, weights)

    def predict(self, inputs: Inputs) -> Predicted:
        """One forward pass, k backward passes, and a few products."""
        dtype = self.bread.problem.dtype
        outputs, grams = self._sum(inputs, lambda weights, view: weights.grams(view))
        return Predicted(outputs.to(dtype), dict(zip(self.names, grams.to(dtype), strict=True)), None)

    def variances(self, inputs: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        """The same without the covariances between outputs: gradients are read once for all estimators."""
        dtype = self.bread.problem.dtype
        outputs, found = self._sum(inputs, lambda weights, view: weights.variances(view))
        return outputs.to(dtype), dict(zip(self.names, found.to(dtype), strict=True))

    def _sum(self, inputs: Inputs, of: Callable[[Weights, BasisView], Tensor]) -> tuple[Tensor, Tensor]:
        """Outputs, and sums over blocks of something (w, n, k) or (w, n, k, k)."""
        stream, k = self.bread.stream, self.bread.problem.output_count(inputs)
        outputs, sums = [], []
        with stream.by_few_threads(batch_size(inputs, "this batch"), k):
            for _, tangents, out in stream.of(inputs, 0, stream.identity(k), k):
                ready = basis_views(tangents, self.bread.bases, self.bread.problem.device)
                found = [of(weights, one) for weights, one in zip(self.weights, ready, strict=True)]
                sums.append(sum_of(found))
                outputs.append(out)
                stream.spare(ready)
                del ready, tangents  # the next piece needs the room
        return torch.cat(outputs), torch.cat(sums, dim=1)
