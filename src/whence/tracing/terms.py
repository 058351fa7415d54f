"""Variances, example by example: the terms that Ho and HeC3 are sums of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from whence.tangents.batches import Inputs, batch_size, take

from .fitted import Fitted
from .numeric_range import check_variances

HELD = 2**18
"""Numbers that are squared in one go on a CPU."""


@dataclass(frozen=True)
class Terms:
    """What every training example adds to the variance of each prediction.

    With alignments a_i = J F_lam^-1 J_i^T, noise covariance Sigma and leave-one-out residuals u_i:

    Attributes:
        ho: (m, n) trace of a_i Sigma a_i^T.
        hec3: (m, n) |a_i u_i|^2.
        size: (m, n) Frobenius norm of a_i.
        pull: (m, n, k) a_i u_i, which is f(x) - f_(-i)(x): how far the example holds the prediction from where it
            would be without it.
    """

    ho: Tensor
    hec3: Tensor
    size: Tensor
    pull: Tensor

    def __len__(self) -> int:
        """Number of predictions."""
        return len(self.ho)


def terms_of(fitted: Fitted, inputs: Inputs, apart: bool = False) -> Iterator[tuple[slice, Terms]]:
    """Yield (which predictions, their terms) for as many inputs of a batch as memory allows at once.

    Args:
        fitted: what was fitted.
        inputs: a batch, or a view of its outputs.
        apart: each output that is seen is a prediction of its own, one input's after the other's; else those of an
            input are one prediction.
    """
    problem = fitted.problem
    k = problem.seen(inputs)
    each = k if apart else 1
    row = 8 * problem.n * (k + 3 * each)
    most = max(1, int(0.1 * problem.budget.limit) // row)
    size = batch_size(inputs, "this batch")
    for low in range(0, size, most):
        some = take(inputs, slice(low, min(low + most, size)))
        for where, chunks in fitted.bread.alignments(some):
            m = (where.stop - where.start) * each
            first = (low + where.start) * each
            found = ((at, _apart(aligned) if apart else aligned) for at, aligned in chunks)
            yield slice(first, first + m), _gather(fitted, found, m, k // each)


def _apart(aligned: Tensor) -> Tensor:
    """(m, c, n, k) to (m c, 1, n, k)."""
    return aligned.flatten(0, 1).unsqueeze(1)


def _gather(fitted: Fitted, chunks: Iterator[tuple[slice, Tensor]], m: int, k: int) -> Terms:
    problem = fitted.problem
    n = problem.n
    ho, hec3, size = (torch.empty(m, n, dtype=problem.dtype, device=problem.device) for _ in range(3))
    pull = torch.empty(m, n, k, dtype=problem.dtype, device=problem.device)
    noise, left_out = fitted.meats.roots["ho"], fitted.meats.roots["hec3"]
    for where, aligned in chunks:  # (m, k, n, k), in the precision it was computed in: squares and sums are too
        noise, left_out = noise.to(aligned.dtype), left_out.to(aligned.dtype)
        size[:, where] = _squares(_moved(aligned, None)).sqrt().T
        ho[:, where] = _squares(_moved(aligned, noise if len(noise) == 1 else noise[where])).T
        moved = _moved(aligned, left_out[where])
        hec3[:, where] = _squares(moved).T
        pull[:, where] = moved.sum(1).transpose(0, 1)
    check_variances(problem, {"ho": ho.sum(1, keepdim=True), "hec3": hec3.sum(1, keepdim=True)}, "a batch")
    return Terms(ho, hec3, size, pull)


def _squares(values: Tensor) -> Tensor:
    """(n, q, m, k) to (n, m): sums of squares, by as many examples at a time as stay in a processor's cache."""
    n, q, m, k = values.shape
    few = max(1, HELD // (q * m * k)) if values.device.type == "cpu" else max(1, n)
    return torch.cat([part.square().sum(1).sum(-1) for part in values.split(few)])


def _moved(aligned: Tensor, roots: Tensor | None) -> Tensor:
    """a_i W_i: (m, k, n, c) with (n or 1, c, q) to (n, q, m, k), by products that leave the numbers where they lie."""
    m, k, n, _ = aligned.shape
    lying = aligned.permute(2, 3, 0, 1)
    if roots is None:
        return lying
    if lying.is_contiguous():
        return (roots.transpose(1, 2) @ lying.flatten(2)).reshape(n, -1, m, k)
    if len(roots) == 1:
        return (aligned.reshape(m * k * n, -1) @ roots[0]).reshape(m, k, n, -1).permute(2, 3, 0, 1)
    return torch.einsum("mkni,niq->nqmk", aligned, roots)
