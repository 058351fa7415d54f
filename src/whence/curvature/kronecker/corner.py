"""The top corner of a Kronecker eigenbasis: where the curvature stands above the ridge.

The weights s / (s + lambda)^2 of the estimators live among the largest eigenvalues. Outside of them every direction has
about the same weight, so that the squared length of a gradient outside the corner is all one needs to know there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .basis import Basis
from .measure import products_are_rounded

WORTH_IT = 0.7
"""A corner is cut only if it holds less than this share of the block's directions."""

ENOUGH = 0.85
"""And only if its products are less than this share of all."""

LARGEST_RATIO = 1e5
"""No corner is cut from eigenvalues above so many ridges: the squared length outside is a difference, and what float32
leaves of it, weighted by 1 / lambda, would be wrong by a thousandth of the leverage here, by all of it at 1e8. Where
products are rounded on a GPU it is measured for itself, and this does not matter."""

ALIGNED = 8
"""Of sides that are longer than a few times so many, multiples of it are kept: a GPU's tensor units take no others."""

MANY_POSITIONS = 12
"""On a GPU no corner is cut where a layer has less than so many inputs for each position: squared lengths cost more
than it saves."""


def cut(
    basis: Basis, spectrum: Tensor | None, positions: float, cotangents: int, ridge: float, tolerance: float
) -> tuple[Basis, Tensor | None]:
    """Keep the output and input directions that carry all but `tolerance` of the homoscedastic variance.

    Returns what is kept of the basis and of its spectrum.

    Args:
        basis: complete.
        spectrum: estimated eigenvalues, KFAC's (e, o, i) or those of a dense block (p,); `None` leaves the basis
            complete.
        positions: at which the layer is seen, for one example; with many, squared lengths cost more than a corner
            saves.
        cotangents: that are pulled back for one example.
        ridge: lambda.
        tolerance: share of sum s^2 / (s + lambda)^2, the mean of Ho over the training set, that may lie outside.
    """
    if spectrum is None or tolerance <= 0 or ridge <= 0:
        return basis, spectrum
    if float(spectrum.max()) > LARGEST_RATIO * ridge and not products_are_rounded(spectrum.device):
        return basis, spectrum
    if basis.block.kind == "dense":
        kept = _largest((spectrum / (spectrum + ridge)).square(), tolerance)
        assert basis.inputs is not None
        if len(kept) > WORTH_IT * len(spectrum):
            return basis, spectrum
        return Basis(basis.block, basis.inputs[:, kept].contiguous()), spectrum[kept]
    if len(spectrum) != 1:  # groups have corners of their own
        return basis, spectrum
    if spectrum.is_cuda and positions > 1 and MANY_POSITIONS * positions > spectrum.shape[2]:
        return basis, spectrum
    weight = (spectrum[0] / (spectrum[0] + ridge)).square()
    rows = _largest(weight.sum(1), tolerance / 2)
    columns = _largest(weight.sum(0), tolerance / 2)
    if len(rows) * len(columns) > WORTH_IT * weight.numel():
        return basis, spectrum
    if not (spectrum.is_cuda or _saves(weight.shape, (len(rows), len(columns)), positions, cotangents)):
        return basis, spectrum
    return basis.corner(rows, columns), spectrum[:, rows][:, :, columns]


def _saves(shape: Sequence[int], kept: tuple[int, int], t: float, c: int) -> bool:
    """Whether a corner of a layer seen at t positions, with its squared lengths, takes fewer products than the whole.

    Factors are turned, then matrices are formed of them; lengths take the products of all pairs of positions.
    """
    (o, i), (few_o, few_i) = shape, kept
    whole = t * i * i + c * t * o * (o + i)
    lengths = t * t * (i + c * o) + c * c * t * o if t > 1 else 0.0
    return t * i * few_i + c * t * few_o * (o + few_i) + lengths < ENOUGH * whole


def _largest(weights: Tensor, leave: float) -> Tensor:
    """Positions of the largest weights that together leave out at most the given share, in order of position."""
    ordered, order = weights.sort(descending=True)
    gathered = ordered.cumsum(0)
    needed = int(torch.searchsorted(gathered, (1.0 - leave) * gathered[-1])) + 1
    if len(weights) > 8 * ALIGNED:
        needed += -needed % ALIGNED
    return order[: min(needed, len(order))].sort().values
