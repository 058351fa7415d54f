"""Steps of training that are recorded once and replayed: on a GPU they are too small to be started kernel by kernel."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def can_capture(inputs: Tensor) -> bool:
    """Whether steps on these data are recorded and replayed."""
    return inputs.is_cuda


class Captured:
    """A step of training as a CUDA graph: the first few are taken as they come, then one is recorded and replayed.

    Attributes:
        step: takes the places of a batch's examples, (b,); asks nothing back from the GPU, and what it reads beside
            them (a rate, say) is changed in place.
        batch: examples in a full batch; another number of them is never replayed.
    """

    def __init__(self, step: Callable[[Tensor], None], batch: int, first: int = 5) -> None:
        self.step, self.batch, self._first = step, batch, first
        self._graph: torch.cuda.CUDAGraph | None = None
        self._chosen: Tensor | None = None

    def __call__(self, chosen: Tensor) -> None:
        """Take a step."""
        if len(chosen) != self.batch:
            self.step(chosen)
        elif self._first > 0:
            self._first -= 1
            aside = torch.cuda.Stream()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                self.step(chosen)
            torch.cuda.current_stream().wait_stream(aside)
        else:
            self._replay(chosen)

    def _replay(self, chosen: Tensor) -> None:
        if self._chosen is None:
            self._chosen = chosen.clone()
        self._chosen.copy_(chosen)
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self.step(self._chosen)
        self._graph.replay()


def set_rate(optimiser: torch.optim.Optimizer, value: float) -> None:
    """Change the learning rate; in place where it is a tensor, as a recorded step needs it."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def one_cycle(step: int, steps: int, most: float, rising: float = 0.25) -> float:
    """A learning rate that rises from a 25th of its largest value and falls to nearly nothing, by half cosines.

    Args:
        step: from 0.
        steps: of the whole training.
        most: the largest rate.
        rising: share of the steps in which it rises.

    Examples:
        >>> [round(one_cycle(step, 9, 1.0, rising=1 / 3), 2) for step in range(9)]
        [0.04, 0.52, 1.0, 0.93, 0.75, 0.5, 0.25, 0.07, 0.0]
    """
    top, last = rising * steps - 1, steps - 1
    if step <= top:
        start, end, gone = most / 25, most, step / top if top > 0 else 1.0
    else:
        start, end, gone = most, most / 25e4, (step - top) / (last - top)
    return end + (start - end) / 2 * (1 + math.cos(math.pi * gone))
