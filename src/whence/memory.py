"""How much memory a computation takes, told before it is taken."""

from __future__ import annotations

import os

import torch

from .errors import TooLargeError

RESERVE = 0.8
"""Share of the free memory that `whence` plans with."""


def free_memory(device: torch.device) -> int:
    """Bytes free on a device.

    Examples:
        >>> free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def readable(size: float) -> str:
    """Bytes for people.

    Examples:
        >>> readable(3 * 2**30)
        '3.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    raise AssertionError("unreachable")


class Budget:
    """The memory a fit may take.

    Args:
        device: where the large matrices will live.
        limit: bytes; 80 % of what is free now when `None`.
    """

    def __init__(self, device: torch.device, limit: float | None = None) -> None:
        """Look once at what is free."""
        self.limit = int(limit if limit is not None else RESERVE * free_memory(device))

    def fits(self, need: float) -> bool:
        """Whether `need` bytes are within the budget."""
        return need <= self.limit

    def require(self, need: float, what: str, instead: str) -> None:
        """Raise, before anything is allocated, when `need` bytes are too many."""
        if not self.fits(need):
            raise TooLargeError(
                f"expected {what} to fit in {readable(self.limit)}, but it takes about {readable(need)}. {instead}"
            )
