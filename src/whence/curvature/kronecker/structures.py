"""Curvatures that are diagonal in a basis: EKFAC, KFAC, and the plain diagonal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from whence.curvature.base import Structure
from whence.errors import InputError
from whence.tangents.forms import Block
from whence.tangents.linearization import Linearization

from .basis import Basis
from .moments import Spectrum, gather_factors, gather_squares
from .spectral import SpectralBread
from .stream import LayerStream

LARGEST_EXACT = 1024
"""Blocks without a Kronecker form (norms, biases, bare parameters) up to this size get an exact block."""


@dataclass(frozen=True)
class EKFAC(Structure):
    """Kronecker eigenbasis with corrected eigenvalues: the paper's scaling to deep networks.

    Args:
        largest_exact: blocks without a Kronecker form are kept exactly up to this size, as a diagonal above.
    """

    name: ClassVar[str] = "ekfac"
    largest_exact: int = LARGEST_EXACT

    def fit(self, problem: Linearization, ridge: float | None) -> SpectralBread:
        """Factors, eigenvalues, leverage: three passes."""
        lam = needs_ridge(ridge, self.name)
        stream, facts = open_stream(problem)
        factors, _ = gather_factors(stream, self.largest_exact, residual_weighted=False)
        precision = working_precision(problem)
        bases = [one.basis(facts)[0].to(precision) for one in factors]
        facts += describe_blocks(stream, self.largest_exact)
        noise = problem.likelihood.noise(problem.residuals, problem.outputs, None)[0]
        return SpectralBread(stream, bases, gather_squares(stream, bases, noise), lam, noise, facts)


@dataclass(frozen=True)
class KFAC(Structure):
    """Kronecker factors without corrected eigenvalues. For comparison: EKFAC costs one more pass and is never worse.

    Args:
        largest_exact: blocks without a Kronecker form are kept exactly up to this size, as a diagonal above.
    """

    name: ClassVar[str] = "kfac"
    largest_exact: int = LARGEST_EXACT

    def fit(self, problem: Linearization, ridge: float | None) -> SpectralBread:
        """As EKFAC, with products of the factors' eigenvalues for the blocks that have two factors."""
        lam = needs_ridge(ridge, self.name)
        stream, facts = open_stream(problem)
        factors, _ = gather_factors(stream, self.largest_exact, residual_weighted=False)
        pairs = [one.basis(facts) for one in factors]
        bases = [basis.to(working_precision(problem)) for basis, _ in pairs]
        noise = problem.likelihood.noise(problem.residuals, problem.outputs, None)[0]
        measured = gather_squares(stream, bases, noise)
        curvature = [
            s if product is None else product for s, (_, product) in zip(measured.curvature, pairs, strict=True)
        ]
        facts += describe_blocks(stream, self.largest_exact)
        return SpectralBread(stream, bases, Spectrum(curvature, measured.noise, measured.score), lam, noise, facts)


@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal of the curvature in the coordinates of the weights themselves. Crude, and one pass cheaper."""

    name: ClassVar[str] = "diagonal"

    def fit(self, problem: Linearization, ridge: float | None) -> SpectralBread:
        """As EKFAC, without any rotation."""
        lam = needs_ridge(ridge, self.name)
        stream, facts = open_stream(problem)
        bases = [Basis(block) for block in stream.blocks]
        noise = problem.likelihood.noise(problem.residuals, problem.outputs, None)[0]
        facts.append("the curvature is taken as diagonal in the weights")
        return SpectralBread(stream, bases, gather_squares(stream, bases, noise), lam, noise, facts)


def open_stream(problem: Linearization) -> tuple[LayerStream, list[str]]:
    """The layers of the network, and what is worth telling about them."""
    stream = LayerStream(problem)
    return stream, list(stream.notes)


def needs_ridge(ridge: float | None, name: str) -> float:
    """The ridge, which this structure cannot choose by itself."""
    if ridge is None:
        raise InputError(
            f'expected a number as ridge for structure "{name}", got "loo", which needs true leverages. '
            'Use structure="core" or "exact" with ridge="loo", or whence.ridge_from_weight_decay.'
        )
    return ridge


def working_precision(problem: Linearization) -> torch.dtype:
    """float64 for float64 models, float32 for all others."""
    widest = max((p.dtype for p in problem.selection.parameters.values()), key=lambda d: torch.finfo(d).bits)
    return torch.float64 if widest == torch.float64 else torch.float32


def describe_blocks(stream: LayerStream, largest_exact: int) -> list[str]:
    """In words: which parameters have a Kronecker form, which an exact block, which a diagonal."""
    kinds: dict[str, list[Block]] = {"Kronecker": [], "exact block": [], "diagonal": []}
    for block in stream.blocks:
        exact = "exact block" if block.numel <= largest_exact else "diagonal"
        kinds["Kronecker" if block.kind != "dense" else exact].append(block)
    facts = []
    for kind, blocks in kinds.items():
        if blocks:
            names = ", ".join(block.name for block in blocks[:4]) + (", ..." if len(blocks) > 4 else "")
            facts.append(f"{kind}: {sum(block.numel for block in blocks)} weights in {len(blocks)} blocks ({names})")
    return facts
