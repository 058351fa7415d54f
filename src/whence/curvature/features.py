"""Features of the training examples: rows z (n, k, r) in which the network is linear, cached or computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from whence.curvature.accumulate import working_precision
from whence.data.batches import Inputs
from whence.jacobian.linearization import Linearization
from whence.linalg import gradients_not_finite
from whence.runtime.checkpoint import State
from whence.runtime.execution import partial_data_error
from whence.runtime.memory import drop_pages, on_disk, readable

CACHE_SHARE = 0.3  # largest share of the memory budget for cached rows of features


class Features(Protocol):
    """A map from inputs to rows z (n, k, r) in which the network is linear."""

    @property
    def notes(self) -> list[str]:
        """What a user should know about these features."""

    @property
    def size(self) -> int:
        """The number r of features."""

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples of the batch, rows (n, k, r))."""

    def weights(self) -> Tensor:
        """The network's weights in the coordinates of the features, (r,)."""

    @property
    def orthonormal(self) -> bool:
        """Whether the features are coordinates along orthonormal directions."""

    def into(self, vectors: Tensor) -> Tensor:
        """Vectors (..., d) over the selected weights to the features (..., r)."""

    def lift(self, step: Tensor) -> Tensor:
        """A step in the features (..., r) as a step of the selected weights (..., d)."""


def groups_within_memory(index: Tensor, problem: Linearization, numbers_each: float) -> Iterator[Tensor]:
    """Yield positions (groups, size) of the members of groups of one size, as many groups at once as fit in memory.

    `index` (n,) numbers the groups. `numbers_each` numbers are held for each output of a member, besides the square of
    the group's outputs.
    """
    order = torch.argsort(index, stable=True)
    sizes = torch.bincount(index)
    starts = sizes.cumsum(0) - sizes
    for size in sizes.unique().tolist():
        members = order[starts[sizes == size].unsqueeze(1) + torch.arange(size, device=order.device)]
        wide = size * problem.k
        need = problem.outputs.element_size() * wide * (numbers_each + 6.0 * wide)
        problem.budget.require(need, f"a group of {size} examples", "Make smaller groups, or select fewer parameters.")
        yield from members.split(max(1, int(0.1 * problem.budget.limit / need)))


class TrainingRows:
    """Features of all training examples: in memory if they fit, else on disk if a folder was given, else recomputed."""

    def __init__(self, problem: Linearization, features: Features) -> None:
        self.problem = problem
        self.features = features
        numbers = (problem.passes.most_examples or problem.n) * problem.k * features.size
        self.in_memory = numbers * problem.outputs.element_size() <= CACHE_SHARE * problem.budget.limit
        self._mapped: Tensor | None = None  # (n, k, r) rows of this process, on disk
        if not self.in_memory and problem.passes.scratch is not None:
            mine = problem.local_rows
            shape = (mine.stop - mine.start, problem.k, features.size)
            self._mapped = on_disk(problem.passes.scratch, shape, working_precision(problem))
            features.notes.append(f"features of the training examples are on disk, {readable(self._mapped.nbytes)}")
        self._cached: list[tuple[slice, Tensor]] = []  # all rows of this process, or none

    @property
    def complete(self) -> bool:
        """Whether the rows of all training examples are in the memory of this process."""
        return self.in_memory and self.problem.passes.process_group.alone

    def read(
        self, label: str, state: State | None = None, given: Sequence[Tensor] = ()
    ) -> Iterator[tuple[slice, Tensor]]:
        """One pass: yield (which training examples, rows (n, k, r)); `state` as in `Linearization.read`."""
        problem = self.problem
        if self._cached:
            kept = ((where, rows.to(problem.device)) for where, rows in self._cached)
            pieces = problem.progress.track(kept, f"{label}, part", len(self._cached))
            if state is not None:
                known = problem.dependencies(given)
                pieces = problem.passes.over(pieces, lambda item: item[0], label, state, known, resumable=False)
            elif problem.passes.closed:
                raise partial_data_error()
            for where, rows in pieces:
                yield where, rows
                if self._mapped is not None:
                    drop_pages(self._rows_on_disk(where))
            return
        found: list[tuple[slice, Tensor]] = []
        mine = problem.local_rows
        for where, rows in self._computed(label, state, given):
            if self._mapped is not None:
                into = self._rows_on_disk(where)
                found.append((where, into.copy_(rows)))
                drop_pages(into)
            elif self.in_memory:
                found.append((where, rows))
            yield where, rows
        if sum(len(rows) for _, rows in found) == mine.stop - mine.start:
            self._cached = found  # a pass that stops early or starts late caches nothing

    def _rows_on_disk(self, where: slice) -> Tensor:
        """The part of the file that belongs to some examples of this process."""
        assert self._mapped is not None
        first = self.problem.local_rows.start
        return self._mapped[where.start - first : where.stop - first]

    def _computed(self, label: str, state: State | None, given: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
        """As `read`, from the training data."""
        checked: list[tuple[int, Tensor]] = []
        for batch in self.problem.read(label, state, given):
            for part, rows in self.features.rows(batch.inputs, self.problem.k):
                where = slice(batch.start + part.start, batch.start + part.stop)
                checked.append((where.start, finite_examples(rows)))
                if not rows.is_cuda:  # checking each would make a GPU wait
                    check_gradients(checked)
                yield where, rows
        check_gradients(checked)

    def read_groups(
        self,
        label: str,
        index: Tensor,
        width: int,
        given: Sequence[Tensor],
        transform: Callable[[Tensor, Tensor], Tensor],
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (members (groups, size), their rows (groups, size k, w)): one pass for as many groups as fit in memory.

        `index` (n,) numbers the groups; `transform` maps positions of examples and their rows to rows (n, k, w).
        """
        problem = self.problem
        for members in groups_within_memory(index, problem, width):
            flat = members.reshape(-1)
            found = problem.outputs.new_zeros(len(flat), problem.k, width)
            for where, rows in self.read(label, {"rows": found}, [*given, members]):
                into = ((flat >= where.start) & (flat < where.stop)).nonzero().squeeze(1)
                found[into] = transform(flat[into], rows[flat[into] - where.start]).to(found.dtype)
            yield members, found.reshape(len(members), -1, width)

    def kernel(self) -> tuple[Tensor, Tensor]:
        """K = J J^T (n k, n k), and J w (n, k). Rows that do not fit in memory are recomputed for each block of K."""
        problem, size, k = self.problem, self.problem.n * self.problem.k, self.problem.k
        kernel = torch.empty(size, size, dtype=problem.dtype, device=problem.device)
        inner, weights = torch.empty_like(problem.outputs), self.features.weights()
        if self.in_memory:
            flat = torch.cat([rows.flatten(0, 1) for _, rows in self.read("kernel")])
            return torch.mm(flat, flat.T, out=kernel), (flat @ weights).view_as(inner)
        most = max(1, int(0.2 * problem.budget.limit) // (k * self.features.size * kernel.element_size()))
        pending, start = list[Tensor](), 0
        for where, rows in self.read("kernel"):
            inner[where] = rows @ weights
            pending.append(rows.flatten(0, 1))
            if where.stop - start >= most or where.stop == problem.n:
                kernel[start * k : where.stop * k] = self.times(torch.cat(pending))
                pending, start = [], where.stop
        return kernel, inner

    def times(self, vectors: Tensor) -> Tensor:
        """Inner products of vectors (q, r) with all training rows, (q, n k)."""
        found = vectors.new_empty(len(vectors), self.problem.n, self.problem.k)
        for where, rows in self.read("alignments"):
            found[:, where] = (vectors @ rows.flatten(0, 1).T).reshape(len(vectors), -1, self.problem.k)
        return found.flatten(1)

    def times_hessian_roots(self, where: slice, rows: Tensor) -> Tensor:
        """Rows multiplied by the roots of the loss's Hessian, (n, q, r), so that their Gram matrix is the curvature."""
        if self.problem.identity_hessians:
            return rows
        return self.problem.hessian_roots[where].mT.to(rows.dtype) @ rows


def finite_examples(rows: Tensor) -> Tensor:
    """(n,) whether the features (n, k, r) of each example are finite."""
    return torch.isfinite(rows).flatten(1).all(1)


def check_gradients(checked: list[tuple[int, Tensor]]) -> None:
    """Empty a list of (number of the first example, finite (n,)); raise if the features of one are not finite."""
    if checked and not bool(torch.cat([finite for _, finite in checked]).all()):
        start, wrong = next((start, ~finite) for start, finite in checked if not bool(finite.all()))
        raise gradients_not_finite(f"for training example {start + int(wrong.int().argmax())}")
    checked.clear()
