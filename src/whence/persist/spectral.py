"""Curvatures that are diagonal in a basis: EKFAC, KFAC, the plain diagonal, and EKFAC with two bases."""

from __future__ import annotations

from whence.curvature import Bread, Meats, Sandwich
from whence.curvature.kronecker.moments import Spectrum
from whence.curvature.kronecker.spectral import SpectralBread, SpectralSandwich
from whence.curvature.kronecker.two_bases import TwoBasesBread
from whence.tangents.linearization import Linearization

from .dense import read_bread, write_bread
from .layers import (
    read_basis,
    read_squares,
    read_stream,
    read_turn,
    read_weights,
    rounded,
    write_basis,
    write_squares,
    write_stream,
    write_turn,
    write_weights,
)
from .problem import Given
from .record import Draft, Saved
from .together import BLOCKS


def write_spectral(draft: Draft, bread: SpectralBread, sandwich: SpectralSandwich) -> None:
    """Bases, spectra and weights, block by block; a block is called by its place among those of all processes."""
    write_bread(draft, bread)
    write_stream(draft.part("stream"), bread.stream)
    draft.note(estimators=list(sandwich.names))
    draft.put("noise", bread.noise)
    draft.put("change", bread._change)
    turns = bread.turns if isinstance(bread, TwoBasesBread) else [None] * len(bread.bases)
    for at, (basis, turn) in enumerate(zip(bread.bases, turns, strict=True)):
        part = draft.part(f"{BLOCKS}{bread.stream.known.blocks.index(basis.block)}")
        write_basis(part.part("basis"), basis)
        write_squares(part, "curvature", bread.spectrum.curvature[at])
        write_squares(part, "noise", bread.spectrum.noise[at])
        part.put("score", bread.spectrum.score[at])
        part.put("step", bread._step[at])
        part.note(turned=turn is not None)
        if turn is not None:
            write_turn(part.part("turn"), turn)
        write_weights(part.part("weights"), sandwich.weights[at])


def read_spectral(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[Bread, Sandwich]:
    """The same, put together again."""
    bread = SpectralBread.__new__(SpectralBread)
    return _read(saved, bread, problem, meats, given)


def read_two_bases(saved: Saved, problem: Linearization, meats: Meats, given: Given) -> tuple[Bread, Sandwich]:
    """The same with meats in a basis of their own."""
    bread = TwoBasesBread.__new__(TwoBasesBread)
    bread._opened = []
    return _read(saved, bread, problem, meats, given)


def _read(
    saved: Saved, bread: SpectralBread, problem: Linearization, meats: Meats, given: Given
) -> tuple[Bread, Sandwich]:
    read_bread(saved, bread, problem, given)
    bread.stream = read_stream(saved.part("stream"), bread.problem)
    bread.noise = saved.algebra("noise", problem.k, problem.k)
    bread._change = saved.algebra("change", problem.n, problem.k)
    bread._meats = None
    names = saved.texts("estimators")
    if sorted(names) != sorted([*meats.roots, "jackknife", "laplace"]):
        raise saved.wrong("estimators", "those of this version")
    parts = [saved.part(f"{BLOCKS}{at}") for at in range(len(bread.stream.blocks))]
    bread.bases = [
        read_basis(part.part("basis"), block) for part, block in zip(parts, bread.stream.blocks, strict=True)
    ]
    pairs = list(zip(parts, bread.bases, strict=True))
    bread.spectrum = Spectrum(
        [read_squares(part, "curvature", basis) for part, basis in pairs],
        [read_squares(part, "noise", basis) for part, basis in pairs],
        [part.double("score", *basis.block.matrix_shape) for part, basis in pairs],
    )
    bread._step = [part.double("step", *basis.block.matrix_shape) for part, basis in pairs]
    turns = [read_turn(part.part("turn"), basis) if part.flag("turned") else None for part, basis in pairs]
    if isinstance(bread, TwoBasesBread):
        bread.turns = turns
    elif any(turn is not None for turn in turns):
        raise saved.wrong("block_0.turned", "no")
    weights = [
        read_weights(part.part("weights"), basis, turn, len(names))
        for (part, basis), turn in zip(pairs, turns, strict=True)
    ]
    bread.tf32 = all(rounded(one, problem.device, bread.tf32) for one in weights)
    return bread, SpectralSandwich(bread, tuple(names), weights)
