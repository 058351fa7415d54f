"""Memory: how much is free, and budgets that are checked before anything is allocated."""

from __future__ import annotations

import ctypes
import math
import os
import shutil
import sys
import uuid
from contextlib import suppress
from mmap import PAGESIZE
from pathlib import Path

import torch
from torch import Tensor

from whence.errors import TooLargeError

RESERVE = 0.8  # share of the free memory that `whence` plans with
UNKNOWN = 4 * 2**30  # the memory assumed on a system that does not report it
MADV_DONTNEED = 4  # constant of madvise(2) on Linux
# files with limit, use and details of a container's memory, for new and old cgroups
CONTAINER_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"),
    tuple(f"/sys/fs/cgroup/memory/memory.{what}" for what in ("limit_in_bytes", "usage_in_bytes", "stat")),
)


def free_memory(device: torch.device) -> int:
    """Bytes free on a device.

    Examples:
        >>> free_memory(torch.device("cpu")) > 0
        True
    """
    if device.type == "cuda":
        used = torch.cuda.memory_allocated(device)
        free, total = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device) - used  # torch's cache, which it reuses
        share = getattr(torch.cuda, "get_per_process_memory_fraction", None)  # torch 2.8 and later
        return int(free if share is None else min(free, share(torch.empty(0, device=device).device) * total - used))
    return min(_available(), *(_left(*files) for files in CONTAINER_FILES))


def _available() -> int:
    """Memory available on the machine."""
    for line in _read("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    if hasattr(os, "sysconf"):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return UNKNOWN


def _left(limit: str, used: str, details: str) -> int:
    """Bytes left within a container's limit, counting cached files as free; 2**62 without a limit."""
    most, now = _read(limit).strip(), _read(used).strip()
    if not (most.isdigit() and now.isdigit()):
        return 2**62
    pairs = [line.split() for line in _read(details).splitlines()]
    cached = sum(int(pair[1]) for pair in pairs if pair[0] in ("active_file", "inactive_file"))
    return int(most) - int(now) + cached


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def trim_heap() -> None:
    """Return freed memory to the system: the C library would keep it and exceed the user's limit."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def on_disk(folder: str | os.PathLike[str], shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in a memory-mapped file: the system writes and drops pages as needed.

    The file has no name, and disappears with the tensor; on systems that do not allow that, it stays behind.
    """
    need = math.prod(shape) * dtype.itemsize
    Path(folder).mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if need > free:
        raise TooLargeError(
            f"expected {readable(need)} free in {folder}, got {readable(free)}. Use another folder for `scratch`, a "
            "smaller size of the core or sketch, fewer columns (hessian_columns=...), or no `scratch`: then features "
            "are computed again in every pass."
        )
    path = Path(folder) / f"whence-{uuid.uuid4().hex}.rows"
    found: Tensor = torch.from_file(str(path), shared=True, size=math.prod(shape), dtype=dtype).reshape(shape)
    with suppress(OSError):
        path.unlink()
    return found


def drop_pages(mapped: Tensor) -> None:
    """Release the pages of a part of a memory-mapped file; they are read again when needed.

    Nothing is lost, as the mapping is shared. The system would drop the pages only when memory is short; until then
    they count as this process's memory.
    """
    if sys.platform != "linux" or not mapped.is_contiguous():
        return
    start, stop = mapped.data_ptr(), mapped.data_ptr() + mapped.nbytes
    low, high = -(-start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE  # whole pages only
    if high > low:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), MADV_DONTNEED)


def readable(size: float) -> str:
    """Format bytes for people.

    Examples:
        >>> readable(3 * 2**30)
        '3.0 GiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.1f} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1024
    return f"{size:.1f} TiB"


def is_full(error: BaseException) -> bool:
    """Whether an error means that a GPU is out of memory; cuBLAS and similar libraries have their own messages.

    Examples:
        >>> is_full(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
        True
        >>> is_full(RuntimeError("expected scalar type Float but found Double"))
        False
    """
    libraries = isinstance(error, RuntimeError) and "STATUS_ALLOC_FAILED" in str(error)
    return libraries or isinstance(error, torch.cuda.OutOfMemoryError)


class Budget:
    """The memory that a fit may use on a device, in bytes: a limit, or 80 % of the free memory if `None`."""

    def __init__(self, device: torch.device, limit: float | None = None) -> None:
        self.limit = int(limit if limit is not None else RESERVE * free_memory(device))

    def fits(self, need: float) -> bool:
        """Whether `need` bytes are within the budget."""
        return need <= self.limit

    def require(self, need: float, what: str, instead: str) -> None:
        """Raise if `need` bytes are too many, before anything is allocated."""
        if not self.fits(need):
            raise TooLargeError(
                f"expected {what} to fit in {readable(self.limit)}, but it takes about {readable(need)}. {instead}"
            )
