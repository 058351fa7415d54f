"""The default structure: exact where that is quick, the core where it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from whence.curvature.base import FittedCurvature, MeatRoots, Structure
from whence.curvature.core import Core
from whence.curvature.cost import Cost, ProblemSizes
from whence.curvature.exact import Exact, Road, memory_needed
from whence.jacobian.linearization import Linearization
from whence.runtime.memory import readable

OPERATIONS = {"cpu": 2e12, "cuda": 2e14}
"""Floating-point operations that an exact fit may take: about a minute."""


@dataclass(frozen=True)
class Auto(Structure):
    """Choose the structure by size: exact where it fits in memory and takes about a minute at most, else the core.

    Diagnostics say which one was taken, and why.

    Examples:
        >>> import torch, whence
        >>> x = torch.linspace(-1, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> tracer = whence.fit(net, [(x, 2 * x + 1)], structure="auto", ridge=0.1)
        >>> tracer.diagnostics["structure"]
        'exact'
    """

    name: ClassVar[str] = "auto"

    @property
    def takes_groups(self) -> bool:
        """Both the exact structure and the core do."""
        return True

    @property
    def additive(self) -> bool:
        """Both the primal road and the core are made of sums over examples."""
        return True

    def resolve(self, problem: Linearization, ridge: float | None) -> tuple[Structure, str]:
        """Exact by the road that takes fewer operations, if it fits; else the core."""
        return choose(
            problem.n * problem.k,
            problem.selection.size,
            lambda road: memory_needed(problem, road),
            problem.budget.limit,
            problem.device,
            dual=not (problem.passes.checkpointed or ridge == 0),  # the kernel is no sum over examples
        )

    def fit(self, problem: Linearization, ridge: float | None, meat_roots: MeatRoots | None = None) -> FittedCurvature:
        """Fit the structure that was chosen."""
        return self.resolve(problem, ridge)[0].fit(problem, ridge, meat_roots)

    def cost(self, sizes: ProblemSizes) -> Cost:
        """Memory and work of the structure that would be chosen."""

        def memory(road: Road) -> float:
            return Exact(road).cost(sizes).memory

        chosen, _ = choose(sizes.numbers, sizes.d, memory, sizes.limit, sizes.device, sizes.dual)
        return chosen.cost(sizes)


def choose(
    numbers: int,
    size: int,
    memory: Callable[[Road], float],
    limit: float,
    device: torch.device,
    dual: bool = True,
) -> tuple[Structure, str]:
    """Exact by the road that takes fewer operations, if it fits, else the core; and why.

    Args:
        numbers: examples times outputs, n k.
        size: number of parameters, d.
        memory: bytes that a road takes.
        limit: bytes that may be taken.
        device: where it is computed.
        dual: whether the dual road may be taken.
    """
    operations: dict[Road, float] = {"primal": float(size) ** 2 * (numbers + size)}
    if dual:
        operations["dual"] = float(numbers) ** 2 * (numbers + size)
    roads = sorted(operations, key=operations.__getitem__)
    most = OPERATIONS["cuda" if device.type == "cuda" else "cpu"]
    for road in roads:
        if operations[road] <= most and memory(road) <= limit:
            return Exact(road), f"{road} road: {readable(memory(road))}, {operations[road]:.0e} operations"
    road = roads[0]
    return Core(), f"exact would take {readable(memory(road))} and {operations[road]:.0e} operations ({road} road)"
