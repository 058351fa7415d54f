"""The clock that says where seconds go, and the kinds of kernels."""

from __future__ import annotations

import time

import pytest
import torch
from benchmarks.where import Clock, kind_of


class Work:
    """Something to watch."""

    def outer(self) -> None:
        time.sleep(0.02)
        self.inner()

    def inner(self) -> None:
        time.sleep(0.04)


def test_seconds_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(torch.device("cpu"))
    for name in ("outer", "inner"):
        monkeypatch.setattr(Work, name, getattr(Work, name))  # put back afterwards
        clock.watch(Work, name, name)
    started = time.perf_counter()
    clock.start()
    with clock.within(stage="first"):
        Work().outer()
    found = clock.stop()
    whole = time.perf_counter() - started
    assert found["first"]["inner"] >= 0.04
    assert found["first"]["outer"] >= 0.02
    assert sum(found["first"].values()) <= whole + 1e-3  # rounded
    assert clock.calls["first", "inner"] == 1


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("sm90_xmma_dgrad_implicit_gemm_f32f32_tf32f32", "convolutions"),
        ("void sytrd4_gpu<sytrd_params<double, 32>>", "decompositions"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_256x64_16x4_nn_align4>", "products"),
        ("CatArrayBatchedCopy_vectorized", "copies"),
        ("something else", "rest"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind
