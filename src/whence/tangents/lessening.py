"""Less memory to plan with, after a device ran out of it in spite of the plan."""

from __future__ import annotations

from dataclasses import replace

import torch

from whence.errors import TooLargeError
from whence.memory import Budget, free_memory, readable

from .linearization import Linearization

LEAST = 2**20
"""Bytes below which no plan is made."""


def lessened(problem: Linearization, full: str) -> Linearization:
    """The same problem with half the memory, and chunks of half the size where that was given; noted for diagnostics.

    Args:
        problem: what did not fit.
        full: what the device said.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    limit = min(problem.budget.limit, free_memory(problem.device)) // 2
    chunk = None if problem.chunk_size is None else problem.chunk_size // 2
    shared = problem.passes.kept or not problem.passes.crew.alone
    if shared or limit < LEAST or chunk == 0:
        why = "A fit that is shared or written down keeps to its plan. " if shared else ""
        raise TooLargeError(
            f"expected the fit to take {readable(problem.budget.limit)} at most on {problem.device}, got out of memory "
            f"({full}). {why}Pass a smaller max_memory or chunk_size, select fewer parameters, or look at fewer "
            "outputs (outputs=...)."
        )
    smaller = "" if chunk is None else f", chunks of {chunk} examples"
    problem.batches.notes.append(
        f"the device ran out of memory; the fit was planned anew with {readable(limit)}{smaller}"
    )
    return replace(problem, budget=Budget(problem.device, limit), chunk_size=chunk)
