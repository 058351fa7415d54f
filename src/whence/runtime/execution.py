"""How a fit runs: options, passes over the data, chunks of batches, what happens when memory runs out, progress."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal, TextIO, TypeVar, get_args

import torch
from torch import Tensor

from whence.errors import InputError, LoaderError, TooLargeError
from whence.runtime.checkpoint import Checkpoint, State
from whence.runtime.memory import trim_heap
from whence.runtime.processes import ALONE, Distributed, ProcessGroup

T = TypeVar("T")

Precision = Literal["float32", "tf32", "fp16"]  # precision of the products in approximate structures


@dataclass(frozen=True)
class Execution:
    """How a fit runs. No option but `precision` changes the results beyond rounding error.

    Args:
        chunk_size: number of examples whose gradients are held at once; as many as memory allows by default.
        max_memory: bytes that may be used; 80 % of the free memory by default.
        dtype: dtype of the algebra; the model computes in its own.
        precision: of the products in approximate structures, for models in single precision: "float32"; "tf32", several
            times as fast on a GPU, with the same results to three digits; or "fp16", where the network also runs in
            half precision for its gradients. Outputs and residuals stay in the model's precision, sums in single or
            double precision. "fp16" may cost a thousandth of the rank correlation with the results in single precision
            (see `docs/benchmarks.md`), and fails for networks whose activations exceed 65,504.
        seed: seed of the random columns, if `hessian_columns` uses some.
        checkpoint: a folder in which the sums of the fit are saved, so that the same call resumes there after a crash,
            with the same result, in any number of processes; see `docs/saving.md`.
        checkpoint_seconds: time between two checkpoints within a pass.
        scratch: a folder on a disk with free space. If the features that a core or sketch keeps of every training
            example do not fit in memory, they are written there and read when needed, instead of another pass through
            the network. They are deleted with the tracer.
        distributed: share the fit among all processes of `torch.distributed`, each with its own shard of the data in
            `train_loader` and of the labels in `groups`: "auto" if there are several, or the number of seconds to wait
            for the others; `False` for a fit of this process alone. See `docs/distributed.md`.

    Examples:
        >>> Execution(max_memory=2**30).max_memory
        1073741824
    """

    chunk_size: int | None = None
    max_memory: float | None = None
    dtype: torch.dtype = torch.float64
    precision: Precision = "tf32"
    seed: int = 0
    checkpoint: str | os.PathLike[str] | None = None
    checkpoint_seconds: float = 60.0
    scratch: str | os.PathLike[str] | None = None
    distributed: Distributed = "auto"

    def __post_init__(self) -> None:
        """Raise for options that no fit could use."""
        chunk, memory, seconds = self.chunk_size, self.max_memory, self.checkpoint_seconds
        folders = [one is None or isinstance(one, (str, os.PathLike)) for one in (self.checkpoint, self.scratch)]
        rules = {
            "chunk_size": (chunk is None or _within(chunk, Integral, 1), "a whole number of examples, at least 1"),
            "max_memory": (memory is None or _within(memory, Real, 1), "a number of bytes, at least 1"),
            "dtype": (self.dtype in (torch.float32, torch.float64), "torch.float64 or torch.float32, for the algebra"),
            "precision": (self.precision in get_args(Precision), f"one of {str(get_args(Precision))[1:-1]}"),
            "seed": (isinstance(self.seed, Integral), "a whole number"),
            "checkpoint_seconds": (_within(seconds, Real, 0), "a number of seconds, not below zero"),
            "checkpoint": (folders[0], "the name of a folder"),
            "scratch": (folders[1], "the name of a folder"),
        }
        for name, (fine, wanted) in rules.items():
            if not fine:
                raise InputError(f"expected {name} to be {wanted}, got {getattr(self, name)!r}.")


def _within(value: Any, kind: type, least: float) -> bool:
    return isinstance(value, kind) and least <= value < math.inf  # type: ignore[operator]  # of numbers


def checked_execution(given: Any) -> Execution:
    """The given `Execution`, checked, or the default one."""
    if given is not None and not isinstance(given, Execution):
        raise InputError(
            f"expected execution to be a whence.Execution, got {given!r}. Write execution=whence.Execution(...), with "
            "chunk_size, max_memory, dtype or another of its options."
        )
    return given or Execution()


class Chunks:
    """Splits batches into chunks; if one is too large for the device, it and all later ones are halved."""

    def __init__(self, notes: list[str], what: str) -> None:
        self.notes = notes  # gets a line when that happens
        self.what = what  # what is held for a chunk, in the plural, for messages
        self.most: int | None = None

    def of(self, size: int, step: int, work: Callable[[slice], T]) -> Iterator[tuple[slice, T]]:
        """Yield (which examples, result of `work`) for chunks of about equal size, at most `step` examples.

        Examples:
            >>> list(Chunks([], "tangents").of(5, 4, lambda where: where.start))
            [(slice(0, 3, None), 0), (slice(3, 5, None), 3)]
        """
        low = 0
        while low < size:
            count = -(-(size - low) // min(step, self.most or step))
            where = slice(low, low + -(-(size - low) // count))
            try:
                found = work(where)
            except torch.cuda.OutOfMemoryError as error:
                taken = where.stop - where.start
                if taken == 1:
                    raise TooLargeError(
                        f"expected the {self.what} of one example to fit on the device, got out of memory. Select "
                        "fewer parameters, use fewer columns (hessian_columns=...), or a device with more memory."
                    ) from error
                self.most = taken // 2
                self.notes.append(
                    f"the device ran out of memory with the {self.what} of {taken} examples at once; {self.most} were "
                    "used from then on"
                )
                if torch.cuda.is_initialized():
                    torch.cuda.empty_cache()
                continue
            yield where, found
            del found  # the next chunk needs the memory
            low = where.stop


@dataclass
class Passes:
    """The passes of a fit over the training data: which processes share them, and where their sums are saved."""

    process_group: ProcessGroup = ALONE  # the processes that share the data
    checkpoint: Checkpoint | None = None  # saves the state of each pass, only in the first process
    checkpointed: bool = False  # whether any process saves states
    offset: int = 0  # index of this process's first example among all
    local_examples: int | None = None  # number of examples of this process; `None` for all
    most_examples: int | None = None  # largest number of examples of any process; `None` for all
    closed: bool = False  # whether several processes shared a fit that is finished
    scratch: str | os.PathLike[str] | None = None  # a folder for what does not fit in memory
    memory_limited: bool = False  # whether the user set a limit; then freed memory is returned to the system at once

    def over(
        self,
        items: Iterable[T],
        rows: Callable[[T], slice],
        label: str,
        state: State,
        given: Sequence[Tensor],
        resumable: bool = True,
    ) -> Iterator[T]:
        """Yield items of the training data in order; the caller adds its sums over them to the state.

        `rows` gives the examples of an item. The state, zeros at first, holds the sums over the data of all processes
        in the end. Saved sums are discarded if `given`, what they depend on besides model, data and options, has
        changed. They are saved after any item, or only at the end if the pass is not `resumable`.
        """
        if self.closed:
            raise partial_data_error()
        self.trim_memory()
        done = self._restored(label, state, given)
        if done is None:
            return
        for item in items:
            where = rows(item)
            if where.stop <= done:
                continue
            if where.start < done:
                raise LoaderError(
                    f"expected batches of the same size as when the checkpoint was written, where one ended after "
                    f"{done} examples, got one of examples {where.start} to {where.stop}. Use the same batch_size, or "
                    "another folder."
                )
            yield item
            if resumable and self.checkpoint is not None and not self.shared:
                self.checkpoint.save_if_due(where.stop)
        self.trim_memory()
        if self.shared:
            self.process_group.all_reduce(list(state.values()), label)
        if self.checkpoint is not None:
            self.checkpoint.finish()

    @property
    def shared(self) -> bool:
        """Whether several processes share the fit."""
        return self.process_group.size > 1

    def trim_memory(self) -> None:
        """Return freed memory to the system if the user set a limit; otherwise the next pass reuses it."""
        if self.memory_limited:
            trim_heap()

    def close(self) -> None:
        """End the fit: later passes are neither shared nor saved."""
        self.checkpoint, self.checkpointed, self.closed = None, False, self.shared

    def _restored(self, label: str, state: State, given: Sequence[Tensor]) -> int | None:
        """Number of examples already in the state; `None` if the pass is finished."""
        done = self.checkpoint.begin(label, state, given) if self.checkpoint is not None else 0
        if not self.shared or not self.checkpointed:
            return done
        if self.process_group.all_gather_object(label, done is None)[0]:
            self.process_group.broadcast(list(state.values()), 0, label)
            return None
        for one in state.values():  # a pass begun by a single process starts from zero
            one.zero_()
        return 0


def partial_data_error() -> LoaderError:
    """The error for a question that needs all training data, when each process has a part of them."""
    return LoaderError(
        "expected all training data for this method, got a fit of several processes, each of which has a part of "
        "them. Save the fit, and whence.load(path, model, train_loader=...) with the batches of all processes, one "
        "after the other."
    )


# --- A progress line with the time left, shown only for long tasks ----------------------------------------------------


class Progress:
    """Shows `label: done/total, time left` on one line of a terminal, once a task has taken over a second.

    Elsewhere (a log file, a pipe) a line is written at most every ten seconds. By default this is standard error.
    """

    def __init__(self, enabled: bool = True, stream: TextIO | None = None) -> None:
        self.enabled = enabled
        self._stream = stream

    def track(self, items: Iterable[T], label: str, total: int | None = None) -> Iterator[T]:
        """Yield `items` and show the progress, with tokens a second if items have `tokens`.

        Examples:
            >>> list(Progress(enabled=False).track([1, 2], "counting"))
            [1, 2]
        """
        stream = self._stream or sys.stderr
        if not self.enabled or stream is None:  # a program without a console has no standard error
            yield from items
            return
        interactive = stream.isatty()
        pause = 0.1 if interactive else 10.0
        start = shown_at = time.monotonic()
        shown, tokens = False, 0
        try:
            for done, item in enumerate(items, start=1):
                yield item
                now, tokens = time.monotonic(), tokens + getattr(item, "tokens", 0)
                if now - start > 1.0 and now - shown_at > pause:
                    line = describe(label, done, total, now - start, tokens)
                    stream.write(f"\r\x1b[2K{line}" if interactive else f"{line}\n")
                    stream.flush()
                    shown, shown_at = True, now
        finally:
            if shown and interactive:
                stream.write("\r\x1b[2K")
                stream.flush()

    def say(self, line: str) -> None:
        """Write a separate line."""
        stream = self._stream or sys.stderr
        if self.enabled and stream is not None:
            stream.write(f"{line}\n")
            stream.flush()


def describe(label: str, done: int, total: int | None, elapsed: float, tokens: int = 0) -> str:
    """One line of progress.

    Examples:
        >>> describe("curvature, batch", 5, 20, 10.0)
        'whence: curvature, batch 5 of 20, 10 s, 30 s left'
        >>> describe("curvature, batch", 5, None, 10.0, 40_960)
        'whence: curvature, batch 5, 10 s, 4,096 tokens a second'
    """
    speed = f", {tokens / elapsed:,.0f} tokens a second" if tokens else ""
    if total is None or done == 0:
        return f"whence: {label} {done}, {clock(elapsed)}{speed}"
    left = elapsed / done * max(total - done, 0)
    return f"whence: {label} {done} of {total}, {clock(elapsed)}, {clock(left)} left{speed}"


def clock(seconds: float) -> str:
    """Format seconds for people.

    Examples:
        >>> clock(42), clock(125), clock(7300)
        ('42 s', '2 min 05 s', '2 h 01 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
