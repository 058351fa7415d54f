"""Rows of features of the training set, kept in memory when they fit and recomputed when they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from whence.curvature.base import (
    Alignments,
    FittedCurvature,
    Groups,
    Meats,
    NewtonStep,
    Predicted,
    RidgePath,
    Sandwich,
    Weigh,
    members_of,
    pieces,
)
from whence.curvature.cost import ProblemSizes
from whence.data.batches import Inputs
from whence.errors import SingularCurvatureError
from whence.jacobian.linearization import Linearization
from whence.linalg import eigenvectors
from whence.runtime.execution import State, partial_data_error
from whence.runtime.model_state import rounded_products

CACHE_SHARE = 0.3
"""Rows are kept when they take at most this share of the memory budget."""


class Features(Protocol):
    """A map from inputs to rows z (n, k, r) in which the network is linear."""

    @property
    def notes(self) -> list[str]:
        """What is worth telling about these features."""

    @property
    def size(self) -> int:
        """The number r of features."""

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples of the batch, rows (n, k, r))."""

    def weights(self) -> Tensor:
        """The network's weights in the coordinates of the features, (r,)."""

    def prescale(self, ridge: float | None) -> Tensor:
        """(r,) sizes by which features may be divided so that single precision serves; ones if not known."""

    @property
    def orthonormal(self) -> bool:
        """Whether the features are coordinates along orthonormal directions."""

    def into(self, vectors: Tensor) -> Tensor:
        """Vectors among the selected weights (..., d) along the features (..., r)."""

    def lift(self, step: Tensor) -> Tensor:
        """A step in the features (..., r) as a step of the selected weights (..., d)."""


class TrainingRows:
    """The features of all training examples, in chunks, as often as they are needed."""

    def __init__(self, problem: Linearization, features: Features) -> None:
        """Decide whether the rows can be kept."""
        self.problem = problem
        self.features = features
        need = problem.max_local_rows * problem.k * features.size * problem.outputs.element_size()
        self.kept: list[tuple[slice, Tensor]] | None = [] if need <= CACHE_SHARE * problem.budget.limit else None
        self._full = False
        self._everywhere = problem.passes.process_group.alone

    @property
    def in_memory(self) -> bool:
        """Whether all rows of this process are held at once."""
        return self.kept is not None

    def read(
        self, label: str, state: State | None = None, given: Sequence[Tensor] = ()
    ) -> Iterator[tuple[slice, Tensor]]:
        """One pass: yield (which training examples, rows (n, k, r)); with a state, as `Linearization.read` does."""
        problem = self.problem
        if self.kept is not None and self._full:
            if state is not None:
                known = problem.dependencies(given)
                yield from problem.passes.over(self.kept, lambda item: item[0], label, state, known, resumable=False)
                return
            if problem.passes.closed and not self._everywhere:
                raise partial_data_error()
            yield from self.kept
            return
        seen: list[tuple[slice, Tensor]] = []
        for batch in problem.read(label, state, given):
            for part, rows in self.features.rows(batch.inputs, problem.k):
                where = slice(batch.start + part.start, batch.start + part.stop)
                check_gradients(rows, where.start)
                if self.kept is not None:
                    seen.append((where, rows))
                yield where, rows
        mine = problem.local_rows
        if self.kept is not None and sum(len(rows) for _, rows in seen) == mine.stop - mine.start:
            self.kept, self._full = seen, True  # a reader that stops early, or starts late, keeps nothing

    def bring_together(self) -> None:
        """Let every process have the rows of all of them."""
        if self._everywhere:
            return
        process_group, problem = self.problem.passes.process_group, self.problem
        need = 2.0 * problem.n * problem.k * self.features.size * problem.outputs.element_size()
        problem.budget.require(
            need, "the gradients of all training examples in each process", "Use Exact(road='primal'), or one process."
        )
        found = [rows for _, rows in self.read("rows")]
        everything = process_group.gather(torch.cat(found) if found else None, "rows", problem.device)
        self.kept, self._full, self._everywhere = [(slice(0, problem.n), everything)], True, True

    def curved(self, where: slice, rows: Tensor) -> Tensor:
        """Rows scaled by the roots of the loss's Hessian, (n, q, r), so that their Gram matrix is the curvature."""
        roots = self.problem.hessian_roots
        return rows if roots is None else roots[where].transpose(1, 2).to(rows.dtype) @ rows


def check_gradients(rows: Tensor, start: int) -> None:
    """Raise when the features of an example, counted from `start`, are not finite."""
    wrong = ~torch.isfinite(rows).flatten(1).all(1)
    if bool(wrong.any()):
        raise SingularCurvatureError(
            "expected finite gradients of the outputs in the weights, got NaN or infinity for training example "
            f"{start + int(wrong.int().argmax())}. Look for a square root, a logarithm or a norm at zero in the model; "
            "gradients of a float16 model may overflow: use float32."
        )


POINTS = 49
DECADES = (-9.0, 3.0)
"""The grid spans these powers of ten of the largest eigenvalue."""


def ridge_grid(values: Tensor) -> Tensor:
    """Ridges from far below to far above the eigenvalues of the curvature."""
    top = max(float(values.max()), torch.finfo(values.dtype).tiny)
    return top * torch.logspace(*DECADES, POINTS, dtype=values.dtype, device=values.device)


Rotated = Callable[[Mapping[str, Tensor], Sequence[Tensor]], Iterator[tuple[slice, Tensor, Tensor]]]
"""From what a pass adds to and depends on to places, rows (n, k, r) and the linearized model's targets (n, k)."""


def path_from_eigenvectors(values: Tensor, chunks: Rotated, problem: Linearization) -> RidgePath:
    """Leave-one-out error from rows rotated into the eigenvectors of F.

    For each ridge: e_i = y_i - q_i b with b = (S + lambda)^-1 sum_i q_i^T y_i, H_ii = q_i (S + lambda)^-1 q_i^T and
    u_i = (I - H_ii)^-1 e_i, where i is an example, a position or an output of one, or a whole group.

    Args:
        values: (r,) eigenvalues of F.
        chunks: gives, each time it is called, all rotated rows and targets.
        problem: knows what is left out at once.
    """
    cross = torch.zeros_like(values)
    for _, rows, targets in chunks({"cross": cross}, ()):
        cross += torch.einsum("nkp,nk->p", rows, targets)
    ridges = ridge_grid(values)

    def add(sums: Tensor, rows: Tensor, targets: Tensor) -> None:
        for g, ridge in enumerate(ridges):
            weights = 1.0 / (values + ridge)
            leverage_blocks = problem.folds.blocks((rows * weights) @ rows.transpose(1, 2))
            residuals = problem.folds.parts(targets - rows @ (cross * weights))
            eye = torch.eye(leverage_blocks.shape[1], dtype=leverage_blocks.dtype, device=leverage_blocks.device)
            sums[g] += _squares(eye - leverage_blocks, residuals)

    sums = torch.zeros_like(ridges)
    if problem.folds.groups is None:
        for _, rows, targets in chunks({"sums": sums}, [cross, ridges]):
            add(sums, rows, targets)
    else:
        for rows, targets in _whole_groups(problem.folds.groups, chunks, len(values), problem):
            add(sums, rows, targets)
    return RidgePath(ridges, sums / problem.n)


def _whole_groups(index: Tensor, chunks: Rotated, size: int, problem: Linearization) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows (g, members k, r) and targets (g, members k) of as many groups as memory allows, a pass for each."""
    for members in pieces(members_of(index), problem, size):
        place = torch.full((problem.n,), -1, device=problem.device)
        place[members.reshape(-1)] = torch.arange(members.numel(), device=problem.device)
        kept = problem.outputs.new_zeros(members.numel(), problem.k, size)
        aims = problem.outputs.new_zeros(members.numel(), problem.k)
        for where, rows, targets in chunks({"rows": kept, "targets": aims}, [members]):
            here = place[where] >= 0
            kept[place[where][here]] = rows[here].to(kept.dtype)
            aims[place[where][here]] = targets[here].to(aims.dtype)
        yield kept.reshape(len(members), -1, size), aims.reshape(len(members), -1)


def path_from_kernel(kernel: Tensor, targets: Tensor, problem: Linearization, facts: list[str]) -> RidgePath:
    """Leave-one-out error from the kernel matrix.

    u_i = C_ii^-1 (C y)_i with C = (K + lambda)^-1 and C_ii its diagonal blocks: of examples, of positions or outputs of
    them, or of whole groups.

    Args:
        kernel: (n k, n k).
        targets: (n, k) of the linearized model.
        problem: knows what is left out at once.
        facts: what was done out of the ordinary is added here.
    """
    values, vectors = (part.to(kernel.dtype) for part in eigenvectors(kernel, "the kernel", facts))
    n, k = targets.shape
    rows = vectors.reshape(n, k, -1)
    along = vectors.T @ targets.reshape(-1)
    ridges = ridge_grid(values)
    errors = torch.zeros_like(ridges)
    index, folds = problem.folds.groups, problem.folds
    whole = (
        [rows] if index is None else (rows[some].flatten(1, 2) for some in pieces(members_of(index), problem, n * k))
    )
    for part in whole:
        for g, ridge in enumerate(ridges):
            weights = 1.0 / (values + ridge)
            blocks = folds.blocks((part * weights) @ part.transpose(1, 2))
            errors[g] += _squares(blocks, folds.parts(part @ (along * weights))) / n
    return RidgePath(ridges, errors)


def _squares(matrices: Tensor, vectors: Tensor) -> Tensor:
    """Sum of squares of the solutions, infinite where a leverage reaches one to machine precision."""
    solved: Tensor = torch.linalg.solve_ex(matrices, vectors.unsqueeze(-1)).result
    return solved.square().sum().nan_to_num(nan=torch.inf)


QR_SIZE = 2048
"""Up to this many features, rows at hand are factored by QR, which squares no condition number."""

FEW = 512
"""Up to this many features, those in single precision are whitened in the precision of the algebra."""


class FittedPrimal(FittedCurvature):
    """F = sum_i z_i^T L_i z_i over features z, factored as D (C C^T) D with D the square roots of its diagonal.

    Scaling by D makes features of any size equal partners, so that unscaled inputs cost no digits.
    """

    def __init__(
        self, problem: Linearization, features: Features, ridge: float | None, rows: TrainingRows | None = None
    ) -> None:
        """Accumulate the curvature in one pass, factor it, and take the leverage blocks in another."""
        self.problem = problem
        self.features = features
        self.rows = rows or TrainingRows(problem, features)
        self.facts = features.notes
        prescale = features.prescale(ridge)  # (r,)
        curvature, score = self._accumulate(prescale)
        self.path: RidgePath | None = None
        if ridge is None:
            self.path = self._path(curvature)
            ridge = self.path.best
        self.ridge = ridge
        self.scale, self.inverse = self._factor(curvature, prescale, ridge)
        problem.passes.process_group.share(
            [self.scale, self.inverse], 0, "curvature"
        )  # sums of meats are in these coordinates
        weights = features.weights()
        white = (self.inverse @ ((score - ridge * weights) / self.scale)).to(problem.dtype)
        self.step = (self.inverse.T @ white) / self.scale
        self.leverage_blocks, self._change, self.degrees_of_freedom = self._leverage()

    def whiten(self, rows: Tensor) -> Tensor:
        """(..., r) features z to coordinates y with z F_lam^-1 z'^T = y y'^T.

        The inverse of a triangle has large entries that cancel, of which single precision keeps one digit less: few
        features are multiplied in the precision of the algebra, which takes little time.
        """
        if len(self.scale) <= FEW and rows.dtype != self.inverse.dtype:
            return self.whiten(rows.to(self.inverse.dtype))
        return (rows / self.scale.to(rows.dtype)) @ self.inverse.to(rows.dtype).T

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w)."""
        direction = self.features.lift(self.step)
        size = self.problem.weights().norm().clamp_min(torch.finfo(direction.dtype).tiny)
        return NewtonStep(self._change, float(direction.norm() / size), direction if with_direction else None)

    def sandwich(self, meats: Meats) -> PrimalSandwich:
        """Meats in whitened coordinates: sum_i y_i^T W_i W_i^T y_i, an r x r matrix for each estimator."""
        size = self.features.size
        matrices = {name: torch.zeros_like(self.inverse) for name in meats.roots}
        total = self.inverse.new_zeros(size)
        sums = {  # of each group, (groups, q, r)
            name: total.new_zeros(groups.total, root.shape[2], size)
            for name, root in meats.roots.items()
            if (groups := meats.pooled(name)) is not None
        }
        state = {"total": total, **matrices, **{f"{name} of groups": one for name, one in sums.items()}}
        given = [self.scale, self.inverse, meats.total, *meats.roots.values()]
        for where, rows in self.rows.read("meats", state, given):
            white = self.whiten(rows)
            for name, root in meats.roots.items():
                part = root if len(root) == 1 else root[where]
                weighted = part.transpose(1, 2).to(white.dtype) @ white
                groups = meats.pooled(name)
                if groups is None:
                    add_gram(matrices[name], weighted.reshape(-1, size))
                    continue
                sums[name].index_add_(0, groups.index[where], weighted.to(total.dtype))
            total += torch.einsum("nkp,nk->p", white, meats.total[where].to(white.dtype)).to(total.dtype)
        for name, pooled in sums.items():
            add_gram(matrices[name], pooled.reshape(-1, size))
        return PrimalSandwich(self, matrices, total)

    def group_leverage_blocks(self, groups: Groups) -> Iterator[tuple[Tensor, Tensor]]:
        """Whitened rows of a group's members, times themselves; each piece costs a pass over the training rows."""
        problem, size = self.problem, self.features.size
        problem.budget.require(
            3.0 * groups.total * size * problem.outputs.element_size(), f"{groups.total} groups", "Make fewer groups."
        )
        for members in pieces(groups.members(), problem, size):
            place = torch.full((problem.n,), -1, device=problem.device)
            place[members.reshape(-1)] = torch.arange(members.numel(), device=problem.device)
            white = self.inverse.new_zeros(members.numel(), problem.k, size)
            for where, rows in self.rows.read("groups", {"white": white}, [self.scale, self.inverse, members]):
                here = place[where] >= 0
                white[place[where][here]] = self.whiten(rows[here]).to(white.dtype)
            flat = white.reshape(len(members), -1, size)
            yield members, flat @ flat.transpose(1, 2)

    def alignments(self, inputs: Inputs) -> Alignments:
        """Solve for the rows of the inputs, and multiply by those of the training examples."""
        for where, rows in self.features.rows(inputs, self.problem.output_count(inputs)):
            scaled = self.whiten(rows.to(self.inverse.dtype)) @ self.inverse  # F_lam^-1 z is this over the scale
            yield where, self._align(scaled)

    def products(self, inputs: Inputs, others: Sequence[Inputs]) -> Tensor:
        """Inner products of whitened rows."""
        seen = self.problem.output_count
        k, j = seen(inputs), seen(others[0])
        rows = torch.cat([self.whiten(rows).flatten(0, 1) for _, rows in self.features.rows(inputs, k)])
        parts = [
            rows @ self.whiten(others_rows).flatten(0, 1).T
            for batch in others
            for _, others_rows in self.features.rows(batch, j)
        ]
        return torch.cat(parts, dim=1).to(self.problem.dtype).reshape(len(rows) // k, k, -1, j)

    def precondition(self, vectors: Tensor) -> Tensor:
        """The inverse itself along the features; 1 / lambda along directions outside, where lambda is all there is."""
        features = self.features
        if not features.orthonormal or (features.size < vectors.shape[1] and self.ridge <= 0):
            return super().precondition(vectors)
        inside = features.into(vectors)  # (q, r)
        solved = features.lift((self.whiten(inside) @ self.inverse) / self.scale)
        if features.size == vectors.shape[1]:
            return solved
        outside = vectors - features.lift(inside)
        return solved + (outside - features.lift(features.into(outside))) / self.ridge

    def at(self, ridge: float, weigh: Weigh | None) -> FittedPrimal:
        """Factor anew; rows that are in memory are not computed again."""
        return FittedPrimal(self.problem, self.features, ridge, self.rows)

    def _align(self, scaled: Tensor) -> Iterator[tuple[slice, Tensor]]:
        m, k = scaled.shape[:2]
        flat = scaled.flatten(0, 1) / self.scale  # here, and not in every training row
        for where, rows in self.rows.read("alignments"):  # in the precision of the training rows
            yield where, (flat.to(rows.dtype) @ rows.flatten(0, 1).T).reshape(m, k, -1, self.problem.k)

    def _accumulate(self, prescale: Tensor) -> tuple[Tensor, Tensor]:
        """The curvature of prescaled features, and the score."""
        size = self.features.size
        curvature = torch.zeros(size, size, dtype=self.problem.dtype, device=self.problem.device)
        score = curvature.new_zeros(size)
        state, given = {"curvature": curvature, "score": score}, [prescale, self.features.weights()]
        for where, rows in self.rows.read("curvature", state, given):
            flat = self.rows.curved(where, rows / prescale.to(rows.dtype)).reshape(-1, size)
            with rounded_products(False):  # TF32 has too few digits for the inverse of what is nearly dependent
                add_gram(curvature, flat)
            score += torch.einsum("nkp,nk->p", rows, self.problem.residuals[where].to(rows.dtype)).to(score.dtype)
        return curvature, score

    def _factor(self, curvature: Tensor, prescale: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        """D, and the inverse of C."""
        penalty = ridge / prescale.square()
        diagonal = curvature.diagonal() + penalty
        if bool((diagonal <= 0).any()):
            raise singular(ridge, int((diagonal <= 0).sum()), len(diagonal))
        inner = diagonal.sqrt()
        if self.rows.in_memory and len(inner) <= QR_SIZE:
            factor = self._factor_by_qr(prescale * inner, ridge)
            tiny = torch.finfo(factor.dtype).eps * len(inner)
        else:
            matrix = curvature / inner / inner.unsqueeze(1)
            matrix.diagonal().add_(penalty / diagonal)
            factor, info = torch.linalg.cholesky_ex(matrix)
            if int(info):
                raise singular(ridge, len(diagonal) - int(info) + 1, len(diagonal), self._rounding(ridge))
            tiny = (torch.finfo(factor.dtype).eps * len(inner)) ** 0.5  # a Gram matrix squares the pivots' rounding
        pivots = factor.diagonal().abs()
        null = int((pivots <= tiny * pivots.max()).sum())
        if null:
            raise singular(ridge, null, len(pivots), self._rounding(ridge))
        eye = torch.eye(len(pivots), dtype=factor.dtype, device=factor.device)
        inverse: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
        return prescale * inner, inverse

    def _rounding(self, ridge: float) -> str:
        """What else helps: with a ridge only rounding makes a curvature singular."""
        used = next(iter(self.problem.selection.parameters.values())).dtype
        if ridge == 0 or used == torch.float64:
            return ""
        name = str(used).removeprefix("torch.")
        return (
            f" With a ridge above zero it is rounding that hides them: gradients are in {name} here, and "
            "`model.double()` (with inputs to match) has the digits for a ridge as small as this."
        )

    def _factor_by_qr(self, scale: Tensor, ridge: float) -> Tensor:
        roots = self.problem.hessian_roots
        each = self.problem.k if roots is None else roots.shape[2]
        mine = self.problem.local_rows
        numbers = (mine.stop - mine.start) * each
        penalty = len(scale) if ridge > 0 else 0
        stacked = scale.new_zeros(numbers + penalty, len(scale))  # large: filled in place
        for where, rows in self.rows.read("curvature"):
            part = self.rows.curved(where, rows) / scale
            stacked[(where.start - mine.start) * each : (where.stop - mine.start) * each] = part.reshape(-1, len(scale))
        if self.problem.n * each + penalty < len(scale):
            raise singular(ridge, len(scale) - self.problem.n * each - penalty, len(scale))
        if not self.problem.passes.process_group.alone:
            stacked, numbers = self._meet(stacked[:numbers], penalty)
        stacked[numbers:].diagonal().copy_(ridge**0.5 / scale[:penalty])
        upper: Tensor = torch.linalg.qr(stacked, mode="r").R
        signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper.dtype)
        return (upper * signs.unsqueeze(1)).T.contiguous()

    def _meet(self, stacked: Tensor, penalty: int) -> tuple[Tensor, int]:
        """Triangles of all processes' rows, with room for the penalty below, and how many rows they have."""
        triangle = torch.linalg.qr(stacked, mode="r").R
        found = self.problem.passes.process_group.gather(triangle, "curvature", stacked.device)
        return torch.cat([found, found.new_zeros(penalty, found.shape[1])]), len(found)

    def _leverage(self) -> tuple[Tensor, Tensor, float]:
        problem = self.problem
        leverage_blocks = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        change = torch.zeros_like(problem.outputs)
        freedom = torch.zeros(1, dtype=torch.float64, device="cpu")
        state = {"leverage_blocks": leverage_blocks, "change": change, "freedom": freedom}
        for where, rows in self.rows.read("leverage", state, [self.scale, self.inverse, self.step]):
            white = self.whiten(rows)
            leverage_blocks[where] = (white @ white.transpose(1, 2)).to(problem.dtype)
            change[where] = (rows @ self.step.to(rows.dtype)).to(problem.dtype)
            freedom += float(self.rows.curved(where, white).double().square().sum())
        return leverage_blocks, change, float(freedom)

    def _path(self, curvature: Tensor) -> RidgePath:
        pair = eigenvectors(curvature, "the curvature", self.facts)
        values, vectors = (part.to(curvature.dtype) for part in pair)
        self.problem.passes.process_group.share(
            [values, vectors], 0, "leave-one-out path"
        )  # signs of vectors are anybody's
        weights = self.features.weights()

        def rotated(state: State, given: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor, Tensor]]:
            for where, rows in self.rows.read("leave-one-out path", state, [vectors, *given]):
                wide = rows.to(vectors.dtype)
                yield where, wide @ vectors, self.problem.residuals[where] + wide @ weights

        return path_from_eigenvectors(values, rotated, self.problem)


@dataclass(frozen=True)
class PrimalSandwich(Sandwich):
    """Quadratic forms in whitened coordinates."""

    bread: FittedPrimal
    matrices: dict[str, Tensor]
    total: Tensor

    def predict(self, inputs: Inputs) -> Predicted:
        """Covariances y M y^T for the rows y of the test points."""
        problem = self.bread.problem
        with torch.no_grad():
            outputs = problem.network(inputs).to(problem.dtype)
        parts: dict[str, list[Tensor]] = {name: [] for name in (*self.matrices, "laplace")}
        shifts = []
        for _, rows in self.bread.features.rows(inputs, problem.output_count(inputs)):
            white = self.bread.whiten(rows).to(rows.dtype)
            flipped = white.transpose(1, 2)
            parts["laplace"].append((white @ flipped).to(problem.dtype))
            for name, matrix in self.matrices.items():
                parts[name].append(((white @ matrix.to(white.dtype)) @ flipped).to(problem.dtype))
            shifts.append((white @ self.total.to(white.dtype)).to(problem.dtype))
        return Predicted(outputs, {name: torch.cat(chunks) for name, chunks in parts.items()}, torch.cat(shifts))


def add_gram(matrix: Tensor, rows: Tensor) -> None:
    """Add rows^T rows, computed in the rows' precision, to a matrix of perhaps higher precision."""
    if rows.dtype == matrix.dtype:
        matrix.addmm_(rows.T, rows)
    else:
        matrix.add_(rows.T @ rows)


def singular(ridge: float, null: int, size: int, more: str = "") -> SingularCurvatureError:
    """The error for a curvature that has no inverse."""
    return SingularCurvatureError(
        f"expected an invertible curvature, got at least {null} of {size} directions without information at "
        f"ridge={ridge:g}. Raise `ridge` (for example to n times the weight decay), or select fewer parameters.{more}"
    )


# --- Cost ------------------------------------------------------------------------------------------------------------


def algebra_stages(sizes: ProblemSizes, r: int, rows: float, chunk: float) -> dict[str, float]:
    """Stages of the algebra on r features, of which `rows` bytes stay in memory, and `chunk` bytes pass."""
    square = float(r) ** 2 * sizes.item
    tall = (sizes.n * (sizes.q or sizes.k) + r) * float(r) * sizes.item
    factor = 2.6 * tall + 3.0 * square if rows and r <= QR_SIZE else 6.0 * square
    return {
        "rows and curvature": rows + 2.0 * square + chunk,
        "factor": rows + factor,
        "leverages and meats": rows + 7.0 * square + chunk + sizes.example_bytes,
    }


def algebra_operations(sizes: ProblemSizes, r: int) -> float:
    """Operations of the algebra on r features, beside the rows."""
    tall = 2.0 * sizes.numbers * float(r) ** 2
    return tall * (5.0 + (sizes.k + 3.0) / sizes.k) + 2.0 * float(r) ** 3


def rows_in_cache(rows: float, limit: float) -> bool:
    """Whether rows of the training set stay in memory."""
    return rows <= CACHE_SHARE * max(limit, 0.0)
