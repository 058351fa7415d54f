"""A basis of its own for the meats of a block: a rotation of the leading coordinates of the curvature's basis.

Eigenvectors come in ascending order, so that the leading coordinates are the last ones of each side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from whence.curvature.accumulate import LayerGradients
from whence.curvature.base import MeatRoots, Meats
from whence.curvature.kronecker import matrix_moments, whole_moments
from whence.curvature.rotation import (
    CHUNK_NUMBERS,
    Basis,
    BasisView,
    Factored,
    Full,
    Rotated,
    Sparse,
    combine,
    dtype_of,
    outer,
    times,
)
from whence.curvature.spectral import (
    Combinations,
    DiagonalMoments,
    FittedSpectral,
    Leverage,
    MeatSums,
    MomentSums,
    SpectralSandwich,
    Spectrum,
    SpectrumSums,
    Weights,
    centre,
)
from whence.jacobian.gradients import Tangent
from whence.linalg import eigenvectors


def leading(basis: Basis, size: int | None) -> Basis | None:
    """The last `size` directions of each side of a basis (all if `None`); nothing where there are not two sides."""
    if basis.inputs is None or basis.block.kind == "rows":
        return None
    columns = basis.inputs[..., -size:] if size is not None else basis.inputs
    if basis.block.kind == "dense":
        return Basis(basis.block, columns.contiguous())
    if basis.outputs is None:
        return None
    rows = basis.outputs[..., -size:] if size is not None else basis.outputs
    return Basis(basis.block, columns.contiguous(), rows.contiguous())


@dataclass(frozen=True)
class MeatRotation:
    """The rotation R = U^T V from the leading coordinates of the curvature's basis U to the basis V of the meats.

    Attributes:
        basis: V, shaped as U.
        inputs: (e, i, j) of kronecker blocks, (p, q) of dense ones.
        outputs: (e, o, q) of kronecker blocks.
    """

    basis: Basis
    inputs: Tensor
    outputs: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """What it is made of."""
        own = [self.inputs] if self.outputs is None else [self.inputs, self.outputs]
        return [*self.basis.tensors, *own]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the coordinates in U."""
        if self.outputs is None:
            return (self.inputs.shape[0],)
        return (len(self.inputs), self.outputs.shape[1], self.inputs.shape[1])

    @property
    def where(self) -> tuple[Any, ...]:
        """Which of the coordinates of U are rotated."""
        if self.outputs is None:
            return (..., slice(-self.shape[0], None))
        _, o, i = self.shape
        return (..., slice(-o, None), slice(-i, None))

    def apply(self, rotated: Rotated, solved: Tensor) -> Iterator[Full]:
        """Yield R^T (solved * phi) for phi in the coordinates of U, the sides swapped: (n, c, e, j, q), in chunks.

        Args:
            rotated: gradients in U.
            solved: 1 / (s + lambda) of the leading coordinates.
        """
        assert not isinstance(rotated, Sparse)
        n, c = (rotated.g if isinstance(rotated, Factored) else rotated.values).shape[:2]
        step = max(1, CHUNK_NUMBERS["cuda" if solved.is_cuda else "cpu"] // (c * solved.numel()))
        for low in range(0, n, step):
            part = slice(low, low + step)
            if isinstance(rotated, Full):
                moved = self._full(rotated.matrices()[part][self.where] * solved)
            else:
                moved = self._factored(
                    rotated.a[part, ..., -self.shape[2] :], rotated.g[part, ..., -self.shape[1] :], solved
                )
            yield Full(moved.flatten(2), moved.shape[2:])

    def _full(self, matrices: Tensor) -> Tensor:
        if self.outputs is None:
            return matrices @ self.inputs
        return times(times(matrices, self.inputs).transpose(-1, -2), self.outputs)

    def _factored(self, a: Tensor, g: Tensor, solved: Tensor) -> Tensor:
        assert self.outputs is not None
        if a.shape[2] > 1:
            return self._full(outer(a, g) * solved)
        # At one position the product over inputs serves all cotangents: (n, e, j, i) times (e, i, o).
        inner = times(a * self.inputs.transpose(1, 2), solved.transpose(1, 2))
        return times(g * inner.unsqueeze(1), self.outputs)


class MeatFactors:
    """MomentSums of G^T G and G G^T of residual-weighted gradients among leading coordinates, block by block.

    Args:
        bases: leading directions of each block; `None` for those that keep one basis.
        device: where to sum.
    """

    def __init__(self, bases: Sequence[Basis | None], device: torch.device) -> None:
        """Zeros."""
        self.bases = bases
        self.inputs: list[Tensor | None] = []
        self.outputs: list[Tensor | None] = []
        for basis in bases:
            below = above = None
            if basis is not None:
                *groups, i = basis.shape if basis.outputs is None else (basis.shape[0], basis.shape[2])
                below = torch.zeros(*groups, i, i, dtype=torch.float64, device=device)
                if basis.outputs is not None:
                    e, o, _ = basis.shape
                    above = torch.zeros(e, o, o, dtype=torch.float64, device=device)
            self.inputs.append(below)
            self.outputs.append(above)

    def state(self) -> dict[str, Tensor]:
        """What is summed up, by name."""
        named = (("inputs", self.inputs), ("outputs", self.outputs))
        pairs = [(name, at, one) for name, each in named for at, one in enumerate(each)]
        return {f"{name}.{at}": one for name, at, one in pairs if one is not None}

    def add(self, at: int, tangent: Tangent) -> None:
        """Add the gradients J_i^T r_i of a chunk of one block."""
        basis, below, above = self.bases[at], self.inputs[at], self.outputs[at]
        if basis is None or below is None:
            return
        for _, rotated in BasisView(tangent, basis).chunks():
            if isinstance(rotated, Factored):
                moments = whole_moments(rotated.a, rotated.g)
            elif above is not None:
                assert isinstance(rotated, Full)
                moments = matrix_moments(rotated.matrices())
            else:
                assert isinstance(rotated, Full)
                flat = rotated.values.flatten(0, 1)
                below += flat.T @ flat
                continue
            below += moments[0]
            if above is not None:
                above += moments[1]

    def rotations(self, notes: list[str]) -> list[MeatRotation | None]:
        """The eigenvectors of the sums, as rotations."""
        found: list[MeatRotation | None] = []
        for basis, below, above in zip(self.bases, self.inputs, self.outputs, strict=True):
            if basis is None or below is None or basis.inputs is None:
                found.append(None)
                continue
            name, dtype = basis.block.name, basis.inputs.dtype
            inputs = eigenvectors(below, f"the input factor of the meat of {name}", notes)[1].to(dtype)
            outputs = None
            if above is not None:
                outputs = eigenvectors(above, f"the output factor of the meat of {name}", notes)[1].to(dtype)
            own = Basis(
                basis.block,
                basis.inputs @ inputs,
                None if outputs is None or basis.outputs is None else basis.outputs @ outputs,
            )
            found.append(MeatRotation(own, inputs, outputs))
        return found


class TwoBasisSums(MomentSums):
    """Weighted squares of one block in the curvature's basis, and in that of the meats."""

    def __init__(self, basis: Basis, rotation: MeatRotation, count: int, device: torch.device) -> None:
        """Zeros for `count` sets of weights."""
        super().__init__(basis, count, device)
        self.rotation = rotation
        self.rotated = torch.zeros(count, *rotation.basis.shape, dtype=torch.float64, device=device)

    def state(self, name: str) -> dict[str, Tensor]:
        """What is summed up, by name."""
        return {**super().state(name), f"{name}.rotated": self.rotated}

    def add(self, view: BasisView, weights: Tensor, summed: Tensor | None = None) -> None:
        """Add a chunk: weights (q, c) of the cotangents."""
        super().add(view, weights, summed)
        for _, rotated in BasisView(view.tangent, self.rotation.basis).chunks():
            self.rotated += rotated.squares(weights.to(dtype_of(rotated)))

    def add_combined(self, view: BasisView, combinations: Combinations) -> None:
        """Add combinations of the cotangents of a chunk."""
        super().add_combined(view, combinations)
        for _, rotated in BasisView(view.tangent, self.rotation.basis).mixed(combinations.weights):
            self.rotated += rotated.squares(combinations.masks.to(dtype_of(rotated)))


class TwoBasisMeats(MeatSums):
    """DiagonalMoments of J_i^T W_i in both bases."""

    needs_captured: ClassVar[bool] = True

    def __init__(
        self,
        bases: Sequence[Basis],
        rotations: Sequence[MeatRotation | None],
        roots: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        """Zeros."""
        super().__init__(bases, roots, device)
        self.rotations = rotations
        for at, rotation in enumerate(rotations):
            if rotation is not None:
                self.sums[at] = TwoBasisSums(bases[at], rotation, len(roots), device)

    def given(self) -> list[Tensor]:
        """The same, and the bases of the meats."""
        return [
            *super().given(),
            *(one for rotation in self.rotations if rotation is not None for one in rotation.basis.tensors),
        ]

    def rotated(self, at: int) -> dict[str, Tensor]:
        """D of each meat of one block, in the basis of the meats."""
        sums = self.sums[at]
        assert isinstance(sums, TwoBasisSums)
        return dict(zip(self.names, sums.rotated, strict=True))


@dataclass(frozen=True)
class TwoBasisWeights(Weights):
    """Weights of a block some of whose meats have a basis of their own among the leading coordinates.

    Attributes:
        rotation: to that basis.
        which: positions of these meats among the weights, whose weights inside are zero where the rotation is.
        solved: 1 / (s + lambda) of the leading coordinates.
        meats: (w, e, j, q) D of these meats, inputs before outputs as `MeatRotation.apply` gives them.
    """

    rotation: MeatRotation
    which: list[int]
    solved: Tensor
    meats: Tensor

    @classmethod
    def add_to(
        cls, plain: Weights, rotation: MeatRotation, meats: Mapping[int, Tensor], solved: Tensor
    ) -> TwoBasisWeights:
        """Take the leading coordinates of some meats out of weights in one basis, and put D (by position) there."""
        which = list(meats)
        inside = plain.inside.clone()
        empty = torch.zeros_like(plain.outside)
        if plain.basis.outside and not plain.rounded:
            empty = -plain.outside  # the squared length adds the weight outside everywhere
        for at in which:
            inside[at][rotation.where] = empty[at].item()
        dtype = inside.dtype
        chosen = torch.stack(list(meats.values())).to(dtype)
        if rotation.outputs is not None:
            chosen = chosen.transpose(-1, -2).contiguous()
        return cls(
            plain.basis, inside, plain.outside, plain.rounded, rotation, which, solved[rotation.where].to(dtype), chosen
        )

    def squared(self, rotated: Rotated) -> Tensor:
        """Weighted squared lengths inside the basis, (w, n, c)."""
        found = super().squared(rotated)
        found[self.which] += torch.cat(
            [full.variances(self.meats) for full in self.rotation.apply(rotated, self.solved)], 1
        )
        return found

    def crossed(self, rotated: Rotated) -> Tensor:
        """Weighted inner products inside the basis, (w, n, c, c)."""
        found = super().crossed(rotated)
        found[self.which] += torch.cat(
            [full.grams(self.meats) for full in self.rotation.apply(rotated, self.solved)], 1
        )
        return found


class TwoBasisSpectrumSums(SpectrumSums):
    """Pass 2, and the factors of the meats' own bases among the leading directions of each block."""

    needs_captured = True

    def __init__(
        self, gradients: LayerGradients, bases: Sequence[Basis], noise: Tensor, directions: int | None
    ) -> None:
        """Zeros."""
        super().__init__(gradients, bases, noise)
        self.factors = MeatFactors([leading(basis, directions) for basis in bases], gradients.problem.device)

    def state(self) -> dict[str, Tensor]:
        """Squares, scores, and factors of the meats."""
        return {**super().state(), **self.factors.state()}

    def add_block(self, at: int, view: BasisView, where: slice, residuals: Tensor) -> None:
        """Add squares, and the second moments of J_i^T r_i."""
        super().add_block(at, view, where, residuals)
        self.factors.add(at, combine(view.tangent, residuals.unsqueeze(2)))

    def spectrum_and_rotations(self, notes: list[str]) -> tuple[Spectrum, list[MeatRotation | None]]:
        """The eigenvalues, and the rotations from the curvature's basis to that of the meats."""
        rotations = self.factors.rotations(notes)
        parts = [one for rotation in rotations if rotation is not None for one in rotation.tensors]
        self.problem.passes.process_group.share(parts, 0, "the eigenvectors of the meats")  # their signs are arbitrary
        return self.spectrum(), rotations


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedTwoBases(FittedSpectral):
    """A spectral curvature whose heteroscedastic meats have a basis of their own.

    Attributes:
        rotations: from the curvature's basis to that of the meats, for each block; `None` where there is one basis.
    """

    rotations: Sequence[MeatRotation | None]

    @classmethod
    def fit(
        cls,
        gradients: LayerGradients,
        bases: Sequence[Basis],
        rotations: Sequence[MeatRotation | None],
        spectrum: Spectrum,
        ridge: float,
        noise: Tensor,
        notes: list[str],
        meat_roots: MeatRoots | None,
    ) -> FittedTwoBases:
        """Pass 3: leverages, the Newton step and, where the weights are known, the meats in both bases."""

        def meat_sums(roots: Mapping[str, Tensor]) -> MeatSums:
            return TwoBasisMeats(bases, rotations, roots, gradients.problem.device)

        leverage = gradients.accumulate(Leverage(gradients, bases, spectrum, ridge, meat_roots, meat_sums), last=True)
        found = cls(**vars(FittedSpectral.of(leverage, noise, notes)), rotations=rotations)
        found.notes.append(found._describe())
        return found

    def at(self, ridge: float, meat_roots: MeatRoots | None) -> FittedTwoBases:
        """The same bases and eigenvalues: one pass, for the leverages and the meats."""
        given = (self.stream, self.bases, self.rotations, self.spectrum, ridge, self.noise)
        return FittedTwoBases.fit(*given, [], meat_roots)

    def meat_sums(self, roots: Mapping[str, Tensor]) -> MeatSums:
        """Zeros of meats for these weights, in both bases."""
        return TwoBasisMeats(self.bases, self.rotations, roots, self.problem.device)

    def sandwich(self, meats: Meats) -> SpectralSandwich:
        """Squares of the weighted gradients in the basis of the meats where there is one, else in the curvature's."""
        plain, summed = self.sandwich_of(meats)
        weights = list(plain.weights)
        for at, rotation in enumerate(self.rotations):
            if rotation is None:
                continue
            found: dict[int, Tensor] = {}
            for sums in summed:
                assert isinstance(sums, TwoBasisMeats)
                squares = {name: one for name, one in sums.rotated(at).items() if name != "ho"}
                if "hec3" in squares:
                    one = DiagonalMoments(squares["hec3"], 0.0)
                    squares["jackknife"] = centre(rotation.basis, one, sums.sums[at].total, meats.deletions).inside
                found.update({plain.names.index(name): one for name, one in squares.items()})
            inverse = 1.0 / (self.spectrum.curvature[at].inside + self.ridge)
            weights[at] = TwoBasisWeights.add_to(weights[at], rotation, found, inverse)
        return replace(plain, weights=weights)

    def _describe(self) -> str:
        inside = whole = 0.0
        for rotation, basis, one in zip(self.rotations, self.bases, self.spectrum.curvature, strict=True):
            weight = (one.inside / (one.inside + self.ridge)).square()
            whole += float(weight.sum()) + basis.outside * (one.outside / (one.outside + self.ridge or 1.0)) ** 2
            inside += float(weight[rotation.where].sum()) if rotation is not None else 0.0
        return (
            "meats in a basis of their own where "
            f"{100 * inside / max(whole, torch.finfo(torch.float64).tiny):.1f} % of the homoscedastic variance lies, "
            "in the curvature's elsewhere"
        )
