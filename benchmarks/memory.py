"""Peak memory of a piece of work: the resident set's high-water mark above what was resident before."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
from collections.abc import Callable
from pathlib import Path

RETURNED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Surrounding of a process in which freed memory goes back at once, so that what is resident is what is held."""

METHOD = "peak resident set (VmHWM, reset before) minus resident set before, in a process of its own"


def extra_bytes(work: Callable[[], object]) -> int:
    """Bytes that the work takes at its peak beyond what is resident when it starts."""
    gc.collect()
    _return_freed()
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        before = status_bytes("VmRSS")
        work()
        return max(0, status_bytes("VmHWM") - before)
    except OSError:  # not Linux, or not allowed: growth of the highest mark so far, a lower bound
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        work()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def _return_freed() -> None:
    """Hand memory that was freed back to the system: else the next piece of work takes it unseen."""
    with contextlib.suppress(OSError, AttributeError):  # another libc
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def status_bytes(field: str) -> int:
    """A size that the system tells of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"expected {field} in /proc/self/status, got none.")
