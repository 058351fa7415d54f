"""How long a user waits on one thread: the verbs on a small CNN, default fits by size, small tables, progress lines.

    python -m benchmarks.seconds --data DIR --out results/seconds.json

Every case runs in a process of its own with one thread. Seconds are CPU time, which does not count what other programs
take; they are the seconds on the clock of a machine with nothing else to do. `DIR` holds `mnist`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import whence

from .data import read_digits
from .memory import extra_bytes
from .networks import mlp, tabular
from .record import save, say, surroundings
from .reference import cpu_seconds, forward_backward
from .training import train

FLOORS = {
    **dict.fromkeys(("cnn: fit", "cnn: explain", "cnn: trust", "cnn: report"), 10.0),
    **dict.fromkeys(("mlp: auto, 2000", "mlp: auto, 5000"), 30.0),
    "small mlp: ekfac fit": 5.0,
    "small mlp: ekfac predict": 1.5,
}
"""Seconds, or multiples of forward + k backward, that must not be exceeded."""

Row = dict[str, Any]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Summed over a batch."""
    return F.cross_entropy(outputs, targets, reduction="sum")


def cnn() -> tuple[nn.Module, TensorDataset, Tensor]:
    """A CNN of 6,090 weights on 1,300 digits of scikit-learn, and the digits that are left."""
    from sklearn.datasets import load_digits  # only here

    found = load_digits()
    torch.manual_seed(0)
    order = torch.randperm(len(found.target))
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1)[order] / 16
    labels = torch.tensor(found.target)[order]
    network = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(128, 10)),
    )
    train(network, images[:1300], labels[:1300], epochs=30, batch=64, loss=cross_entropy)
    return network, TensorDataset(images[:1300], labels[:1300]), images[1300:]


def classifier(folder: Path, n: int, *widths: int) -> tuple[nn.Module, TensorDataset, Tensor]:
    """An MLP on MNIST."""
    digits = read_digits(folder, "mnist")
    torch.manual_seed(0)
    network = mlp(*widths)
    train(network, digits.inputs[:n], digits.labels[:n], epochs=3, loss=cross_entropy)
    return network, TensorDataset(digits.inputs[:n], digits.labels[:n]), digits.test_inputs


def timed(name: str, work: Callable[[], Any], lines: bool = True, **more: Any) -> Any:
    """Print a row with seconds, megabytes and lines of progress; what the work gives."""
    kept: list[Any] = []
    said = io.StringIO()

    def run() -> None:
        with redirect_stderr(said):
            kept.append(work())

    spent: list[float] = []
    taken = extra_bytes(lambda: spent.append(cpu_seconds(run)))
    row = {"name": name, "seconds": round(spent[0], 2), "mb": round(taken / 1e6), **more}
    if lines:
        row["lines"] = [line for line in said.getvalue().splitlines() if line][:2]
    say(json.dumps(row))
    return kept[0]


def fit(network: nn.Module, data: TensorDataset, structure: Any = "auto", **options: Any) -> whence.Tracer:
    """A default fit of a classifier."""
    loader = DataLoader(data, batch_size=100)
    return whence.fit(network, loader, likelihood="categorical", structure=structure, **options)


def verbs(_: Path) -> None:
    """Fit, explain of 200 points, trust and report of a small CNN."""
    network, data, others = cnn()
    tracer = timed("cnn: fit", lambda: fit(network, data), what="`auto` (core)", n=1300, weights=6090)
    points = others[:200]
    timed("cnn: predict", lambda: tracer.predict(points))
    timed("cnn: explain", lambda: tracer.explain(points))
    timed("cnn: trust", lambda: tracer.trust(points))
    with TemporaryDirectory() as folder:
        timed("cnn: report", lambda: tracer.report(Path(folder) / "report.html", points))


def by_structure(structure: Any, folder: Path, **options: Any) -> None:
    """A fit of the same CNN by a structure, or with other options."""
    network, data, _ = cnn()
    name = " ".join([structure, *(f"{key}={value}" for key, value in options.items())])
    what = f"`{name}`"
    timed(f"cnn: {name}", lambda: fit(network, data, structure, **options), what=what, n=1300, weights=6090)


def large(structure: Any, n: int, folder: Path) -> None:
    """A fit of an MLP of 2 million weights."""
    network, data, others = classifier(folder, n, 784, 1200, 900, 10)
    about = {"n": n, "weights": sum(p.numel() for p in network.parameters())}
    what = f"`{structure}`" + " (core)" * (structure == "auto")
    name = f"mlp: {structure}, {n}"
    tracer = timed(name, lambda: fit(network, data, structure), what=what, **about)
    timed(f"{name}, predict 1,000", lambda: tracer.predict(others[:1000]), lines=False)


def multiples(folder: Path) -> None:
    """EKFAC of an MLP of 1.9 million weights on 2,000 examples, as multiples of forward + k backward."""
    network, data, others = classifier(folder, 2000, 784, 1024, 1024, 10)
    inputs, labels = data.tensors
    parts, targets = inputs.split(500), whence.one_hot(labels, 10).split(500)
    loader = list(zip(parts, targets, strict=True))

    def fitted() -> whence.Tracer:
        return whence.fit(network, loader, structure="ekfac", ridge=20.0, progress=False)

    tests = list(others[:2000].split(500))
    tracer = fitted()
    tracer.predict(tests)
    unit = min(cpu_seconds(lambda: forward_backward(network, parts)) for _ in range(3))
    for name, work in (("fit", fitted), ("predict", lambda: tracer.predict(tests))):
        spent = min(cpu_seconds(work) for _ in range(3))
        row = {"name": f"small mlp: ekfac {name}", "seconds": round(spent, 2), "multiple": round(spent / unit, 2)}
        say(json.dumps(row))


def tables(_: Path) -> None:
    """16,000 rows of 8 numbers, from a list of batches and from a DataLoader, as multiples of forward + backward."""
    torch.manual_seed(0)
    network, inputs, targets = tabular().eval(), torch.randn(16_000, 8), torch.randn(16_000, 1)
    parts = inputs.split(2000)
    listed = list(zip(parts, targets.split(2000), strict=True))
    loader = DataLoader(TensorDataset(inputs, targets), batch_size=2000)
    for name, batches in (("list", listed), ("DataLoader", loader)):
        work = partial(whence.fit, network, batches, structure="ekfac", ridge=1.0, progress=False)
        work()
        unit = min(cpu_seconds(lambda: forward_backward(network, parts)) for _ in range(5))
        spent = min(cpu_seconds(work) for _ in range(5))
        row = {"name": f"table: ekfac, {name}", "seconds": round(spent, 3), "multiple": round(spent / unit, 1)}
        say(json.dumps(row))


CASES: dict[str, Callable[[Path], None]] = {
    "verbs": verbs,
    **{f"cnn {one}": partial(by_structure, one) for one in ("exact", "sketch", "ekfac")},
    "cnn loo": partial(by_structure, "core", ridge="loo"),
    "mlp auto 2000": partial(large, "auto", 2000),
    **{f"mlp {one} 5000": partial(large, one, 5000) for one in ("auto", "sketch", "ekfac")},
    "multiples": multiples,
    "tables": tables,
}


def child(case: str, given: argparse.Namespace) -> list[Row]:
    """The rows of one case, measured in a process with one thread."""
    command = [sys.executable, "-m", "benchmarks.seconds", "--data", str(given.data), "--one", case]
    single = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **single})
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        found.append({"name": case, "failed": (done.stderr.strip().splitlines() or ["without a word"])[-1][:300]})
    return [{"case": case, **row} for row in found]


def main() -> None:
    """Measure all cases, or those that were asked for; the record keeps the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--out", type=Path, default=Path("out/seconds.json"))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        torch.set_num_threads(1)
        CASES[given.one](given.data)
        return
    known = json.loads(given.out.read_text()) if given.out.exists() else {"rows": [], "commands": []}
    about = surroundings()
    commands = list(dict.fromkeys([*known["commands"], about["command"]]))
    rows = {case: [row for row in known["rows"] if row["case"] == case] for case in CASES}
    for case in given.cases:
        rows[case] = [{**row, "commit": about["commit"]} for row in child(case, given)]
        for row in rows[case]:
            say(row, "floor", FLOORS.get(row["name"], "-"))
        every = [row for each in rows.values() for row in each]
        save(given.out, {**about, "commands": commands, "threads": 1, "floors": FLOORS, "rows": every})


if __name__ == "__main__":
    main()
