"""Rows of features of the training set, kept in memory when they fit and recomputed when they do not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from whence.errors import SingularCurvatureError
from whence.tangents.batches import Inputs
from whence.tangents.linearization import Linearization
from whence.tangents.passes import State, elsewhere

CACHE_SHARE = 0.3
"""Rows are kept when they take at most this share of the memory budget."""


class Features(Protocol):
    """A map from inputs to rows z (n, k, r) in which the network is linear."""

    @property
    def notes(self) -> list[str]:
        """What is worth telling about these features."""

    @property
    def size(self) -> int:
        """The number r of features."""

    def rows(self, inputs: Inputs, outputs: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield (which examples of the batch, rows (n, k, r))."""

    def weights(self) -> Tensor:
        """The network's weights in the coordinates of the features, (r,)."""

    def prescale(self, ridge: float | None) -> Tensor:
        """(r,) sizes by which features may be divided so that single precision serves; ones if not known."""

    @property
    def orthonormal(self) -> bool:
        """Whether the features are coordinates along orthonormal directions."""

    def into(self, vectors: Tensor) -> Tensor:
        """Vectors among the selected weights (..., d) along the features (..., r)."""

    def lift(self, step: Tensor) -> Tensor:
        """A step in the features (..., r) as a step of the selected weights (..., d)."""


class TrainingRows:
    """The features of all training examples, in chunks, as often as they are needed."""

    def __init__(self, problem: Linearization, features: Features) -> None:
        """Decide whether the rows can be kept."""
        self.problem = problem
        self.features = features
        need = problem.share * problem.k * features.size * problem.outputs.element_size()
        self.kept: list[tuple[slice, Tensor]] | None = [] if need <= CACHE_SHARE * problem.budget.limit else None
        self._full = False
        self._everywhere = problem.passes.crew.alone

    @property
    def in_memory(self) -> bool:
        """Whether all rows of this process are held at once."""
        return self.kept is not None

    def read(
        self, label: str, state: State | None = None, given: Sequence[Tensor] = ()
    ) -> Iterator[tuple[slice, Tensor]]:
        """One pass: yield (which training examples, rows (n, k, r)); with a state, as `Linearization.read` does."""
        problem = self.problem
        if self.kept is not None and self._full:
            if state is not None:
                known = problem.known(given)
                yield from problem.passes.over(self.kept, lambda item: item[0], label, state, known, noted=False)
                return
            if problem.passes.closed and not self._everywhere:
                raise elsewhere()
            yield from self.kept
            return
        seen: list[tuple[slice, Tensor]] = []
        for batch in problem.read(label, state, given):
            for part, rows in self.features.rows(batch.inputs, problem.k):
                where = slice(batch.start + part.start, batch.start + part.stop)
                check_gradients(rows, where.start)
                if self.kept is not None:
                    seen.append((where, rows))
                yield where, rows
        mine = problem.mine
        if self.kept is not None and sum(len(rows) for _, rows in seen) == mine.stop - mine.start:
            self.kept, self._full = seen, True  # a reader that stops early, or starts late, keeps nothing

    def bring_together(self) -> None:
        """Let every process have the rows of all of them."""
        if self._everywhere:
            return
        crew, problem = self.problem.passes.crew, self.problem
        need = 2.0 * problem.n * problem.k * self.features.size * problem.outputs.element_size()
        problem.budget.require(
            need, "the gradients of all training examples in each process", "Use Exact(road='primal'), or one process."
        )
        found = [rows for _, rows in self.read("rows")]
        everything = crew.gather(torch.cat(found) if found else None, "rows", problem.device)
        self.kept, self._full, self._everywhere = [(slice(0, problem.n), everything)], True, True

    def curved(self, where: slice, rows: Tensor) -> Tensor:
        """Rows scaled by the roots of the loss's Hessian, (n, q, r), so that their Gram matrix is the curvature."""
        roots = self.problem.hessian_roots
        return rows if roots is None else roots[where].transpose(1, 2).to(rows.dtype) @ rows


def check_gradients(rows: Tensor, start: int) -> None:
    """Raise when the features of an example, counted from `start`, are not finite."""
    wrong = ~torch.isfinite(rows).flatten(1).all(1)
    if bool(wrong.any()):
        raise SingularCurvatureError(
            "expected finite gradients of the outputs in the weights, got NaN or infinity for training example "
            f"{start + int(wrong.int().argmax())}. Look for a square root, a logarithm or a norm at zero in the model; "
            "gradients of a float16 model may overflow: use float32."
        )
