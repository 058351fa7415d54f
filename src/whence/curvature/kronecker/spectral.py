"""EKFAC, KFAC and the diagonal: one curvature that is diagonal in a basis, whichever basis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.base import Bread, Meats, NewtonStep, Predicted, RidgePath, Sandwich
from whence.errors import SingularCurvatureError
from whence.tangents.batches import Inputs

from .basis import Basis
from .moments import Spectrum, dtype_of, gather_meats
from .rotate import rotate
from .stream import LayerStream


class SpectralBread(Bread):
    """F ~ U diag(s) U^T, block by block: every estimator is a weighted sum of squares of U^T phi.

    Attributes:
        bases: U of each block.
        spectrum: s of each block, and what was summed along with it.
    """

    exact_leverage: ClassVar[bool] = False

    def __init__(
        self,
        stream: LayerStream,
        bases: Sequence[Basis],
        spectrum: Spectrum,
        ridge: float,
        noise: Tensor,
        facts: list[str],
    ) -> None:
        """Take leverage blocks and the Newton step's effect in one pass."""
        self.stream = stream
        self.problem = stream.problem
        self.bases = bases
        self.spectrum = spectrum
        self.ridge = ridge
        self.noise = noise
        self.path: RidgePath | None = None
        self.facts = facts
        self.damped = [s + ridge for s in spectrum.curvature]
        empty = sum(int((s <= 0).sum()) for s in self.damped)
        if empty:
            raise SingularCurvatureError(
                f"expected an invertible curvature, got {empty} directions without information at ridge={ridge:g}. "
                "Raise `ridge` (for example to n times the weight decay)."
            )
        self.degrees_of_freedom = sum(
            float((s / d).sum()) for s, d in zip(spectrum.curvature, self.damped, strict=True)
        )
        self._step = self._solve_newton()
        self.hats, self._change = self._leverage()

    def newton_step(self, with_direction: bool) -> NewtonStep:
        """Delta w = F_lam^-1 (sum_i J_i^T r_i - lambda w), with this curvature for F."""
        size = float(sum(float(step.square().sum()) for step in self._step)) ** 0.5
        weights = self.problem.weights()
        relative = size / max(float(weights.norm()), torch.finfo(torch.float64).tiny)
        direction = None
        if with_direction:
            tensors: dict[str, Tensor] = {}
            for basis, step in zip(self.bases, self._step, strict=True):
                tensors.update(basis.block.from_matrix(basis.to(step.dtype).out_of(step)))
            direction = self.problem.selection.flatten(tensors).to(self.problem.dtype)
        return NewtonStep(self._change, relative, direction)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the same basis."""
        roots = dict(meats.roots)
        ready: dict[str, list[Tensor]] = {}
        scale = self._noise_scale(roots.get("ho"))
        if scale is not None and self.spectrum.noise is not None:
            ready["ho"] = [scale * one for one in self.spectrum.noise]
            del roots["ho"]
        squares, total = gather_meats(self.stream, self.bases, roots, meats.total)
        ready.update(squares)
        return SpectralSandwich.make(self, ready, total)

    def _noise_scale(self, root: Tensor | None) -> float | None:
        """How many times the noise covariance of the spectrum these weights are; `None` if they are not."""
        if root is None or len(root) != 1:
            return None
        wanted = (root @ root.transpose(1, 2))[0]
        size = float(self.noise.diagonal().sum())
        scale = float(wanted.diagonal().sum()) / size if size > 0 else 1.0
        return scale if torch.allclose(wanted, scale * self.noise, rtol=1e-9, atol=1e-12 * size) else None

    def _solve_newton(self) -> list[Tensor]:
        parameters = {name: p.detach() for name, p in self.problem.selection.parameters.items()}
        steps = []
        for basis, score, damped in zip(self.bases, self.spectrum.score, self.damped, strict=True):
            weights = basis.to(torch.float64).into(basis.block.to_matrix(parameters).double())
            steps.append((score - self.ridge * weights) / damped)
        return steps

    def _leverage(self) -> tuple[Tensor, Tensor]:
        problem = self.problem
        hats = torch.zeros(problem.n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
        change = torch.zeros(problem.n, problem.k, dtype=problem.dtype, device=problem.device)
        weights = [(1.0 / damped).unsqueeze(0) for damped in self.damped]
        for where, tangents in self.stream.read("leverage", self.stream.identity(), problem.k):
            for at, tangent in enumerate(tangents):
                for part, rotated in rotate(tangent, self.bases[at]):
                    here = slice(where.start + part.start, where.start + part.stop)
                    dtype = dtype_of(rotated)
                    hats[here] += rotated.grams(weights[at].to(dtype))[0].to(problem.dtype)
                    change[here] += rotated.along(self._step[at].to(dtype)).to(problem.dtype)
        return hats, change


@dataclass(frozen=True)
class SpectralSandwich(Sandwich):
    """Weighted sums of squares of U^T phi.

    Attributes:
        names: estimators, in the order of the weights.
        weights: (w, *shape) of each block: d / (s + lambda)^2 for each meat, 1 / (s + lambda) for Laplace.
        centre: sum_i J_i^T u_i / (s + lambda) of each block.
    """

    bread: SpectralBread
    names: tuple[str, ...]
    weights: list[Tensor]
    centre: list[Tensor]

    @classmethod
    def make(cls, bread: SpectralBread, meats: dict[str, list[Tensor]], total: list[Tensor]) -> SpectralSandwich:
        """Divide by the bread on both sides."""
        precision = bread.bases[0].outputs.dtype if bread.bases[0].outputs is not None else torch.float32
        weights, centre = [], []
        for at, damped in enumerate(bread.damped):
            stacked = [meats[name][at] / damped.square() for name in meats]
            weights.append(torch.stack([*stacked, 1.0 / damped]).to(precision))
            centre.append((total[at] / damped).to(precision))
        return cls(bread, (*meats, "laplace"), weights, centre)

    def predict(self, inputs: Inputs) -> Predicted:
        """One forward pass, k backward passes, and a few products."""
        problem, stream = self.bread.problem, self.bread.stream
        outputs, grams, shifts = [], [], []
        for _, tangents, out in stream.of(inputs, 0, stream.identity(), problem.k):
            n = len(out)
            gram = torch.zeros(len(self.names), n, problem.k, problem.k, dtype=problem.dtype, device=problem.device)
            shift = torch.zeros(n, problem.k, dtype=problem.dtype, device=problem.device)
            for at, tangent in enumerate(tangents):
                for part, rotated in rotate(tangent, self.bread.bases[at]):
                    dtype = dtype_of(rotated)
                    gram[:, part] += rotated.grams(self.weights[at].to(dtype)).to(problem.dtype)
                    shift[part] += rotated.along(self.centre[at].to(dtype)).to(problem.dtype)
            outputs.append(out.to(problem.dtype))
            grams.append(gram)
            shifts.append(shift)
        covariances = dict(zip(self.names, torch.cat(grams, dim=1), strict=True))
        return Predicted(torch.cat(outputs), covariances, torch.cat(shifts))
