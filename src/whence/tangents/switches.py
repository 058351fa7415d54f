"""Settings of the whole process that some work needs otherwise: changed for all threads, until the last is done.

Torch has a single switch for attention kernels, cuDNN and rounding, Python a single list of warning filters and a
random state. Were each thread to put back what it had found, one would undo what another still needs, and the last to
leave would put back what the first had set.
"""

from __future__ import annotations

import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
import torch
from torch.backends import cudnn, mha
from torch.nn.attention import SDPBackend, sdpa_kernel


class Together:
    """A change of settings that is made for the first thread in, and undone after the last one out.

    Args:
        change: makes it, and undoes it on the way out.

    Examples:
        >>> @contextmanager
        ... def door():
        ...     print("open")
        ...     yield
        ...     print("closed")
        >>> together = Together(door)
        >>> with together.entered(), together.entered():
        ...     print("two inside")
        open
        two inside
        closed
    """

    def __init__(self, change: Callable[[], AbstractContextManager[object]]) -> None:
        """Nobody is in."""
        self._change = change
        self._empty()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._left_behind)

    def _empty(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._undo = ExitStack()

    def _left_behind(self) -> None:
        """In a process that was forked: the threads inside did not come along."""
        self._undo.close()
        self._empty()

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Work under the changed settings."""
        with self._lock:
            if self._inside == 0:
                self._undo.enter_context(self._change())
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside = max(self._inside - 1, 0)
                if self._inside == 0:
                    self._undo.close()


@contextmanager
def _plain_kernels() -> Iterator[None]:
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(mha.set_fastpath_enabled, mha.get_fastpath_enabled())
        mha.set_fastpath_enabled(False)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated", category=Warning)
        warnings.filterwarnings("ignore", message="There is a performance drop", category=UserWarning)
        yield


@contextmanager
def _other_recurrent_kernels() -> Iterator[None]:
    before = cudnn.enabled
    cudnn.enabled = False
    try:
        yield
    finally:
        cudnn.enabled = before


@contextmanager
def _same_draws() -> Iterator[None]:
    ours, theirs = random.getstate(), np.random.get_state()  # noqa: NPY002  the global state is what is restored
    with torch.random.fork_rng(devices=()):
        try:
            yield
        finally:
            random.setstate(ours)
            np.random.set_state(theirs)  # noqa: NPY002


_PLAIN_KERNELS = Together(_plain_kernels)
_NO_CUDNN = Together(_other_recurrent_kernels)
_SAME_DRAWS = Together(_same_draws)


def plain_kernels() -> AbstractContextManager[None]:
    """Take kernels that can be differentiated in every way, and keep torch's own warnings about it from the user."""
    return _PLAIN_KERNELS.entered()


def without_cudnn() -> AbstractContextManager[None]:
    """Do without cuDNN, whose recurrent networks can be differentiated in training mode only."""
    return _NO_CUDNN.entered()


def same_draws() -> AbstractContextManager[None]:
    """Set the random states of torch's CPU generator, numpy and Python back afterwards."""
    return _SAME_DRAWS.entered()


class _Products:
    """Who wants products rounded, and who forbids it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wishes: list[bool] = []
        self._before = (False, False)

    @contextmanager
    def rounded(self, allowed: bool | None) -> Iterator[None]:
        with self._lock:
            if not self._wishes:
                self._before = torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32
            wish = self._before[0] if allowed is None else allowed
            self._wishes.append(wish)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                if wish in self._wishes:  # else in a process that was forked meanwhile
                    self._wishes.remove(wish)
                    self._set()

    def _set(self) -> None:
        products, convolutions = self._before if not self._wishes else (all(self._wishes),) * 2
        torch.backends.cuda.matmul.allow_tf32, cudnn.allow_tf32 = products, convolutions

    def left_behind(self) -> None:
        """In a process that was forked: the threads inside did not come along."""
        self._lock = threading.Lock()
        if self._wishes:
            self._wishes = []
            self._set()


_PRODUCTS = _Products()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_PRODUCTS.left_behind)


def rounded_products(allowed: bool | None) -> AbstractContextManager[None]:
    """Let a GPU round single-precision products to TF32 meanwhile, which is several times faster, or forbid it.

    Args:
        allowed: `None` leaves it to what the caller has set. While any thread forbids it, nothing is rounded.

    Examples:
        >>> with rounded_products(True), rounded_products(False):
        ...     print(torch.backends.cuda.matmul.allow_tf32)
        False
    """
    return _PRODUCTS.rounded(allowed)
