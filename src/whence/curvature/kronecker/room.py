"""How many examples are handled at once, and what of them is kept: as memory allows, and no more than a batch takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from whence.memory import Budget
from whence.tangents.forms import Block

PIECE_BYTES = {"cpu": 48 * 2**20, "cuda": 24 * 2**30}
"""Output gradients and activations of one piece are kept under this size."""

OF_BATCH = 3
"""On a CPU also under the batch's over so much, since what is computed from them takes more than they do;"""

OF_SMALL_BATCH = 4
"""over so much where examples are small and few: then there is room to keep some;"""

LEAST_BYTES = 4 * 2**20
"""and down to this size."""

FEW_EXAMPLES = 8
"""So many are taken together at least, up to four times that size: products of fewer rows are slow."""

PIECE_SHARE = 0.18
"""The same as a share of the memory that may be taken: what is computed from a piece takes three or four times it."""

PIECES = 3.6
"""What is computed from a piece, in units of its size, itself included."""

WITHOUT_HOLES = 0.7
"""Share of the memory that tensors may take where little is left: a heap in which they come and go has holes."""

LEAST_PIECES = 0.07
"""Share of it that pieces take at least."""

WORK_SHARE = 0.4
"""Share of the memory that gradient matrices of a piece, or products of its pairs of positions, may take."""

KEPT_BYTES = {"cpu": 64 * 2**20, "cuda": 4 * 2**30}
"""Gradients of training sets up to this size, as they are and turned, are kept from pass to pass, if there is room."""

TAKEN = 1.7
"""What is computed at once from a piece, in units of its size, where nothing is formed on the way."""

TURNED = 1.1
"""What is kept of a piece takes so many times its size, once it is turned."""

FEW_NUMBERS = 512
"""Up to so many activations and gradients an example, one thread is done before several have met."""


@dataclass(frozen=True)
class Known:
    """What a capture found out about a model.

    Attributes:
        blocks: blocks of parameters, in the order of the tangents.
        fixed: bytes of an example's activations.
        each: bytes of an example's output gradients for each cotangent.
        work: bytes that are formed on the way, for each of them, where that is more than a chunk.
    """

    blocks: tuple[Block, ...]
    fixed: float
    each: float
    work: float = 0.0

    def example(self, cotangents: int) -> float:
        """Bytes of the activations and output gradients of one example."""
        return self.fixed + cotangents * self.each

    def few(self, examples: int, cotangents: int) -> bool:
        """Whether examples are so small, and so few, that calls cost more than numbers."""
        each = self.example(cotangents)
        return each <= 4 * FEW_NUMBERS and 2.0 * examples * each <= KEPT_BYTES["cpu"]


def piece(known: Known, cotangents: int, batch: int, device: torch.device, budget: Budget, held: float) -> int:
    """How many examples of a batch are handled at once.

    Args:
        known: about the model.
        cotangents: how many there are.
        batch: examples of the batch.
        device: where they are.
        budget: memory that may be taken.
        held: bytes of it that are in use beside the pieces.
    """
    each = max(known.example(cotangents), 1.0)
    usual = float(PIECE_BYTES["cuda"])
    if device.type != "cuda":
        parts = OF_SMALL_BATCH if known.few(batch, cotangents) else OF_BATCH
        usual = min(PIECE_BYTES["cpu"], max(LEAST_BYTES, math.ceil(batch / parts) * each))
    most = min(max(usual, FEW_EXAMPLES * each), 4 * usual)
    room = budget.limit
    left = max(WITHOUT_HOLES * room - held, LEAST_PIECES * room) / PIECES
    work = WORK_SHARE * room // max(cotangents * known.work, 1)
    return max(1, int(min(min(most, PIECE_SHARE * room, left) // each, work)))


def has_room_for_two(known: Known, cotangents: int, step: int, batch: int) -> bool:
    """Whether two pieces of so many examples, one done and one begun, take less than the batch."""
    return PIECES * step <= batch and not known.few(batch, cotangents)


def to_keep(known: Known, cotangents: int, n: int, batch: int, device: torch.device, budget: Budget) -> float:
    """Bytes of the gradients of a small training set that are kept from pass to pass: what pieces leave of a batch's.

    None of a large one, of which that would be little.
    """
    on_gpu = device.type == "cuda"
    each = known.example(cotangents)
    most = min(KEPT_BYTES["cuda" if on_gpu else "cpu"], LEAST_PIECES * budget.limit)
    if 2.0 * n * each > most:
        return 0.0
    if on_gpu:
        return float(most)
    taken = TAKEN * each * min(batch, piece(known, cotangents, batch, device, budget, 0.0))
    return max(batch * each - taken, LEAST_BYTES) / TURNED
