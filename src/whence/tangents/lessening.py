"""Less memory to plan with, after a device ran out of it in spite of the plan."""

from __future__ import annotations

from dataclasses import replace

import torch

from whence.errors import TooLargeError
from whence.memory import Budget, free_memory, readable

from .linearization import Linearization

LEAST = 2**20
"""Bytes below which no plan is made."""


def lessened(problem: Linearization, full: str, least: int = LEAST) -> Linearization:
    """The same problem with half the memory, and chunks of half the size where that was given; noted for diagnostics.

    Raises `TooLargeError` where there is nothing left to halve.

    Args:
        problem: what did not fit.
        full: what the device said.
        least: no plan is made with less memory than this: from there on, chunks alone become smaller.
    """
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    most = min(problem.budget.limit, free_memory(problem.device))
    limit = max(most // 2, min(least, most))
    chunk = problem.chunk_size
    if chunk is None and limit == problem.budget.limit:
        chunk = problem.batches.first().size  # nothing else is left to be made smaller
    chunk = None if chunk is None else max(chunk // 2, 1)
    shared = problem.passes.kept or not problem.passes.crew.alone
    if shared or limit < LEAST or (limit, chunk) == (problem.budget.limit, problem.chunk_size):
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
