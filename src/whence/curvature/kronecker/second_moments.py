"""Second moments: sums of v v^T over examples, positions and cotangents, in the order that is cheapest.

Axis letters: n examples, c cotangents, e groups, t positions, o layer outputs, i layer inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from whence.tangents.factors import cotangents_first, lies_transposed

from .measure import CHUNK_NUMBERS, outer

LONGEST_SUM = 8192
"""Rows whose products are summed in their own precision."""

PANELS = 4
"""A symmetric product is made of about so many panels, 5/8 of the whole, of a multiple of 16 columns."""

LEAST_PANEL = 64
"""Columns of a panel at least: with fewer, a second thread has too little to do."""


def whole_moments(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of G^T G and G G^T, (e, i, i) and (e, o, o), of G = sum_t g_t a_t^T: (n, e, t, i) and (n, c, e, t, o).

    At one position G is never formed; at few, products of positions take its place; at many it is formed.
    """
    n, c, e, t, o = g.shape
    i = a.shape[3]
    if t == 1:
        below = a * g.square().sum((1, 4)).sqrt().unsqueeze(3)
        above = g * a.square().sum(3, keepdim=True).sqrt().unsqueeze(1)
        return summed(below, 1), summed(above, 2)
    by_pairs = 2 * t * t * (c * o + i) + t * i * i + c * t * o * o
    by_matrices = c * t * o * i + c * o * i * (o + i)
    each = t * t if by_pairs <= by_matrices else c * o * i
    step = max(1, CHUNK_NUMBERS["cuda" if a.is_cuda else "cpu"] // (e * each))
    sums = [torch.zeros(e, size, size, dtype=torch.float64, device=a.device) for size in (i, o)]
    for low in range(0, n, step):
        inner, above = a[low : low + step], g[low : low + step]
        if by_pairs <= by_matrices:
            joined = above.permute(0, 2, 3, 1, 4).flatten(3)  # (n, e, t, c o)
            alike_out, alike_in = joined @ joined.transpose(-1, -2), inner @ inner.transpose(-1, -2)
            sums[0] += summed(inner, 1, alike_out @ inner)
            sums[1] += summed(above, 2, alike_in.unsqueeze(1) @ above)
        else:
            below, beyond = matrix_moments(outer(inner, above))
            sums[0] += below
            sums[1] += beyond
    return sums[0], sums[1]


def matrix_moments(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Sums of G^T G and G G^T, (e, i, i) and (e, o, o), of gradient matrices (n, c, e, o, i)."""
    return summed(matrices, 2), summed(matrices.transpose(3, 4), 2)


def summed(values: Tensor, groups: int, other: Tensor | None = None) -> Tensor:
    """Sum v w^T over every axis but the last and that of the groups, for (..., e, ..., i): (e, i, i)."""
    if other is None and cotangents_first(values):
        values = values.transpose(0, 1)
    if other is None and values.is_cuda and lies_transposed(values) and values.shape[-1] <= values.shape[-2]:
        turned = values.transpose(-1, -2)  # turning many positions round would cost more than a matrix an example
        return (turned @ values).sum([at for at in range(values.dim() - 2) if at != groups], dtype=torch.float64)
    first = values.movedim(groups, 0).flatten(1, -2)
    if other is None:
        return second_moment(first)
    return first.transpose(-1, -2) @ other.movedim(groups, 0).flatten(1, -2)


def second_moment(rows: Tensor) -> Tensor:
    """Rows (..., m, i) to (..., i, i), summed in float64 where they are many, or small eigenvalues would drown."""
    parts = rows.split(LONGEST_SUM * (32 if rows.is_cuda else 1), dim=-2)  # a GPU sums in tiles, and calls cost more
    if len(parts) == 1 or rows.dtype == torch.float64:
        return _crossed(rows)
    total = torch.zeros(*rows.shape[:-2], rows.shape[-1], rows.shape[-1], dtype=torch.float64, device=rows.device)
    for part in parts:
        total += _crossed(part)
    return total


def joint_moment(parts: Sequence[Tensor]) -> Tensor:
    """The second moment of rows that lie in several parts side by side, (m, i) each."""
    if len(parts) == 1 or parts[0].is_cuda:
        return second_moment(parts[0] if len(parts) == 1 else torch.cat(tuple(parts), -1))
    sizes = [part.shape[-1] for part in parts]
    found = torch.zeros(sum(sizes), sum(sizes), dtype=torch.float64, device=parts[0].device)
    blocks = [row.split(sizes, 1) for row in found.split(sizes)]
    for at, part in enumerate(parts):
        blocks[at][at].copy_(second_moment(part))
        for other in range(at):
            for some, more in zip(part.split(LONGEST_SUM), parts[other].split(LONGEST_SUM), strict=True):
                blocks[at][other].add_(some.T @ more)
            blocks[other][at].copy_(blocks[at][other].T)
    return found


def _crossed(rows: Tensor) -> Tensor:
    """Rows (..., m, i) to (..., i, i); of one matrix on a CPU the upper half alone, in panels of columns."""
    size = rows.shape[-1]
    if rows.is_cuda or 2 * size < 3 * LEAST_PANEL or rows.numel() != rows.shape[-2] * size:
        return rows.transpose(-1, -2) @ rows
    flat = rows.reshape(-1, size)
    found, step = flat.new_empty(size, size), max(-(-size // (16 * PANELS)) * 16, LEAST_PANEL)
    for low in range(0, size, step):
        high = low + step
        torch.mm(flat[:, low:high].T, flat[:, low:], out=found[low:high, low:])
    upper = found.triu_()
    return (upper + upper.triu(1).T).reshape(*rows.shape[:-2], size, size)
