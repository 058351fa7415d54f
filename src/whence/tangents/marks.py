"""One number for the bits of a tensor, to notice that weights or data are not what they were."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

SPAN = 2**12
"""Bits are weighted by a table of this many odd numbers, and so are the sums of each span, until one is left."""

PIECE = 2**22
"""So many elements are looked at once, to bound the memory."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def _real(tensor: Tensor) -> Tensor:
    """The numbers in memory as they are meant: dense, real, no sign or conjugate pending."""
    found = tensor.detach()
    if found.layout != torch.strided:
        found = found.to_dense()
    if found.is_complex():
        found = torch.view_as_real(found.resolve_conj())
    return found.resolve_neg()


def mark(tensor: Tensor) -> int:
    """A number that changes when a bit of the tensor does, or when two elements change places.

    The same on every device; integers wrap around and are never rounded.

    Examples:
        >>> a, b = mark(torch.tensor([1.0, 2.0])), mark(torch.tensor([2.0, 1.0]))
        >>> a == b, a == mark(torch.tensor([1.0, 2.0]))
        (False, True)
    """
    flat = _real(tensor).reshape(-1)
    table = _table(flat.device)
    if 0 < flat.numel() * flat.element_size() <= SPAN:  # one span at most, in few calls
        return int(_sums(flat, table))
    sums = [_sums(piece, table) for piece in flat.split(PIECE)]
    joined = torch.cat(sums)
    while len(joined) > 1:
        joined = _sums(joined, table)
    return int(joined) if len(joined) else 0


def row_marks(tensor: Tensor) -> Tensor:
    """The same for every row of a tensor (n, ...), by itself: (n,).

    Examples:
        >>> one, two = row_marks(torch.tensor([[1.0, 2.0], [2.0, 1.0]])).tolist()
        >>> one == two, [one] == row_marks(torch.tensor([[1.0, 2.0]])).tolist()
        (False, True)
    """
    found = _real(tensor)
    n = len(found)
    words = found.reshape(n, -1) if n else found
    if not words.numel():
        return torch.zeros(n, dtype=torch.int64, device=found.device)
    table = _table(found.device)
    return torch.cat([_row_sums(part, table) for part in words.split(max(1, PIECE // words.shape[1]))])


def _row_sums(rows: Tensor, table: Tensor) -> Tensor:
    """Weighted sums (n,) of the words in each row (n, m)."""
    joined = rows.contiguous().view(_WORDS[rows.element_size()]).long()
    while joined.shape[1] > 1:
        spans = -(-joined.shape[1] // SPAN)
        padded = torch.nn.functional.pad(joined, (0, spans * SPAN - joined.shape[1]))
        joined = (padded.reshape(len(rows), spans, SPAN) * table).sum(2)
    return joined.squeeze(1)


def _sums(flat: Tensor, table: Tensor) -> Tensor:
    """Weighted sums (s,) of the words in each span."""
    words = flat.contiguous().view(_WORDS[flat.element_size()]).long()
    spans = -(-len(words) // SPAN)
    if spans == 1:
        return (words * table[: len(words)]).sum(0, keepdim=True)
    padded = torch.nn.functional.pad(words, (0, spans * SPAN - len(words)))
    return (padded.reshape(spans, SPAN) * table).sum(1)


@cache
def _table(device: torch.device) -> Tensor:
    """Odd numbers without a pattern: the finaliser of splitmix64 on 1, 2, 3, ..."""
    mixed = torch.arange(1, SPAN + 1, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return (mixed ^ (mixed >> 31)) | 1
