"""Several processes at work on one fit: what they tell each other, and what happens when one of them fails."""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.torch_version import TorchVersion

from whence.errors import InputError, ProcessError

PATIENCE = 1800.0
"""Seconds that processes wait for one another, unless told otherwise."""

SMALL = 2**16
"""Tensors of fewer numbers travel together."""

LETTING_GO = 0.0 if torch.__version__ >= TorchVersion("2.9") else 0.05
"""Seconds for the threads of a group to let go of the last tensors before it is taken down. Before torch's change
154976, of June 2025, that is done with Python's lock held, which they need for it: both would wait for ever."""

BRACKETS = re.compile(r"^\[[^\]]*\]\s*")
"""Where in gloo's own source an error comes from."""

Distributed = Literal["auto"] | bool | float
"""Whether the processes of torch.distributed work together: "auto" if there are several; seconds to wait for others."""


class Processes:
    """The processes that share a fit, each with its shard of the data, in the order of their ranks.

    Messages go through a group of gloo's own, which notices at once when a process has died and at the latest after the
    timeout when one hangs. Tensors follow only after all processes said that they are well, through gloo from the CPU
    and through the default group (NCCL) from a GPU. A process alone has no group.
    """

    def __init__(
        self, ranks: Sequence[int] = (0,), group: Any = None, timeout: float = PATIENCE, neighbours: int = 1
    ) -> None:
        self._ranks, self._group, self._timeout = list(ranks), group, timeout
        self.neighbours = neighbours  # how many processes of the job are on this machine
        self.rank: int = 0 if group is None else self._ranks.index(dist.get_rank())
        self.size: int = len(self._ranks)
        self.alone: bool = self.size == 1  # whether there is no other process

    def tell(self, what: str, value: Any = None) -> list[Any]:
        """What every process says, something to be pickled, in the order of ranks; an error if one of them failed."""
        if self.alone:
            return [value]
        heard: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(heard, ("well", value), group=self._group)
        except RuntimeError as error:  # the connection is closed, or nobody came in time
            raise self._lost(what, error) from error
        for rank, (state, said) in enumerate(heard):
            if state != "well":
                raise ProcessError(
                    f"expected all {self.size} processes to go on to {what}, got an error in rank {rank}: {said}. "
                    "Look at its output; a fit with Execution(checkpoint=...) goes on from there when it is started "
                    "again."
                )
        return [said for _, said in heard]

    def add(self, tensors: Sequence[Tensor], what: str) -> None:
        """Replace tensors of the same shapes everywhere by their sums over all processes."""
        if self.alone:
            return
        self.tell(what)
        small = [one for one in tensors if one.numel() < SMALL]
        for kind in dict.fromkeys((one.dtype, one.device) for one in small):
            alike = [one for one in small if (one.dtype, one.device) == kind]
            joined = torch.cat([one.reshape(-1) for one in alike])
            self._sum(joined, what)
            for one, part in zip(alike, joined.split([one.numel() for one in alike]), strict=True):
                one.copy_(part.reshape(one.shape))
        for one in tensors:
            if one.numel() >= SMALL:
                self._sum(one, what)

    def share(self, tensors: Sequence[Tensor], owner: int, what: str) -> None:
        """Replace tensors by those of one process."""
        for one in () if self.alone else tensors:
            whole = one.contiguous()
            with self.watched(what):
                dist.broadcast(whole, src=self._ranks[owner], group=self._group_of(one))
            if whole is not one:
                one.copy_(whole)

    def send(self, tensors: Sequence[Tensor] | None, owner: int, what: str, device: torch.device) -> list[Tensor]:
        """The tensors of one process, to all; the others learn their shapes on the way."""
        mine = list(tensors or ())
        if self.alone:
            return mine
        shapes = self.tell(what, [(tuple(one.shape), one.dtype) for one in mine])[owner]
        if self.rank != owner:
            mine = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        self.share(mine, owner, what)
        return mine

    def gather(self, rows: Tensor | None, what: str, device: torch.device) -> Tensor:
        """Rows of all processes, one after the other in the order of ranks; `None` where a process has none."""
        own = [] if rows is None else [rows]
        if self.alone:
            return torch.cat(own)
        return torch.cat([one for rank in range(self.size) for one in self.send(own, rank, what, device)])

    @contextmanager
    def working(self) -> Iterator[None]:
        """Report a failure of this process to the others, and take the group down at the end."""
        if self.alone:
            yield
            return
        try:
            yield
        except ProcessError:  # the others know, or are gone
            self.part()
            raise
        except BaseException as error:
            with suppress(Exception):
                message = (str(error).strip().splitlines() or [""])[0].rstrip(".")
                heard: list[Any] = [None] * self.size
                dist.all_gather_object(heard, ("failed", f"{type(error).__name__}: {message}"), group=self._group)
            self.part()
            raise
        else:
            self.part()

    def part(self) -> None:
        """Take the group down: from now on each process is on its own."""
        time.sleep(LETTING_GO)
        with suppress(Exception):
            dist.destroy_process_group(self._group)

    def _sum(self, tensor: Tensor, what: str) -> None:
        whole = tensor.contiguous()
        with self.watched(what):
            dist.all_reduce(whole, group=self._group_of(tensor))
        if whole is not tensor:
            tensor.copy_(whole)

    def _group_of(self, tensor: Tensor) -> Any:
        """Ours on a CPU, the default one (NCCL) on a GPU."""
        return self._group if tensor.device.type == "cpu" else None

    @contextmanager
    def watched(self, what: str) -> Iterator[None]:
        """Raise a `ProcessError` where a process is gone."""
        try:
            yield
        except RuntimeError as error:
            raise self._lost(what, error) from error

    def _lost(self, what: str, error: Exception) -> ProcessError:
        message = BRACKETS.sub("", (str(error).strip().splitlines() or [type(error).__name__])[0]).split(". ")[0][:120]
        return ProcessError(
            f"expected all {self.size} processes to go on to {what} within {self._timeout:g} s, got no answer from one "
            f"of them ({message}). It has died, or hangs: look at its output. A fit with checkpoint=... goes on from "
            "there when it is started again."
        )


ALONE = Processes()
"""One process, which waits for nobody."""


def opened(distributed: Distributed) -> Processes:
    """The processes that shall work together: all of torch.distributed, where it is set up and not refused."""
    given: Any = distributed
    named = given == "auto" if isinstance(given, str) else isinstance(given, bool)
    try:
        seconds = PATIENCE if named else float(given)
    except (TypeError, ValueError):
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InputError(
            f'expected distributed to be "auto", True, False or a number of seconds to wait for others, got {given!r}.'
        )
    ready = dist.is_available() and dist.is_initialized()
    if given not in ("auto", False) and not ready:
        raise InputError(
            "expected processes that know of each other for distributed=..., got none. Start them with torchrun, and "
            "call torch.distributed.init_process_group() first."
        )
    if given is False or not ready or dist.get_world_size() == 1:
        return ALONE
    try:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))
    except RuntimeError as error:
        raise ProcessError(
            f"expected all {dist.get_world_size()} processes of torch.distributed to call whence together, within "
            f"{seconds:g} s, got not all of them. For a fit of this process alone pass "
            "execution=whence.Execution(distributed=False)."
        ) from error
    found = Processes(range(dist.get_world_size()), group, seconds)
    found.neighbours = found.tell("the fit", platform.node()).count(platform.node())
    return found


def assign_by_cost(costs: Sequence[float], size: int) -> list[int]:
    """Which of `size` processes does which task, so that all have about as much to do: the dearest task first.

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
