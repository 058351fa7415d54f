"""The unit of cost: one forward and k backward passes, down to every weight, over the same data."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter, process_time

import torch
from torch import Tensor, nn


def forward_backward(network: nn.Module, parts: Iterable[Tensor]) -> None:
    """One forward pass and a backward pass for each output, over batches of inputs."""
    weights = [p for p in network.parameters() if p.requires_grad]
    for inputs in parts:
        outputs = network(inputs).sum(0)
        for at, output in enumerate(outputs):
            torch.autograd.grad(output, weights, retain_graph=at + 1 < len(outputs))


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of this process, all threads together."""
    start = process_time()
    work()
    return process_time() - start


def wall_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Elapsed time, with everything queued on a GPU finished before and after."""
    _wait(device)
    start = perf_counter()
    work()
    _wait(device)
    return perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
