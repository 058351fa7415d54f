"""Where the seconds of a fit and of a prediction go: passes of the network, products, rotations, decompositions.

    python -m benchmarks.where --device cuda --structures ekfac core sketch --out results/where.json

Two tables for each structure. The first has the seconds of every stage by what was done in them, on a clock that waits
for the GPU before and after each part, so that the time between launches is in the part that causes it. The second has
the seconds by kind of kernel, from torch's profiler, on fewer images (`--profiled`), and the time that the GPU idles.
Images are random, and lie on the GPU beforehand.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import whence
from whence import fitting
from whence.curvature import accumulate, kronecker, primal, rotation, spectral
from whence.jacobian import capture, network, record

from . import networks
from .data import batches, random_images
from .gpu_cifar import NETWORKS, profile_arguments
from .record import save, say, surroundings
from .reference import forward_backward, wall_seconds
from .variants import parse, precision

KERNELS = {
    "convolutions": ("conv", "cudnn", "winograd", "wgrad", "dgrad", "fprop", "implicit", "im2col", "col2im"),
    "decompositions": (
        "eigh",
        "syevd",
        "sytrd",
        "stedc",
        "ormtr",
        "laed",
        "larf",
        "cholesky",
        "potrf",
        "qr",
        "trsm",
        "symv",
        "syr",
    ),
    "products": ("gemm", "gemv", "cutlass", "matmul", "nvjet", "splitk", "dot", "addmm", "bmm", "::mm"),
    "copies": ("copy", "memcpy", "memset", "cat", "nchwtonhwc", "nhwctonchw", "fill", "unfold"),
    "norms": ("batch_norm", "batchnorm", "layer_norm", "bn_"),
    "elementwise and sums": (
        "elementwise",
        "reduce",
        "add",
        "mul",
        "sum",
        "square",
        "gram_kernel",
        "sqrt",
        "threshold",
        "relu",
        "div",
    ),
}
"""Kinds of kernels by what their names contain; the first that fits counts."""


class Clock:
    """Seconds by stage and part, each without those of the parts called from it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)
        self.calls: dict[tuple[str, str], int] = defaultdict(int)
        self._stages, self._parts, self._last = ["other"], ["other"], 0.0

    def _turn(self) -> None:
        """Count the time since the last turn for what was on until now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = perf_counter()
        self.seconds[self._stages[-1], self._parts[-1]] += now - self._last
        self._last = now

    def start(self) -> None:
        """From zero."""
        self.seconds.clear()
        self.calls.clear()
        self._last = perf_counter()

    def stop(self) -> dict[str, dict[str, float]]:
        """Seconds by stage, then by part."""
        self._turn()
        found: dict[str, dict[str, float]] = {}
        for (stage, part), seconds in self.seconds.items():
            found.setdefault(stage, {})[part] = round(seconds, 4)
        return found

    @contextmanager
    def within(self, stage: str | None = None, part: str | None = None) -> Iterator[None]:
        """Count for a stage, or a part, meanwhile."""
        self._turn()
        self._stages.append(stage or self._stages[-1])
        self._parts.append(part or "other")
        self.calls[self._stages[-1], self._parts[-1]] += 1
        try:
            yield
        finally:
            self._turn()
            self._stages.pop()
            self._parts.pop()

    def watch(self, owner: Any, name: str, part: str | None = None, stage: Callable[..., str] | None = None) -> None:
        """Count the time within a function or method of `owner`."""
        before = getattr(owner, name)

        @wraps(before)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self.within(None if stage is None else stage(*args, **kwargs), part):
                return before(*args, **kwargs)

        setattr(owner, name, watched)


PARTS: tuple[tuple[Any, str, str], ...] = (
    (network.Network, "shaped", "forward"),
    (record, "pull", "backward"),
    (capture, "uses_in_graph", "graph"),
    (capture, "tangents_of", "graph"),
    (kronecker.Factors, "add", "factors"),
    (kronecker, "eigenvectors", "decompositions"),
    (primal, "factorize", "decompositions"),
    (rotation, "_project", "rotations"),
    (rotation, "rotated_values", "rotations"),
    (rotation.Basis, "to_coordinates", "rotations"),
    (rotation, "gradient_matrices", "matrices"),
    (rotation, "mix", "mixtures"),
    (rotation, "gram_matrices", "lengths outside"),
    (rotation, "squared_lengths", "lengths outside"),
    (rotation, "parts_outside", "lengths outside"),
    (rotation, "weighted_sum", "totals"),
    (rotation, "directional_derivatives", "totals"),
    (rotation, "inner_products", "totals"),
    (rotation, "scaled_grams", "squares"),
    *((owner, name, "squares") for owner in (rotation.Factored, rotation.Full) for name in ("squares", "grams")),
    *((owner, "gather", "gathering") for owner in (rotation.Factored, rotation.Full)),
    *((owner, "variances", "squares") for owner in (rotation.Factored, rotation.Full)),
    (primal, "add_gram", "algebra"),
    (primal, "times_lower", "algebra"),
)


def watch_everything(clock: Clock) -> None:
    """Count the parts of fits and predictions from now on."""
    for owner, name, part in PARTS:
        clock.watch(owner, name, part)

    def label(stream: Any, sums: Any, **_: Any) -> str:
        return str(sums.label)

    clock.watch(accumulate.LayerGradients, "accumulate", stage=label)
    for name, stage in {"feature_curvature": "curvature", "leverages": "leverage", "whitened_meats": "meats"}.items():
        clock.watch(primal, name, stage=lambda *_, stage=stage, **__: stage)
    clock.watch(accumulate.LayerGradients, "_verified", stage=lambda *_, **__: "verification")
    clock.watch(kronecker.KroneckerFactors, "eigenbases", stage=lambda *_, **__: "eigenvectors")
    clock.watch(fitting, "linearize", stage=lambda *_, **__: "outputs")
    clock.watch(fitting, "_with_trust", stage=lambda *_, **__: "trust")
    clock.watch(spectral.FittedSpectral, "sandwich", stage=lambda *_, **__: "sandwich")


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    low = kernel.lower()
    return next((kind for kind, words in KERNELS.items() if any(word in low for word in words)), "rest")


def by_kernel(work: Callable[[], object], device: torch.device) -> dict[str, Any]:
    """Seconds of the GPU by kind of kernel, the longest kernels, and how long it idles."""
    on_gpu = device.type == "cuda"
    kinds = [ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    with profile(activities=kinds) as seen:
        seconds = wall_seconds(work, device)
    spent: dict[str, float] = defaultdict(float)
    longest = []
    for event in seen.key_averages():
        own = (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e6
        spent[kind_of(event.key)] += own
        longest.append((round(own, 4), event.count, event.key[:120]))
    found = {kind: round(own, 4) for kind, own in sorted(spent.items(), key=lambda pair: -pair[1])}
    found["idle"] = round(max(seconds - sum(spent.values()), 0.0), 4)
    return {"seconds": seconds, "kinds": found, "longest": sorted(longest, reverse=True)[:25]}


def show(title: str, stages: dict[str, dict[str, float]]) -> None:
    """A table of stages and parts, in seconds."""
    parts = sorted({part for each in stages.values() for part in each}, key=lambda part: -_sum_of(stages, part))
    shown = [part for part in parts if _sum_of(stages, part) >= 0.005]
    whole = sum(sum(each.values()) for each in stages.values())
    say(f"{title}: {whole:.2f} s")
    say(" ".join([f"{'':18s}", *(f"{part[:12]:>12s}" for part in [*shown, "all"])]))
    for stage, each in stages.items():
        cells = [each.get(part, 0.0) for part in shown] + [sum(each.values())]
        say(" ".join([f"{stage[:18]:18s}", *(f"{cell:12.2f}" if cell >= 0.005 else f"{'':12s}" for cell in cells)]))
    say(" ".join([f"{'all':18s}", *(f"{_sum_of(stages, part):12.2f}" for part in shown), f"{whole:12.2f}"]))


def _sum_of(stages: dict[str, dict[str, float]], part: str) -> float:
    return sum(each.get(part, 0.0) for each in stages.values())


def measure(net: nn.Module, x: Tensor, y: Tensor, text: str, clock: Clock, given: argparse.Namespace) -> dict[str, Any]:
    """Both tables of one structure, and the seconds without a clock that waits."""
    device, variant = torch.device(given.device), parse(text)
    options = {"structure": variant.structure, "ridge": given.ridge_share * given.n, "progress": False}
    loader, tests = batches(x, y, given.batch), list(x[: given.test].split(given.batch))
    kept: list[Any] = []
    row: dict[str, Any] = {"structure": text}

    def fit(some: Any = loader) -> None:
        kept[:] = [whence.fit(net, some, **options, **variant.options)]

    with precision(variant.tf32):
        if device.type == "cuda":
            fit(batches(x[: given.profiled], y[: given.profiled], given.batch))  # kernels are loaded and chosen
            kept.clear()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        for name, work in (("fit", fit), ("predict", lambda: kept[0].predict(tests))):
            clock.start()
            row[f"{name}_s"] = wall_seconds(work, device)
            row[name] = clock.stop()
            row[f"{name}_calls"] = {f"{stage}: {part}": count for (stage, part), count in clock.calls.items()}
            show(f"{text}, {name}", row[name])
        if device.type == "cuda":
            row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        tracer = kept[0]
        few = batches(x[: given.profiled], y[: given.profiled], given.batch)
        if given.profiled:
            row["fit_kernels"] = by_kernel(partial(fit, few), device)
            row["predict_kernels"] = by_kernel(lambda: tracer.predict([inputs for inputs, _ in few]), device)
            for name in ("fit", "predict"):
                found = row[f"{name}_kernels"]
                said = ", ".join(f"{kind} {own:.2f}" for kind, own in found["kinds"].items())
                say(f"{text}, {name} of {given.profiled} images by kernels, {found['seconds']:.2f} s: {said}")
    row["notes"] = [finding.value for finding in tracer.diagnostics if finding.name == "note"]
    return row


def main() -> None:
    """Measure the structures that were asked for."""
    parser = profile_arguments(__doc__, "out/where.json", 50_000)
    parser.add_argument("--structures", nargs="+", default=["ekfac", "core", "sketch"])
    parser.add_argument("--test", type=int, default=10_000)
    parser.add_argument("--profiled", type=int, default=2000, help="images for the table of kernels; 0 for none")
    parser.add_argument("--ridge-share", type=float, default=0.01, help="lambda / n")
    given = parser.parse_args()
    if given.tiny:
        given.network, given.n, given.test, given.batch, given.profiled = "tiny", 60, 30, 20, 20
    device = torch.device(given.device)
    torch.manual_seed(0)
    net = NETWORKS[given.network]().to(device).eval()
    split = random_images(given.n, 0, (3, 32, 32))
    x, y = split.inputs.to(device), whence.one_hot(split.labels.to(device), 10)
    told = {"network": given.network, "parameters": networks.size(net), "n": given.n, "test": given.test}
    result: dict[str, Any] = {**surroundings(given.commit), **told, "reference": {}, "rows": []}
    parts = x[: given.test].split(given.batch)
    for tf32 in (False, True) if device.type == "cuda" else (False,):
        with precision(tf32):
            forward_backward(net, parts[:1])
            label = "tf32" if tf32 else "float32"
            result["reference"][label] = wall_seconds(partial(forward_backward, net, parts), device)
    say(f"forward + k backward of {given.test} images: {result['reference']}")
    clock = Clock(device)
    watch_everything(clock)
    for text in given.structures:
        result["rows"].append(measure(net, x, y, text, clock, given))
        save(given.out, result)
    say(f"wrote {given.out}")


if __name__ == "__main__":
    main()
