"""Memory is looked up, planned with, and refused in words."""

from __future__ import annotations

import builtins
import io
import os
from typing import Any

import pytest
import torch

import whence
from whence.linalg import eigh, few_at_once
from whence.runtime.memory import Budget, free_memory, readable

CPU = torch.device("cpu")


def test_free_memory(device: torch.device) -> None:
    assert 2**20 < free_memory(device) < 2**50


def test_small_matrices_are_decomposed_in_pieces(device: torch.device) -> None:
    matrices = torch.randn(4000, 10, 10, generator=torch.Generator().manual_seed(0)).to(device)
    assert len(few_at_once(matrices)) == (1 if device.type == "cpu" else 13)
    assert torch.equal(torch.cat(few_at_once(matrices)), matrices)
    small = torch.zeros(9000, 1, 1, device=device)
    assert len(few_at_once(small)) == (1 if device.type == "cpu" else 3)  # 4096 at most, small or not
    large = torch.zeros(3, 200, 200, device=device)
    assert len(few_at_once(large)) == (1 if device.type == "cpu" else 3)  # one at least


def test_decompositions_in_pieces_are_those_of_all(device: torch.device) -> None:
    roots = torch.randn(5000, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(device)
    values, vectors = eigh(roots @ roots.mT)
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, roots @ roots.mT)
    values, vectors = eigh(roots[:, :1, :1])
    assert torch.equal(values, roots[:, 0, :1])
    assert torch.equal(vectors, torch.ones_like(roots[:, :1, :1]))


@pytest.mark.gpu
def test_the_workspace_of_small_decompositions_does_not_grow() -> None:
    matrices = torch.randn(4000, 10, 10, device="cuda")
    peaks = []
    for count in (1000, 4000):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = eigh(matrices[:count])
        peaks.append(torch.cuda.max_memory_allocated() - before - sum(one.nbytes for one in results))
    assert peaks[1] <= peaks[0] + 2**20
    assert peaks[1] < 256 * 2**20


def with_files(monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let only these files exist below /proc and /sys."""
    real = builtins.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> Any:
        if str(path).startswith(("/proc", "/sys")):
            if str(path) not in files:
                raise FileNotFoundError(path)
            return io.StringIO(files[str(path)])
        return real(path, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", opened)


MEMINFO = "MemTotal:       64000000 kB\nMemFree:  1 kB\nMemAvailable:   32000000 kB\n"


GROUP = "/sys/fs/cgroup/"
CONTAINERS: dict[str, tuple[dict[str, str], int]] = {
    "machine": ({}, 32_000_000 * 1024),
    "no limit": ({GROUP + "memory.max": "max\n", GROUP + "memory.current": "5\n"}, 32_000_000 * 1024),
    "container": ({GROUP + "memory.max": "4000\n", GROUP + "memory.current": "1500\n"}, 2500),
    "cached files": (
        {
            GROUP + "memory.max": "4000\n",
            GROUP + "memory.current": "3900\n",
            GROUP + "memory.stat": "anon 1000\ninactive_file 2000\nactive_file 500\nslab 400\n",
        },
        2600,
    ),
    "old container": (
        {GROUP + "memory/memory.limit_in_bytes": "4000\n", GROUP + "memory/memory.usage_in_bytes": "1000\n"},
        3000,
    ),
}


@pytest.mark.parametrize(("files", "expected"), CONTAINERS.values(), ids=CONTAINERS.keys())
def test_containers_have_less_than_the_machine(
    files: dict[str, str], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_files(monkeypatch, {"/proc/meminfo": MEMINFO, **files})
    assert free_memory(CPU) == expected


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    with_files(monkeypatch, {})
    assert free_memory(CPU) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    monkeypatch.delattr(os, "sysconf")
    assert free_memory(CPU) == 4 * 2**30


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2.5 * 2**20, "2.5 MiB"), (2**50, "1024.0 TiB")],
)
def test_sizes_for_people(size: float, words: str) -> None:
    assert readable(size) == words


def test_budgets() -> None:
    budget = Budget(CPU, 1000)
    assert budget.fits(1000)
    assert not budget.fits(1001)
    budget.require(1000, "this", "Nothing.")
    with pytest.raises(
        whence.TooLargeError, match=r"expected this to fit in 1000 B, but it takes about 2\.0 KiB\. Do that\."
    ):
        budget.require(2048, "this", "Do that.")
    assert Budget(CPU, None).limit > 2**20
