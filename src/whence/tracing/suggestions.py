"""What to do next with a budget: labels to check, inputs to label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.display import Column, Shown, Table, numbers, rows_shown
from whence.tangents.batches import Inputs

from .fitted import Fitted
from .tables import frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Suggestion(Shown):
    """Examples in the order in which to take them.

    Attributes:
        index: (b,) positions, in the training set or in the pool.
        score: (b,) why: the size of the studentized residual for labels to check; for inputs to label, the total
            variance that the label takes away, after those before it.
        total: (b,) for inputs to label, the total variance left; empty for labels to check.
        kind: "labels to check" or "inputs to label".
    """

    index: Tensor
    score: Tensor
    total: Tensor
    kind: str

    def __len__(self) -> int:
        """How many."""
        return len(self.index)

    def to_frame(self) -> pandas.DataFrame:
        """One row a suggestion, in order."""
        columns: dict[str, Sequence[Tensor | list[str]]] = {"index": [self.index], "score": [self.score]}
        if len(self.total):
            columns["total"] = [self.total]
        return frame(columns)

    def __repr__(self) -> str:
        """The first few."""
        shown = ", ".join(map(str, self.index[:5].tolist())) + (", ..." if len(self) > 5 else "")
        return f"Suggestion({len(self)} {self.kind}: {shown})"

    def _table(self) -> Table:
        rows, more = rows_shown(len(self), "to_frame()")
        scores = self.score[:rows].tolist()
        largest = max(scores, default=0.0)
        bars = tuple(score / largest if largest > 0 else 0.0 for score in scores)
        columns = [
            Column("rank", tuple(str(row + 1) for row in range(rows))),
            Column("example" if not len(self.total) else "input", tuple(map(str, self.index[:rows].tolist()))),
            Column("doubt" if not len(self.total) else "variance taken", numbers(scores), bars=bars),
        ]
        if len(self.total):
            columns.append(Column("variance left", numbers(self.total[:rows].tolist())))
        return Table(f"{len(self):,} {self.kind}, in this order", tuple(columns), more)


def label_first(fitted: Fitted, pool: Sequence[Inputs], test: Sequence[Inputs] | None, budget: int) -> Suggestion:
    """Inputs of a pool whose labels take away most of the total variance, one after the other.

    The variance is that of the Bayesian reading, V = s^2 J F_lam^-1 J^T, which a label can only lower; Ho may rise
    with a label where the ridge kept it low. Adding an input z with tangents J_z changes products of any two inputs by

        V(x, x') -= V(x, z) (1 / s^2) (I + V(z, z) / s^2)^-1 V(z, x')

    without training, since its label does not enter. Choosing greedily with these updates, two copies of one input are
    not both chosen while anything else would help more.

    Args:
        fitted: the fit.
        pool: batches of inputs without labels.
        test: batches whose total variance is to fall; the pool itself when `None`.
        budget: how many to choose.
    """
    problem = fitted.problem
    k = problem.k
    within = torch.cat([fitted.bread.products(batch, pool) for batch in pool])  # (p, k, p, k)
    p = len(within)
    need = 3.0 * (p * k) ** 2 * within.element_size()
    problem.budget.require(need, f"the products of {p} inputs of the pool", "Pass a smaller pool.")
    matrix = within.reshape(p * k, p * k)
    aims = matrix
    if test is not None:
        aims = torch.cat([fitted.bread.products(batch, pool) for batch in test]).reshape(-1, p * k)
        total = sum(_trace(fitted.bread.products(batch, [batch])) for batch in test)
    else:
        total = float(matrix.diagonal().sum())
    eye = torch.eye(k, dtype=matrix.dtype, device=matrix.device)
    open_ = torch.ones(p, dtype=torch.bool, device=matrix.device)
    index, score, left = [], [], []
    for _ in range(min(budget, p)):
        drops = _drops(matrix, aims, p, k, eye)
        best = int(torch.where(open_, drops, -torch.inf).argmax())
        drop = float(drops[best])
        total -= drop
        open_[best] = False
        index.append(best)
        score.append(drop * fitted.noise_scale)
        left.append(max(total, 0.0) * fitted.noise_scale)
        matrix, aims = _updated(matrix, aims, slice(best * k, (best + 1) * k), eye, same=test is None)
    scores, totals = (torch.tensor(values, dtype=matrix.dtype) for values in (score, left))
    return Suggestion(torch.tensor(index), scores, totals, "inputs to label")


def check_first(suspicion: Tensor, budget: int) -> Suggestion:
    """Training examples with the most doubtful labels."""
    score, index = suspicion.sort(descending=True, stable=True)
    return Suggestion(index[:budget], score[:budget], score.new_zeros(0), "labels to check")


def _drops(matrix: Tensor, aims: Tensor, p: int, k: int, eye: Tensor) -> Tensor:
    """(p,) trace of V(T, z) (I + V(z, z))^-1 V(z, T) for every z, in units of the noise variance."""
    columns = aims.reshape(-1, p, k)
    grams = torch.einsum("tpi,tpj->pij", columns, columns)
    at = torch.arange(p, device=matrix.device)
    own = matrix.reshape(p, k, p, k)[at, :, at]  # (p, k, k)
    solved = torch.linalg.solve(own + eye, grams)
    return torch.diagonal(solved, dim1=1, dim2=2).sum(1)


def _updated(matrix: Tensor, aims: Tensor, at: slice, eye: Tensor, same: bool) -> tuple[Tensor, Tensor]:
    """Products after the label at `at` is known."""
    gain = torch.linalg.solve(matrix[at, at] + eye, matrix[at])  # (k, p k)
    fresh = matrix - matrix[:, at] @ gain
    return fresh, fresh if same else aims - aims[:, at] @ gain


def _trace(products: Tensor) -> float:
    m, k = products.shape[:2]
    return float(products.reshape(m * k, m * k).diagonal().sum())
