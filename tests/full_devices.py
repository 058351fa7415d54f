"""A stand-in for a GPU that is full: on the CPU, what tensors hold is counted, and beyond a limit there is no more."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Full(TorchDispatchMode):
    """Raises what a full GPU raises as soon as tensors that were made inside hold more than `limit` bytes."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit, self.held, self.peak, self.times = limit, 0, 0, 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                self._count(one.untyped_storage())
        if self.held > self.limit:
            self.times += 1
            raise torch.cuda.OutOfMemoryError(f"CUDA out of memory: {self.held} bytes of {self.limit} in use")
        self.peak = max(self.peak, self.held)
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known[key] = size
            self.held += size
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.held -= self._known.pop(key, 0)
