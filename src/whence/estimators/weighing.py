"""How training examples are weighed, given their leverages: the choices of a fit, applied to any part of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.curvature.groups import Groups
from whence.tangents.folds import Folds
from whence.tangents.linearization import Linearization
from whence.tangents.losses import Units

from .clusters import leave_groups_out
from .leave_one_out import LeftOut, Policy, leave_one_out


@dataclass(frozen=True)
class Weighing:
    """Residuals and what to do with them.

    Attributes:
        given: (n, k) residuals of the network.
        roots: (n, k, q) roots of the loss's Hessian in the outputs; `None` for the identity.
        policy: what to do with leverages.
        recenter: use the residuals at the optimum of the linearized model.
        by_output: leave out single outputs instead of whole examples.
        groups: leave out whole groups instead of single examples.
        units: leave out these positions of examples, one by one, instead of whole examples.
    """

    given: Tensor
    roots: Tensor | None
    policy: Policy
    recenter: bool
    by_output: bool
    groups: Groups | None = None
    units: Units | None = None

    def deletions(self, problem: Linearization) -> int:
        """How many are left out, one after the other: groups, positions, outputs or examples, those that count."""
        if self.groups is not None:
            return self.groups.counted
        if self.units is not None:
            return problem.counted_units
        return problem.counted_units * problem.width if self.by_output else problem.counted

    @property
    def folds(self) -> Folds:
        """The same for the choice of a ridge."""
        if self.groups is not None:
            return Folds(self.groups.index)
        if self.units is not None:
            return Folds(width=self.units.width)
        return Folds(width=1 if self.by_output else None)

    @property
    def left_out_name(self) -> str:
        """What is left out, in words."""
        if self.groups is not None:
            return "groups"
        if self.units is not None:
            return "positions"
        return "outputs" if self.by_output else "training examples"

    def residuals(self, where: slice, change: Tensor) -> Tensor:
        """(n, k) residuals after the outputs moved by `change`, if they are to move."""
        given = self.given[where]
        return given - self.lost(where, change) if self.recenter else given

    def lost(self, where: slice, change: Tensor) -> Tensor:
        """L_i times the change of the outputs (n, k): what residuals lose by it, to first order."""
        if self.roots is None:
            return change
        roots = self.roots[where]
        return torch.einsum("nkq,nq->nk", roots, torch.einsum("nkq,nk->nq", roots, change))

    def left_out(self, where: slice, hats: Tensor, change: Tensor) -> LeftOut:
        """Leave-one-out residuals."""
        roots = None if self.roots is None else self.roots[where]
        return self.leave_out(self.residuals(where, change), hats, roots)

    def leave_out(self, residuals: Tensor, hats: Tensor, roots: Tensor | None) -> LeftOut:
        """The same for residuals (n, k), leverage blocks (n, k, k) and roots (n, k, q) at hand."""
        if self.units is None:
            return leave_one_out(residuals, hats, roots, self.policy, self.by_output)
        inner = None if roots is None else self.units.split(roots)
        flat = residuals.reshape(-1, self.units.width)
        found = leave_one_out(flat, self.units.split(hats), inner, self.policy, by_output=False)
        hec2, hec3, leverage = (part.reshape(residuals.shape) for part in (found.hec2, found.hec3, found.leverage))
        return LeftOut(hec2, hec3, leverage, found.guarded)

    def groups_left_out(self, residuals: Tensor, alone: LeftOut, blocks: Iterable[tuple[Tensor, Tensor]]) -> LeftOut:
        """Leave-one-group-out residuals, from the blocks of whole groups."""
        return leave_groups_out(residuals, alone, self.roots, self.policy, blocks)

    def columns(self, where: slice, hats: Tensor, change: Tensor) -> Mapping[str, Tensor]:
        """Weights W (n, k, q) of the examples in each heteroscedastic estimator."""
        return self.roots_of(self.residuals(where, change), self.left_out(where, hats, change))

    def roots_of(self, residuals: Tensor, left_out: LeftOut) -> dict[str, Tensor]:
        """The same from residuals and leave-one-out residuals at hand."""
        vectors = {"hec0": residuals, "hec2": left_out.hec2, "hec3": left_out.hec3}
        return {name: self.column(one) for name, one in vectors.items()}

    def column(self, vectors: Tensor) -> Tensor:
        """Vectors (n, k) as weights W (n, k, q), with one column for each that is left out of an example."""
        if self.units is not None:
            return self.units.join(vectors.reshape(-1, self.units.width, 1))
        return vectors.diag_embed() if self.by_output else vectors.unsqueeze(-1)

    def within(self, matrices: Tensor) -> Tensor:
        """Matrices (n, k, k) with zeros between outputs of an example that are not left out together."""
        if self.units is not None:
            return self.units.join(self.units.split(matrices))
        return matrices.diagonal(dim1=1, dim2=2).diag_embed() if self.by_output else matrices
