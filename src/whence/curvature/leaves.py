"""The core of a sum of leaf values: exact algebra on the leading singular directions of its leaf matrix.

Gradients of a leaf sum are sparse, with one number for each tree. Products with them are sums over bags of rows of a
table, forward (from leaves to examples) and back. The leading directions therefore need a few passes, and no dense
gradient is formed. The part outside them is not dropped: its length is known, and random sums of training rows measure
the curvature along it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from whence.curvature.accumulate import reserve_memory
from whence.curvature.base import AdditiveStructure, MeatRoots, Meats, Predicted, Structure, singular
from whence.curvature.cost import EIGENVECTORS, Cost, ProblemSizes
from whence.curvature.exact import Auto
from whence.curvature.features import CACHE_SHARE, Features
from whence.curvature.primal import (
    FittedPrimal,
    PrimalSandwich,
    algebra_bytes,
    algebra_operations,
    cached_rows_bytes,
    primal_bytes,
)
from whence.data.batches import Inputs
from whence.errors import InputError
from whence.jacobian.functionals import OutputFunctional
from whence.jacobian.leaves import LeafSum
from whence.jacobian.linearization import Linearization

SAMPLE = 20_000  # training rows used to find the directions, evenly spaced
ITERATIONS = 2  # of the subspace iteration: each multiplies by the curvature once
ROW_BYTES = 64 * 2**20  # bytes of rows of features formed at once
LEAF_BYTES = 36.0  # memory of the search, for each direction and leaf
LARGEST_SEARCH = 1e11  # leaves times squared directions; forests of large trees have many leaves
GATHER = 8.0  # one number gathered and added takes as long as this many operations of a matrix product
SUMS = 64  # random sums of training rows that measure the curvature outside the directions


@dataclass(frozen=True)
class LeafFeatures:
    """Coordinates of the gradients of a leaf sum along orthonormal directions of its leaves.

    If a leaf adds to all w outputs at once, they share the directions.
    """

    model: LeafSum
    basis: Tensor  # (leaves, r / w)
    sums: Tensor  # (leaves, 2 s) random sums of training rows outside the directions, and F times them
    notes: list[str] = field(default_factory=list)
    orthonormal: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """The number r of features."""
        return self.basis.shape[1] * self.model.leaf_values.shape[1]

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples, rows (n, k, r)) in single precision."""
        leaves, shown = self._shown(inputs)
        table = (self.basis / self.model.scale.unsqueeze(1)).float().contiguous()  # contiguous rows, as bags read them
        step = max(1, ROW_BYTES // (4 * max(len(self.model.base), outputs) * self.size))
        for low in range(0, len(leaves), step):
            where = slice(low, min(low + step, len(leaves)))
            rows = self._gather(leaves[where], table)
            yield where, rows if shown is None else torch.einsum("nkr,nkc->ncr", rows, shown[where].to(rows.dtype))

    def _shown(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        """Leaves (n, trees), and the matrix (n, k, c) of a functional, which is linear in the outputs."""
        if not isinstance(inputs, OutputFunctional):
            return inputs["leaves"], None
        leaves = inputs.inputs["leaves"]
        eye = torch.eye(len(self.model.base), dtype=torch.float64, device=leaves.device)
        return leaves, torch.stack([inputs.apply(one.expand(len(leaves), -1)) for one in eye], 1)

    def _gather(self, leaves: Tensor, table: Tensor) -> Tensor:
        model = self.model
        if model.outputs is not None:
            each = [leaves[:, model.outputs == output].contiguous() for output in range(len(model.base))]
            return torch.stack([F.embedding_bag(some, table, mode="sum") for some in each], 1)
        found, k = F.embedding_bag(leaves, table, mode="sum"), len(model.base)
        rows = found.new_zeros(len(leaves), k, k, found.shape[1])
        rows.diagonal(dim1=1, dim2=2).copy_(found.unsqueeze(2).expand(-1, -1, k))
        return rows.flatten(2)

    def squared_lengths(self, inputs: Inputs) -> Tensor:
        """(n, k) squared lengths of the whole gradients."""
        leaves, shown = self._shown(inputs)
        each = 1.0 / self.model.scale[leaves.long()].square()  # (n, trees)
        if self.model.outputs is None:
            by_output = each.sum(1, keepdim=True).expand(-1, len(self.model.base))
        else:
            by_output = each @ self.model.one_hot_outputs(each.dtype)
        return by_output if shown is None else torch.einsum("nkc,nk->nc", shown.square().to(each.dtype), by_output)

    def curvature_outside(self, inputs: Inputs, outputs: int) -> Tensor:
        """(2, n, k) z F z^T and z F^3 z^T outside the directions, measured by random sums."""
        parts = [
            rows.square().unflatten(2, (-1, 2, SUMS)).sum((2, 4))
            for _, rows in replace(self, basis=self.sums).rows(inputs, outputs)
        ]
        return torch.cat(parts).to(self.sums.dtype).movedim(2, 0)

    def weights(self) -> Tensor:
        """The leaf values in these coordinates, (r,)."""
        return self.into(self.model.leaf_values.detach().flatten())

    def into(self, vectors: Tensor) -> Tensor:
        """V^T v: vectors (..., d) over the leaf values to these coordinates (..., r)."""
        wide = vectors.reshape(*vectors.shape[:-1], *self.model.leaf_values.shape)
        return (wide.mT @ self.basis.to(vectors.dtype)).flatten(-2)

    def lift(self, step: Tensor) -> Tensor:
        """V z: from coordinates (..., r) back to the leaf values (..., d)."""
        wide = step.reshape(*step.shape[:-1], -1, self.basis.shape[1])
        return (self.basis.to(step.dtype) @ wide.mT).flatten(-2)


@dataclass(frozen=True, eq=False, kw_only=True)
class FittedLeaves(FittedPrimal):
    """The primal algebra on leading directions, with leverages that include the part outside them."""

    @classmethod
    def fit(cls, problem: Linearization, features: Features, ridge: float | None) -> FittedPrimal:
        """Add o / (lambda + o + f) to the leverages, for a squared length o outside the directions.

        f is the curvature there from other rows, a mean over all rows. No leverage exceeds |z|^2 / (lambda + |z|^2),
        the leverage of a row that shares no leaf with others.
        """
        assert isinstance(features, LeafFeatures)
        found = super().fit(problem, features, ridge)
        whole, met = torch.empty_like(problem.outputs), torch.empty_like(problem.outputs)  # (n, k)
        for batch in problem.read("lengths"):
            whole[batch.rows] = features.squared_lengths(batch.inputs).to(whole.dtype)
            met[batch.rows] = features.curvature_outside(batch.inputs, problem.k)[0].to(met.dtype)
        inside = torch.cat([some.square().sum(2) for _, some in found.rows.read("lengths")]).to(problem.dtype)
        outside = (whole - inside).clamp_min(0.0)
        curved = torch.ones_like(whole) if problem.identity_hessians else problem.hessian_roots.square().sum(2)
        curvature = curved * outside
        others = (curved * met - curvature.square()).sum() / curvature.sum().clamp_min(torch.finfo(met.dtype).tiny)
        share = outside / (found.ridge + curvature + others.clamp_min(0.0))
        most = whole / (found.ridge + curved * whole)
        diagonal = found.leverage_blocks.diagonal(dim1=1, dim2=2)
        diagonal.copy_(torch.maximum(diagonal, torch.minimum(diagonal + share, most)))
        return found

    def sandwich(self, meats: Meats) -> LeafSandwich:
        """Meats in whitened coordinates."""
        found = super().sandwich(meats)
        return LeafSandwich(found.fitted, found.matrices, found.total)


@dataclass(frozen=True)
class LeafSandwich(PrimalSandwich):
    """Quadratic forms in whitened coordinates, plus the part outside."""

    def predict(self, inputs: Inputs) -> Predicted:
        """Add the part outside to z A z^T and to z A F A z^T, with A the inverse curvature.

        Outside, z has a part along which F is f, f^2 = z F^3 z^T / z F z^T, and a part along which F is zero. Ho is the
        noise times the second form, and is multiplied by the growth of that form. HeC0 to HeC3 get the same factor:
        labels count as much outside as inside.
        """
        found, fitted = super().predict(inputs), self.fitted
        features, problem = fitted.features, fitted.problem
        assert isinstance(features, LeafFeatures)
        count = problem.output_count(inputs)
        solver = fitted.whiten.inverse / fitted.whiten.scale
        curvature = -fitted.ridge * solver @ solver.T  # F in whitened coordinates
        curvature.diagonal().add_(1.0)
        lengths, forms = [], []
        for _, rows in features.rows(inputs, count):
            white = fitted.whiten(rows)
            lengths.append(rows.square().sum(2).to(problem.dtype))
            forms.append(((white @ curvature.to(white.dtype)) * white).sum(2).to(problem.dtype))
        outside = (features.squared_lengths(inputs) - torch.cat(lengths)).clamp_min(0.0)
        laplace = found.covariances["laplace"].diagonal(dim1=1, dim2=2)
        spread = torch.cat(forms).clamp_min(torch.finfo(torch.float32).eps * laplace)  # z A F A z^T
        first, third = features.curvature_outside(inputs, count)
        damped = fitted.ridge + (third / first.clamp_min(torch.finfo(first.dtype).tiny)).sqrt()
        growth = torch.where(first > 0, first / damped.square() / spread, 0.0)  # leaves without rows have neither
        root = (1.0 + growth).sqrt()
        for name, covariance in found.covariances.items():
            if name != "laplace":
                covariance.mul_(root.unsqueeze(2) * root.unsqueeze(1))
        laplace.add_(torch.maximum(outside / damped, (outside - first / damped) / fitted.ridge))
        return found


@dataclass(frozen=True)
class LeafCore(AdditiveStructure):
    """Exact algebra on the leading singular directions of the leaf matrix of trees.

    Args:
        size: number of directions; when `None`, chosen from the size of the data and the memory limit.
        seed: seed of the search for them.

    Examples:
        >>> LeafCore(size=100).size
        100
    """

    name: ClassVar[str] = "core"
    takes_groups: ClassVar[bool] = True
    size: int | None = None
    largest: int = 1024
    seed: int = 0

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots) -> FittedPrimal:
        """Find the directions, then run the primal algebra along them."""
        model = problem.network.model
        if not isinstance(model, LeafSum):
            raise InputError(f'expected trees for {self!r}, got {type(model).__name__}. Use structure="core".')
        if ridge == 0:
            raise singular(0.0, 1, problem.selection.size)
        width, leaves = model.leaf_values.shape[1], len(model.scale)  # outputs that a leaf adds to
        wanted = self._wanted(leaves, width, problem.budget.limit) // width
        r = max(1, min(wanted, leaves, problem.n * (problem.k if width == 1 else 1)))
        features = LeafFeatures(model, *leading_directions(problem, model, r, self.seed))
        need, what = primal_bytes(features.size), f"a core of {features.size} directions"
        left = reserve_memory(problem, need, what, "Lower `size`.")
        features.notes.append(
            f"{features.size} leading directions of {problem.selection.size} leaf values; what lies outside of them "
            "counts by its length, and by the curvature there as random sums of training rows measure it"
        )
        return FittedLeaves.fit(left, features, ridge)

    def _wanted(self, leaves: int, width: int, limit: float) -> int:
        """Total number of directions: `size`, or what memory and about ten seconds of algebra allow."""
        algebra = (limit / primal_bytes(1)) ** 0.5
        memory, seconds = CACHE_SHARE * limit / (LEAF_BYTES * leaves), (LARGEST_SEARCH / leaves) ** 0.5
        return self.size or int(min(self.largest, algebra, width * memory, width * seconds))

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Directions from a sample of the training rows, then the algebra along them."""
        r = max(1, min(self._wanted(sizes.d, 1, sizes.limit), sizes.d, sizes.numbers))
        sample, square = min(sizes.n, SAMPLE / sizes.k), float(r) ** 2
        gather = GATHER * sizes.entries * r  # for each row
        rows = cached_rows_bytes(sizes, r, 4, primal_bytes(r))
        algebra = algebra_bytes(sizes, r, rows, 3.0 * min(ROW_BYTES, 4.0 * sizes.numbers * r))
        directions = 50.0 * sample * sizes.entries + sizes.d * (LEAF_BYTES * r + 32.0 * SUMS)
        search = (2 * ITERATIONS + 2) * sample * gather + 12.0 * (ITERATIONS + 1) * sizes.d * square
        reading = sizes.n * gather * (1.0 if rows else 4.0)
        operations = search + EIGENVECTORS * r * square + reading + algebra_operations(sizes, r)
        return Cost(self.name, max(directions, 8.0 * sizes.d * r + algebra), 0.0, operations)


def leading_directions(problem: Linearization, model: LeafSum, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """(leaves, r) orthonormal directions that nearly span the leading ones of the curvature F of leaf values.

    Found by subspace iteration on a sample of the training rows, with Rayleigh quotients at the end. Outputs do not
    mix. Also returns (leaves, 2 s): random sums of the parts of rows outside, whose products with themselves have the
    mean F, and F times these sums.
    """
    forth, back, step = sampled_leaves(problem, model)
    extra = min(len(model.scale), count + max(8, count // 16))
    generator = torch.Generator("cpu").manual_seed(seed)
    found = torch.randn(len(model.scale), extra, generator=generator, device="cpu").to(problem.device)
    for _ in range(ITERATIONS):
        found = torch.linalg.qr(back.times(forth.times(found))).Q.contiguous()
    moved = forth.times(found).double()
    order = torch.linalg.eigh(moved.T @ moved).eigenvectors.flip(1)[:, :count]
    vectors: Tensor = torch.linalg.qr(found.double() @ order).Q.contiguous()
    signs = torch.randint(0, 2, (len(forth.starts), SUMS), generator=generator, device="cpu").to(found) * 2.0 - 1.0
    sums = back.times(signs).double() * (step / SUMS) ** 0.5
    sums -= vectors @ (vectors.T @ sums)
    moved = step * back.times(forth.times(sums.float())).double()
    return vectors, torch.cat([sums, moved - vectors @ (vectors.T @ moved)], 1)


@dataclass(frozen=True)
class Bags:
    """A sparse matrix, stored row by row."""

    columns: Tensor  # (entries,) column of each entry
    starts: Tensor  # (rows,) where the entries of each row begin
    values: Tensor  # (entries,)

    def times(self, dense: Tensor) -> Tensor:
        """The matrix times a dense one."""
        return F.embedding_bag(self.columns, dense, self.starts, mode="sum", per_sample_weights=self.values)


def sampled_leaves(problem: Linearization, model: LeafSum) -> tuple[Bags, Bags, int]:
    """The leaf matrix of some training rows, times roots of their curvature; its transpose; and the step between rows.

    A row of the matrix is one output of a training row, or a training row if leaves add to all outputs. Training rows
    are evenly spaced, and fewer if there are several outputs.
    """
    k = 1 if model.outputs is None else len(model.base)
    step = max(1, -(-problem.n * k // SAMPLE))
    read = problem.read("leaves")
    leaves = torch.cat([batch.inputs["leaves"][-batch.start % step :: step] for batch in read]).long()
    curved = problem.hessian_roots[::step].square().sum(2)
    output = torch.zeros(leaves.shape[1], dtype=torch.int64, device=leaves.device)
    if model.outputs is None:
        curved = curved.mean(1, keepdim=True)
    else:
        output, order = model.outputs.sort(stable=True)
        leaves = leaves[:, order]
    values = (curved[:, output].sqrt() / model.scale[leaves]).float().flatten()
    rows = (k * torch.arange(len(leaves), device=leaves.device).unsqueeze(1) + output).flatten()
    leaf = leaves.flatten()
    by_leaf = leaf.argsort(stable=True)
    forth = Bags(leaf.int(), _starts(rows, k * len(leaves)), values)
    return forth, Bags(rows[by_leaf].int(), _starts(leaf, len(model.scale)), values[by_leaf]), step


def _starts(places: Tensor, count: int) -> Tensor:
    """(count,) where the entries of each place begin, after sorting by place."""
    sizes = torch.bincount(places, minlength=count)
    return (sizes.cumsum(0) - sizes).int()


@dataclass(frozen=True)
class LeafAuto(Auto):
    """Exact where it fits in memory and takes a few seconds, else the leading directions of the leaves."""

    # lower than for networks: the core is as good
    most_operations: ClassVar[Mapping[str, float]] = {"cpu": 3e10, "cuda": 4e13}
    fallback: ClassVar[Structure] = LeafCore()
    primal_first: ClassVar[bool] = True  # such a fit can be loaded and predict without the training data
