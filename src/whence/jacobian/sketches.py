"""Hessian sketches: training examples with many outputs, reduced to a few mixtures of their outputs.

All that a fit needs of an example are the gradients J^T r of its residual and J^T R of a root of its Hessian
L = R R^T, k columns for k classes. Here R is replaced by S with c columns and E[S S^T] = L: the largest columns of R as
they are, and random signs times all the others. S and r span at most c + 1 directions of the outputs; each example is
reduced to an orthonormal basis of these. In it the residual is exact, so that HeC0 is White's for this curvature; and
since the curvature holds the example as J^T S S^T J, leaving it out by S is exact for it as well. With c as large as
the number of outputs nothing is approximated.

The bases are too large to store: every pass computes them again, and so does a fit that was saved and is loaded on
another machine, where they are used with coordinates of the first. They are therefore functions of the outputs alone,
without the signs and rotations that eigenvectors are free to have. The choice of the largest columns, which would
depend on rounding, is made once and stored with the fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from whence.data.batches import Batch, Batches, check_finite, take
from whence.data.targets import example_weights, position_weights, targets_at
from whence.errors import CorruptArtifactError, InputError, StaleModelError
from whence.jacobian.network import Network, OutputMixtures, SeparateExamples
from whence.likelihoods import Likelihood
from whence.linalg import eigh

ALL_OUTPUTS = 64
"""Largest number of outputs for which no sketch is used by default."""

COLUMNS = 16
"""Columns of a sketch, by default."""

BASIS_BYTES = 96 * 2**20
"""The bases of one chunk of a batch are kept under this size."""

PARALLEL = 1e-14
"""Directions whose angle has a smaller squared sine count as the same."""

RESIDUAL_FLOOR = 1e5
"""A residual of this size, in units of rounding errors of the outputs, has half its weight in a basis."""


@dataclass(frozen=True)
class OutputSketch:
    """The sizes of a sketch."""

    columns: int  # c
    width: int  # outputs k at each position
    dense: bool  # whether the network has outputs at several positions
    counted: int  # how many positions of training examples count


@dataclass(frozen=True)
class ReducedBatch:
    """One batch in the bases of its examples."""

    basis: Tensor  # (n, K, c + 1), an isometry onto what the columns of S and r span
    residuals: Tensor  # (n, c + 1) coordinates of the weighted residuals
    roots: Tensor  # (n, c + 1, c) coordinates of S
    outputs: Tensor  # (n, c + 1) of the network
    weights: Tensor  # (n,) of the examples
    largest: Tensor  # (n, c // 2) which columns of the Hessian's root are used as they are; zeros where all are
    counted: int  # how many positions count


@dataclass
class SketchedBatches:
    """Batches whose inputs are views of a few mixtures of the outputs, the same in every pass.

    Attributes:
        largest: (n, c // 2) which columns of each example's root are used as they are; `None` in the first pass.
        saved: residuals and roots in the bases of the saved fit, where one was loaded: they must be the same here.
    """

    plain: Batches  # the batches as they are
    network: Network  # the model
    likelihood: Likelihood  # gives residuals and the Hessian's root
    columns: int  # c
    seed: int  # of the random signs
    dtype: torch.dtype  # of the algebra
    largest: Tensor | None = None
    saved: tuple[Tensor, Tensor] | None = None
    notes: list[str] = field(init=False)
    fingerprints: list[tuple[int, ...]] = field(init=False)
    separate: SeparateExamples = field(init=False)

    def __post_init__(self) -> None:
        """Notes and fingerprints are those of the plain batches."""
        self.notes, self.fingerprints = self.plain.notes, self.plain.fingerprints
        self.separate = SeparateExamples(self.network)

    @property
    def loader(self) -> Iterable[Any]:
        """That of the plain batches."""
        return self.plain.loader

    @property
    def positional(self) -> int:
        """How many positional arguments the inputs are."""
        return self.plain.positional

    def __iter__(self) -> Iterator[Batch]:
        """Read all batches once, without a progress bar."""
        return self.read(None)

    def read(self, label: str | None) -> Iterator[Batch]:
        """Read all batches once, in chunks whose bases fit in memory."""
        for batch, _, reduced in self.reduced(label):
            yield self._view(batch, reduced)

    def reduced(self, label: str | None) -> Iterator[tuple[Batch, torch.Size, ReducedBatch]]:
        """Read all batches once: chunks of them, the shape (..., k) of an example's outputs, and the reduced chunks."""
        for number, batch in enumerate(self.plain.read(label)):
            yield from self._chunks(batch, f"batch {number}")

    def sample(self, count: int) -> Iterator[tuple[int, Batch]]:
        """A few batches, in chunks, and their numbers; see `Batches.sample`."""
        for number, batch in self.plain.sample(count):
            for chunk, _, reduced in self._chunks(batch, f"batch {number}"):
                yield number, self._view(chunk, reduced)

    def first(self) -> Batch:
        """The first chunk of the first batch of all."""
        batch, _, reduced = next(self._chunks(self.plain.first(), "batch 0"))
        return self._view(batch, reduced)

    def _view(self, batch: Batch, reduced: ReducedBatch) -> Batch:
        return Batch(OutputMixtures(batch.inputs, reduced.basis), batch.targets, batch.start, batch.size, batch.weights)

    def _chunks(self, batch: Batch, where: str) -> Iterator[tuple[Batch, torch.Size, ReducedBatch]]:
        with torch.no_grad():
            outputs = self.network.shaped(batch.inputs, where).detach()
        check_finite(outputs, "outputs of the model", where)
        self.separate.check(batch.inputs, outputs, where)
        each = outputs[0].numel() * (self.columns + 1) * torch.float64.itemsize
        step = max(1, BASIS_BYTES // each)
        for low in range(0, batch.size, step):
            some = slice(low, min(low + step, batch.size))
            weights = None if batch.weights is None else batch.weights[some]
            chunk = Batch(take(batch.inputs, some), batch.targets[some], batch.start + low, some.stop - low, weights)
            reduced = self._reduce(outputs[some], chunk, where)
            if self.saved is not None:
                self._check_saved(outputs[some], chunk.rows, reduced, where)
            yield chunk, outputs.shape[1:], reduced

    def _check_weights(self, weights: Tensor | None, where: str) -> None:
        """Raise for weights of positions with squared error: residuals without them are not known in a sketch."""
        squared = self.likelihood.squared_error
        if weights is None or weights.ndim == 1 or not squared or bool(((weights == 0) | (weights == 1)).all()):
            return
        raise InputError(
            "expected one weight for each example, or zeros and ones for its positions, where mixtures of the outputs "
            f"are fitted with squared error, got other weights of positions in {where}: the noise variance needs "
            'each position\'s residual without its weight. Fit with hessian_columns="all", or weigh whole examples.'
        )

    def _reduce(self, outputs: Tensor, batch: Batch, where: str) -> ReducedBatch:
        n, k = len(outputs), outputs.shape[-1]
        shaped = outputs.double()  # exact for rounded outputs, however confident
        flat = shaped.reshape(-1, k)
        likelihood = self.likelihood
        targets = likelihood.check_targets(targets_at(batch.targets, outputs, where), flat, where)
        self._check_weights(batch.weights, where)
        weights = position_weights(batch.weights, shaped, likelihood.counted(targets), where)
        each = weights.reshape(-1, 1)
        residuals = (likelihood.residuals(flat, targets) * each).reshape(n, -1)
        sizes = (likelihood.root_sizes(flat, targets) * each).reshape(n, -1)
        largest = self._largest(sizes, batch.rows)
        mixing = mixtures(largest, sizes.shape[1], self.columns, self.seed, batch.start).to(flat)
        roots = likelihood.root_times(flat, targets, mixing.reshape(len(flat), -1, self.columns))
        del mixing  # as large as what it makes
        roots = (roots * each.sqrt().unsqueeze(2)).reshape(n, -1, self.columns)
        check_finite((roots, residuals), f"derivatives of the {likelihood.name} loss", where)
        rounding = torch.finfo(outputs.dtype).eps * outputs.abs().flatten(1).amax(1).double()
        basis, coordinates = joint_basis(roots, residuals, rounding)
        basis = basis.to(outputs.dtype)
        return ReducedBatch(
            basis=basis,
            residuals=coordinates[:, :, -1].to(self.dtype),
            roots=coordinates[:, :, :-1].to(self.dtype),
            outputs=torch.einsum("nj,njc->nc", outputs.flatten(1), basis).to(self.dtype),
            weights=example_weights(batch.weights, weights).to(self.dtype),
            largest=largest,
            counted=int((weights > 0).sum()),
        )

    def _largest(self, sizes: Tensor, rows: slice) -> Tensor:
        """(n, c // 2) which columns of these sizes are used as they are; as in the first pass."""
        n, size = sizes.shape
        if self.largest is not None:
            found = self.largest[rows]
            if self.saved is not None and found.numel() and int(found.max()) >= size:
                raise CorruptArtifactError(
                    f"expected columns 0 to {size - 1} of a Hessian's root for training examples {rows.start} to "
                    f"{rows.stop - 1}, got {int(found.max())} in the saved fit. Fit and save again."
                )
            return found
        if self.columns >= size:
            return torch.zeros(n, self.columns // 2, dtype=torch.int64, device=sizes.device)
        return sizes.topk(self.columns // 2, dim=1).indices

    def _check_saved(self, outputs: Tensor, rows: slice, reduced: ReducedBatch, where: str) -> None:
        """Raise where mixtures computed here differ from those of the saved fit by more than rounding.

        Coordinates are Lipschitz functions of S and r, which change with the outputs about as logarithms do.
        """
        assert self.saved is not None
        residuals, roots = (one[rows] for one in self.saved)
        near = self.network.tolerance * (1.0 + float(outputs.abs().max()))
        size, square = reduced.roots.flatten(1).norm(dim=1), reduced.residuals.norm(dim=1)
        gaps = (reduced.roots - roots).flatten(1).norm(dim=1), (reduced.residuals - residuals).norm(dim=1)
        bounds = size, square + size.square() / self.columns
        for gap, bound, name in zip(gaps, bounds, ("Hessians", "residuals"), strict=True):
            wrong = ~(gap <= min(4.0 * near, 0.5) * bound)
            if bool(wrong.any()):
                at = int(wrong.nonzero()[0])
                raise StaleModelError(
                    f"expected the {name} of the training examples as they were when the fit was saved, got another in "
                    f"{where}, example {rows.start + at} (a difference of {float(gap[at]):.3g} where it is "
                    f"{float(bound[at]):.3g}). The weights are the same, the outputs are not: build the model as it "
                    "was then, and load where it computes in the same precision; or fit again here."
                )


def mixtures(largest: Tensor, size: int, columns: int, seed: int, start: int) -> Tensor:
    """M (n, q, c) with E[M M^T] = I: some columns as they are, random signs times all the others.

    The `largest` (n, c // 2) of q = `size` columns are used as they are; with c = `columns` at least q, M is the
    identity, and zeros. Signs are drawn by the seed and the positions of the examples, from `start` on.

    Examples:
        >>> mixtures(torch.tensor([[1]]), 2, 2, 0, 0)
        tensor([[[1., 0.],
                 [0., 1.]]], dtype=torch.float64)
    """
    n, exact = largest.shape
    found = torch.zeros(n, size, columns, dtype=torch.float64, device=largest.device)
    if columns >= size:
        found[:, :, :size] = torch.eye(size, dtype=found.dtype, device=found.device)
        return found
    signs = torch.stack([random_signs(size, columns - exact, seed, start + at) for at in range(n)])
    found[:, :, exact:] = signs.to(found) / (columns - exact) ** 0.5
    if exact:
        found.scatter_(1, largest.unsqueeze(2).expand(-1, -1, columns), 0.0)
        found.scatter_(1, largest.unsqueeze(1), 1.0)
    return found


def random_signs(size: int, count: int, seed: int, example: int) -> Tensor:
    """(size, count) random signs of one example, the same in every call."""
    # Torch reads 32 bits of a seed.
    generator = torch.Generator(device="cpu").manual_seed((seed * 0x9E3779B1 + example) % 2**32)
    return 2 * torch.randint(0, 2, (size, count), generator=generator, dtype=torch.int8, device="cpu") - 1


def joint_basis(roots: Tensor, residuals: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor]:
    """A basis B (n, K, c + 1) of the columns of S (n, K, c) and r (n, K), and coordinates T with B T = (S, r).

    Both are functions of S and r alone: B T is the polar decomposition of C = (S / |S|, r / (|r| + d)), T its symmetric
    root (C^T C)^1/2 and B = C T^+. Between two machines on which C differs by rounding, T differs by sqrt(2) |dC| at
    most, whatever the rank and however near to each other the singular values, so that B of the one with T of the other
    still gives C. An eigenbasis does not: its vectors change signs, and turn where eigenvalues are nearly equal.

    The direction of r counts whatever its size, except where it is of the order of rounding errors: there d reduces its
    weight, so that noise does not rotate S as well. Rounding errors (n,) are those of the outputs.
    """
    size, length = roots.flatten(1).norm(dim=1), residuals.norm(dim=1)  # (n,)
    floor = RESIDUAL_FLOOR * rounding * size.square() / roots.shape[2]
    scale = torch.cat([size.unsqueeze(1).expand(-1, roots.shape[2]), (length + floor).unsqueeze(1)], dim=1)
    scale = scale.clamp_min(torch.finfo(roots.dtype).tiny)
    columns = torch.cat([roots, residuals.unsqueeze(2)], dim=2) / scale.unsqueeze(1)
    values, vectors = eigh(columns.transpose(1, 2) @ columns)
    positive = values > PARALLEL * values.shape[1] * values[:, -1:]
    root = torch.where(positive, values.clamp_min(0.0).sqrt(), 0.0)
    inverse = torch.where(positive, 1.0 / root, 0.0)
    basis = columns @ (vectors * inverse.unsqueeze(1)) @ vectors.transpose(1, 2)
    coordinates = (vectors * root.unsqueeze(1)) @ vectors.transpose(1, 2) * scale.unsqueeze(1)
    return basis, coordinates
