"""What `explain` costs beside `predict`, for every structure: seconds for many predictions, without naming examples.

    python -m benchmarks.price --data DIR --out results/price.json
    python -m benchmarks.price --data DIR --cases cifar-10 --device cuda --out results/price_gpu.json

Each is called twice and the second time counts: the first `explain` also takes a pass over the training data, which is
listed apart. `predict` is asked for variances alone, as it does by itself. Networks are trained for a single epoch, as
the seconds do not depend on what they have learned.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import whence

from . import networks, studied
from .data import Split, batches, random_images, read_cifar
from .record import attempt, save, say
from .studied import open_record, options, put, read
from .trained import LOSSES
from .training import train

AT_ONCE = 500
FLOOR = 3.0
"""Times `predict` that `explain` may take."""


@dataclass(frozen=True)
class Case(studied.Case):
    """A data set and its network."""

    structures: tuple[str, ...]


SMALL = ("exact@last_layer", "core:size=1024", "sketch:size=1024", "ekfac")
CASES: dict[str, Case] = {
    "mnist": Case("mnist", 5000, 1000, lambda k: networks.mlp(784, 128, 128, k), "MLP 784-128-128", SMALL),
    "fashion-mnist": Case(
        "fashion-mnist", 5000, 1000, lambda k: networks.cnn(k, (8, 16, 32)), "CNN of 8, 16, 32 channels", SMALL
    ),
    "cifar-10": Case(
        "cifar-10",
        50_000,
        10_000,
        lambda k: networks.resnet18(k),
        "ResNet-18",
        ("sketch:size=1024", "core:size=1024", "ekfac", "exact@last_layer"),
    ),
}


def seconds(work: Callable[[], Any], cuda: bool) -> float:
    """Of one call; on a GPU until it is done there."""
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter() if cuda else time.process_time()
    work()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() if cuda else time.process_time()) - start


def measure(network: nn.Module, split: Split, text: str, cuda: bool, repeats: int) -> dict[str, Any]:
    """Seconds of a fit, of `predict`, and of `explain` the first time and again; the least of some repetitions.

    `explain` names no examples; beside it what naming five takes, and how many verdicts are the same then; and what
    the inputs as a pool of their own take.
    """
    loader = batches(split.inputs, split.labels, AT_ONCE)
    kept: list[whence.Tracer] = []
    fit = seconds(
        lambda: kept.append(whence.fit(network, loader, likelihood="categorical", progress=False, **options(text))),
        cuda,
    )
    tracer, tests = kept[0], list(split.test_inputs.split(AT_ONCE))
    first = seconds(lambda: tracer.predict(tests), cuda)
    predict = min(seconds(lambda: tracer.predict(tests), cuda) for _ in range(repeats))
    opening = seconds(lambda: tracer.explain(tests, top=0), cuda)
    explain = min(seconds(lambda: tracer.explain(tests, top=0), cuda) for _ in range(repeats))
    pool = min(seconds(lambda: tracer.explain(tests, top=0, pool=tests), cuda) for _ in range(repeats))
    quick, named = (tracer.explain(tests, top=top).verdicts for top in (0, 5))
    naming = min(seconds(lambda: tracer.explain(tests, top=5), cuda) for _ in range(repeats))
    return {
        "fit_s": fit,
        "first_predict_s": first,
        "predict_s": predict,
        "first_explain_s": opening,
        "explain_s": explain,
        "explain_over_predict": explain / predict,
        "naming_five_s": naming,
        "pool_s": pool,
        "same_verdicts": sum(map(str.__eq__, quick, named)) / len(named),
    }


def summary(row: dict[str, Any]) -> str:
    """One line."""
    return (
        f"predict {row['predict_s']:.2f} s, explain {row['explain_s']:.2f} s, {row['explain_over_predict']:.2f} times"
    )


def main() -> None:
    """Every case and structure that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/, fashion-mnist/ and cifar-10/; without: noise")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["mnist", "fashion-mnist"])
    parser.add_argument("--structures", nargs="+", help="in place of each case's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--n", type=int, help="training examples, in place of each case's")
    parser.add_argument("--test", type=int, help="predictions, in place of each case's")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("out/price.json"))
    parser.add_argument("--append", action="store_true")
    given = parser.parse_args()
    record = open_record(given.out, given.append, floor=FLOOR)
    for name in given.cases:
        case = CASES[name]
        case = replace(case, n=given.n or case.n, test=given.test or case.test)
        split = part(case, given.data, given.device)
        torch.manual_seed(0)
        network = case.make(10).to(given.device)
        train(network, split.inputs, split.labels, epochs=1, loss=LOSSES["cross-entropy"])
        for text in given.structures or case.structures:
            row: dict[str, Any] = {"case": name, "seed": 0, "network": case.describe, "structure": text}
            row.update({"n": case.n, "test": case.test, "parameters": networks.size(network)})
            cuda = given.device == "cuda"
            words = attempt(row, partial(measure, network, split, text, cuda, given.repeats), summary)
            put(record, row, ("case", "structure", "n"))
            save(given.out, record)
            say(name, text, words)


def part(case: Case, folder: Path | None, device: str) -> Split:
    """As many training and test points as the case has, on the device."""
    if folder is None:
        shape = (3, 32, 32) if case.data == "cifar-10" else (1, 28, 28)
        split = random_images(case.n, case.test, shape)
    else:
        split = read_cifar(folder) if case.data == "cifar-10" else read(case.data, folder)
    return Split(
        split.inputs[: case.n].to(device),
        split.labels[: case.n].to(device),
        split.test_inputs[: case.test].to(device),
        split.test_labels[: case.test].to(device),
    )


if __name__ == "__main__":
    main()
