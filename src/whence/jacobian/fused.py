"""Sums and products of half-precision gradients on a GPU that read the gradients once.

With torch alone the gradients are scaled or squared first, which writes and reads them once more; and if one factor is
the same for all cotangents, torch reads and writes at a third of the memory speed. Needs Triton, which comes with torch
for NVIDIA GPUs; `available` says whether the kernels run here.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32  # rows of gradients in one program, which computes their products or squares
MOST_WEIGHTS = 16  # sets of weights in one sum of squares
PROGRAMS = 528  # least number of programs at once, four for each processor of a large GPU
COLUMNS = 128  # coordinates in a step
TILE = 4096  # numbers held by one program


@triton.jit(do_not_specialize=("rows", "group", "steps"))  # compiled once, not for every size
def _gram_kernel(x, roots, out, rows, p, group, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Products between `group` rows of x (rows, p), scaled by roots, over one part of the coordinates."""
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


@triton.jit(do_not_specialize=("c", "q"))
def _mix_kernel(x, weights, out, p, by_example, by_cotangent, c, q, SETS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums over c of weights (c, q) times rows of x (c, p), for one example and some of the coordinates."""
    example = tl.program_id(0).to(tl.int64)
    column, one = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, SETS)
    total = tl.zeros((SETS, COLUMNS), tl.float32)
    start = example * by_example
    for at in range(c):
        values = tl.load(x + start + column, mask=column < p, other=0.0)
        weight = tl.load(weights + (example * c + at) * q + one, mask=one < q, other=0.0)
        total += weight.to(tl.float32)[:, None] * values.to(tl.float32)[None, :]
        start += by_cotangent
    place = (example * q + one)[:, None] * p + column[None, :]
    tl.store(out + place, total.to(x.dtype.element_ty), mask=(one < q)[:, None] & (column < p)[None, :])


@triton.jit(do_not_specialize=("n", "c", "steps"))
def _inner_kernel(x, y, out, n, c, p, by_example, by_cotangent, steps, COTANGENTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Inner products of rows of x (c, p) with y (p), over one part of the coordinates of one example."""
    example, row = tl.program_id(0).to(tl.int64), tl.arange(0, COTANGENTS)
    total = tl.zeros((COTANGENTS, COLUMNS), tl.float32)
    start = tl.program_id(1) * steps * COLUMNS
    for low in range(start, tl.minimum(start + steps * COLUMNS, p), COLUMNS):
        column = low + tl.arange(0, COLUMNS)
        here = column < p
        place = example * by_example + row[:, None].to(tl.int64) * by_cotangent + column[None, :]
        values = tl.load(x + place, mask=(row < c)[:, None] & here[None, :], other=0.0)
        other = tl.load(y + example * p + column, mask=here, other=0.0)
        total += values.to(tl.float32) * other.to(tl.float32)[None, :]
    place = (tl.program_id(1).to(tl.int64) * n + example) * COTANGENTS + row
    tl.store(out + place, tl.sum(total, 1))


@triton.jit(do_not_specialize=("n", "c"))
def _position_kernel(g, z, out, n, c, t, x, TIMES: tl.constexpr, POSITIONS: tl.constexpr, CHANNELS: tl.constexpr):
    """Sums over t of g (c, n, t, x), or of g z for z (n, t, x), for one example, cotangent and some channels."""
    at = tl.program_id(0).to(tl.int64)  # cotangents of one example are consecutive and share z
    example, cotangent = at // c, at % c
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    total = tl.zeros((POSITIONS, CHANNELS), tl.float32)
    for low in range(0, t, POSITIONS):
        position = low + tl.arange(0, POSITIONS)
        inside = (position < t)[:, None] & (channel < x)[None, :]
        place = position[:, None] * x + channel[None, :]
        values = tl.load(g + (cotangent * n + example) * t * x + place, mask=inside, other=0.0).to(tl.float32)
        if TIMES:
            values *= tl.load(z + example * t * x + place, mask=inside, other=0.0).to(tl.float32)
        total += values
    tl.store(out + at * x + channel, tl.sum(total, 0).to(g.dtype.element_ty), mask=channel < x)


@triton.jit
def _channel_kernel(x, scale, out, size, channels, COLUMNS: tl.constexpr):
    """Values with channels last, times a scale for each channel."""
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    values = tl.load(x + place, mask=place < size, other=0.0)
    tl.store(out + place, values * tl.load(scale + place % channels), mask=place < size)


@triton.jit(do_not_specialize=("c",))
def _mask_kernel(x, mask, out, c, size, COLUMNS: tl.constexpr):
    """Rows of x (c, size) where the mask (size) is above zero, and zeros elsewhere."""
    place = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = place < size
    positive = tl.load(mask + place, mask=here, other=0.0) > 0
    for _ in range(c):
        values = tl.load(x + place, mask=here, other=0.0)
        tl.store(out + place, tl.where(positive, values, 0.0), mask=here)
        place += size


def _parts(p: int, programs: int, columns: int = COLUMNS) -> tuple[int, int]:
    """Number of parts for a sum over p coordinates, given the programs for each part, and of steps in a part."""
    steps = triton.cdiv(p, columns)
    each = triton.cdiv(steps, min(steps, triton.cdiv(PROGRAMS, programs)))
    return triton.cdiv(steps, each), each


def grams(values: Tensor, roots: Tensor) -> Tensor:
    """V diag(roots)^2 V^T of values (n, c, p) for roots (p,): (n, c, c)."""
    n, c, p = values.shape
    each = ROWS // c  # examples multiplied by one program
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


def mixtures(values: Tensor, weights: Tensor) -> Tensor:
    """Combine values (n, c, p), contiguous along p, with weights (n, c, q): (n, q, p)."""
    (n, c, p), q = values.shape, weights.shape[2]
    sets = triton.next_power_of_2(q)
    columns = max(COLUMNS, TILE // sets)
    out = values.new_empty(n, q, p)
    with torch.cuda.device(values.device):
        _mix_kernel[(n, triton.cdiv(p, columns))](
            values, weights.contiguous(), out, p, *values.stride()[:2], c, q, SETS=sets, COLUMNS=columns
        )
    return out


def inner_products(values: Tensor, others: Tensor) -> Tensor:
    """Inner products of values (n, c, p), contiguous along p, with one row for each example (n, p): (n, c)."""
    n, c, p = values.shape
    rows = triton.next_power_of_2(c)
    columns = min(1024, max(COLUMNS, TILE // rows))
    parts, steps = _parts(p, n, columns)
    out = torch.empty(parts, n, rows, device=values.device)
    with torch.cuda.device(values.device):
        _inner_kernel[(n, parts)](
            values, others.contiguous(), out, n, c, p, *values.stride()[:2], steps, COTANGENTS=rows, COLUMNS=columns
        )
    return out.sum(0)[:, :c]


def over_positions(grads: Tensor, z: Tensor | None) -> Tensor:
    """Sums over t of contiguous g (c, n, t, x), or of g z for contiguous z (n, t, x): (n, c, x)."""
    c, n, t, x = grads.shape
    channels = min(128, triton.next_power_of_2(x))
    positions = min(TILE // channels, triton.next_power_of_2(t))
    out = grads.new_empty(n, c, x)
    with torch.cuda.device(grads.device):
        _position_kernel[(n * c, triton.cdiv(x, channels))](
            grads, grads if z is None else z, out, n, c, t, x, z is not None, POSITIONS=positions, CHANNELS=channels
        )
    return out


def times_channels(values: Tensor, scale: Tensor) -> Tensor:
    """Values, contiguous with channels last, times a scale for each channel."""
    out = torch.empty_like(values)
    with torch.cuda.device(values.device):
        _channel_kernel[(triton.cdiv(values.numel(), TILE),)](
            values, scale, out, values.numel(), len(scale), COLUMNS=TILE
        )
    return out


def where_positive(values: Tensor, mask: Tensor) -> Tensor:
    """Values (c, ...) where a mask (...) is above zero, else zero; both contiguous in the same memory order."""
    out = torch.empty_like(values)
    with torch.cuda.device(values.device):
        _mask_kernel[(triton.cdiv(mask.numel(), TILE),)](values, mask, out, len(values), mask.numel(), COLUMNS=TILE)
    return out


@functools.cache
def available(device: torch.device) -> bool:
    """Whether the kernels run correctly on this GPU: Triton needs a C compiler and a supported GPU."""
    try:
        values = (torch.arange(288, device=device) % 7 - 2).reshape(3, 2, 48).bfloat16()
        weights = (torch.arange(48, device=device) % 3).bfloat16()
        mixing = (torch.arange(18, device=device) % 5 - 1).reshape(3, 2, 3).bfloat16()
        wide, wide_weights, images = values.double(), weights.double(), values.reshape(3, 2, 6, 8)
        pairs = [
            (grams(values, weights.float()), torch.einsum("ncp,p,ndp->ncd", wide, wide_weights.square(), wide)),
            (squares(values.flatten(0, 1), weights.unsqueeze(0)).reshape(3, 2), wide.square() @ wide_weights),
            (mixtures(values, mixing), torch.einsum("ncp,ncq->nqp", wide, mixing.double())),
            (inner_products(values, values[:, 1]), torch.einsum("ncp,np->nc", wide, wide[:, 1])),
            (over_positions(images, images[0]), (images * images[0]).double().sum(2).transpose(0, 1)),
            (over_positions(images, None), images.double().sum(2).transpose(0, 1)),
            (times_channels(images, weights[:8]), images * weights[:8]),
            (where_positive(images, images[0]), images * (images[0] > 0)),
        ]
        return all(bool((one.double() == other.double()).all()) for one, other in pairs)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception:  # any compiler error: torch alone works, more slowly
        return False
