"""Weighted sums of products of gradients in half precision, on a GPU, that read the gradients once.

With torch alone the gradients are scaled or squared first, which writes and reads them once more. Needs Triton, which
comes with torch for NVIDIA GPUs; `available` says whether its kernels run here.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # of gradients, of which one program has the products with one another, or the squares
MOST_WEIGHTS = 16  # sets of weights in one sum of squares
PROGRAMS = 528  # at least so many at once, four for each processor of a large GPU
COLUMNS = 128  # coordinates of a step


@triton.jit(do_not_specialize=("rows", "group", "steps"))  # compiled once, and not for every size
def _gram_kernel(x, roots, out, rows, p, group, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Products of `group` rows of x (rows, p) with one another, over one part of the coordinates, scaled by roots."""
    row = tl.arange(0, ROWS)
    at = tl.program_id(0).to(tl.int64) * group + row
    inside = (row < group) & (at < rows)
    total = tl.zeros((ROWS, ROWS), tl.float32)
    start = tl.program_id(1) * steps * COLUMNS
    for low in range(start, tl.minimum(start + steps * COLUMNS, p), COLUMNS):
        column = low + tl.arange(0, COLUMNS)
        here = column < p
        values = tl.load(x + at[:, None] * p + column[None, :], mask=inside[:, None] & here[None, :], other=0.0)
        root = tl.load(roots + column, mask=here, other=0.0)
        scaled = (values.to(tl.float32) * root[None, :]).to(x.dtype.element_ty)
        total += tl.dot(scaled, tl.trans(scaled))
    place = (tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * ROWS * ROWS
    tl.store(out + place + row[:, None] * ROWS + row[None, :], total)


@triton.jit(do_not_specialize=("rows", "sets", "steps"))
def _square_kernel(
    x, weights, out, rows, p, sets, steps, ROWS: tl.constexpr, SETS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Squares of rows of x (rows, p), summed over one part of the coordinates with each set of weights (sets, p)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    one = tl.arange(0, SETS)
    total = tl.zeros((ROWS, SETS), tl.float32)
    start = tl.program_id(1) * steps * COLUMNS
    for low in range(start, tl.minimum(start + steps * COLUMNS, p), COLUMNS):
        column = low + tl.arange(0, COLUMNS)
        here = column < p
        values = tl.load(x + row[:, None] * p + column[None, :], mask=(row < rows)[:, None] & here[None, :], other=0.0)
        given = (one < sets)[None, :] & here[:, None]
        weight = tl.load(weights + one[None, :] * p + column[:, None], mask=given, other=0.0)
        wide = values.to(tl.float32)
        total += tl.dot((wide * wide).to(weights.dtype.element_ty), weight)
    place = (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * SETS + one[None, :]
    tl.store(out + place, total, mask=(row < rows)[:, None])


def _parts(p: int, programs: int) -> tuple[int, int]:
    """In how many parts to sum over p coordinates where there are so many programs for each, and steps of a part."""
    steps = triton.cdiv(p, COLUMNS)
    each = triton.cdiv(steps, min(steps, triton.cdiv(PROGRAMS, programs)))
    return triton.cdiv(steps, each), each


def grams(values: Tensor, roots: Tensor) -> Tensor:
    """V diag(roots)^2 V^T of values (n, c, p) for roots (p,): (n, c, c)."""
    n, c, p = values.shape
    each = ROWS // c  # examples that one program multiplies
    groups = triton.cdiv(n, each)
    parts, steps = _parts(p, groups)
    out = torch.empty(parts, groups, ROWS, ROWS, device=values.device)
    with torch.cuda.device(values.device):
        _gram_kernel[(groups, parts)](values, roots, out, n * c, p, each * c, steps, ROWS=ROWS, COLUMNS=COLUMNS)
    blocks = out.sum(0)[:, : each * c, : each * c].reshape(groups, each, c, each, c).diagonal(dim1=1, dim2=3)
    return blocks.permute(0, 3, 1, 2).reshape(-1, c, c)[:n]


def squares(rows: Tensor, weights: Tensor) -> Tensor:
    """sum_p W_wp v_p^2 of rows v (m, p) for weights (w, p): (w, m)."""
    m, p = rows.shape
    programs = triton.cdiv(m, ROWS)
    parts, steps = _parts(p, programs)
    out = torch.empty(parts, m, MOST_WEIGHTS, device=rows.device)
    with torch.cuda.device(rows.device):
        _square_kernel[(programs, parts)](
            rows, weights, out, m, p, len(weights), steps, ROWS=ROWS, SETS=MOST_WEIGHTS, COLUMNS=COLUMNS
        )
    return out.sum(0)[:, : len(weights)].T


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run on this GPU, and rightly: Triton wants a C compiler, and a GPU that it knows."""
    try:
        values = (torch.arange(288, device=device) % 7).reshape(3, 2, 48).bfloat16()
        weights = (torch.arange(48, device=device) % 3).bfloat16()
        wide, wide_weights = values.double(), weights.double()
        wanted = torch.einsum("ncp,p,ndp->ncd", wide, wide_weights.square(), wide), wide.square() @ wide_weights
        found = grams(values, weights.float()), squares(values.flatten(0, 1), weights.unsqueeze(0)).reshape(3, 2)
        return all(bool((one == other).all()) for one, other in zip(found, wanted, strict=True))
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:  # whatever a compiler may say; torch alone takes longer
        return False
