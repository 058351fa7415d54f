"""EKFAC with the meats in an eigenbasis of their own: the paper's appendix, kept to where it pays.

The meats of HeC0, HeC2 and HeC3 do not share the curvature's basis U. With V D V^T for a meat, a variance is
|| D^1/2 R^T (S + lambda)^-1 U^T phi ||^2 with R = U^T V: every test gradient is turned as a matrix, which for large R
costs far more than the backward pass it came from. So only the leading coordinates of U are turned, those with the
largest eigenvalues, where the estimators have nearly all of their weight; among the others a meat is taken as diagonal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from whence.curvature.base import Meats, Weigh

from .basis import Basis
from .meats import MeatSums, centre
from .moments import Mixture, Squares, Sums
from .rotated import Rotated
from .spectral import SpectralBread, SpectralSandwich
from .turn import Turn
from .view import View, dtype_of
from .weights import Weights


class TurnedSums(Sums):
    """Weighted squares of one block in the curvature's basis, and in that of the meats."""

    def __init__(self, basis: Basis, turn: Turn, count: int, device: torch.device) -> None:
        """Zeros for `count` sets of weights."""
        super().__init__(basis, count, device)
        self.turn = turn
        self.turned = torch.zeros(count, *turn.basis.shape, dtype=torch.float64, device=device)

    def state(self, name: str) -> dict[str, Tensor]:
        """What is summed up, by name."""
        return {**super().state(name), f"{name}.turned": self.turned}

    def add(self, view: View, weights: Tensor, summed: Tensor | None = None) -> None:
        """Count one piece: weights (q, c) of the cotangents."""
        super().add(view, weights, summed)
        for _, rotated in View(view.tangent, self.turn.basis).chunks():
            self.turned += rotated.squares(weights.to(dtype_of(rotated)))

    def add_mixed(self, view: View, mixture: Mixture) -> None:
        """Count combinations of the cotangents of one piece."""
        super().add_mixed(view, mixture)
        for _, rotated in View(view.tangent, self.turn.basis).mixed(mixture.weights):
            self.turned += rotated.squares(mixture.masks.to(dtype_of(rotated)))


class TurnedMeats(MeatSums):
    """Squares of J_i^T W_i in both bases."""

    in_views_alone: ClassVar[bool] = False

    def __init__(
        self,
        bases: Sequence[Basis],
        turns: Sequence[Turn | None],
        roots: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Zeros."""
        super().__init__(bases, roots, device)
        self.turns = turns
        for at, turn in enumerate(turns):
            if turn is not None:
                self.sums[at] = TurnedSums(bases[at], turn, len(roots), device)

    @property
    def given(self) -> list[Tensor]:
        """The same, and the bases of the meats."""
        return [*super().given, *(one for turn in self.turns if turn is not None for one in turn.basis.tensors)]

    def turned(self, at: int) -> dict[str, Tensor]:
        """D of each meat of one block, in the basis of the meats."""
        sums = self.sums[at]
        assert isinstance(sums, TurnedSums)
        return dict(zip(self.names, sums.turned, strict=True))


@dataclass(frozen=True)
class TurnedWeights(Weights):
    """Weights of a block some of whose meats have a basis of their own among the leading coordinates.

    Attributes:
        turn: to that basis.
        which: positions of these meats among the weights, whose weights inside are zero where the turn is.
        solved: 1 / (s + lambda) of the leading coordinates.
        meats: (w, e, j, q) D of these meats, inputs before outputs as `Turn.apply` gives them.
    """

    turn: Turn
    which: list[int]
    solved: Tensor
    meats: Tensor

    @classmethod
    def add_to(cls, plain: Weights, turn: Turn, meats: Mapping[int, Tensor], solved: Tensor) -> TurnedWeights:
        """Take the leading coordinates of some meats out of weights in one basis, and put D (by position) there."""
        which = list(meats)
        inside = plain.inside.clone()
        empty = torch.zeros_like(plain.outside)
        if plain.basis.outside and not plain.rounded:
            empty = -plain.outside  # the squared length adds the weight outside everywhere
        for at in which:
            inside[at][turn.where] = empty[at].item()
        dtype = inside.dtype
        chosen = torch.stack(list(meats.values())).to(dtype)
        if turn.outputs is not None:
            chosen = chosen.transpose(-1, -2).contiguous()
        return cls(plain.basis, inside, plain.outside, plain.rounded, turn, which, solved[turn.where].to(dtype), chosen)

    def squared(self, rotated: Rotated) -> Tensor:
        """Weighted squared lengths inside the basis, (w, n, c)."""
        found = super().squared(rotated)
        found[self.which] += torch.cat(
            [full.variances(self.meats) for full in self.turn.apply(rotated, self.solved)], 1
        )
        return found

    def crossed(self, rotated: Rotated) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c)."""
        found = super().crossed(rotated)
        found[self.which] += torch.cat([full.grams(self.meats) for full in self.turn.apply(rotated, self.solved)], 1)
        return found


class TwoBasesBread(SpectralBread):
    """A spectral curvature whose heteroscedastic meats have a basis of their own.

    Attributes:
        turns: from the curvature's basis to that of the meats, for each block; `None` for blocks that keep one basis.
    """

    def __init__(self, turns: Sequence[Turn | None], *given: Any) -> None:
        """The turns, then what `SpectralBread` takes."""
        self.turns = turns
        self._opened: list[TurnedMeats] = []
        super().__init__(*given)
        self.facts.append(self._describe())

    def open_meats(self, roots: Mapping[str, Tensor]) -> MeatSums:
        """Where the squares of the weighted gradients are summed, in both bases."""
        self._opened.append(TurnedMeats(self.bases, self.turns, roots, self.problem.device))
        return self._opened[-1]

    def at(self, ridge: float, weigh: Weigh | None) -> TwoBasesBread:
        """The same bases and eigenvalues: one pass, for the leverages and the meats."""
        return TwoBasesBread(self.turns, self.stream, self.bases, self.spectrum, ridge, self.noise, [], weigh)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the basis of the meats where there is one, else in the curvature's."""
        plain = super().sandwich(meats)
        weights = list(plain.weights)
        for at, turn in enumerate(self.turns):
            if turn is None:
                continue
            found: dict[int, Tensor] = {}
            for sums in self._opened:
                squares = {name: one for name, one in sums.turned(at).items() if name != "ho"}
                if "hec3" in squares:
                    one = Squares(squares["hec3"], 0.0)
                    squares["jackknife"] = centre(turn.basis, one, sums.sums[at].total, meats.deletions).inside
                found.update({plain.names.index(name): one for name, one in squares.items()})
            solved = 1.0 / (self.spectrum.curvature[at].inside + self.ridge)
            weights[at] = TurnedWeights.add_to(weights[at], turn, found, solved)
        return replace(plain, weights=weights)

    def _describe(self) -> str:
        inside = whole = 0.0
        for turn, basis, one in zip(self.turns, self.bases, self.spectrum.curvature, strict=True):
            weight = (one.inside / (one.inside + self.ridge)).square()
            whole += float(weight.sum()) + basis.outside * (one.outside / (one.outside + self.ridge or 1.0)) ** 2
            inside += float(weight[turn.where].sum()) if turn is not None else 0.0
        return (
            "meats in a basis of their own where "
            f"{100 * inside / max(whole, torch.finfo(torch.float64).tiny):.1f} % of the homoscedastic variance lies, "
            "in the curvature's elsewhere"
        )
