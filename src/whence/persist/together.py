"""Fits whose layers are shared by several processes: brought together in one of them, which writes the file."""

from __future__ import annotations

from collections.abc import Callable

import torch

from whence.errors import ProcessError
from whence.processes import Processes

from .record import Draft

SAVING = "saving the fit"
BLOCKS = "block_"
"""How the parts of blocks are called, of which each process has some."""


def bring_together(draft: Draft, part: str, crew: Processes) -> None:
    """Give the first process the blocks of all; one tensor after the other travels, in main memory.

    Args:
        draft: what this process would write; its blocks are called by their places among all.
        part: the name of the part of the draft that has the blocks.
        crew: the processes that share the layers.
    """
    mine = [name for name in draft.tensors if name.startswith(f"{part}.{BLOCKS}")]
    facts = {name: fact for name, fact in draft.facts[part].items() if name.startswith(BLOCKS)}
    orders = {name: draft.orders[name] for name in mine if name in draft.orders}
    sizes = [(name, draft.tensors[name].dtype, tuple(draft.tensors[name].shape)) for name in mine]
    for owner, (theirs, turned, entries) in enumerate(crew.tell(SAVING, (facts, orders, sizes))):
        if crew.rank == 0:
            draft.facts[part].update(theirs)
            draft.orders.update(turned)
        for name, dtype, shape in entries:
            own = owner == crew.rank
            tensor = draft.tensors[name].detach().cpu() if own else torch.empty(shape, dtype=dtype, device="cpu")
            crew.share([tensor], owner, SAVING)
            if crew.rank == 0:
                draft.tensors[name] = tensor


def written_by_first(crew: Processes, work: Callable[[], None]) -> None:
    """Let the first process write, and all of them know how that went: they go on sharing the fit."""
    failed: Exception | None = None
    if crew.rank == 0:
        try:
            work()
        except Exception as error:  # whatever it is, the others wait for a word
            failed = error
    words = crew.tell(SAVING, None if failed is None else f"{type(failed).__name__}: {failed}")[0]
    if failed is not None:
        raise failed
    if words is not None:
        raise ProcessError(f"expected the first process to write the fit, got {words}")
