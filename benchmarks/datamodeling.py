"""Linear datamodeling score: do attributions foresee what training on a random half of the examples does?

    python -m benchmarks.datamodeling --data DIR --out results/datamodeling.json

A network is trained on all examples, and others of the same kind on random halves (50). For every test point the loss
that each half leads to is foreseen from the first network alone, and compared with the true one by rank correlation
over the halves; the score is its mean over test points. Beside `attribute` (the pulls of the examples that are left
out, summed) and `what_if` (these examples left out together): TRAK from one network and from ten, and EK-FAC influence
by kronfluence. `--tiny` is a trial of a minute.

The record is saved after every method. The row of a run that was stopped names the methods it lacks under `missing`,
which a complete row does not have.

`cifar-2` has the images, sizes and training of dattri: cats and dogs, gradient descent with momentum, no augmentation.

`reviews` is a small GPT, trained from scratch on parts of 32 words of 50 film reviews, and asked for the loss of one
more part of each. There whole reviews are left out, too: the same score over 50 trainings without one of them, which
start from the first network's own weights.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import whence
from whence_paper.texts import reviews

from . import influences, networks, studied, tokens, trak
from .data import Split, batches, read_cifar
from .record import failed, save, say
from .scores import spearman
from .studied import open_record, options, put, read
from .trained import LOSSES
from .training import descend, train

HALVES = 50
MEMORY = 24 * 2**30
"""Bytes that a fit may take, so that several studies share a machine."""
CHECKPOINTS = 10
SUMMED, KRONFLUENCE = "attribute, loss of the summed change", "kronfluence EK-FAC"
ASKED = 100
"""Test points whose pulls are computed at once."""
DAMPINGS: dict[str, float | None] = {"default damping 1e-8": 1e-8, "its own rule": None}
"""Of kronfluence: what it takes if not told, and a tenth of the mean eigenvalue, which its authors suggest."""


@dataclass(frozen=True)
class Case(studied.Case):
    """A data set, the network that learns it, and how.

    Attributes:
        structures: what `whence` fits; `what_if` is asked of those that have true leverages.
        what_if: whether to leave halves out together, which takes (n k / 2)^3 operations each time.
        projection: numbers that TRAK keeps of a gradient.
        classes: labels that are kept; all of them if there are none.
        momentum: of gradient descent at a constant rate, in place of AdamW.
    """

    epochs: int
    structures: tuple[str, ...]
    what_if: bool = False
    projection: int = 512
    classes: tuple[int, ...] = ()
    rate: float = 1e-3
    batch: int = 128
    momentum: float | None = None


WORDS, LENGTH, PARTS = 300, 32, 10
"""Of a small GPT: words it knows, words of a sequence, sequences of each review to learn from."""


class SmallGPT(tokens.Model):
    """With an output layer of its own, which kronfluence sees, too."""

    def __init__(self, layers: int, width: int, heads: int, words: int, tokens: int) -> None:
        super().__init__(layers, width, heads, words, tokens)
        self.head = nn.Linear(width, words)
        nn.init.normal_(self.words.weight)
        nn.init.normal_(self.places.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (n, t, words) of the next words."""
        found: Tensor = self.head(self.hidden(x))
        return found


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
        10,
        ("sketch:size=2048", "core:size=2048"),
        what_if=True,
        classes=(3, 5),
        rate=0.01,
        batch=64,
        momentum=0.9,
    ),
    "reviews": Case(
        "reviews",
        500,
        50,
        lambda k: SmallGPT(2, 64, 4, k, LENGTH),
        "GPT of 2 layers, width 64",
        15,
        ("ekfac", "core:size=1024", "sketch:size=2048"),
        rate=3e-3,
        batch=50,
    ),
}
TINY: dict[str, Any] = {"n": 60, "test": 10, "epochs": 5, "projection": 16}
SMALLER: dict[str, dict[str, Any]] = {
    "cifar-10": {"make": lambda k: networks.resnet9(k, width=2), "structures": ("sketch:size=32",)},
    "reviews": {"make": lambda k: SmallGPT(1, 8, 2, k, LENGTH), "structures": ("ekfac", "sketch:size=32"), "n": 50},
}


@dataclass(frozen=True)
class Drawn:
    """Training and test points of one draw."""

    inputs: Tensor
    labels: Tensor
    tests: Tensor
    answers: Tensor
    documents: Tensor | None = None  # (n,) which one a training sequence is a part of

    @property
    def classes(self) -> int:
        """How many labels there are."""
        return 1 + int(max(self.labels.max(), self.answers.max()))

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


def parts_of_reviews(found: list[reviews.Review], count: int, device: str) -> Drawn:
    """Parts of long reviews to learn from, and one more part of each to ask for; rare words are one and the same."""
    long = [words for words in (one.text.lower().split() for one in found) if len(words) > (PARTS + 1) * LENGTH]
    kept = [words[: (PARTS + 1) * LENGTH + 1] for words in long[:count]]
    often = [word for word, _ in Counter(word for words in kept for word in words).most_common(WORDS - 1)]
    number = {word: at for at, word in enumerate(often)}
    rows = torch.tensor([[number.get(word, len(often)) for word in words] for words in kept], device=device)
    inputs, labels = (rows[:, low : low + (PARTS + 1) * LENGTH].unflatten(1, (-1, LENGTH)) for low in (0, 1))
    learned = (inputs[:, :PARTS].flatten(0, 1), labels[:, :PARTS].flatten(0, 1))
    documents = torch.arange(len(kept)).repeat_interleave(PARTS)
    return Drawn(*learned, inputs[:, PARTS], labels[:, PARTS].contiguous(), documents)


def train_on(case: Case, classes: int, inputs: Tensor, labels: Tensor, seed: int) -> nn.Module:
    """A network trained on some examples by cross-entropy."""
    with torch.random.fork_rng(devices=[]):  # modules draw their weights from the global generator
        torch.manual_seed(seed)
        network = case.make(classes).to(inputs.device)
    if case.momentum is not None:
        return descend(
            network,
            inputs,
            labels,
            epochs=case.epochs,
            batch=case.batch,
            rate=case.rate,
            momentum=case.momentum,
            seed=seed,
        )
    return train(
        network,
        inputs,
        labels,
        epochs=case.epochs,
        seed=seed,
        rate=case.rate,
        batch=case.batch,
        loss=lambda outputs, targets: LOSSES["cross-entropy"](outputs.flatten(0, -2), targets.flatten()),
    )


@torch.no_grad()
def test_losses(network: nn.Module, task: Drawn) -> Tensor:
    """(m,) of the test points, summed over positions."""
    outputs = torch.cat([network(some) for some in task.tests.split(500)])
    found = F.cross_entropy(outputs.flatten(0, -2), task.answers.flatten(), reduction="none")
    return found.reshape(len(outputs), -1).sum(1).double().cpu()


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
        >>> score(torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]), true)  # no correlation with a constant
        0.5
    """
    pairs = [(a, b) for a, b in zip(foreseen.T, true.T, strict=True) if bool((a != a[0]).any() & (b != b[0]).any())]
    return sum(spearman(a, b) for a, b in pairs) / true.shape[1]


def from_scores(helpful: Tensor, kept: Tensor) -> Tensor:
    """(halves, m) losses up to order: minus the summed helpfulness (m, n) of the examples that are kept."""
    return -(kept.double() @ helpful.T)


def by_pulls(tracer: whence.Tracer, task: Drawn, kept: Tensor) -> dict[str, Tensor]:
    """From `attribute`: pulls f - f_(-i) of all examples; the loss to first order, and that at the summed change."""
    some = ASKED if task.documents is None else 25
    left_out, asked = (~kept).double(), list(zip(task.tests.split(some), task.answers.split(some), strict=True))
    losses = in_order([tracer.attribute(some, top=len(task.inputs), loss=True) for some in asked]).squeeze(2)
    found = {"attribute": -(left_out @ losses.T)}
    if task.documents is None:
        pull = in_order([tracer.attribute(some, top=len(task.inputs)) for some, _ in asked])  # (m, n, k)
        outputs = tracer.predict(list(task.tests.split(500))).mean.cpu().double()
        answers, change = task.answers.cpu(), -torch.einsum("sn,mnk->smk", left_out, pull)
        after = [F.cross_entropy(outputs + one, answers, reduction="none") for one in change]
        found[SUMMED] = torch.stack(after)
    return found


def in_order(found: list[whence.Attribution]) -> Tensor:
    """(m, n, k) pulls of the training examples, in their order."""
    pieces = []
    for one in (each.hec3 for each in found):
        order = one.index.argsort(1).unsqueeze(2).expand_as(one.pull)
        pieces.append(one.pull.gather(1, order).cpu().double())
    return torch.cat(pieces)


def by_what_if(tracer: whence.Tracer, task: Drawn, kept: Tensor) -> Tensor:
    """From `what_if`: all examples that a half lacks left out together."""
    found = []
    for half in kept:
        said = tracer.what_if(task.tests, remove=(~half).nonzero().squeeze(1).tolist())
        assert said.mean is not None
        found.append(F.cross_entropy((said.mean + said.change).cpu().double(), task.answers.cpu(), reduction="none"))
    return torch.stack(found)


Foreseen = dict[str, Any]
"""By method, losses (halves, m) up to order; or why there are none."""
Stages = Iterator[tuple[str, Foreseen]]
"""What was done last, and what came of it."""


def attempted(name: str, work: Callable[[], Tensor]) -> Foreseen:
    """What a method foresees; or why it does not."""
    try:
        return {name: work()}
    except (whence.WhenceError, RuntimeError) as error:
        return {name: failed(error)}


def by_whence(case: Case, network: nn.Module, task: Drawn, kept: Tensor) -> Stages:
    """Every structure."""
    for text in case.structures:
        settings = options(text)
        if task.documents is not None:  # those that kronfluence looks at
            settings["parameters"] = linear_weights(network)
        tracer = whence.fit(
            network,
            batches(task.inputs, task.labels, case.batch if task.documents is not None else 500),
            likelihood="categorical",
            progress=False,
            execution=whence.Execution(max_memory=MEMORY),
            **settings,
        )
        yield f"whence {text}, fit", {}
        pulls = by_pulls(tracer, task, kept)
        yield f"whence {text}, attribute", {f"whence {text}, {name}": values for name, values in pulls.items()}
        if asks_what_if(case, text):
            name = f"whence {text}, what_if"
            yield name, attempted(name, partial(by_what_if, tracer, task, kept))
        del tracer  # the next one needs its memory


def asks_what_if(case: Case, structure: str) -> bool:
    """Whether halves are left out together: approximate leverages cannot."""
    return case.what_if and not structure.startswith("ekfac")


def linear_weights(network: nn.Module) -> list[str]:
    """Names of the weights and biases of linear layers."""
    layers = [name for name, layer in network.named_modules() if isinstance(layer, nn.Linear)]
    return [f"{name}.{kind}" for name in layers for kind in ("weight", "bias")]


def by_peers(
    case: Case, checkpoints: list[nn.Module], task: Drawn, kept: Tensor, seed: int, dampings: Sequence[str]
) -> Stages:
    """TRAK and kronfluence; or why they did not run."""
    known, asked = (task.inputs, task.labels), (task.tests, task.answers)
    if task.documents is None:
        for count, helpful in enumerate(trak.running_scores(checkpoints, known, asked, case.projection), 1):
            if count in (1, len(checkpoints)):
                yield f"TRAK of {count}", {f"TRAK of {count}": from_scores(helpful, kept)}
    found: Foreseen = {}
    try:
        pairs = influences.pairwise_influences(
            checkpoints[0], known, asked, {name: DAMPINGS[name] for name in dampings}, seed
        )
        found.update({f"{KRONFLUENCE}, {name}": from_scores(each.cpu(), kept) for name, each in pairs.items()})
    except Exception as error:  # a peer that fails is part of the result
        found[KRONFLUENCE] = failed(error)
    yield KRONFLUENCE, found


def methods(case: Case, task: Drawn, checkpoints: int, dampings: Sequence[str]) -> list[str]:
    """All that a complete row has."""
    found = []
    for text in case.structures:
        found.append(f"whence {text}, attribute")
        if task.documents is None:
            found.append(f"whence {text}, {SUMMED}")
        if asks_what_if(case, text):
            found.append(f"whence {text}, what_if")
    if task.documents is None:
        found += [f"TRAK of {count}" for count in dict.fromkeys((1, checkpoints))]
    return [*found, *(f"{KRONFLUENCE}, {name}" for name in dampings)]


class Watch:
    """Says what was done, and how long it took."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.last = time.perf_counter()

    def done(self, stage: str) -> None:
        """Note the seconds since the last stage."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[stage] = round(now - self.last, 1)
        self.last = now
        say(f"{stage}: {self.seconds[stage]} s")


def run(
    case: Case,
    task: Drawn,
    seed: int,
    count: int,
    checkpoints: int,
    dampings: Sequence[str] = tuple(DAMPINGS),
    keep: Callable[[dict[str, Any]], None] = lambda row: None,
) -> dict[str, Any]:
    """Train, retrain, foresee, compare; `keep` gets the row as it is after every method."""
    watch = Watch()
    classes, device = len(case.classes) or task.classes, task.inputs.device
    kept = halves(len(task.inputs), count, seed)
    seeds = [1000 * seed + 100 + at for at in range(count)]
    if task.documents is not None:  # the same first weights: what one review does is small
        without = task.documents != task.documents.unique().unsqueeze(1)
        kept, seeds = torch.cat([kept, without]), seeds + len(without) * [1000 * seed]
    members = [train_on(case, classes, task.inputs, task.labels, 1000 * seed + at) for at in range(checkpoints)]
    watch.done("training")
    losses = []
    for half, each in zip(kept, seeds, strict=True):
        some = task.part(half.nonzero().squeeze(1).to(device))
        losses.append(test_losses(train_on(case, classes, *some, each), task))
    true = torch.stack(losses)
    watch.done("retraining")
    right = torch.cat([members[0](some).argmax(-1) for some in task.tests.split(500)]) == task.answers
    row: dict[str, Any] = {
        "n": len(task.inputs),
        "test": len(task.tests),
        "halves": count,
        "accuracy": float(right.double().mean()),
        "score": {},
        "did_not_run": {},
        "missing": methods(case, task, checkpoints, dampings),
        "seconds": watch.seconds,
    }
    if task.documents is not None:
        row["documents"] = {}
    keep(row)
    for stage, foreseen in chain(
        by_whence(case, members[0], task, kept), by_peers(case, members, task, kept, seed, dampings)
    ):
        for name, value in foreseen.items():
            if not isinstance(value, Tensor):
                row["did_not_run"][name] = value["failed"]
                continue
            row["score"][name] = score(value[:count], true[:count])
            if task.documents is not None:
                row["documents"][name] = score(value[count:], true[count:])
        row["missing"] = [name for name in row["missing"] if not {name, name.partition(",")[0]} & foreseen.keys()]
        watch.done(stage)
        keep(row)
    del row["missing"]
    spent = list(watch.seconds.items())
    row["retraining_s"] = round(sum(seconds for _, seconds in spent[:2]), 1)
    row["whence_s"] = round(sum(seconds for name, seconds in spent if name.startswith("whence")), 1)
    row["attribution_s"] = round(sum(seconds for _, seconds in spent[2:]), 1)
    keep(row)
    return row


def task_of(case: Case, given: argparse.Namespace, seed: int) -> Drawn:
    """Training and test points of a draw."""
    if case.data == "reviews":
        if given.tiny:
            some = reviews.made_up(400, 0, seed)[0]
            joined = [" ".join(one.text for one in some[low : low + 80]) for low in range(0, 400, 80)]
            found = [reviews.Review(str(at), text, 0) for at, text in enumerate(joined)]
        else:
            found = reviews.read_reviews(given.data, 1000, 0, seed)[0]
        return parts_of_reviews(found, case.n // PARTS, given.device)
    cifar = case.data == "cifar-10"
    split = read_cifar(given.data, 1 if given.tiny else 5) if cifar else read(case.data, given.data)
    return drawn(case, split, seed, given.device)


def main() -> None:
    """Every case and draw that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with mnist/, cifar-10/ and imdb/")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["digits", "mnist"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[300, 301, 302])
    parser.add_argument("--halves", type=int, default=HALVES)
    parser.add_argument("--checkpoints", type=int, default=CHECKPOINTS, help="of TRAK")
    parser.add_argument("--dampings", nargs="*", choices=DAMPINGS, default=list(DAMPINGS), help="of kronfluence")
    parser.add_argument("--structures", nargs="+", help="in place of each case's")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tiny", action="store_true", help="few examples and epochs")
    parser.add_argument("--out", type=Path, default=Path("out/datamodeling.json"))
    parser.add_argument("--append", action="store_true")
    given = parser.parse_args()
    record = open_record(given.out, given.append)
    for name in given.cases:
        case = CASES[name]
        if given.tiny:
            case = replace(case, **{**TINY, **SMALLER.get(case.data, {})})
        case = replace(case, structures=tuple(given.structures or case.structures))
        for seed in given.seeds:
            about = {"case": name, "seed": seed, "network": case.describe, "epochs": case.epochs}
            about["checkpoints"] = given.checkpoints

            def keep(row: dict[str, Any], about: dict[str, Any] = about) -> None:
                put(record, {**about, **row}, ("case", "seed"))
                save(given.out, record)

            task = task_of(case, given, seed)
            row = run(case, task, seed, given.halves, given.checkpoints, given.dampings, keep)
            say(name, seed, {key: round(value, 3) for key, value in row["score"].items()})
            say({key: round(value, 3) for key, value in row.get("documents", {}).items()})
            say(row["did_not_run"], row["accuracy"], row["retraining_s"], row["attribution_s"])


if __name__ == "__main__":
    main()
