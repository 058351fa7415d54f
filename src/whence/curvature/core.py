"""Exact algebra on few features: the largest coordinates of the Kronecker eigenbasis (core), or a random sketch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from whence.curvature.accumulate import LayerGradients, reserve_memory, working_precision
from whence.curvature.base import AdditiveStructure, MeatRoots, singular
from whence.curvature.cost import Cost, ProblemSizes
from whence.curvature.ekfac import factor_cost
from whence.curvature.kronecker import KroneckerFactors, example_step, fit_spectrum
from whence.curvature.primal import (
    FittedPrimal,
    Projected,
    algebra_bytes,
    algebra_operations,
    cached_rows_bytes,
    primal_bytes,
)
from whence.curvature.rotation import Basis
from whence.jacobian.gradients import Block
from whence.jacobian.linearization import Linearization

RANKED = 256  # least number of sequences from which coordinates are ranked
QUICK_SIZE = 2048  # features that are always allowed, for any number of examples
SHARE = 0.99  # share of EKFAC's effective degrees of freedom in a core
LARGEST = 8192  # maximum number of coordinates of a core
OPERATIONS = {"cpu": 1e11, "cuda": 2e14}  # most n k r^2 above QUICK_SIZE: about five seconds on one CPU core
SKETCH_SIZE, SKETCH_SHARE = 6144, 0.3  # maximum number of features of a sketch, and its share of OPERATIONS


@dataclass(frozen=True)
class Core(AdditiveStructure):
    """The exact algebra on the r largest coordinates of the Kronecker eigenbasis, terms across layers included.

    Leverages are true leverages (in [0, 1), no guard), and variances have the right scale, unlike EKFAC's.

    Args:
        size: r. When `None`, as many coordinates as hold 99 % of EKFAC's effective degrees of freedom, but at most 8192
            and what fits in memory; on a CPU with many examples also what takes some ten seconds, or 2048.
        tolerance: as for EKFAC. Coordinates outside the truncated basis are never chosen.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> tracer = whence.fit(net, [(x, x**2)], structure=whence.Core(size=12), ridge=0.1, progress=False)
        >>> tracer.predict(x[:2]).hec3.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "core"
    takes_groups: ClassVar[bool] = True
    size: int | None = None
    tolerance: float = 1e-3

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedPrimal:
        """Factors, eigenvalues, then the primal algebra on the chosen coordinates."""
        gradients = LayerGradients(problem)
        notes = list(gradients.notes)
        bases, _ = gradients.accumulate(KroneckerFactors(gradients)).eigenbases(ridge or 0.0, self.tolerance, notes)
        every = example_step(problem, gradients.blocks, RANKED)
        spectrum = [block.curvature.inside for block in fit_spectrum(gradients, bases, None, notes, every)]
        chosen, share, r = self._choose(spectrum, problem, ridge)
        trimmed = [without_unused_columns(basis, index) for basis, index in zip(bases, chosen, strict=True)]
        notes.append(f"core of {r} coordinates, {100 * share:.1f} % of the degrees of freedom EKFAC counts")
        features = Projected(gradients, [one for one, _ in trimmed], [index for _, index in trimmed], notes)
        left = reserve_memory(problem, primal_bytes(r), f"a core of {r} coordinates", "Lower `size`.")
        return FittedPrimal.fit(left, features, ridge)

    def _choose(
        self, spectrum: Sequence[Tensor], problem: Linearization, ridge: float | None
    ) -> tuple[list[Tensor], float, int]:
        """Flat positions of the coordinates in each block, the share of degrees of freedom, and their number."""
        joined = torch.cat([s.reshape(-1) for s in spectrum])
        order = joined.argsort(descending=True, stable=True)
        ordered = joined[order]
        if not ridge and not float(ordered[0]) > 0:
            raise singular(0.0, len(ordered), len(ordered))
        lam = ridge if ridge else 1e-12 * float(ordered[0])
        freedom = (ordered / (ordered + lam)).cumsum(0)
        useful = int((ordered > 1e-12 * ordered[0]).sum())
        if self.size is not None:
            # With a ridge, directions without training gradients count too: predictions may depend on them.
            r = min(self.size, useful if ridge == 0 else len(ordered))
        else:
            wanted = int(torch.searchsorted(freedom, SHARE * freedom[-1])) + 1
            most = quick_size(problem.n * problem.k, problem.device, problem.budget.limit)
            r = max(1, min(wanted, LARGEST, most, useful))
        picked = torch.zeros(len(joined), dtype=torch.uint8, device=joined.device)
        picked[order[:r]] = 1
        problem.passes.process_group.broadcast([picked], 0, "the core")  # other processes may round sums differently
        r = int(picked.sum(dtype=torch.int64))
        parts = picked.split([s.numel() for s in spectrum])
        share = float(freedom[r - 1] / freedom[-1]) if float(freedom[-1]) > 0 else 1.0
        return [part.nonzero().squeeze(1) for part in parts], share, r

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        r = min(self.size or min(LARGEST, quick_size(sizes.numbers, sizes.device, sizes.limit)), sizes.d)
        peak, bases, decompositions = factor_cost(sizes)
        found = sketch_cost(sizes, self.name, r, bases)
        sample = affordable_sample(sizes.d, sizes.k, sizes.limit) if r < sizes.d else None
        more = 0.0 if sample is None else sample_bytes(sizes.d, sizes.k, *sample)
        eigenvalues = bases + 10.0 * 8 * sizes.d + sizes.layer_bytes
        return replace(
            found,
            memory=max(peak, eigenvalues, found.memory + more),
            passes=found.passes + 2.0,
            operations=found.operations + decompositions + sizes.n * (sizes.rotations + sizes.squares),
            least=max(peak, bases + primal_bytes(r) if self.size else 0.0),
        )


def quick_size(numbers: int, device: torch.device, limit: float = math.inf, share: float = 1.0) -> int:
    """Number of features whose algebra takes a share of OPERATIONS for n k `numbers`, and at least QUICK_SIZE.

    The features always fit in `limit` bytes.

    Examples:
        >>> quick_size(10_000, torch.device("cpu")), quick_size(10**6, torch.device("cpu"))
        (3162, 2048)
    """
    quick = (share * OPERATIONS["cuda" if device.type == "cuda" else "cpu"] / max(numbers, 1)) ** 0.5
    return int(min(max(QUICK_SIZE, quick), (limit / primal_bytes(1)) ** 0.5))


def without_unused_columns(basis: Basis, index: Tensor) -> tuple[Basis, Tensor]:
    """Drop the columns of a basis that no chosen coordinate uses; return the coordinates' new positions too."""
    block = basis.block
    if not len(index) or block.kind != "kronecker" or basis.inputs is None or basis.outputs is None:
        return basis, index
    _, o, i = basis.shape
    group, row, column = index // (o * i), (index // i) % o, index % i
    rows, at_row = torch.unique(row, return_inverse=True)
    columns, at_column = torch.unique(column, return_inverse=True)
    return basis.select(rows, columns), (group * len(rows) + at_row) * len(columns) + at_column


# --- Gradients outside the core: a sample of them ---


# Numbers of sources, of predicted points, and of columns of each source's Hessian root. A fit takes the first sample
# that fits in a tenth of its memory and in LARGEST_SAMPLE bytes.
SAMPLES = ((24, 12, 3), (12, 8, 2))
LARGEST_SAMPLE = 2**30


def affordable_sample(d: int, k: int, limit: float) -> tuple[int, int, int] | None:
    """The largest sample whose gradients fit in memory, if there is one."""
    room = min(LARGEST_SAMPLE, 0.1 * limit)
    return next((one for one in SAMPLES if sample_bytes(d, k, *one) <= room), None)


def sample_bytes(d: int, k: int, sources: int, points: int, columns: int) -> float:
    """Memory of a sample's gradients in float32, and of one example's in float64 while they are projected."""
    columns = min(columns, k)
    return float(d) * (4 * (points + sources * (columns + 1)) + 8 * 8 * (columns + 2))


@dataclass(frozen=True)
class Sketch(AdditiveStructure):
    """Exact algebra on random Kronecker projections of the gradients: one pass, no eigendecomposition of factors.

    Args:
        size: number of features over all blocks; small blocks are kept whole. When `None`: 2048 for many examples, up
            to 6144 for fewer.
        seed: seed of the random projections.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 30, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
        >>> tracer = whence.fit(net, [(x, x**2)], structure=whence.Sketch(size=12), ridge=0.1, progress=False)
        >>> tracer.predict(x[:2]).hec3.shape
        torch.Size([2, 1])
    """

    name: ClassVar[str] = "sketch"
    takes_groups: ClassVar[bool] = True
    size: int | None = None
    seed: int = 0

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedPrimal:
        """Draw the projections, then run the primal algebra on them."""
        size = self._size(problem.n * problem.k, problem.device)
        features = sketch_features(LayerGradients(problem), size, self.seed)
        bases = [one for basis in features.bases for one in basis.tensors]
        problem.passes.process_group.broadcast(bases, 0, "the sketch")  # other processes may round them differently
        r = features.size
        features.notes.append(f"random sketch of {r} features for {problem.selection.size} weights")
        left = reserve_memory(problem, primal_bytes(r), f"a sketch of {r} features", "Lower `size`.")
        return FittedPrimal.fit(left, features, ridge)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of a fit."""
        return sketch_cost(sizes, self.name, min(self._size(sizes.numbers, sizes.device), sizes.d))

    def _size(self, numbers: int, device: torch.device) -> int:
        """Number of features for n k `numbers`."""
        return self.size or min(SKETCH_SIZE, quick_size(numbers, device, share=SKETCH_SHARE))


def sketch_features(gradients: LayerGradients, size: int, seed: int) -> Projected:
    """Random projections of the gradients to about `size` features, the same in every call up to rounding."""
    problem = gradients.problem
    generator = torch.Generator("cpu").manual_seed(seed)
    shares = allot([block.numel for block in gradients.blocks], size)
    bases = [random_basis(block, share, generator) for block, share in zip(gradients.blocks, shares, strict=True)]
    moved = [basis.to(working_precision(problem), problem.device) for basis in bases]
    indices = [torch.arange(math.prod(basis.shape), device=problem.device) for basis in moved]
    return Projected(gradients, moved, indices, list(gradients.notes), orthonormal=False)


def allot(sizes: Sequence[int], total: int) -> list[int]:
    """Distribute features over blocks: small blocks are kept whole, the rest share evenly.

    Examples:
        >>> allot([10, 1000, 1000], 110)
        [10, 50, 50]
    """
    shares = [0] * len(sizes)
    left = total
    for rank, at in enumerate(sorted(range(len(sizes)), key=lambda at: sizes[at])):
        shares[at] = min(sizes[at], max(1, left // (len(sizes) - rank)))
        left -= shares[at]
    return shares


def random_basis(block: Block, share: int, generator: torch.Generator) -> Basis:
    """A random basis of about `share` coordinates with U U^T equal to the identity on average."""
    if share >= block.numel:
        return Basis(block)
    if block.kind != "kronecker":
        columns = max(1, share // math.prod(block.matrix_shape[:-1]))
        return Basis(block, inputs=orthonormal(1, block.matrix_shape[-1], columns, generator)[0])
    e, o, i = block.matrix_shape
    each = max(1, share // e)
    above = min(o, max(1, round(each**0.5)))
    below = min(i, max(1, each // above))
    above = min(o, max(1, each // below))
    return Basis(block, orthonormal(e, i, below, generator), orthonormal(e, o, above, generator))


def orthonormal(groups: int, size: int, columns: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal columns scaled so that U U^T is the identity on average: (groups, size, columns)."""
    normal = torch.randn(groups, size, columns, generator=generator, dtype=torch.float64, device="cpu")
    vectors: Tensor = torch.linalg.qr(normal).Q
    scaled: Tensor = vectors * math.sqrt(size / columns)
    return scaled


# --- Cost ------------------------------------------------------------------------------------------------------------


def sketch_cost(sizes: ProblemSizes, name: str, r: int, bases: float | None = None) -> Cost:
    """Cost of the exact algebra on r features; `bases` is in bytes, by default for random projections."""
    if bases is None:
        bases = sum(math.sqrt(block.numel) for block in sizes.blocks) * math.sqrt(r) * sizes.working
    rows = cached_rows_bytes(sizes, r, sizes.working, primal_bytes(r))
    disk = float(sizes.numbers) * r * sizes.working if sizes.scratch and not rows else 0.0
    chunk = sizes.layer_bytes + 3.0 * sizes.layer_chunk * sizes.k * r * sizes.working
    passes = 1.0 if rows or disk else 4.0
    features = passes * sizes.n * (sizes.rotations + sizes.squares)
    algebra = algebra_operations(sizes, r) * sizes.working / sizes.item
    return Cost(name, bases + algebra_bytes(sizes, r, rows, chunk), passes, features + algebra, disk=disk)
