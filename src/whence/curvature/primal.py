"""Exact algebra on features z of the gradients: the factored r x r curvature F = sum_i z_i^T L_i z_i.

Features are the gradients themselves (`Jacobian`), chosen coordinates of them in a basis (`Projected`: the core or a
random sketch), or features supplied by a user.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from whence.curvature.accumulate import (
    LayerGradients,
    working_precision,
)
from whence.curvature.base import (
    Alignments,
    FittedCurvature,
    Groups,
    Meats,
    NewtonStep,
    Predicted,
    Sandwich,
    multiple_of_hessians,
    singular,
)
from whence.curvature.cost import ProblemSizes
from whence.curvature.features import CACHE_SHARE, Features, TrainingRows
from whence.curvature.ridge import path_from_curvature, path_from_losses
from whence.curvature.rotation import Basis, BasisView
from whence.data.batches import Inputs
from whence.jacobian.linearization import Linearization
from whence.linalg import NARROWEST, add_gram, inverse_norm, mirror, panels, solve_lower
from whence.runtime.model_state import rounded_products

QR_SIZE = 2048  # largest number of features factored by QR of the cached rows: it does not square the condition number
CONDITION = 1e4  # largest condition number for a Gram matrix: at most four digits of the rows are lost
FEW_FEATURES = 512  # up to this number, single-precision rows are whitened in the precision of the algebra


@dataclass(frozen=True)
class Projected:
    """Features z: chosen coordinates of U^T phi over all blocks. Bases may have fewer columns than rows."""

    gradients: LayerGradients
    bases: Sequence[Basis]  # of each block
    indices: Sequence[Tensor]  # flat positions among each block's coordinates
    notes: list[str]
    orthonormal: bool = True  # whether the columns of the bases are orthonormal

    @property
    def size(self) -> int:
        """The number r of features."""
        return sum(len(index) for index in self.indices)

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples, rows (n, k, r))."""
        precision = working_precision(self.gradients.problem)
        for chunk in self.gradients.of(inputs, self.gradients.identity(outputs), outputs):
            rows = torch.empty(len(chunk.outputs), outputs, self.size, dtype=precision, device=chunk.outputs.device)
            parts = rows.split([len(index) for index in self.indices], 2)
            for tangent, basis, index, into in zip(chunk.tangents, self.bases, self.indices, parts, strict=True):
                if len(index):
                    into.copy_(BasisView(tangent, basis).coordinates(index))
            yield chunk.where, rows
            del rows, parts, into, chunk  # the next chunk needs the memory

    def weights(self) -> Tensor:
        """The network's weights in these coordinates, (r,)."""
        return self._coordinates(self.gradients.problem.selection.detached(), torch.float64)

    def into(self, vectors: Tensor) -> Tensor:
        """U^T v: vectors (..., d) over the selected weights to these coordinates (..., r)."""
        return self._coordinates(self.gradients.problem.selection.unflatten(vectors))

    def _coordinates(self, parameters: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Tensor:
        parts = []
        for basis, index in zip(self.bases, self.indices, strict=True):
            matrix = basis.block.to_matrix(parameters).to(dtype=dtype)
            moved = basis.to(matrix.dtype).to_coordinates(matrix)
            parts.append(moved.flatten(moved.ndim - len(basis.shape))[..., index])
        return torch.cat(parts, dim=-1).to(self.gradients.problem.dtype)

    def lift(self, step: Tensor) -> Tensor:
        """U z: from coordinates (..., r) back to the selected weights (..., d)."""
        return self.gradients.flatten(self.lifted(step), *step.shape[:-1])

    def lifted(self, step: Tensor) -> Iterator[Tensor]:
        """As `lift`, but one matrix for each block: all at once may not fit in memory."""
        lead, parts = step.shape[:-1], step.split([len(index) for index in self.indices], -1)
        for basis, index, part in zip(self.bases, self.indices, parts, strict=True):
            flat = step.new_zeros(*lead, math.prod(basis.shape))
            flat[..., index] = part
            yield basis.to(step.dtype).from_coordinates(flat.reshape(*lead, *basis.shape))


def primal_bytes(r: int) -> float:
    """Memory of the primal algebra on r features."""
    return 9.0 * r * r * 8


@dataclass(frozen=True)
class Whitening:
    """Factored F_lam = D C C^T D, D the square roots of its diagonal: z F_lam^-1 z'^T = y y'^T for y = C^-1 D^-1 z.

    Scaling by D puts features of any size on equal terms, so that unscaled inputs cost no digits.
    """

    scale: Tensor  # (r,) D
    inverse: Tensor  # (r, r) C^-1

    def __call__(self, rows: Tensor) -> Tensor:
        """Features z (..., r) to coordinates y (..., r).

        The inverse of a triangular matrix has large entries that cancel, which costs a digit in single precision. Few
        features are therefore multiplied in the precision of the algebra, which takes little time.
        """
        if len(self.scale) <= FEW_FEATURES and rows.dtype != self.inverse.dtype:
            return self(rows.to(self.inverse.dtype))
        return times_lower(rows / self.scale.to(rows.dtype), self.inverse.to(rows.dtype))


def feature_curvature(rows: TrainingRows) -> tuple[Tensor, Tensor]:
    """The curvature sum_i z_i^T L_i z_i (r, r), and the score sum_i z_i^T r_i."""
    problem, size = rows.problem, rows.features.size
    curvature = torch.zeros(size, size, dtype=problem.dtype, device=problem.device)
    score = curvature.new_zeros(size)
    state = {"curvature": curvature, "score": score}
    for where, some in rows.read("curvature", state, [rows.features.weights()]):
        with rounded_products(False):  # TF32 has too few digits to invert nearly dependent features
            add_gram(curvature, rows.times_hessian_roots(where, some).flatten(0, 1))
        score += (problem.residuals[where].to(some.dtype).flatten() @ some.flatten(0, 1)).to(score.dtype)
    return mirror(curvature), score


def leverages(rows: TrainingRows, whiten: Whitening, step: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Leverage blocks Q_i = y_i y_i^T, the Newton step's change z_i Delta, and sum_i y_i^T L_i y_i unless L_i = I."""
    problem = rows.problem
    blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
    change = torch.zeros_like(problem.outputs)
    curvature = None if problem.identity_hessians else torch.zeros_like(whiten.inverse)
    state = {"leverage_blocks": blocks, "change": change, **({} if curvature is None else {"curvature": curvature})}
    for where, some in rows.read("leverage", state, [whiten.scale, whiten.inverse, step]):
        white = whiten(some)
        blocks[where] = (white @ white.mT).to(blocks.dtype)
        change[where] = (some @ step.to(some.dtype)).to(change.dtype)
        if curvature is not None:
            add_gram(curvature, rows.times_hessian_roots(where, white).flatten(0, 1))
    return blocks, change, None if curvature is None else mirror(curvature)


def whitened_meats(rows: TrainingRows, whiten: Whitening, meats: Meats) -> tuple[dict[str, Tensor], Tensor]:
    """Meats in whitened coordinates: sum_i y_i^T W_i W_i^T y_i, r x r, for each estimator; and sum_i y_i^T u_i."""
    matrices = {name: torch.zeros_like(whiten.inverse) for name in meats.roots}
    total = whiten.inverse.new_zeros(len(whiten.scale))
    of_groups = {  # (groups, q, r) sums, squared at the end
        name: total.new_zeros(groups.total, root.shape[2], len(total))
        for name, root in meats.roots.items()
        if (groups := meats.pooled(name)) is not None
    }
    state = {"total": total, **matrices, **{f"{name} of groups": one for name, one in of_groups.items()}}
    columns = sum(root.shape[2] for root in meats.roots.values())
    for where, some in rows.read("meats", state, [whiten.scale, whiten.inverse, meats.total, *meats.roots.values()]):
        first = columns > some.shape[1]  # whichever takes fewer products
        given = whiten(some) if first else some
        for name, root in meats.roots.items():
            weighted = (root if len(root) == 1 else root[where]).mT.to(given.dtype) @ given
            weighted = weighted if first else whiten(weighted)
            groups = meats.pooled(name)
            if groups is None:
                add_gram(matrices[name], weighted.flatten(0, 1))
            else:
                of_groups[name].index_add_(0, groups.index[where], weighted.to(total.dtype))
        added = meats.total[where].to(given.dtype).flatten() @ given.flatten(0, 1)
        total += (added if first else whiten(added)).to(total.dtype)
    for name, sums in of_groups.items():
        add_gram(matrices[name], sums.flatten(0, 1))
    return {name: mirror(matrix) for name, matrix in matrices.items()}, total


def times_lower(rows: Tensor, triangle: Tensor) -> Tensor:
    """Products rows @ triangle^T for rows (..., r) and a lower triangular (r, r), skipping most zeros.

    Examples:
        >>> times_lower(torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 0.0], [3.0, 1.0]]))
        tensor([1., 5.])
    """
    if len(triangle) <= NARROWEST:
        return rows @ triangle.T
    found = torch.empty_like(rows)
    for here in panels(len(triangle)):
        found[..., here] = rows[..., : here.stop] @ triangle[here, : here.stop].T
    return found


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedPrimal(FittedCurvature):
    """F = sum_i z_i^T L_i z_i over features z, factored."""

    features: Features  # z
    rows: TrainingRows  # features of the training examples
    whiten: Whitening  # the factored inverse of F_lam
    step: Tensor  # (r,) the Newton step along the features
    change: Tensor  # (n, k) its change of the outputs
    white_curvature: Tensor | None = None  # (r, r) F in whitened coordinates, unless L = I; not saved

    @classmethod
    def fit(cls, problem: Linearization, features: Features, ridge: float | None) -> FittedPrimal:
        """Sum the curvature, choose the ridge by leave-one-out if it is `None`, factor, and compute the leverages."""
        rows, path = TrainingRows(problem, features), None
        curvature, score = feature_curvature(rows)
        if ridge is None:
            squared = problem.identity_hessians
            path = path_from_curvature(curvature, rows, features.notes) if squared else path_from_losses(rows)
            ridge = path.best
        whiten = factorize(curvature, ridge, rows)
        # meats are summed in these coordinates, so all processes need the same ones
        problem.passes.process_group.broadcast([whiten.scale, whiten.inverse], 0, "curvature")
        downhill = (score - ridge * features.weights()) / whiten.scale
        step = (whiten.inverse.T @ (whiten.inverse @ downhill).to(problem.dtype)) / whiten.scale
        leverage_blocks, change, white_curvature = leverages(rows, whiten, step)
        return cls(
            problem=problem,
            ridge=ridge,
            leverage_blocks=leverage_blocks,
            notes=features.notes,
            path=path,
            features=features,
            rows=rows,
            whiten=whiten,
            step=step,
            change=change,
            white_curvature=white_curvature,
        )

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w)."""
        features, size = self.features, float(self.step.norm())
        if isinstance(features, Projected) and not features.orthonormal:
            size = math.hypot(*(float(matrix.norm()) for matrix in features.lifted(self.step)))
        direction = features.lift(self.step) if with_direction else None
        return NewtonStep(self.change, size / self.problem.selection.norm(), direction)

    def sandwich(self, meats: Meats) -> PrimalSandwich:
        """Meats in whitened coordinates; Ho's is already known if its weights are a multiple of the Hessians."""
        roots, ho, known = dict(meats.roots), dict[str, Tensor](), self.white_curvature
        if known is not None and (times := multiple_of_hessians(roots["ho"], self.problem)) is not None:
            del roots["ho"]
            ho = {"ho": known if times == 1.0 else times * known}
        matrices, total = whitened_meats(self.rows, self.whiten, replace(meats, roots=roots))
        return PrimalSandwich(self, {**ho, **matrices}, total)

    def group_leverage_blocks(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Products of whitened rows within each group; each chunk of groups costs a pass over the rows."""
        problem, size, given = self.problem, self.features.size, [self.whiten.scale, self.whiten.inverse]
        need = 3.0 * groups.total * size * problem.outputs.element_size()
        problem.budget.require(need, f"{groups.total} groups", "Make fewer groups.")
        read = self.rows.read_groups("groups", groups.index, size, given, lambda _, rows: self.whiten(rows))
        yield from ((members, white @ white.mT) for members, white in read)

    def alignments(self, inputs: Inputs) -> Alignments:
        """Solve for the rows of the inputs, then multiply by the rows of the training examples."""
        for where, rows in self.features.rows(inputs, self.problem.output_count(inputs)):
            yield where, self._align(self._solve(rows.to(self.whiten.inverse.dtype)))

    def training_alignments(self, index: Tensor) -> Tensor | None:
        """As `alignments`, with the rows of these examples."""
        if not self.rows.complete:
            return None
        solved = []
        for where, rows in self.rows.read("examples to change"):
            here = index[(index >= where.start) & (index < where.stop)] - where.start
            solved.append(self._solve(rows[here].to(self.whiten.inverse.dtype)))
        aligned = [some for _, some in self._align(torch.cat(solved))]
        return torch.cat(aligned, dim=2).to(self.problem.dtype)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """Inner products of whitened rows."""
        k, j = self.problem.output_count(inputs), self.problem.output_count(others[0])
        left = torch.cat([self.whiten(rows).flatten(0, 1) for _, rows in self.features.rows(inputs, k)])
        right = (self.whiten(rows).flatten(0, 1) for batch in others for _, rows in self.features.rows(batch, j))
        found = torch.cat([left @ rows.T for rows in right], dim=1)
        return found.to(self.problem.dtype).reshape(len(left) // k, k, -1, j)

    def precondition(self, vectors: Tensor) -> Tensor:
        """The exact inverse along the features; 1 / lambda outside, where F_lam is the ridge alone."""
        features = self.features
        if not features.orthonormal or (features.size < vectors.shape[1] and self.ridge <= 0):
            return super().precondition(vectors)
        inside = features.into(vectors)  # (q, r)
        solved = features.lift(self._solve(inside))
        if features.size == vectors.shape[1]:
            return solved
        outside = vectors - features.lift(inside)
        return solved + (outside - features.lift(features.into(outside))) / self.ridge

    def to_dense(self) -> Tensor:
        """The inverse along the features, zero outside."""
        root = self.features.lift(self.whiten.inverse / self.whiten.scale)  # (r, d)
        return root.mT @ root

    def _solve(self, rows: Tensor) -> Tensor:
        """F_lam^-1 z for features z (..., r)."""
        return (self.whiten(rows) @ self.whiten.inverse) / self.whiten.scale

    def _align(self, solved: Tensor) -> Iterator[tuple[slice, Tensor]]:
        (m, k), flat = solved.shape[:2], solved.flatten(0, 1)
        for where, rows in self.rows.read("alignments"):  # in the precision of the training rows
            yield where, (flat.to(rows.dtype) @ rows.flatten(0, 1).T).reshape(m, k, -1, self.problem.k)


def factorize(curvature: Tensor, ridge: float, rows: TrainingRows) -> Whitening:
    """The factored inverse of F_lam, from the curvature F, or by QR of the rows for accuracy."""
    diagonal = curvature.diagonal() + ridge
    eps = torch.finfo(curvature.dtype).eps * len(diagonal)
    scale = diagonal.clamp_min(0.0).sqrt()
    empty = scale <= (0.0 if ridge > 0 else eps * scale.max())  # gradients this small are rounding errors of the others
    if bool(empty.any()):
        raise singular(ridge, int(empty.sum()), len(scale))
    matrix = curvature / scale / scale.unsqueeze(1)
    matrix.diagonal().add_(ridge / diagonal)
    factor, info = torch.linalg.cholesky_ex(matrix)
    null = len(scale) - int(info) + 1 if int(info) else 0
    tiny = eps**0.5  # a Gram matrix squares the rounding of the pivots
    if rows.in_memory and len(scale) <= QR_SIZE and (null or inverse_norm(factor) > CONDITION):
        factor, null = factor_by_qr(rows, scale, ridge), 0
        tiny = eps if ridge > 0 else 100 * eps  # without a ridge, rounding of the gradients matters too
    pivots = factor.diagonal().abs()
    null = null or int((pivots <= tiny * pivots.max()).sum())
    inverse = solve_lower(factor, torch.eye(len(pivots), dtype=factor.dtype, device=factor.device))
    if ridge == 0 and not null:  # all pivots may exceed the smallest singular value
        null = int(not float(inverse.norm()) * tiny * float(pivots.max()) < 1)
    if null:
        used, more = next(iter(rows.problem.selection.parameters.values())).dtype, ""
        if ridge > 0 and used != torch.float64:  # with a ridge, only rounding can make it singular
            more = (
                " With a ridge above zero it is rounding that hides them: gradients are in "
                f"{str(used).removeprefix('torch.')} here, and `model.double()` (with inputs to match) has the digits "
                "for a ridge as small as this."
            )
        raise singular(ridge, null, len(pivots), more)
    return Whitening(scale, inverse)


def factor_by_qr(rows: TrainingRows, scale: Tensor, ridge: float) -> Tensor:
    """The triangle C of D^-1 F_lam D^-1 = C C^T from the rows themselves, with the penalty as extra rows."""
    problem, mine = rows.problem, rows.problem.local_rows
    each = problem.hessian_roots.shape[2]
    numbers = (mine.stop - mine.start) * each
    penalty = len(scale) if ridge > 0 else 0
    stacked = scale.new_zeros(numbers + penalty, len(scale))  # large: filled in place
    for where, some in rows.read("curvature"):
        part = rows.times_hessian_roots(where, some) / scale
        stacked[(where.start - mine.start) * each : (where.stop - mine.start) * each] = part.reshape(-1, len(scale))
    if problem.n * each + penalty < len(scale):
        raise singular(ridge, len(scale) - problem.n * each - penalty, len(scale))
    if not problem.passes.process_group.alone:  # stack the triangles of all processes
        triangle = torch.linalg.qr(stacked[:numbers], mode="r").R
        found = problem.passes.process_group.all_gather(triangle, "curvature", stacked.device)
        stacked, numbers = torch.cat([found, found.new_zeros(penalty, found.shape[1])]), len(found)
    stacked[numbers:].diagonal().copy_(ridge**0.5 / scale[:penalty])
    upper: Tensor = torch.linalg.qr(stacked, mode="r").R
    signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper.dtype)
    return (upper * signs.unsqueeze(1)).T.contiguous()


@dataclass(frozen=True)
class PrimalSandwich(Sandwich):
    """Quadratic forms in whitened coordinates."""

    fitted: FittedPrimal
    matrices: dict[str, Tensor]
    total: Tensor

    def predict(self, inputs: Inputs) -> Predicted:
        """Covariances y M y^T for the rows y of the test points."""
        problem = self.fitted.problem
        with torch.no_grad():
            outputs = problem.network(inputs).to(problem.dtype)
        parts: dict[str, list[Tensor]] = {name: [] for name in (*self.matrices, "laplace", "shift")}
        for _, rows in self.fitted.features.rows(inputs, problem.output_count(inputs)):
            white = self.fitted.whiten(rows).to(rows.dtype)
            parts["laplace"].append(white @ white.mT)
            parts["shift"].append(white @ self.total.to(white.dtype))
            for name, matrix in self.matrices.items():
                parts[name].append((white @ matrix.to(white.dtype)) @ white.mT)
        found = {name: torch.cat(chunks).to(problem.dtype) for name, chunks in parts.items()}
        return Predicted(outputs, found, found.pop("shift"))


# --- Cost ------------------------------------------------------------------------------------------------------------


def cached_rows_bytes(sizes: ProblemSizes, r: int, item: int, needed: float) -> float:
    """Bytes of r features of all training examples, if they stay in memory beside the `needed` bytes, else zero."""
    held = sizes.numbers * r <= CACHE_SHARE * max(sizes.limit - needed, 0.0) / sizes.item
    return float(sizes.numbers) * r * item if held else 0.0


def algebra_bytes(sizes: ProblemSizes, r: int, rows: float, chunk: float) -> float:
    """Bytes at the peak of the algebra on r features: `rows` bytes stay in memory, `chunk` bytes are transient."""
    square = float(r) ** 2 * sizes.item
    tall = (sizes.n * (sizes.q or sizes.k) + r) * float(r) * sizes.item
    factor = 2.6 * tall + 3.0 * square if rows and r <= QR_SIZE else 6.0 * square
    return rows + max(factor, 7.0 * square + chunk + sizes.example_bytes)


def algebra_operations(sizes: ProblemSizes, r: int) -> float:
    """Operations of the algebra on r features, without computing the rows."""
    tall = 1.2 * sizes.numbers * float(r) ** 2  # a symmetric product
    known = bool(sizes.q) or sizes.k == 1  # the meat of Ho follows from the curvature
    return tall * (2.0 + 6.0 / sizes.k + (0.0 if known else 2.0)) + 4.0 * float(r) ** 3
