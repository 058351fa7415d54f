"""Suggestion: what to do next with a budget, labels to check or inputs to label."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from whence.data.batches import Inputs, batch_size
from whence.display import Column, Shown, Table, listing, numbers, rows_shown
from whence.influence.fitted import Fitted, check_variances
from whence.results import frame

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Suggestion(Shown):
    """Examples in the order in which to check or label them.

    Attributes:
        index: (b,) positions, in the training set or in the pool.
        score: (b,) for labels to check, how doubtful the label is: the size of the studentized residual, or for classes
            1 - p of the label in the fit without the example. For inputs to label, the total variance that the label
            removes, given the labels before it.
        total: (b,) for inputs to label, the total variance left; empty for labels to check. For classes, variances of
            logits are weighted by the loss's Hessian, so that directions in which an answer is certain do not count.
        kind: "labels to check" or "inputs to label".

    Examples:
        >>> Suggestion(torch.tensor([7, 3]), torch.tensor([5.1, 4.4]), torch.zeros(0), "labels to check")
        Suggestion(2 labels to check: 7, 3)
    """

    index: Tensor
    score: Tensor
    total: Tensor
    kind: str

    def __len__(self) -> int:
        return len(self.index)

    def to_frame(self) -> pandas.DataFrame:
        """Return one row per suggestion, in order."""
        total = {"total": self.total} if len(self.total) else {}
        return frame({"index": self.index, "score": self.score, **total})

    def __repr__(self) -> str:
        return f"Suggestion({len(self)} {self.kind}: {listing(self.index.tolist())})"

    def _table(self) -> Table:
        rows, more = rows_shown(len(self), "to_frame()")
        scores, to_label = self.score[:rows].tolist(), len(self.total) > 0
        largest = max(scores, default=0.0)
        bars = tuple(score / largest if largest > 0 else 0.0 for score in scores)
        columns = [
            Column("rank", tuple(str(row + 1) for row in range(rows))),
            Column("input" if to_label else "example", tuple(map(str, self.index[:rows].tolist()))),
            Column("variance taken" if to_label else "doubt", numbers(scores), bars=bars),
        ]
        if to_label:
            columns.append(Column("variance left", numbers(self.total[:rows].tolist())))
        return Table(f"{len(self):,} {self.kind}, in this order", tuple(columns), more)


def label_first(fitted: Fitted, pool: Sequence[Inputs], budget: int) -> Suggestion:
    """Inputs of a pool whose labels reduce the total variance of the pool most, one after the other.

    The variance is the Bayesian one, V = s^2 J F_lam^-1 J^T, which a label can only lower; Ho may rise with a label if
    the ridge kept it low. Adding an input z with Jacobian J_z changes products of any two inputs by

        V(x, x') -= V(x, z) (1 / s^2) (I + V(z, z) / s^2)^-1 V(z, x')

    without training, since its label is not needed. With these updates, a greedy choice does not take two copies of one
    input while anything else would help more. For losses with a Hessian L = R R^T in the outputs, R^T V R replaces V: a
    label is worth L, and tr L V, summed over inputs, is twice the expected excess loss.
    """
    problem = fitted.problem
    p = sum(batch_size(batch, "the pool") for batch in pool)
    need = 4.0 * (p * problem.k) ** 2 * problem.outputs.element_size()
    problem.budget.require(need, f"the products of {p} inputs of the pool", "Pass a smaller pool.")
    roots = _hessian_roots(fitted, pool)
    products = torch.cat([fitted.bread.products(batch, pool) for batch in pool])  # (p, k, p, k)
    matrix = torch.einsum("mkq,mkpj,pjr->mqpr", roots, products, roots).flatten(0, 1).flatten(1)  # V / s^2, (p q, p q)
    check_variances(problem, {"the Laplace variance": matrix}, "the pool")
    q, total = len(matrix) // p, float(matrix.diagonal().sum())
    eye = torch.eye(q, dtype=matrix.dtype, device=matrix.device)
    available = torch.ones(p, dtype=torch.bool, device=matrix.device)
    found = []  # index, reduction, and the variance left
    for _ in range(min(budget, p)):
        # the trace of V(x, z) (I + V(z, z))^-1 V(z, x) over all x, for every z, in units of the noise variance
        columns = matrix.reshape(-1, p, q)
        own = torch.diagonal(matrix.reshape(p, q, p, q), dim1=0, dim2=2).permute(2, 0, 1)  # (p, q, q)
        solved = torch.linalg.solve(own + eye, torch.einsum("tpi,tpj->pij", columns, columns))
        reductions = torch.diagonal(solved, dim1=1, dim2=2).sum(1)
        check_variances(problem, {"the drop of variance": reductions[available].unsqueeze(1)}, "the pool")
        best = int(torch.where(available, reductions, -torch.inf).argmax())
        total -= float(reductions[best])
        available[best] = False
        found.append((best, float(reductions[best]) * fitted.noise_scale, max(total, 0.0) * fitted.noise_scale))
        at = slice(best * q, (best + 1) * q)
        gain = torch.linalg.solve(matrix[at, at] + eye, matrix[at])  # (q, p q)
        matrix = matrix - matrix[:, at] @ gain
    index, score, left = zip(*found, strict=True)
    scores, totals = (torch.tensor(values, dtype=matrix.dtype, device="cpu") for values in (score, left))
    return Suggestion(torch.tensor(index, device="cpu"), scores, totals, "inputs to label")


def _hessian_roots(fitted: Fitted, batches: Sequence[Inputs]) -> Tensor:
    """(p, k, q) roots of the loss's Hessian, for labels distributed as the network predicts."""
    problem = fitted.problem
    likelihood = problem.likelihood
    found = []
    for batch in batches:
        with torch.no_grad():
            outputs = problem.network(batch).to(problem.dtype)
        expected = outputs
        if likelihood.has_classes:
            expected = likelihood.check_targets(likelihood.probabilities(outputs), outputs, "the pool")
        root = likelihood.hessian_root(outputs, expected)
        found.append(torch.ones_like(outputs).diag_embed() if root is None else root)
    return torch.cat(found)
