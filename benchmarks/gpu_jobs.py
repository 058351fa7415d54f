"""Three jobs on one GPU: scores of all pairs, a million images, and a card of 16 GB.

    python -m benchmarks.gpu_jobs pairs --device cuda --out results/gpu_jobs.json
    python -m benchmarks.gpu_jobs growth --device cuda --sizes 50000 200000 1200000
    python -m benchmarks.gpu_jobs limit --device cuda --structures ekfac:precision=fp16,max_memory=13e9

"pairs" is the job that kronfluence publishes: a ResNet-9, 50,000 images, their scores for 2,000 queries, all pairs. The
structure "kronfluence" stands for that package, in half precision (`--structures kronfluence`), where it is installed.
"growth" fits a small network to ever more images, which are drawn on the GPU when they are read. "limit" fits a
ResNet-18 within the memory of a structure's option. Images are random, and networks untrained: for timings alone.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import whence

from . import networks
from .data import batches
from .influences import FACTORS, analyzer_of, fit_factors
from .record import attempt, save, say, surroundings
from .reference import wall_seconds
from .variants import parse

STRUCTURES = {
    "pairs": ["sketch:precision=fp16", "core:size=2048,precision=fp16"],
    "growth": ["sketch:precision=fp16", "ekfac:precision=fp16"],
    "limit": ["ekfac:precision=fp16,max_memory=13e9", "core:size=2048,precision=fp16,max_memory=13e9"],
}
"""13 of the 16 GB of such a card are free for a fit."""


class Drawn:
    """A loader that draws each batch of images from its number, on the device: the same on every pass, none kept."""

    def __init__(self, n: int, batch: int, device: torch.device) -> None:
        self.n, self.batch, self.device = n, batch, device

    def __len__(self) -> int:
        return math.ceil(self.n / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(len(self)):
            draw = torch.Generator(self.device).manual_seed(number)
            size = min(self.batch, self.n - number * self.batch)
            labels = torch.randint(10, (size,), generator=draw, device=self.device)
            images = torch.randn(size, 3, 32, 32, generator=draw, device=self.device)
            yield images, whence.one_hot(labels, 10)


def convolution(inputs: int, outputs: int, *more: nn.Module, kernel: int = 3, stride: int = 1) -> nn.Sequential:
    """With a norm and a rectifier."""
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, *more)


class Plus(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The sum."""
        found: Tensor = x + self.inner(x)
        return found


def resnet9(outputs: int = 10, width: int = 64) -> nn.Sequential:
    """The layers of kronfluence's example on CIFAR-10; its factor of the outputs is left out."""
    w = width
    return nn.Sequential(
        convolution(3, w),
        convolution(w, 2 * w, kernel=5, stride=2),
        Plus(nn.Sequential(convolution(2 * w, 2 * w), convolution(2 * w, 2 * w))),
        convolution(2 * w, 4 * w, nn.MaxPool2d(2)),
        Plus(nn.Sequential(convolution(4 * w, 4 * w), convolution(4 * w, 4 * w))),
        convolution(4 * w, 2 * w, nn.AdaptiveMaxPool2d(1)),
        nn.Flatten(),
        nn.Linear(2 * w, outputs, bias=False),
    )


def pairs(structure: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds of a fit, and of the scores of all pairs of queries and training examples."""
    device = torch.device(given.device)
    net = resnet9(width=given.width).to(device).eval()
    x, y = (torch.cat(parts) for parts in zip(*Drawn(given.n, given.batch, device), strict=True))
    queries = torch.randn(given.queries, 3, 32, 32, device=device)
    kept: list[Any] = []

    def fit() -> None:
        kept.append(_fit(net, batches(x, y, given.batch), parse(structure), given.n))

    def score() -> None:
        for some in queries.split(500):
            kept[1:] = [kept[0].attribute(some, matrix=True)]

    if structure == "kronfluence":
        fit, score = _kronfluence(net, (x, y), queries, given)
    fit_s, scores_s = wall_seconds(fit, device), wall_seconds(score, device)
    return {
        "n": given.n,
        "queries": given.queries,
        "parameters": networks.size(net),
        "fit_s": fit_s,
        "pairs_s": scores_s,
    }


def _kronfluence(
    net: nn.Module, known: tuple[Tensor, Tensor], queries: Tensor, given: argparse.Namespace
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A fit and the scores of all pairs by kronfluence, with the settings of its example in half precision."""
    from kronfluence.utils.common.factor_arguments import all_low_precision_factor_arguments  # present or not
    from kronfluence.utils.common.score_arguments import all_low_precision_score_arguments

    on_cpu, half = given.device == "cpu", torch.float32 if given.device == "cpu" else torch.bfloat16
    folder = tempfile.mkdtemp()
    data = TensorDataset(known[0].cpu(), known[1].argmax(1).cpu())
    asked = TensorDataset(queries.cpu(), torch.zeros(len(queries), dtype=torch.long))
    analyzer = analyzer_of(net, folder, classes=True, cpu=on_cpu)

    def fit() -> None:
        arguments = all_low_precision_factor_arguments("ekfac", dtype=half)
        arguments.amp_dtype = None if on_cpu else half
        fit_factors(analyzer, data, given.batch, arguments)

    def score() -> None:
        arguments = all_low_precision_score_arguments(damping_factor=None, dtype=half)
        arguments.amp_dtype = None if on_cpu else half
        analyzer.compute_pairwise_scores(
            scores_name="pairs",
            factors_name=FACTORS,
            query_dataset=asked,
            train_dataset=data,
            per_device_query_batch_size=min(1000, len(queries)),
            per_device_train_batch_size=given.batch,
            score_args=arguments,
            overwrite_output_dir=True,
        )

    return fit, score


def growth(structure: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak memory of fits to ever more images."""
    device, variant = torch.device(given.device), parse(structure)
    net = networks.resnet18(10, given.width // 4).to(device).eval()
    rows = []
    for n in given.sizes:
        seconds, peak = _measured(net, Drawn(n, given.batch, device), variant, n, device)
        rows.append({"n": n, "fit_s": seconds, "peak_gib": peak})
        say(f"  {structure}, {n} images: {seconds:.2f} s, {peak} GiB")
    return {"parameters": networks.size(net), "sizes": rows, "fit_s": rows[-1]["fit_s"]}


def limit(structure: str, given: argparse.Namespace) -> dict[str, Any]:
    """Seconds and peak memory of a ResNet-18 within a limit."""
    device, variant = torch.device(given.device), parse(structure)
    net = networks.resnet18(10, given.width).to(device).eval()
    loader = batches(
        *(torch.cat(parts) for parts in zip(*Drawn(given.n, given.batch, device), strict=True)), given.batch
    )
    seconds, peak = _measured(net, loader, variant, given.n, device)
    return {"n": given.n, "parameters": networks.size(net), "fit_s": seconds, "peak_gib": peak}


def _fit(net: nn.Module, loader: Any, variant: Any, n: int) -> whence.Tracer:
    options = {"structure": variant.structure, "ridge": 0.01 * n, "progress": False, **variant.options}
    return whence.fit(net, loader, **options)


def _measured(net: nn.Module, loader: Any, variant: Any, n: int, device: torch.device) -> tuple[float, float | None]:
    """Seconds, and the peak beyond what was held before, in GiB."""
    held = 0
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    seconds = wall_seconds(lambda: _fit(net, loader, variant, n), device)
    return seconds, (torch.cuda.max_memory_allocated() - held) / 2**30 if device.type == "cuda" else None


def main() -> None:
    """Run a job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=STRUCTURES)
    parser.add_argument("--out", type=Path, default=Path("out/gpu_jobs.json"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--structures", nargs="+")
    parser.add_argument("--n", type=int, default=50_000)
    parser.add_argument("--sizes", nargs="+", type=int, default=[50_000, 200_000, 1_200_000], help='for "growth"')
    parser.add_argument("--queries", type=int, default=2000, help='for "pairs"')
    parser.add_argument("--batch", type=int, default=1000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--commit", help="recorded as the commit, where there is no repository")
    parser.add_argument("--tiny", action="store_true", help="a few images and a small network: does it run?")
    given = parser.parse_args()
    if given.tiny:
        given.n, given.sizes, given.queries, given.batch, given.width = 40, [20, 40], 10, 20, 8
    given.structures = given.structures or STRUCTURES[given.job]
    torch.manual_seed(0)
    record: dict[str, Any] = {**surroundings(given.commit), "job": given.job, "rows": []}
    for structure in given.structures:
        row: dict[str, Any] = {"structure": structure}
        job = {"pairs": pairs, "growth": growth, "limit": limit}[given.job]
        said = attempt(row, lambda job=job, structure=structure: job(structure, given), lambda row: str(row))
        say(said)
        record["rows"].append(row)
        save(given.out, record)


if __name__ == "__main__":
    main()
