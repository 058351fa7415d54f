"""The default ridge, and the ridge with the smallest leave-one-out error.

For squared error one eigendecomposition, of the curvature or of the kernel, serves all ridges.

For other losses, at each ridge the linearized model, f + J dw with its own loss, is fitted to its optimum. If the
loss's curvature changes with the outputs, one Newton step from the network's weights says little about other ridges.
At the optimum every example (or position, or group, as the fit leaves out) is left out in one step,
u_i = (I - L_i Q_i)^-1 r_i as everywhere else, and its loss at the outputs without it, f_i - Q_i u_i, is summed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy
import torch
from torch import Tensor

from whence.curvature.base import RidgePath, Structure
from whence.curvature.features import TrainingRows, groups_within_memory
from whence.data.targets import block_diagonal
from whence.errors import InputError, SingularCurvatureError
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Folds, Linearization
from whence.linalg import add_gram, eigenvectors

POINTS = 49  # of the grid of ridges for squared error
DECADES = (-9.0, 3.0)  # its range: powers of ten times the largest eigenvalue
LOWEST, HIGHEST = -8.0, 0.5  # range of ridges for other losses: powers of ten times the trace of the curvature
FINE = (0.5, 0.25)  # last distances tried around the best ridge, in powers of ten
WORSE = 2  # after this many ridges in a row worse than the best, stop in that direction
COORDINATES = 1024  # most directions of the weights used to compare ridges
STEPS, CLOSE = 60, 1e-3  # most Newton steps for a ridge; the change of outputs at which they stop
NODES = 32  # quadrature nodes for the change of a loss
WEIGHT_DECAY = 0.01  # assumed if no ridge is given; its accuracy: `benchmarks/ridge_default.py`


def default_ridge(problem: Linearization) -> tuple[float, str]:
    """The ridge of a weight decay of 0.01 of the mean loss, or the trees' own; and where it came from, in words.

    The mean runs over examples or positions by their weights, and over outputs if the loss treats them independently.
    The decay is for squared error with targets of variance one; in other units the ridge scales with the variance.
    """
    model = problem.network.model
    if isinstance(model, LeafSum) and model.own_ridge is not None:
        return model.own_ridge
    weights = problem.position_weights
    n = float(problem.n * problem.k / problem.width if weights is None else weights.sum())
    if problem.sketch is not None:
        n = problem.total_weight * problem.sketch.counted / max(problem.counted, 1)
    terms = n if problem.likelihood.couples_outputs else n * problem.width
    words = f"of an assumed weight decay of {WEIGHT_DECAY:g} of the mean over {terms:g} terms"
    if problem.likelihood.squared_error:
        name, variance = _target_variance(problem, n)
        if variance > 0:
            return WEIGHT_DECAY * terms * variance / 2, f"{words}, for targets of {name} {variance:.3g}"
    return WEIGHT_DECAY * terms, words


def _target_variance(problem: Linearization, n: float) -> tuple[str, float]:
    """Mean variance over outputs; if only mixtures of outputs are known, the mean square, which they estimate."""
    if problem.gram is not None:  # S^T (f + r / w)
        mixed = (problem.outputs + problem.unweighted(problem.gram[:, :, -1]))[:, :-1].double()
        return "mean square", float(mixed.square().sum()) / n / problem.width
    targets = (problem.outputs + problem.unweighted(problem.residuals)).double()
    rows = targets.reshape(-1, problem.width)
    weights = problem.position_weights
    weigh = rows.new_ones(len(rows), 1) if weights is None else weights.reshape(-1, 1).double()
    centred = rows - (weigh * rows).sum(0) / n
    found = float((weigh * centred.square()).sum()) / n / problem.width
    rounding = torch.finfo(problem.dtype).eps * float(rows.abs().max())
    return "variance", found if found > rounding**2 else 0.0


def check_search(structure: Structure, problem: Linearization) -> None:
    """Raise if leave-one-out cannot choose the ridge."""
    alone = problem.passes.process_group.alone and not problem.passes.checkpointed
    if structure.policy != "exact" or not structure.takes_groups:
        needs = f'true leverages at many ridges, which {structure!r} does not give. Use structure="core" or "exact"'
    elif problem.sketch is not None:
        needs = 'the loss of all outputs, not of mixtures of the outputs. Use hessian_columns="all"'
    elif not problem.identity_hessians and not alone:
        needs = "one process and no checkpoint, for losses other than squared error. Choose it in such a fit"
    else:
        return
    raise InputError(f'expected a number as ridge, got "loo", which needs {needs}, or whence.ridge_from_weight_decay.')


# --- Squared error ----------------------------------------------------------------------------------------------------


def ridge_grid(values: Tensor) -> Tensor:
    """Ridges from far below to far above the eigenvalues of the curvature."""
    top = max(float(values.max()), torch.finfo(values.dtype).tiny)
    return top * torch.logspace(*DECADES, POINTS, dtype=values.dtype, device=values.device)


def path_from_curvature(curvature: Tensor, rows: TrainingRows, notes: list[str]) -> RidgePath:
    """Leave-one-out error over ridges, from rows q rotated into the eigenvectors of F.

    For each ridge: e_i = y_i - q_i b with b = (S + lambda)^-1 sum_i q_i^T y_i, H_ii = q_i (S + lambda)^-1 q_i^T and
    u_i = (I - H_ii)^-1 e_i. Here i is an example, one position or output of an example, or a whole group.
    """
    problem, label, weights = rows.problem, "leave-one-out path", rows.features.weights()
    values, vectors = (part.to(curvature.dtype) for part in eigenvectors(curvature, "the curvature", notes))
    # signs of eigenvectors are arbitrary: all processes take those of one
    problem.passes.process_group.broadcast([values, vectors], 0, label)

    def rotated(where: slice | Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (n, k, r), and the targets (n, k) of the linearized model."""
        wide = some.to(vectors.dtype)
        return wide @ vectors, problem.residuals[where] + wide @ weights

    along, ridges = torch.zeros_like(values), ridge_grid(values)
    for where, some in rows.read(label, {"cross": along}, [vectors]):
        along += torch.einsum("nkp,nk->p", *rotated(where, some))
    sums, folds, groups = torch.zeros_like(ridges), problem.folds, problem.folds.groups
    if groups is None:
        for where, some in rows.read(label, {"sums": sums}, [vectors, along, ridges]):
            sums += _errors(ridges, values, along, folds, *rotated(where, some))
    else:

        def joined(where: Tensor, some: Tensor) -> Tensor:
            some, targets = rotated(where, some)
            return torch.cat([some, targets.unsqueeze(2)], 2)

        for _, both in rows.read_groups(label, groups, len(values) + 1, [vectors], joined):
            sums += _errors(ridges, values, along, folds, both[..., :-1], both[..., -1])
    return RidgePath(ridges, sums / problem.n)


def path_from_kernel(kernel: Tensor, targets: Tensor, problem: Linearization, notes: list[str]) -> RidgePath:
    """Leave-one-out error over ridges, from the kernel (n k, n k) and the targets (n, k) of the linearized model.

    u_i = C_ii^-1 (C y)_i with C = (K + lambda)^-1 and its diagonal blocks C_ii, of examples, of their positions or
    outputs, or of whole groups.
    """
    values, vectors = (part.to(kernel.dtype) for part in eigenvectors(kernel, "the kernel", notes))
    rows, along, groups = vectors.reshape(*targets.shape, -1), vectors.T @ targets.reshape(-1), problem.folds.groups
    ridges = ridge_grid(values)
    parts = (
        [rows]
        if groups is None
        else (rows[members].flatten(1, 2) for members in groups_within_memory(groups, problem, len(values)))
    )
    errors = sum((_errors(ridges, values, along, problem.folds, part) for part in parts), torch.zeros_like(ridges))
    return RidgePath(ridges, errors / problem.n)


def _errors(
    ridges: Tensor, values: Tensor, along: Tensor, folds: Folds, rows: Tensor, targets: Tensor | None = None
) -> Tensor:
    """(g,) sums of squared leave-one-out residuals at each ridge: from the curvature if targets are given, else from C.

    Infinite if a leverage reaches one to machine precision.
    """
    errors = []
    for ridge in ridges:
        weights = 1.0 / (values + ridge)
        blocks, vectors = folds.blocks((rows * weights) @ rows.transpose(1, 2)), rows @ (along * weights)
        if targets is not None:
            eye = torch.eye(blocks.shape[1], dtype=blocks.dtype, device=blocks.device)
            blocks, vectors = eye - blocks, targets - vectors
        solved = torch.linalg.solve_ex(blocks, folds.parts(vectors).unsqueeze(-1)).result
        errors.append(solved.square().sum().nan_to_num(nan=torch.inf))
    return torch.stack(errors)


# --- Other losses -----------------------------------------------------------------------------------------------------


def path_from_losses(rows: TrainingRows) -> RidgePath:
    """Leave-one-out losses over ridges, first coarse, then finer around the best; sorted by ridge."""
    problem, model = rows.problem, LinearizedModel.of(rows)
    trace = float(torch.einsum("nkp,nkj,njp->", model.rows, model.curvatures(model.start), model.rows))
    if trace <= 0:
        raise SingularCurvatureError(
            'expected a curvature above zero for ridge="loo", got zero: the network is certain of all its training '
            "examples, or they do not count. Pass a number as `ridge`, or use whence.ridge_from_weight_decay."
        )
    usual = math.log10(max(default_ridge(problem)[0], sys.float_info.min) / trace)
    tried: dict[float, float] = {}
    optima: dict[float, Tensor] = {}
    powers = _powers(tried, min(max(usual, LOWEST), HIGHEST))
    for power in problem.progress.track(powers, "leave-one-out loss, ridge"):
        near = min(tried, key=lambda other: abs(other - power), default=None)
        start = model.start if near is None else optima[near]
        optima[power], tried[power] = model.left_out_loss(start, trace * 10.0**power)
    if math.isinf(min(tried.values())):
        raise SingularCurvatureError(
            f'expected a ridge with a finite leave-one-out loss for ridge="loo", got none between '
            f"{trace * 10.0 ** min(tried):.1e} and {trace * 10.0 ** max(tried):.1e}, beside which the curvature has no "
            "inverse in this precision: the network is nearly certain of all its training examples. Pass a number as "
            "`ridge`, or use whence.ridge_from_weight_decay."
        )
    ordered = sorted(tried)
    ridges = model.start.new_tensor([trace * 10.0**power for power in ordered])
    return RidgePath(ridges, model.start.new_tensor([tried[power] for power in ordered]))


def _powers(tried: Mapping[float, float], start: float) -> Iterator[float]:
    """Powers of ten to try, given the losses so far: decades downhill from a start, then closer to the best.

    Examples:
        >>> tried = {}
        >>> for power in _powers(tried, 0.0):
        ...     tried[power] = (power + 2.2) ** 2
        >>> len(tried), min(tried, key=tried.get)
        (9, -2.25)
    """
    yield start
    for way in (-1.0, 1.0):
        power, worse = start + way, 0
        while worse < WORSE and LOWEST <= power <= HIGHEST:
            best = min(tried.values())
            yield power
            power, worse = power + way, 0 if tried[power] < best else worse + 1
        if min(tried, key=lambda one: tried[one]) != start:
            break
    for gap in FINE:
        best = min(tried, key=lambda one: tried[one])
        yield best - gap
        yield best + gap


@dataclass(frozen=True)
class LinearizedModel:
    """The linearized model with its loss."""

    problem: Linearization  # training examples
    rows: Tensor  # (n, k, r) features
    start: Tensor  # (r,) the network's weights along the features

    @classmethod
    def of(cls, training: TrainingRows) -> LinearizedModel:
        """All rows at once, along the directions that they span and in which outputs vary most."""
        problem, features = training.problem, training.features
        n, k, r = problem.n, problem.k, features.size
        need, what = 4.0 * n * k * min(r, n * k) * problem.outputs.element_size(), "leave-one-out losses over ridges"
        problem.budget.require(need, what, "Use whence.ridge_from_weight_decay, or a smaller core.")
        rows = torch.cat([part.to(problem.dtype) for _, part in training.read("leave-one-out path")])
        weights = features.weights().to(problem.dtype)
        if r <= min(n * k, COORDINATES):
            return cls(problem, rows, weights)
        flat = rows.reshape(n * k, r)
        gram = flat @ flat.T if r > n * k else flat.T @ flat
        values, vectors = (part.to(rows.dtype) for part in eigenvectors(gram, "the features", features.notes))
        spanned = values > values.max() * len(values) * torch.finfo(values.dtype).eps
        values, vectors = values[spanned][-COORDINATES:], vectors[:, spanned][:, -COORDINATES:]
        fewer = vectors * values.sqrt() if r > n * k else flat @ vectors
        start = fewer.T @ (flat @ weights) / values
        return cls(problem, fewer.reshape(n, k, -1), start)

    def change(self, weights: Tensor) -> Tensor:
        """(n, k) change of the outputs from the network's."""
        return self.rows @ (weights - self.start)

    def curvatures(self, weights: Tensor) -> Tensor:
        """(n, k, k) Hessian of the loss in the outputs: minus the derivative of the residuals."""
        with torch.enable_grad():
            change = self.change(weights).detach().requires_grad_(True)
            found = self.problem.residuals_after(change)
            columns = [torch.autograd.grad(one.sum(), change, retain_graph=True)[0] for one in found.unbind(1)]
        slope = -torch.stack(columns, 1)
        return (slope + slope.transpose(1, 2)) / 2

    def growth(self, change: Tensor) -> Tensor:
        """(n,) loss of each example minus the network's: minus the integral of the residuals."""
        change = change.double()
        nodes, weights = numpy.polynomial.legendre.leggauss(NODES)
        total = torch.zeros_like(change[:, 0])
        for node, weight in zip(nodes.tolist(), weights.tolist(), strict=True):
            total -= 0.5 * weight * (self.problem.residuals_after(0.5 * (1.0 + node) * change) * change).sum(1)
        return total

    def objective(self, weights: Tensor, ridge: float) -> float:
        """Loss plus penalty."""
        return float(self.growth(self.change(weights)).sum() + 0.5 * ridge * weights @ weights)

    def left_out_loss(self, weights: Tensor, ridge: float) -> tuple[Tensor, float]:
        """The optimum (r,) for a ridge, starting from weights near it, and the mean leave-one-out loss there.

        If the ridge is too small for a Cholesky factor of the damped curvature: the given weights and an infinite loss.
        """
        start = weights
        try:
            inner, factor, step = self._newton(weights, ridge)
            for _ in range(STEPS):
                if float((self.rows @ step).abs().max()) < CLOSE:
                    weights = weights + step
                    break
                here, part = self.objective(weights, ridge), 1.0
                while self.objective(weights + part * step, ridge) > here and part > 1e-6:
                    part /= 2
                if part <= 1e-6:  # only rounding error is left
                    break
                weights = weights + part * step
                inner, factor, step = self._newton(weights, ridge)
        except SingularCurvatureError:
            return start, math.inf
        change = self.change(weights)
        white = torch.linalg.solve_triangular(factor, self.rows.flatten(0, 1).T, upper=False).T.reshape(self.rows.shape)
        moved = self._moved(white, inner, self.problem.residuals_after(change))
        loss = float(self.growth(change - moved).sum()) / self.problem.counted
        return weights, loss if math.isfinite(loss) else math.inf

    def _moved(self, white: Tensor, inner: Tensor, residuals: Tensor) -> Tensor:
        """(n, k) Q u with u = (I - L Q)^-1 r: how far outputs drop when their own example is left out.

        Computed from whitened rows y (n, k, r) with Q = y y^T, L (n, k, k) and residuals r (n, k).
        """
        folds = self.problem.folds
        if folds.groups is None:
            leverage_blocks = folds.blocks(white @ white.transpose(1, 2))
            return _solved(leverage_blocks, folds.blocks(inner), folds.parts(residuals)).reshape(residuals.shape)
        found = torch.empty_like(residuals)
        for members in groups_within_memory(folds.groups, self.problem, white.shape[2]):
            flat = white[members].flatten(1, 2)
            joint = block_diagonal(inner[members])
            moved = _solved(flat @ flat.transpose(1, 2), joint, residuals[members].flatten(1))
            found[members] = moved.reshape(*members.shape, -1)
        return found

    def _newton(self, weights: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
        """Hessians of the loss, the factor of the curvature, and the Newton step (r,)."""
        inner = self.curvatures(weights)
        values, vectors = torch.linalg.eigh(inner)  # roots, so that the product is symmetric
        roots = (vectors * values.clamp_min(0.0).sqrt().unsqueeze(1)).mT
        curvature = self.rows.new_zeros(self.rows.shape[2], self.rows.shape[2])
        add_gram(curvature, (roots @ self.rows).flatten(0, 1))
        curvature.diagonal().add_(ridge)
        factor, info = torch.linalg.cholesky_ex(curvature)
        if int(info):
            raise SingularCurvatureError(f"expected a curvature with an inverse at ridge={ridge:.1e}, got none.")
        residuals = self.problem.residuals_after(self.change(weights))
        downhill = residuals.flatten() @ self.rows.flatten(0, 1) - ridge * weights
        return inner, factor, torch.cholesky_solve(downhill.unsqueeze(1), factor).squeeze(1)


def _solved(leverage_blocks: Tensor, inner: Tensor, residuals: Tensor) -> Tensor:
    """(N, w) Q (I - L Q)^-1 r."""
    eye = torch.eye(leverage_blocks.shape[1], dtype=leverage_blocks.dtype, device=leverage_blocks.device)
    left_out = torch.linalg.solve_ex(eye - inner @ leverage_blocks, residuals.unsqueeze(2)).result
    moved: Tensor = (leverage_blocks @ left_out).squeeze(2)
    return moved
