"""Batches in pieces, and in smaller ones once a device has run out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch

from whence.errors import TooLargeError

T = TypeVar("T")


class Pieces:
    """Cuts batches into pieces; when one is too large for the device, it and all later ones are cut in half.

    Args:
        notes: is told when that happens.
        what: is held for a piece, in the plural, for messages.
    """

    def __init__(self, notes: list[str], what: str) -> None:
        """No limit yet."""
        self.notes = notes
        self.what = what
        self.most: int | None = None

    def of(self, size: int, step: int, work: Callable[[slice], T]) -> Iterator[tuple[slice, T]]:
        """Yield (which examples, what `work` makes of them) for pieces of at most `step` examples, about equal.

        Examples:
            >>> list(Pieces([], "tangents").of(5, 4, lambda where: where.start))
            [(slice(0, 3, None), 0), (slice(3, 5, None), 3)]
        """
        low = 0
        while low < size:
            count = -(-(size - low) // min(step, self.most or step))
            where = slice(low, low + -(-(size - low) // count))
            try:
                found = work(where)
            except (torch.cuda.OutOfMemoryError, TooLargeError) as error:
                self._halve(where.stop - where.start, error)
                continue
            yield where, found
            del found  # the next piece needs the room
            low = where.stop

    def _halve(self, size: int, error: Exception) -> None:
        """Half as much from now on, if there is a half."""
        if isinstance(error, TooLargeError) and not isinstance(error.__cause__, torch.cuda.OutOfMemoryError):
            raise error
        if size == 1:
            raise TooLargeError(
                f"expected the {self.what} of one example to fit on the device, got out of memory. Select fewer "
                "parameters, look at fewer outputs (outputs=...), or use a device with more memory."
            ) from error
        self.most = size // 2
        self.notes.append(
            f"the device ran out of memory with the {self.what} of {size} examples at once; {self.most} were taken "
            "from then on"
        )
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
