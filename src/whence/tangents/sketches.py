"""Training examples with many outputs, seen through a few mixtures of them that differ from example to example.

All that a fit needs to know of an example are the gradients J^T r of its residual and J^T R of a root of its Hessian
L = R R^T, k columns for k classes. Here R is replaced by S with c columns and E[S S^T] = L: the largest columns of R as
they are, and random signs times all the others. S and r span at most c + 1 directions among the outputs, and an
orthonormal basis of these is what is looked at. In it the residual is exact, so that HeC0 is White's for this
curvature; and since the curvature holds the example as J^T S S^T J, leaving it out by S is exact for it as well. With
c as large as the number of outputs nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.likelihoods import Likelihood

from .batches import Batch, Batches, check_finite, take
from .eigh import eigh
from .forward import Network
from .losses import example_weights, targets_at, unit_weights, weights_at
from .views import Mixed

MANY = 64
"""Fits look at all outputs of an example up to so many, unless told otherwise."""

COLUMNS = 16
"""How many columns of the Hessian's root are taken where there are more outputs, unless told otherwise."""

BASIS_BYTES = 96 * 2**20
"""Bases of one piece of a batch are kept under this size."""

PARALLEL = 1e-14
"""Squared sines of angles below which directions count as the same."""


@dataclass(frozen=True)
class Sketch:
    """What is known of outputs that are not all looked at.

    Attributes:
        columns: c.
        width: outputs k at each position.
        dense: whether the network answers at several positions.
        counted: how many positions of training examples count.
    """

    columns: int
    width: int
    dense: bool
    counted: int


@dataclass(frozen=True)
class Reduced:
    """One batch in the bases of its examples.

    Attributes:
        basis: (n, K, c + 1) orthonormal columns, and zeros where fewer are needed.
        residuals: (n, c + 1) coordinates of the weighted residuals.
        roots: (n, c + 1, c) coordinates of S.
        outputs: (n, c + 1) of the network.
        weights: (n,) of the examples.
        counted: how many positions count.
    """

    basis: Tensor
    residuals: Tensor
    roots: Tensor
    outputs: Tensor
    weights: Tensor
    counted: int


@dataclass
class SketchedBatches:
    """Batches whose inputs are views of a few mixtures of the outputs, made anew in every pass and always the same.

    Attributes:
        plain: the batches as they are.
        network: the model.
        likelihood: tells residuals and the Hessian's root.
        columns: c.
        seed: of the random signs.
        dtype: of the algebra.
    """

    plain: Batches
    network: Network
    likelihood: Likelihood
    columns: int
    seed: int
    dtype: torch.dtype
    notes: list[str] = field(init=False)
    prints: list[tuple[int, ...]] = field(init=False)

    def __post_init__(self) -> None:
        """What is noted here is noted there."""
        self.notes, self.prints = self.plain.notes, self.plain.prints

    @property
    def loader(self) -> Iterable[Any]:
        """What the batches come from."""
        return self.plain.loader

    @property
    def positional(self) -> int:
        """How many positional arguments the inputs are."""
        return self.plain.positional

    def __iter__(self) -> Iterator[Batch]:
        """Read all batches once, without a progress bar."""
        return self.read(None)

    def read(self, label: str | None) -> Iterator[Batch]:
        """Read all batches once, in pieces whose bases fit in memory."""
        for batch, _, reduced in self.reduced(label):
            yield self._view(batch, reduced)

    def reduced(self, label: str | None) -> Iterator[tuple[Batch, torch.Size, Reduced]]:
        """Read all batches once: pieces of them, the shape (..., k) of an example's outputs, and what is seen."""
        for number, batch in enumerate(self.plain.read(label)):
            yield from self._pieces(batch, f"batch {number}")

    def first(self) -> Batch:
        """The first piece of the first batch of all."""
        batch, _, reduced = next(self._pieces(self.plain.first(), "batch 0"))
        return self._view(batch, reduced)

    def _view(self, batch: Batch, reduced: Reduced) -> Batch:
        return Batch(Mixed(batch.inputs, reduced.basis), batch.targets, batch.start, batch.size, batch.weights)

    def _pieces(self, batch: Batch, where: str) -> Iterator[tuple[Batch, torch.Size, Reduced]]:
        with torch.no_grad():
            outputs = self.network.shaped(batch.inputs, where).detach()
        check_finite(outputs, "outputs of the model", where)
        each = outputs[0].numel() * (self.columns + 1) * outputs.element_size()
        step = max(1, BASIS_BYTES // each)
        for low in range(0, batch.size, step):
            some = slice(low, min(low + step, batch.size))
            weights = None if batch.weights is None else batch.weights[some]
            piece = Batch(take(batch.inputs, some), batch.targets[some], batch.start + low, some.stop - low, weights)
            yield piece, outputs.shape[1:], self._reduce(outputs[some], piece, where)

    def _reduce(self, outputs: Tensor, batch: Batch, where: str) -> Reduced:
        n, k = len(outputs), outputs.shape[-1]
        flat = outputs.reshape(-1, k)
        likelihood = self.likelihood
        targets = likelihood.check_targets(targets_at(batch.targets, outputs, where), flat, where)
        given = weights_at(batch.weights, outputs, where)
        weights = unit_weights(flat, given, likelihood.counted(targets))
        residuals = likelihood.residuals(flat, targets)
        sizes = likelihood.root_sizes(flat, targets)
        if weights is not None:
            residuals, sizes = residuals * weights.unsqueeze(1), sizes * weights.unsqueeze(1)
        mixing = mixtures(sizes.reshape(n, -1), self.columns, self.seed, batch.start)
        roots = likelihood.root_times(flat, targets, mixing.reshape(len(flat), -1, self.columns))
        del mixing  # as large as what it makes
        if weights is not None:
            roots = roots * weights.sqrt().reshape(-1, 1, 1)
        columns = torch.cat([roots.reshape(n, -1, self.columns), residuals.reshape(n, -1, 1)], dim=2)
        check_finite(columns, f"derivatives of the {likelihood.name} loss", where)
        basis, coordinates = orthonormal(columns)
        units = torch.ones_like(flat[:, 0]) if weights is None else weights
        return Reduced(
            basis=basis,
            residuals=coordinates[:, :, -1].to(self.dtype),
            roots=coordinates[:, :, :-1].to(self.dtype),
            outputs=torch.einsum("nj,njc->nc", outputs.flatten(1), basis).to(self.dtype),
            weights=example_weights(batch.weights, units.reshape(n, -1)).to(self.dtype),
            counted=int((units > 0).sum()),
        )


def mixtures(sizes: Tensor, columns: int, seed: int, start: int) -> Tensor:
    """M (n, q, c) with E[M M^T] = I: the columns of largest size as they are, random signs of all the others.

    Args:
        sizes: (n, q) squared lengths of the columns that are to be mixed.
        columns: c.
        seed: of the signs, together with the positions of the examples.
        start: position of the first example.

    Examples:
        >>> mixtures(torch.tensor([[1.0, 3.0]]), 2, 0, 0)
        tensor([[[1., 0.],
                 [0., 1.]]])
    """
    n, q = sizes.shape
    found = sizes.new_zeros(n, q, columns)
    if columns >= q:
        found[:, :, :q] = torch.eye(q, dtype=sizes.dtype, device=sizes.device)
        return found
    exact = columns // 2
    signs = torch.stack([random_signs(q, columns - exact, seed, start + at) for at in range(n)])
    found[:, :, exact:] = signs.to(sizes) / (columns - exact) ** 0.5
    if exact:
        largest = sizes.topk(exact, dim=1).indices  # (n, exact)
        found.scatter_(1, largest.unsqueeze(2).expand(-1, -1, columns), 0.0)
        found.scatter_(1, largest.unsqueeze(1), 1.0)
    return found


def random_signs(size: int, count: int, seed: int, example: int) -> Tensor:
    """(size, count) random signs of one example, the same whenever they are asked for."""
    generator = torch.Generator().manual_seed((seed * 0x9E3779B1 + example) % 2**32)  # torch reads 32 bits of a seed
    return 2 * torch.randint(0, 2, (size, count), generator=generator, dtype=torch.int8) - 1


def orthonormal(columns: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis B (n, K, c) of the columns C (n, K, c) of each example, and coordinates T with B T = C.

    By the eigenvectors of their products in double precision, which for long columns is much faster than Householder's
    QR. Where columns depend on each other, as a residual and the column of its own class do, the basis ends in zeros.
    """
    wide = columns.double()
    length = wide.square().sum(1).sqrt()  # (n, c)
    unit = wide / length.clamp_min(torch.finfo(wide.dtype).tiny).unsqueeze(1)
    values, vectors = eigh(unit.transpose(1, 2) @ unit)
    values, vectors = values.flip(1), vectors.flip(2)
    kept = values > PARALLEL * values.shape[1]
    inverse = torch.where(kept, values.clamp_min(PARALLEL).rsqrt(), 0.0)
    basis = unit @ (vectors * inverse.unsqueeze(1))
    root = torch.where(kept, values.clamp_min(0.0).sqrt(), 0.0)
    coordinates = root.unsqueeze(2) * vectors.transpose(1, 2) * length.unsqueeze(1)
    return basis.to(columns.dtype), coordinates
