"""One thread at a time at a model.

While a model is differentiated its parameters are exchanged inside its modules (`torch.func.functional_call`), hooks
may be on them, and on the way out they are set back to what they were. A second thread would meet all of that. So a
thread claims the modules it uses, and another that wants any of them waits; models that share no module run side by
side.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from whence.errors import InputError


@dataclass
class _Claim:
    """The thread that uses a module, and how often it has claimed it without giving it back."""

    thread: int
    depth: int = 0


class Claims:
    """Which thread uses which modules."""

    def __init__(self) -> None:
        """Nothing is in use."""
        self.forget()

    def forget(self) -> None:
        """Nothing is in use: in a process that was forked, the threads did not come along."""
        self._given_back = threading.Condition()
        self._claims: dict[int, _Claim] = {}

    @contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        """Claim a model and all its submodules at once, when no other thread uses any of them.

        A thread may claim again what it has.
        """
        keys = {id(module) for module in model.modules()}
        me = threading.get_ident()
        with self._given_back:
            self._given_back.wait_for(lambda: all(self._free(key, me) for key in keys))
            for key in keys:
                self._claims.setdefault(key, _Claim(me)).depth += 1
        try:
            yield
        finally:
            self._give_back(keys)

    def _free(self, key: int, thread: int) -> bool:
        claim = self._claims.get(key)
        return claim is None or claim.thread == thread

    def _give_back(self, keys: set[int]) -> None:
        with self._given_back:
            for key in keys & self._claims.keys():
                claim = self._claims[key]
                claim.depth -= 1
                if claim.depth == 0:
                    del self._claims[key]
            self._given_back.notify_all()


_CLAIMS = Claims()
"""One for the process: threads meet nowhere else. It holds nothing while no model is in use."""

if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_CLAIMS.forget)


@contextmanager
def claimed(model: nn.Module) -> Iterator[None]:
    """Have a model for this thread alone, waiting for others that use it or parts of it through whence.

    Examples:
        >>> body = nn.Linear(3, 4)
        >>> with claimed(nn.Sequential(body, nn.ReLU())), claimed(body):
        ...     print("mine")
        mine
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module as model, got {type(model).__name__}.")
    with _CLAIMS.of(model):
        yield
