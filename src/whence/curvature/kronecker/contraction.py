"""Products of factors and gradients in the order and the layout that a core's cache or a GPU's tensor units like.

Axis letters: n examples, c cotangents, e groups, t positions, o outputs, i inputs, q combinations, w weight matrices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from whence.tangents.factors import lies_transposed

CACHE_NUMBERS = 2**17
"""Numbers that a core's cache holds with room to spare."""

GROUP_ROWS = 128
"""Rows that fill a GPU's tensor units."""


def mix(g: Tensor, weights: Tensor) -> Tensor:
    """Gradients (n, c, e, t, o) combined by weights (n, c, q): (n, q, e, t, o)."""
    if g.shape[1] == 1:
        return g * weights.reshape(len(g), -1, 1, 1, 1)
    turned = lies_transposed(g)
    lying = g.transpose(3, 4) if turned else g
    rows = weights.transpose(1, 2).contiguous()  # as it lies a GPU takes twice as long
    mixed: Tensor = (rows @ lying.flatten(2)).unflatten(2, lying.shape[2:])
    return mixed.transpose(3, 4) if turned else mixed


def few_columns(rows: Tensor, columns: Tensor) -> Tensor:
    """Columns (q, p) times rows (n, p) as (q, n): with few columns and many rows up to four times as fast as (n, q)."""
    return columns @ rows.T


def along_factors(a: Tensor, g: Tensor, direction: Tensor) -> Tensor:
    """Inner products of sum_t g_t a_t^T with a direction (e, o, i), for (n, e, t, i) and (n, c, e, t, o): (n, c)."""
    if g.shape[1:4] == (1, 1, 1) and not g.is_cuda:  # one outer product of two vectors, the longer ones first
        outer, inner, matrix = g.flatten(1), a.flatten(1), direction[0]
        if inner.shape[1] > outer.shape[1]:
            outer, inner, matrix = inner, outer, matrix.T
        return (few_columns(outer, matrix.T) * inner.T).sum(0).unsqueeze(1)
    turned = direction.transpose(-1, -2)
    moved = (a.squeeze(1) @ turned[0]).unsqueeze(1) if len(turned) == 1 else a @ turned  # (n, e, t, o)
    if lies_transposed(g):
        g, moved = g.transpose(3, 4), moved.transpose(2, 3)
    return (g.flatten(2) @ moved.flatten(1).unsqueeze(2)).squeeze(2)


def scaled_grams(values: Tensor, scales: Tensor, positive: bool = False) -> Tensor:
    """V diag(scale) V^T for values (n, c, p) and scales (w, n or 1, 1, p): (w, n, c, c), a cacheful at a time.

    Where no scale is negative, a GPU reads one tensor in place of two.
    """
    n, c, p = values.shape
    if c == 1:
        squares = values.squeeze(1).square()
        flat = scales.reshape(len(scales), -1, p)
        one = few_columns(squares, flat.squeeze(1)) if flat.shape[1] == 1 else torch.einsum("np,wnp->wn", squares, flat)
        return one.reshape(len(scales), n, 1, 1)
    if values.is_cuda and positive:
        roots = (values * scale.sqrt() for scale in scales)
        return torch.stack([_grouped_products(one, one) for one in roots])
    if values.is_cuda:
        return torch.stack([_grouped_products(values * scale, values) for scale in scales])
    found = values.new_empty(len(scales), n, c, c)
    step = max(1, CACHE_NUMBERS // (c * p))
    for low in range(0, n, step):
        part = values[low : low + step]
        flipped = part.transpose(1, 2)
        for at, scale in enumerate(scales):
            here = scale if len(scale) == 1 else scale[low : low + step]
            torch.bmm(part * here, flipped, out=found[at, low : low + step])
    return found


def _grouped_products(left: Tensor, right: Tensor) -> Tensor:
    """L R^T for both (n, c, p) on a GPU: (n, c, c).

    Products of c x p matrices are too small for its tensor units, so several examples share one product, of which only
    the blocks on the diagonal are kept.
    """
    n, c, p = left.shape
    together = max(1, min(n, GROUP_ROWS // c))
    even = n - n % together
    ours, theirs = (one[:even].reshape(-1, together * c, p) for one in (left, right))
    blocks = (ours @ theirs.transpose(1, 2)).reshape(-1, together, c, together, c).diagonal(dim1=1, dim2=3)
    found = blocks.permute(0, 3, 1, 2).reshape(-1, c, c)
    return found if even == n else torch.cat([found, left[even:] @ right[even:].transpose(1, 2)])
