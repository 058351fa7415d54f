"""Eigendecompositions shared out by layer: each process decomposes some of the factors, and tells the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from whence.processes import Processes, shared_out

from .basis import Basis
from .factors import Factors

Found = tuple[Basis, Tensor | None]
"""A basis, and KFAC's eigenvalues in it."""


def cost(factors: Factors) -> float:
    """About the operations of its eigendecompositions: cubes of the sides."""
    sides = [one.shape for one in (factors.inputs, factors.outputs) if one is not None]
    return float(sum((shape[0] if len(shape) == 3 else 1) * shape[-1] ** 3 for shape in sides))


def decompose(
    factors: Sequence[Factors],
    make: Callable[[int, list[str]], Found],
    crew: Processes,
    device: torch.device,
    facts: list[str],
) -> list[Found]:
    """The bases of all blocks, each made by one process.

    Args:
        factors: of each block, the same in every process.
        make: from the position of a block to its basis; told where to note what is worth telling.
        crew: the processes.
        device: where the bases go.
        facts: is told what is worth telling.
    """
    if crew.alone:
        return [make(at, facts) for at in range(len(factors))]
    owners = shared_out([cost(one) for one in factors], crew.size)
    notes: list[str] = []
    mine = {at: make(at, notes) for at, owner in enumerate(owners) if owner == crew.rank}
    specs = {at: [_spec(part) for part in (basis.inputs, basis.outputs, s)] for at, (basis, s) in mine.items()}
    told = crew.tell("the eigenvectors of all layers", (specs, notes))
    found = []
    for at, owner in enumerate(owners):
        if owner == crew.rank:
            basis, spectrum = mine[at]
            parts = [basis.inputs, basis.outputs, spectrum]
        else:
            parts = [
                None if spec is None else torch.empty(spec[0], dtype=spec[1], device=device)
                for spec in told[owner][0][at]
            ]
        crew.share([part for part in parts if part is not None], owner, "the eigenvectors of all layers")
        found.append((Basis(factors[at].block, parts[0], parts[1]), parts[2]))
    facts += [note for _, each in told for note in each]
    return found


def _spec(part: Tensor | None) -> tuple[tuple[int, ...], torch.dtype] | None:
    return None if part is None else (tuple(part.shape), part.dtype)
