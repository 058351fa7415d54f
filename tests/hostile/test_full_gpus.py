"""A GPU that is really full: torch's allocator refuses, chunks are halved, and the answers are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whence
from doubles import fit

POSITIONS, WIDTH, OUTPUTS = 64, 32, 32
CHUNKS = 20
"""Small chunks are so many; their peak is nearly what a fit takes whatever its chunks are."""

STRUCTURES: dict[str, whence.Structure] = {
    "ekfac": whence.EKFAC(),
    "core": whence.Core(size=100),
    "primal": whence.Exact(road="primal"),
}
SIZES = 1000, 4000, 16_000
"""Examples: more where the workspaces of decompositions take so much that few gradients are not seen beside them."""


class Positions(nn.Module):
    """A layer that is used at 64 positions: gradients of all outputs are 32 times as large as what flows through."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.outside(torch.tanh(self.inside(x)).mean(1))
        return found


class Case:
    """One structure on one number of examples."""

    def __init__(self, name: str, n: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.n = n
        self.model = Positions().to(device).eval()
        self.x = torch.randn(n, POSITIONS, WIDTH, device=device)
        self.y = torch.randn(n, OUTPUTS, device=device)
        size = sum(p.numel() for p in self.model.parameters())
        # The plan is the same for all chunks: so much that nothing is refused, so little that rows are not kept.
        plan = 40 * size**2 + 3.2 * 4 * n * OUTPUTS * size
        self.options: dict[str, Any] = {"structure": STRUCTURES[name], "ridge": 10.0}
        self.execution: dict[str, Any] = {"max_memory": int(plan), "dtype": torch.float32}

    def fit(self, chunk: int) -> whence.Tracer:
        execution = whence.Execution(chunk_size=chunk, **self.execution)
        return fit(self.model, [(self.x, self.y)], **self.options, execution=execution)

    def answer(self, tracer: whence.Tracer) -> Tensor:
        return tracer.predict(self.x[:50]).hec3

    def peaks(self, chunk: int) -> tuple[int, int, Tensor]:
        """Bytes that tensors and workspaces took, bytes that the allocator held for them, and the answer."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tracer = self.fit(chunk)
        torch.cuda.synchronize()
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        answer = self.answer(tracer)
        del tracer
        torch.cuda.empty_cache()
        return allocated, reserved, answer


@pytest.mark.gpu
@pytest.mark.parametrize("name", STRUCTURES)
def test_a_gpu_that_is_full(name: str) -> None:
    """The limit lies between what the allocator holds for small chunks, and what all examples at once must have."""
    device = torch.device("cuda")
    case, small, large, wanted = _apart(name, device)
    assert large >= 2 * small, f"{case.n} examples at once take {large} bytes, few {small}"
    limit = (small + large) // 2
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(limit / total)
    try:
        found = case.fit(case.n)
        answer = case.answer(found)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert [str(one.value) for one in found.diagnostics if "the device ran out of memory" in str(one.value)]
    torch.testing.assert_close(answer, wanted, rtol=1e-2, atol=1e-6)
    assert _room_is_given_back(device)


def _apart(name: str, device: torch.device) -> tuple[Case, int, int, Tensor]:
    """A case with what small chunks hold, what all at once take, and the answer without any limit."""
    Case(name, 200, device).peaks(100)  # what loads late is loaded
    for n in SIZES:
        case = Case(name, n, device)
        _, small, wanted = case.peaks(n // CHUNKS)
        large, _, at_once = case.peaks(n)
        torch.testing.assert_close(at_once, wanted, rtol=1e-2, atol=1e-6)
        if large >= 4 * small:
            break
    return case, small, large, wanted


def _room_is_given_back(device: torch.device) -> bool:
    """Whether the allocator may take again what it was refused."""
    torch.cuda.empty_cache()
    return bool(torch.empty(2**28, dtype=torch.uint8, device=device).numel())
