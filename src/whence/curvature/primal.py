"""The exact algebra on r features: an r x r curvature, its Cholesky factor, r x r meats."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.errors import SingularCurvatureError
from whence.tangents.batches import Inputs
from whence.tangents.linearization import Linearization

from .base import Bread, Meats, NewtonStep, Predicted, RidgePath, Sandwich
from .features import Features, TrainingRows
from .loo import path_from_eigenvectors


class PrimalBread(Bread):
    """F = sum_i J_i^T L_i J_i over features z, factored as D (L L^T) D with D the square roots of its diagonal.

    Scaling by D makes features of any size equal partners, so that unscaled inputs cost no digits.
    """

    def __init__(self, problem: Linearization, features: Features, ridge: float | None) -> None:
        """Accumulate the curvature in one pass, factor it, and take the leverage blocks in another."""
        self.problem = problem
        self.features = features
        self.rows = TrainingRows(problem, features)
        self.facts = features.notes
        curvature = self._accumulate()
        self.path: RidgePath | None = None
        if ridge is None:
            self.path = self._path(curvature)
            ridge = self.path.best
        self.ridge = ridge
        self.scale, self.factor = self._factor(curvature, ridge)
        self.hats, self.degrees_of_freedom = self._leverage()

    def whiten(self, rows: Tensor) -> Tensor:
        """(..., r) features z to coordinates y with z F_lam^-1 z'^T = y y'^T."""
        flat = (rows / self.scale).reshape(-1, rows.shape[-1])
        white: Tensor = torch.linalg.solve_triangular(self.factor, flat.T, upper=False)
        return white.T.reshape(rows.shape)

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w)."""
        weights = self.features.weights()
        score = -self.ridge * weights
        for where, rows in self.rows.read("Newton step"):
            score = score + torch.einsum("nkp,nk->p", rows, self.problem.residuals[where])
        white = self.whiten(score)
        step = torch.linalg.solve_triangular(self.factor.T, white.unsqueeze(1), upper=True).squeeze(1) / self.scale
        change = torch.empty_like(self.problem.outputs)
        for where, rows in self.rows.read("Newton step"):
            change[where] = rows @ step
        size = float(step.norm() / weights.norm().clamp_min(torch.finfo(step.dtype).tiny))
        return NewtonStep(change, size, step if with_direction else None)

    def sandwich(self, meats: Meats) -> PrimalSandwich:
        """Meats in whitened coordinates: sum_i y_i^T W_i W_i^T y_i, an r x r matrix for each estimator."""
        size = self.features.size
        matrices = {name: self.factor.new_zeros(size, size) for name in meats.roots}
        total = self.factor.new_zeros(size)
        for where, rows in self.rows.read("meats"):
            white = self.whiten(rows)
            for name, root in meats.roots.items():
                part = root if len(root) == 1 else root[where]
                weighted = (part.transpose(1, 2) @ white).reshape(-1, size)
                matrices[name].addmm_(weighted.T, weighted)
            total += torch.einsum("nkp,nk->p", white, meats.total[where])
        return PrimalSandwich(self, matrices, total)

    def _accumulate(self) -> Tensor:
        size = self.features.size
        device = self.problem.device
        curvature = torch.zeros(size, size, dtype=self.problem.dtype, device=device)
        for where, rows in self.rows.read("curvature"):
            flat = self.rows.curved(where, rows).reshape(-1, size)
            curvature.addmm_(flat.T, flat)
        return curvature

    def _factor(self, curvature: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
        diagonal = curvature.diagonal() + ridge
        if bool((diagonal <= 0).any()):
            raise singular(ridge, int((diagonal <= 0).sum()), len(diagonal))
        scale = diagonal.sqrt()
        if self.rows.in_memory:
            factor = self._factor_by_qr(scale, ridge)
        else:
            matrix = curvature / scale / scale.unsqueeze(1)
            matrix.diagonal().add_(ridge / diagonal)
            factor, info = torch.linalg.cholesky_ex(matrix)
            if int(info):
                raise singular(ridge, len(diagonal) - int(info) + 1, len(diagonal))
        pivots = factor.diagonal().abs()
        tiny = torch.finfo(factor.dtype).eps * len(pivots)
        null = int((pivots <= tiny * pivots.max()).sum())
        if null:
            raise singular(ridge, null, len(pivots))
        return scale, factor

    def _factor_by_qr(self, scale: Tensor, ridge: float) -> Tensor:
        """With all rows at hand, a QR factorization squares no condition number."""
        flat = [self.rows.curved(where, rows).reshape(-1, len(scale)) / scale for where, rows in self._kept()]
        if ridge > 0:
            flat.append(torch.diag(ridge**0.5 / scale))
        stacked = torch.cat(flat)
        if len(stacked) < len(scale):
            raise singular(ridge, len(scale) - len(stacked), len(scale))
        upper: Tensor = torch.linalg.qr(stacked, mode="r").R
        signs = torch.where(upper.diagonal() < 0, -1.0, 1.0).to(upper.dtype)
        return (upper * signs.unsqueeze(1)).T.contiguous()

    def _kept(self) -> Iterator[tuple[slice, Tensor]]:
        return self.rows.read("curvature")

    def _leverage(self) -> tuple[Tensor, float]:
        problem = self.problem
        hats = torch.empty(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        freedom = 0.0
        for where, rows in self.rows.read("leverage"):
            white = self.whiten(rows)
            hats[where] = white @ white.transpose(1, 2)
            freedom += float(self.rows.curved(where, white).square().sum())
        return hats, freedom

    def _path(self, curvature: Tensor) -> RidgePath:
        values, vectors = torch.linalg.eigh(curvature)
        weights = self.features.weights()

        def rotated() -> Iterator[tuple[Tensor, Tensor]]:
            for where, rows in self.rows.read("leave-one-out path"):
                yield rows @ vectors, self.problem.residuals[where] + rows @ weights

        return path_from_eigenvectors(values.clamp_min(0.0), rotated)


@dataclass(frozen=True)
class PrimalSandwich(Sandwich):
    """Quadratic forms in whitened coordinates."""

    bread: PrimalBread
    matrices: dict[str, Tensor]
    total: Tensor

    def predict(self, inputs: Inputs) -> Predicted:
        """Covariances y M y^T for the rows y of the test points."""
        problem = self.bread.problem
        with torch.no_grad():
            outputs = problem.network(inputs).to(problem.dtype)
        parts: dict[str, list[Tensor]] = {name: [] for name in (*self.matrices, "laplace")}
        shifts = []
        for _, rows in self.bread.features.rows(inputs, problem.k):
            white = self.bread.whiten(rows)
            parts["laplace"].append(white @ white.transpose(1, 2))
            for name, matrix in self.matrices.items():
                parts[name].append((white @ matrix) @ white.transpose(1, 2))
            shifts.append(white @ self.total)
        return Predicted(outputs, {name: torch.cat(chunks) for name, chunks in parts.items()}, torch.cat(shifts))


def singular(ridge: float, null: int, size: int) -> SingularCurvatureError:
    """The error for a curvature that has no inverse."""
    return SingularCurvatureError(
        f"expected an invertible curvature, got at least {null} of {size} directions without information at "
        f"ridge={ridge:g}. Raise `ridge` (for example to n times the weight decay), or select fewer parameters."
    )
