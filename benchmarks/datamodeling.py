"""Linear datamodeling score: do attributions foresee what training on a random half of the examples does?

    python -m benchmarks.datamodeling --data DIR --out results/datamodeling.json

A network is trained on all examples, and others of the same kind on random halves (50). For every test point the loss
that each half leads to is foreseen from the first network alone, and compared with the true one by rank correlation
over the halves; the score is its mean over test points. Beside `attribute` (the pulls of the examples that are left
out, summed) and `what_if` (these examples left out together): TRAK from one network and from ten, and EK-FAC influence
by kronfluence. `--tiny` is a trial of a minute.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import whence

from . import influences, networks, studied, trak
from .data import Split, batches, read_cifar
from .record import failed, save, say
from .scores import spearman
from .studied import open_record, options, put, read
from .trained import LOSSES
from .training import train

HALVES = 50
MEMORY = 24 * 2**30
"""Bytes that a fit may take, so that several studies share a machine."""
CHECKPOINTS = 10
DAMPINGS = {"default damping 1e-8": 1e-8, "its own rule": None}
"""Of kronfluence: what it takes if not told, and a tenth of the mean eigenvalue, which its authors suggest."""


@dataclass(frozen=True)
class Case(studied.Case):
    """A data set, the network that learns it, and how.

    Attributes:
        structures: what `whence` fits; `what_if` is asked of those that have true leverages.
        what_if: whether to leave halves out together, which takes (n k / 2)^3 operations each time.
        projection: numbers that TRAK keeps of a gradient.
        classes: labels that are kept; all of them if there are none.
    """

    epochs: int
    structures: tuple[str, ...]
    what_if: bool = False
    projection: int = 512
    classes: tuple[int, ...] = ()
    rate: float = 1e-3


CASES: dict[str, Case] = {
    "digits": Case(
        "digits", 150, 50, lambda k: networks.mlp(64, 32, k), "MLP 64-32", 40, ("exact", "ekfac"), True, 64, rate=5e-3
    ),
    "mnist": Case(
        "mnist", 5000, 200, lambda k: networks.mlp(784, 128, 64, k), "MLP 784-128-64", 20, ("ekfac", "core:size=1024")
    ),
    "cifar-2": Case(
        "cifar-10",
        5000,
        500,
        lambda k: networks.resnet9(k),
        "ResNet-9",
        15,
        ("sketch:size=2048",),
        what_if=True,
        classes=(3, 5),
    ),
}
TINY: dict[str, Any] = {"n": 60, "test": 10, "epochs": 5, "projection": 16}
NARROW: dict[str, Any] = {"make": lambda k: networks.resnet9(k, width=2), "structures": ("sketch:size=32",)}


@dataclass(frozen=True)
class Drawn:
    """Training and test points of one draw."""

    inputs: Tensor
    labels: Tensor
    tests: Tensor
    answers: Tensor

    def part(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Some of the training set."""
        return self.inputs[index], self.labels[index]


def drawn(case: Case, split: Split, seed: int, device: str) -> Drawn:
    """Training and test points, at random; of some classes only, numbered anew."""
    draw = torch.Generator().manual_seed(seed)
    kept = torch.tensor(case.classes or tuple(range(10)))
    parts: list[Tensor] = []
    for inputs, labels, count in (
        (split.inputs, split.labels, case.n),
        (split.test_inputs, split.test_labels, case.test),
    ):
        allowed = torch.isin(labels, kept).nonzero().squeeze(1)
        chosen = allowed[torch.randperm(len(allowed), generator=draw)[:count]]
        parts += [inputs[chosen].to(device), torch.searchsorted(kept, labels[chosen]).to(device)]
    return Drawn(*parts)


def train_on(case: Case, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A network trained on some examples by cross-entropy."""
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator
        torch.manual_seed(seed)
        network = case.make(len(case.classes) or 10).to(inputs.device)
    flips = case.data == "cifar-10"
    return train(
        network,
        inputs,
        labels,
        epochs=case.epochs,
        seed=seed,
        rate=case.rate,
        flips=flips,
        loss=LOSSES["cross-entropy"],
    )


@torch.no_grad()
def test_losses(network: nn.Module, task: Drawn) -> Tensor:
    """(m,) of the test points."""
    outputs = torch.cat([network(some) for some in task.tests.split(500)])
    return F.cross_entropy(outputs, task.answers, reduction="none").double().cpu()


def halves(n: int, count: int, seed: int) -> Tensor:
    """(count, n) which examples are kept: a random half, every time."""
    draw = torch.Generator().manual_seed(10_000 + seed)
    kept = torch.zeros(count, n, dtype=torch.bool)
    for row in kept:
        row[torch.randperm(n, generator=draw)[: n // 2]] = True
    return kept


def score(foreseen: Tensor, true: Tensor) -> float:
    """Mean over test points of the rank correlation over halves, of losses (halves, m).

    Examples:
        >>> true = torch.tensor([[1.0, 3.0], [2.0, 2.0], [3.0, 1.0]])
        >>> score(true.exp(), true)
        1.0
    """
    return sum(spearman(a, b) for a, b in zip(foreseen.T, true.T, strict=True)) / true.shape[1]


def from_scores(helpful: Tensor, kept: Tensor) -> Tensor:
    """(halves, m) losses up to order: minus the summed helpfulness (m, n) of the examples that are kept."""
    return -(kept.double() @ helpful.T)


def by_pulls(tracer: whence.Tracer, task: Drawn, kept: Tensor) -> dict[str, Tensor]:
    """From `attribute`: pulls f - f_(-i) of all examples; the loss at the summed change, and to first order in it."""
    pieces = []
    for some in task.tests.split(25):
        found = tracer.attribute(some, top=len(task.inputs)).hec3
        order = found.index.argsort(1).unsqueeze(2).expand_as(found.pull)
        pieces.append(found.pull.gather(1, order).cpu().double())
    pull = torch.cat(pieces)  # (m, n, k)
    outputs = tracer.predict(list(task.tests.split(500))).mean.cpu().double()
    answers = task.answers.cpu()
    slope = outputs.softmax(1) - F.one_hot(answers, outputs.shape[1])
    change = -torch.einsum("sn,mnk->smk", (~kept).double(), pull)
    after = torch.stack([F.cross_entropy(outputs + one, answers, reduction="none") for one in change])
    return {"attribute": torch.einsum("smk,mk->sm", change, slope), "attribute, loss of the summed change": after}


def by_what_if(tracer: whence.Tracer, task: Drawn, kept: Tensor) -> Tensor:
    """From `what_if`: all examples that a half lacks left out together."""
    found = []
    for half in kept:
        said = tracer.what_if(task.tests, remove=(~half).nonzero().squeeze(1).tolist())
        assert said.mean is not None
        found.append(F.cross_entropy((said.mean + said.change).cpu().double(), task.answers.cpu(), reduction="none"))
    return torch.stack(found)


def by_whence(case: Case, network: nn.Module, task: Drawn, kept: Tensor) -> dict[str, Tensor]:
    """Every structure."""
    found = {}
    for text in case.structures:
        tracer = whence.fit(
            network,
            batches(task.inputs, task.labels, 500),
            likelihood="categorical",
            progress=False,
            execution=whence.Execution(max_memory=MEMORY),
            **options(text),
        )
        found.update({f"whence {text}, {name}": values for name, values in by_pulls(tracer, task, kept).items()})
        if case.what_if and not text.startswith("ekfac"):
            found[f"whence {text}, what_if"] = by_what_if(tracer, task, kept)
    return found


def by_peers(case: Case, checkpoints: list[nn.Module], task: Drawn, kept: Tensor, seed: int) -> dict[str, Any]:
    """TRAK and kronfluence; or why they did not run."""
    known, asked = (task.inputs, task.labels), (task.tests, task.answers)
    found: dict[str, Any] = {}
    for count in dict.fromkeys((1, len(checkpoints))):
        found[f"TRAK of {count}"] = from_scores(trak.scores(checkpoints[:count], known, asked, case.projection), kept)
    if task.inputs.is_cuda:
        return found  # kronfluence is measured on a CPU alone
    try:
        for name, damping in DAMPINGS.items():
            pairs = influences.pairwise_influences(
                checkpoints[0], TensorDataset(*known), TensorDataset(*asked), damping, seed
            )
            found[f"kronfluence EK-FAC, {name}"] = from_scores(pairs, kept)
    except Exception as error:  # a peer that fails is part of the result
        found["kronfluence EK-FAC"] = failed(error)
    return found


def run(case: Case, split: Split, seed: int, count: int, checkpoints: int, device: str) -> dict[str, Any]:
    """Train, retrain, foresee, compare."""
    start = time.perf_counter()
    task = drawn(case, split, seed, device)
    kept = halves(len(task.inputs), count, seed)
    members = [train_on(case, task.inputs, task.labels, 1000 * seed + member) for member in range(checkpoints)]
    true = torch.stack(
        [
            test_losses(train_on(case, *task.part(half.nonzero().squeeze(1).to(device)), 1000 * seed + 100 + at), task)
            for at, half in enumerate(kept)
        ]
    )
    retrained = time.perf_counter()
    foreseen: dict[str, Any] = by_whence(case, members[0], task, kept)
    foreseen.update(by_peers(case, members, task, kept, seed))
    right = torch.cat([members[0](some).argmax(1) for some in task.tests.split(500)]) == task.answers
    return {
        "n": len(task.inputs),
        "test": len(task.tests),
        "halves": count,
        "accuracy": float(right.double().mean()),
        "score": {name: score(value, true) for name, value in foreseen.items() if isinstance(value, Tensor)},
        "did_not_run": {name: value["failed"] for name, value in foreseen.items() if not isinstance(value, Tensor)},
        "retraining_s": round(retrained - start, 1),
        "attribution_s": round(time.perf_counter() - retrained, 1),
    }


def main() -> None:
    """Every case and draw that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/ and cifar-10/")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["digits", "mnist"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[300, 301, 302])
    parser.add_argument("--halves", type=int, default=HALVES)
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS, help="of TRAK")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="few examples and epochs")
    parser.add_argument("--out", type=Path, default=Path("out/datamodeling.json"))
    parser.add_argument("--append", action="store_true")
    given = parser.parse_args()
    record = open_record(given.out, given.append)
    for name in given.cases:
        case = CASES[name]
        if given.tiny:
            case = replace(case, **TINY, **(NARROW if case.data == "cifar-10" else {}))
        split = (
            read_cifar(given.data, 1 if given.tiny else 5) if case.data == "cifar-10" else read(case.data, given.data)
        )
        for seed in given.seeds:
            row = run(case, split, seed, given.halves, given.checkpoints, given.device)
            about = {"case": name, "seed": seed, "network": case.describe, "epochs": case.epochs}
            put(record, {**about, "checkpoints": given.checkpoints, **row}, ("case", "seed"))
            save(given.out, record)
            say(name, seed, {key: round(value, 3) for key, value in row["score"].items()})
            say(row["did_not_run"], row["accuracy"], row["retraining_s"], row["attribution_s"])


if __name__ == "__main__":
    main()
