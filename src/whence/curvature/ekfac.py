"""EKFAC, the paper's scaling to deep networks, and its simpler relatives KFAC and the diagonal."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from whence.curvature.accumulate import LayerGradients, decomposition_bytes, factor_sides, sums_bytes
from whence.curvature.base import AdditiveStructure, MeatRoots
from whence.curvature.cost import EIGENVECTORS, Cost, ProblemSizes
from whence.curvature.kronecker import (
    BlockSpectrum,
    KroneckerFactors,
    SpectrumSums,
    TwoBasisSpectrumSums,
    fit_spectrum,
    noise_covariance,
)
from whence.curvature.rotation import Basis, DiagonalMoments
from whence.curvature.spectral import FittedSpectral, Leverage
from whence.errors import InputError
from whence.jacobian.linearization import Linearization


class SpectralStructure(AdditiveStructure):
    """A curvature that is diagonal in a basis of each block. Its leverages are approximate."""

    policy: ClassVar[Literal["exact", "one_plus_q"]] = "one_plus_q"

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedSpectral:
        """Passes for the bases and the eigenvalues, and one for the leverages."""
        assert ridge is not None  # "loo" is refused before: it needs true leverages
        gradients = LayerGradients(problem)
        notes, noise = list(gradients.notes), noise_covariance(problem)
        with gradients.cached():
            blocks = self.decompose(gradients, ridge, noise, notes)
            leverage = gradients.accumulate(Leverage(gradients, blocks, ridge, meat_roots), last=True)
        return FittedSpectral(
            problem=problem,
            ridge=ridge,
            leverage_blocks=leverage.leverage_blocks,
            notes=notes,
            gradients=gradients,
            blocks=blocks,
            noise=noise,
            step=leverage.step,
            change=leverage.change,
            summed_meats=leverage.meats,
        )

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        return spectral_cost(sizes, self.name)

    @abstractmethod
    def decompose(
        self, gradients: LayerGradients, ridge: float, noise: Tensor, notes: list[str]
    ) -> list[BlockSpectrum]:
        """The basis of every block, and the eigenvalues in it."""


@dataclass(frozen=True)
class EKFAC(SpectralStructure):
    """Kronecker eigenbasis with corrected eigenvalues: the paper's scaling to deep networks.

    Args:
        tolerance: share of the homoscedastic variance that may lie outside the leading directions of the eigenbasis.
            Leading directions have an eigenvalue each; the others share their mean. Zero keeps all directions.
        meat: basis of the meats of HeC0, HeC2 and HeC3. "two_bases" gives them their own eigenbasis among the leading
            directions of each layer (the paper's appendix); "one_basis" takes them as diagonal in the curvature's.
        basis: how to find the basis of a layer that is used at several positions: from "gradients" of whole examples,
            summed over positions, or from single "positions", as in KFAC.
        corner: number of leading directions on each side of a layer that "two_bases" rotates; `None` for all.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> tracer = whence.fit(net, [(x, x**2)], structure=whence.EKFAC(tolerance=0), ridge=0.1, progress=False)
        >>> tracer.predict(x[:2]).hec3.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "ekfac"
    tolerance: float = 1e-2
    meat: Literal["one_basis", "two_bases"] = "one_basis"
    basis: Literal["positions", "gradients"] = "positions"
    corner: int | None = 64

    def __post_init__(self) -> None:
        """Check the options now, not after a pass over the data."""
        choices = {"meat": ("one_basis", "two_bases"), "basis": ("positions", "gradients")}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                wanted = ", ".join(map(repr, allowed))
                raise InputError(f"expected EKFAC's {name} to be one of {wanted}, got {getattr(self, name)!r}.")
        if not 0.0 <= self.tolerance < 1.0:
            raise InputError(f"expected EKFAC's tolerance to be at least 0 and below 1, got {self.tolerance!r}.")
        if self.corner is not None and self.corner < 1:
            raise InputError(f"expected EKFAC's corner to be at least 1 or None, got {self.corner!r}.")

    def decompose(
        self, gradients: LayerGradients, ridge: float, noise: Tensor, notes: list[str]
    ) -> list[BlockSpectrum]:
        """Pass 1 for the factors, pass 2 for the eigenvalues. With many examples, one more for the score."""
        if self.tolerance <= 0:  # the size of the sums is known before the first pass
            gradients.require_sums([Basis(block) for block in gradients.blocks])
        factors = gradients.accumulate(KroneckerFactors(gradients, whole=self.basis == "gradients"))
        bases, _ = factors.eigenbases(ridge, self.tolerance, notes, truncate_dense=True)
        gradients.require_sums(bases)
        if self.meat == "one_basis":
            return fit_spectrum(gradients, bases, noise, notes)
        sums = gradients.accumulate(TwoBasisSpectrumSums(gradients, bases, noise, self.corner))
        notes.append("the meats of HeC0, HeC2 and HeC3 have a basis of their own along the leading directions")
        return sums.two_bases(notes)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        two_bases = self.meat == "two_bases" and self.corner is None
        return spectral_cost(sizes, self.name, two_bases=two_bases, bounded=self.tolerance > 0)


@dataclass(frozen=True)
class KFAC(SpectralStructure):
    """Kronecker factors without corrected eigenvalues. For comparison: EKFAC costs about the same and fits better.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> whence.fit(net, [(x, x**2)], structure=whence.KFAC(), ridge=0.1, progress=False).predict(x[:2]).ho.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "kfac"

    def decompose(
        self, gradients: LayerGradients, ridge: float, noise: Tensor, notes: list[str]
    ) -> list[BlockSpectrum]:
        """As EKFAC, but blocks with two factors take products of the factors' eigenvalues."""
        gradients.require_sums([Basis(block) for block in gradients.blocks])
        factors = gradients.accumulate(KroneckerFactors(gradients, every=1))
        bases, products = factors.eigenbases(0.0, 0.0, notes, products=True)
        measured = gradients.accumulate(SpectrumSums(gradients, bases, noise)).spectrum()
        return [
            block if product is None else replace(block, curvature=DiagonalMoments(product, 0.0))
            for block, product in zip(measured, products, strict=True)
        ]


@dataclass(frozen=True)
class Diagonal(SpectralStructure):
    """The diagonal of the curvature in the coordinates of the weights themselves. Crude, and one pass cheaper.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> whence.fit(net, [(x, x**2)], structure=whence.Diagonal(), ridge=0.1, progress=False).predict(x[:2]).ho.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "diagonal"

    def decompose(
        self, gradients: LayerGradients, ridge: float, noise: Tensor, notes: list[str]
    ) -> list[BlockSpectrum]:
        """One pass for the eigenvalues, without any rotation."""
        notes.append("the curvature is taken as diagonal in the weights")
        bases = [Basis(block) for block in gradients.blocks]
        gradients.require_sums(bases)
        return gradients.accumulate(SpectrumSums(gradients, bases, noise)).spectrum()

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        return spectral_cost(sizes, self.name, factors=False)


# --- Cost ------------------------------------------------------------------------------------------------------------


def spectral_cost(
    sizes: ProblemSizes, name: str, factors: bool = True, two_bases: bool = False, bounded: bool = False
) -> Cost:
    """Cost of sums of squares in a Kronecker eigenbasis, or without factors; meats may have their own basis."""
    peak, bases, operations = factor_cost(sizes) if factors else (0.0, 0.0, 0.0)
    sums = sums_bytes(sizes.d, sizes.d, sizes.working) + (32.0 * sizes.d if two_bases else 0.0)
    rotations = 2.0 * sizes.rotations if factors else 0.0
    return Cost(
        name,
        memory=max(peak, (3.0 if two_bases else 1.0) * bases + sums + sizes.layer_bytes + sizes.example_bytes),
        passes=3.0 if factors else 2.0,
        operations=operations + sizes.n * (rotations + (3.0 + 3.0 / sizes.k) * sizes.squares),
        least=peak if bounded else None,
    )


def factor_cost(sizes: ProblemSizes) -> tuple[float, float, float]:
    """Bytes at the peak of factors and eigenvectors, bytes of the eigenvectors alone, and operations."""
    sides = factor_sides(sizes.blocks)
    total = sum(8.0 * count * side**2 for count, side in sides)
    cubes = sum(count * float(side) ** 3 for count, side in sides)
    peak = max(total + sizes.layer_bytes, decomposition_bytes(sizes.blocks))
    return peak, total * sizes.working / 8, sizes.n * sizes.rotations + EIGENVECTORS * cubes
