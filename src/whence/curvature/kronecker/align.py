"""Inner products of captured gradients with given directions, by the cheapest order of contractions."""

from __future__ import annotations

import torch
from torch import Tensor

from whence.tangents.forms import Dense, Kronecker, Rows, Tangent

from .measure import CHUNK_NUMBERS, raised


def align(tangent: Tangent, directions: Tensor) -> Tensor:
    """<J_i^T u_c, v_q> for every example, cotangent and direction.

    A layer seen at one position never has its gradient matrices formed: g^T V a takes one matrix product for each
    direction. Layers with shared weights take that way too, unless forming the matrices first is cheaper.

    Args:
        tangent: gradients of n examples for c cotangents.
        directions: V (q, *matrix shape of the block).

    Returns:
        (n, c, q).
    """
    if isinstance(tangent, Dense):
        return raised(tangent.values).to(directions.dtype) @ directions.T
    if isinstance(tangent, Rows):
        return _align_rows(tangent, directions)
    return _align_kronecker(tangent, directions)


def _align_kronecker(tangent: Kronecker, directions: Tensor) -> Tensor:
    a, g = tangent.inputs().to(directions.dtype), tangent.grads().to(directions.dtype)
    n, c, e, t, o = g.shape
    i, q = a.shape[3], len(directions)
    factored = q * t * o * (i + c)
    formed = c * o * i * (t + q)
    numbers = q * t * o * e if factored <= formed else c * e * o * i
    step = max(1, CHUNK_NUMBERS["cuda" if g.is_cuda else "cpu"] // numbers)
    parts = []
    for low in range(0, n, step):
        some_a, some_g = a[low : low + step], g[low : low + step]
        if factored <= formed:
            moved = _times_inputs(some_a, directions)  # (n, e, t, q, o)
            left = some_g.permute(0, 2, 3, 1, 4).reshape(len(some_g), e * t, c, o)
            parts.append(torch.einsum("nsco,nsqo->ncq", left, moved.flatten(1, 2)))
        else:
            matrices = torch.einsum("nceto,neti->nceoi", some_g, some_a)
            parts.append(matrices.flatten(2) @ directions.flatten(1).T)
    return torch.cat(parts)


def _times_inputs(a: Tensor, directions: Tensor) -> Tensor:
    """V a: (n, e, t, i) with (q, e, o, i) to (n, e, t, q, o); one large product where there is one group."""
    n, e, t, i = a.shape
    q, _, o, _ = directions.shape
    if e == 1:
        return (a.reshape(-1, i) @ directions.reshape(-1, i).T).reshape(n, e, t, q, o)
    return torch.einsum("neti,qeoi->netqo", a, directions)


def _align_rows(tangent: Rows, directions: Tensor) -> Tensor:
    rows, examples, values = tangent.aggregate()
    n, c = tangent.index.shape[0], tangent.grads.shape[1]
    values = raised(values).to(directions.dtype)  # (u, c, d)
    found = values.new_zeros(n, c, len(directions))
    step = max(1, CHUNK_NUMBERS["cuda" if values.is_cuda else "cpu"] // (len(directions) * values.shape[2]))
    for low in range(0, len(rows), step):
        part = slice(low, low + step)
        products = torch.einsum("ucd,qud->ucq", values[part], directions[:, rows[part]])
        found.index_add_(0, examples[part], products)
    return found
