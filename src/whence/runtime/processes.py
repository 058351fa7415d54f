"""Several processes that share one fit: messages between them, and what happens when one fails."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from whence.errors import InputError, ProcessError, first_line

TIMEOUT = 1800.0  # seconds that processes wait for each other by default
BRACKETS = re.compile(r"^\[[^\]]*\]\s*")  # the source location at the start of gloo's errors
# Time for the threads of a group to release the last tensors before it is destroyed. Before torch's pull request
# 154976, of June 2025, a group is destroyed while holding Python's lock, which these threads need: a deadlock.
RELEASE_SECONDS = 0.0 if torch.__version__ >= TorchVersion("2.9") else 0.05

Distributed = Literal["auto"] | bool | float
"""Whether the processes of torch.distributed work together: "auto" if there are several; seconds to wait for others."""


class ProcessGroup:
    """The processes that share a fit, each with its shard of the data, in the order of their ranks.

    Messages go through a separate gloo group, which fails at once if a process has died, and after the timeout if one
    hangs. Tensors follow only after every process has reported no error: through gloo from a CPU, and through the
    default group (NCCL) from a GPU. A single process has no group.
    """

    def __init__(self, size: int = 1, group: Any = None, timeout: float = TIMEOUT) -> None:
        self._group, self._timeout = group, timeout
        self.local_size = 1  # number of processes of the job on this machine
        self.rank: int = 0 if group is None else dist.get_rank()
        self.size = size
        self.alone = size == 1  # whether there is no other process

    def all_gather_object(self, what: str, value: Any = None) -> list[Any]:
        """Values (picklable) of all processes in the order of ranks; raises if one of them failed."""
        if self.alone:
            return [value]
        gathered: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(gathered, (True, value), group=self._group)
        except RuntimeError as error:  # the connection is closed, or a process was late
            raise self._lost(what, error) from error
        for rank, (sound, said) in enumerate(gathered):
            if not sound:
                raise ProcessError(
                    f"expected all {self.size} processes to go on to {what}, got an error in rank {rank}: {said}. "
                    "Check its output; a fit with Execution(checkpoint=...) resumes there when it is started again."
                )
        return [said for _, said in gathered]

    def all_reduce(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace tensors, of the same shapes in all processes, by their sums over processes."""
        if self.alone:
            return
        self.all_gather_object(what)
        for one in tensors:
            self._run(dist.all_reduce, one, what)

    def broadcast(self, tensors: Sequence[Tensor], owner: int, what: str) -> None:
        """Replace tensors by those of one process."""
        for one in () if self.alone else tensors:
            self._run(dist.broadcast, one, what, src=owner)

    def all_gather(self, rows: Tensor | None, what: str, device: torch.device) -> Tensor:
        """Concatenate the rows of all processes in the order of ranks; `None` for a process without rows."""
        parts = []
        forms = self.all_gather_object(what, None if rows is None else (tuple(rows.shape), rows.dtype))
        for rank, form in enumerate(forms):
            if form is not None:
                own = rows if rank == self.rank else None
                parts.append(torch.empty(form[0], dtype=form[1], device=device) if own is None else own)
                self.broadcast(parts[-1:], rank, what)
        return torch.cat(parts)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """Report an error of this process to the others, and destroy the group at the end."""
        if self.alone:
            yield
            return
        try:
            yield
        except ProcessError:  # the others know already, or are gone
            raise
        except BaseException as error:
            with suppress(Exception):
                report = f"{type(error).__name__}: {first_line(error)}"
                dist.all_gather_object([None] * self.size, (False, report), group=self._group)
            raise
        finally:
            time.sleep(RELEASE_SECONDS)
            with suppress(Exception):
                dist.destroy_process_group(self._group)

    def _run(self, collective: Callable[..., Any], tensor: Tensor, what: str, **options: int) -> None:
        """Run a collective operation on a tensor in place: gloo on a CPU, the default group (NCCL) on a GPU."""
        whole = tensor.contiguous()
        try:
            collective(whole, group=self._group if tensor.device.type == "cpu" else None, **options)
        except RuntimeError as error:
            raise self._lost(what, error) from error
        if whole is not tensor:
            tensor.copy_(whole)

    def _lost(self, what: str, error: Exception) -> ProcessError:
        message = BRACKETS.sub("", first_line(error)).split(". ")[0]
        return ProcessError(
            f"expected all {self.size} processes to go on to {what} within {self._timeout:g} s, got no answer from one "
            f"of them ({message}). It has ended or hangs: check its output. A fit with checkpoint=... resumes there "
            "when it is started again."
        )


ALONE = ProcessGroup()  # a single process


def open_process_group(distributed: Distributed) -> ProcessGroup:
    """The processes that share a fit: all of torch.distributed, unless it is not initialised or not requested."""
    given: Any = distributed
    named = given == "auto" if isinstance(given, str) else isinstance(given, bool)
    try:
        seconds = TIMEOUT if named else float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(
            f'expected distributed to be "auto", True, False or a number of seconds to wait for others, got {given!r}.'
        )
    ready = dist.is_available() and dist.is_initialized()
    if given not in ("auto", False) and not ready:
        raise InputError(
            "expected torch.distributed to be initialised for distributed=..., got none. Start the processes with "
            "torchrun, and call torch.distributed.init_process_group() first."
        )
    if given is False or not ready or dist.get_world_size() == 1:
        return ALONE
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ProcessError(
            f"expected all {dist.get_world_size()} processes of torch.distributed to call whence together, within "
            f"{seconds:g} s, got only some of them. For a fit of this process alone pass "
            "execution=whence.Execution(distributed=False)."
        ) from error
    found = ProcessGroup(dist.get_world_size(), group, seconds)
    found.local_size = found.all_gather_object("the fit", platform.node()).count(platform.node())
    return found


def assign_by_cost(costs: Sequence[float], size: int) -> list[int]:
    """Assign tasks to `size` processes so that loads are about equal: the most expensive task first.

    Examples:
        >>> assign_by_cost([1.0, 8.0, 4.0, 4.0], 2)
        [0, 0, 1, 1]
    """
    load = [0.0] * size
    owners = [0] * len(costs)
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        owners[at] = load.index(min(load))
        load[owners[at]] += costs[at]
    return owners
