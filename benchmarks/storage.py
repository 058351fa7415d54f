"""Features on a disk: what a fit keeps of many sequences is a matter of disk, not of memory.

    python -m benchmarks.storage --sequences 70000 --folder DIR --out results/storage.json

A small language model of random weights, short sequences, a sketch of 4,096 features, one column and the residual:
32 kB a sequence. The fit may take less memory than the features do, and has a folder for them. Measured: bytes on the
disk and what `estimate` says of them, peak memory of the process, its own and with the pages of the file that are
mapped just then, seconds of the fit and of attribution from the file; and that a fit that was stopped in the midst of
writing resumes to the same numbers.
"""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import whence

from .memory import status_bytes
from .record import save, say, surroundings
from .tokens import Model, trace

TOKENS, WORDS, WIDTH, LAYERS = 8, 200, 64, 2
PEAKS = {
    "VmRSS": "peak resident, GiB",
    "RssAnon": "peak of its own memory, GiB",
    "RssFile": "peak of mapped pages, GiB",
}
"""Fields of /proc/self/status; the last has the pages of libraries, too."""
EVERY = 0.02
"""Seconds between two looks at them."""


class Counted(Model):
    """Counts the sequences that run through it."""

    seen: ClassVar[int] = 0  # not of the model, whose state a fit preserves

    def forward(self, x: Tensor) -> Tensor:
        """Logits of token numbers (n, t)."""
        Counted.seen += len(x)
        return super().forward(x)


class Loader:
    """Batches of random tokens; stops the program after so many of them, if asked to."""

    def __init__(self, sequences: int, batch: int) -> None:
        draw = torch.Generator().manual_seed(0)
        self.tokens = torch.randint(0, WORDS, (sequences, TOKENS + 1), generator=draw)
        self.batch, self.read, self.most = batch, 0, 0

    def __len__(self) -> int:
        """Of batches."""
        return math.ceil(len(self.tokens) / self.batch)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs, and the tokens that follow."""
        for some in self.tokens.split(self.batch):
            self.read += 1
            if self.read == self.most:
                raise KeyboardInterrupt
            yield some[:, :-1], some[:, 1:].contiguous()


def watched(work: Callable[[], Any], folder: Path) -> tuple[Any, dict[str, float]]:
    """What some work gives, its seconds, peaks of this process above what it had, and what the disk lost to anyone."""
    before, free, most = {key: status_bytes(key) for key in PEAKS}, shutil.disk_usage(folder).free, dict[str, int]()
    ended, taken = threading.Event(), [0]

    def look() -> None:
        while not ended.wait(EVERY):
            for key in PEAKS:
                most[key] = max(most.get(key, 0), status_bytes(key))
            taken[0] = max(taken[0], free - shutil.disk_usage(folder).free)

    watcher = threading.Thread(target=look)
    watcher.start()
    start = time.perf_counter()
    try:
        found = work()
    finally:
        ended.set()
        watcher.join()
    row = {"seconds": time.perf_counter() - start}
    row |= {name: (most.get(key, 0) - before[key]) / 2**30 for key, name in PEAKS.items()}
    return found, {**row, "taken from the disk, GiB": taken[0] / 2**30}


def through(loader: Loader) -> dict[str, float]:
    """How often the data were read, and run through the network."""
    passes = {"passes over the loader": loader.read / len(loader)}
    return {**passes, "passes through the network": Counted.seen / len(loader.tokens)}


def measure(given: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """Estimate, fit, attribute; stop another fit and resume it."""
    torch.manual_seed(0)
    torch.set_num_threads(given.threads)
    model = Counted(LAYERS, WIDTH, 2, WORDS, TOKENS).eval()
    trace(model, LAYERS)
    loader = Loader(given.sequences, given.batch)
    structure = whence.Sketch(size=given.size)
    options: dict[str, Any] = {"ridge": 1.0, "hessian_columns": 1}

    def execution(**more: Any) -> whence.Execution:
        return whence.Execution(max_memory=given.memory * 2**30, scratch=folder, **more)

    def fit(**more: Any) -> whence.Tracer:
        loader.read = Counted.seen = 0
        return whence.fit(
            model, loader, "categorical", structure, execution=execution(**more), progress=given.progress, **options
        )

    planned = whence.estimate(model, loader, "categorical", structure, execution=execution(), hessian_columns=1)
    found: dict[str, Any] = {
        "sequences": given.sequences,
        "features": given.size,
        "features, GiB": given.sequences * 2 * given.size * 4 / 2**30,
        "memory that a fit may take, GiB": given.memory,
        "estimate": {"disk, GiB": planned.disk / 2**30, "memory, GiB": planned.memory / 2**30, "fits": planned.fits},
    }
    yield found
    tracer, row = watched(fit, folder)
    passes = loader.read / len(loader)
    notes = [note.strip() for note in str(tracer.diagnostics).splitlines() if "on disk" in note]
    found["fit"] = {**row, **through(loader), "notes": notes}
    yield found
    queries = loader.tokens[: given.queries, :-1].roll(1, 0)
    loader.read = 0
    first, row = watched(lambda: tracer.attribute(queries, top=100, positions=[-1]), folder)
    found["attribution"] = {**row, "queries": len(queries), "batches read": loader.read}
    yield found
    del tracer
    kept = folder / "checkpoint"
    # A fit with a checkpoint reads the data once more, before all else, and the last pass writes the features.
    loader.most = int((passes + 0.5) * len(loader))
    try:
        fit(checkpoint=kept, checkpoint_seconds=given.every)
    except KeyboardInterrupt:
        found["stopped"] = through(loader)
    loader.most = 0
    tracer, row = watched(lambda: fit(checkpoint=kept, checkpoint_seconds=given.every), folder)
    row |= through(loader)
    again = tracer.attribute(queries, top=100, positions=[-1])
    row["largest difference of a share"] = float((again.hec3.share - first.hec3.share).abs().max())
    row["same first sequences"] = float((again.hec3.index == first.hec3.index).double().mean())
    found["resumed"] = row
    yield found


def main() -> None:
    """Measure and write everything down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--sequences", type=int, default=70_000)
    add("--size", type=int, default=4096)
    add("--batch", type=int, default=1000)
    add("--queries", type=int, default=8)
    add("--memory", type=float, default=1.5, help="GiB that a fit may take")
    add("--every", type=float, default=5.0, help="seconds between checkpoints")
    add("--threads", type=int, default=1)
    add("--progress", action="store_true")
    add("--folder", type=Path, help="on the disk that is to be used")
    add("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for found in measure(given, Path(folder)):
            say(found)
            if given.out is not None:
                save(given.out, {**surroundings(), "found": found})


if __name__ == "__main__":
    main()
