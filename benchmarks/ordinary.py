"""Networks trained the ordinary way, against real retraining: how wrong are HeC3 and verdicts, and what does trust say?

Small networks for 200 digits, by Adam, with a weight decay, augmentation, early stopping, dropout, or for a few epochs;
labels as they are, or one class with random labels and one left out. Each is compared with networks retrained on
bootstrap samples from the same first weights, and with a fit with `recenter=True`.

    python -m benchmarks.ordinary --processes 2
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import whence
from whence.trust import trust_of_fit
from whence.trust.checks import stationarity

from .record import save, say, surroundings
from .scores import auroc, spearman

N, VALIDATION, TESTED, BOOTSTRAPS, EPOCHS, PATIENCE, DECAY, DROPOUT = 200, 100, 150, 12, 40, 5, 0.01, 0.2
RECIPES = ("adam", "decay", "augmentation", "decay augmentation", "early", "augmentation early dropout", "short")


def network(kind: str, dropout: float) -> nn.Module:
    """The same first weights each time."""
    torch.manual_seed(1)
    last = (nn.Flatten(), nn.Dropout(dropout), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    if kind == "mlp":
        return nn.Sequential(*last)
    first = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
    return nn.Sequential(*first, nn.MaxPool2d(2), *last)


def digits(seed: int, planted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
    """Training images (the last ones for validation), labels, test images, classes; noisy and missing class."""
    found, generator = load_digits(), Generator().manual_seed(seed)
    order = torch.randperm(len(found.data), generator=generator)
    images = torch.tensor(found.data[order] / 16).float().reshape(-1, 1, 8, 8)
    classes = torch.tensor(found.target[order]).long()
    noisy, missing = torch.randperm(10, generator=generator)[:2].tolist() if planted else (-1, -1)
    chosen = (classes[:-TESTED] != missing).nonzero().squeeze(1)[: N + VALIDATION]
    labels = classes[chosen]
    labels[labels == noisy] = torch.randint(10, (int((labels == noisy).sum()),), generator=generator)
    return images[chosen], labels, images[-TESTED:], classes[-TESTED:], noisy, missing


def shifted(images: Tensor, generator: Generator) -> Tensor:
    """Each image moved by up to a pixel."""
    padded, by = F.pad(images, (1, 1, 1, 1)), torch.randint(0, 3, (2, len(images), 1), generator=generator)
    rows, columns = (by + torch.arange(8)).unbind()
    return padded[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None, :]].unsqueeze(1)


def train(kind: str, recipe: str, x: Tensor, y: Tensor, weights: Tensor) -> nn.Module:
    """Adam on weighted cross-entropy, batches of 32 in the same order each time."""
    model, generator = network(kind, DROPOUT if "dropout" in recipe else 0.0), Generator().manual_seed(5)
    decay = DECAY if "decay" in recipe else 0.0
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3, weight_decay=decay)
    best, since, kept = float("inf"), 0, model.state_dict()
    for _ in range(5 if recipe == "short" else EPOCHS):
        model.train()
        for batch in torch.randperm(N, generator=generator).split(32):
            optimiser.zero_grad()
            images = shifted(x[batch], generator) if "augmentation" in recipe else x[batch]
            (F.cross_entropy(model(images), y[batch], reduction="none") * weights[batch]).mean().backward()
            optimiser.step()
        if "early" in recipe:
            with torch.no_grad():
                loss = float(F.cross_entropy(model.eval()(x[N:]), y[N:]))
            since += 1
            if loss < best:
                best, since, kept = loss, 0, {name: one.clone() for name, one in model.state_dict().items()}
            if since >= PATIENCE:
                break
    model.load_state_dict(kept if "early" in recipe else model.state_dict())
    return model.eval()


def study(kind: str, recipe: str, planted: bool, seed: int) -> dict[str, Any]:
    """One network."""
    torch.set_num_threads(1)
    x, y, tests, classes, noisy, missing = digits(seed, planted)
    model = train(kind, recipe, x, y, torch.ones(N))
    draws, outputs = Generator().manual_seed(9), []
    for _ in range(BOOTSTRAPS):
        counts = torch.bincount(torch.randint(N, (N,), generator=draws), minlength=N).float()
        outputs.append(train(kind, recipe, x, y, counts)(tests).detach().double())
    retrained = torch.stack(outputs)
    centred = retrained - retrained.mean(2, keepdim=True)
    logits, probabilities = centred.var(0).sum(1), retrained.softmax(2).var(0).sum(1)
    row: dict[str, Any] = {"network": kind, "recipe": recipe, "planted": planted, "seed": seed}
    row["accuracy"] = float((model(tests).argmax(1) == classes).double().mean())
    row["train_accuracy"] = float((model(x[:N]).argmax(1) == y[:N]).double().mean())
    level = torch.eye(10, dtype=torch.double) - 0.1
    first: Any = None
    verdicts: Any = None
    for name in ("fit", "recentered"):
        tracer = whence.fit(model, [(x[:N], y[:N])], "categorical", recenter=name == "recentered", progress=False)
        found = tracer.predict(tests)
        hec3 = torch.diagonal(level @ found.covariance("hec3").double() @ level, dim1=1, dim2=2).sum(1)
        spread = found.probability_std().double().square().sum(1)
        check = trust_of_fit(tracer)["stationarity"]
        first = hec3 if first is None else first
        row[name] = {
            "ridge": tracer.ridge,
            "level": check.level,
            **check.numbers,
            "freedom": float(tracer.bread.degrees_of_freedom),
            "hec3_over_retrained": float((hec3 / logits).median()),
            "rank_with_retrained": spearman(hec3, logits),
            "probability_variance_over_retrained": float((spread / probabilities).median()),
            "total_probability_variance_over_retrained": float(spread.sum() / probabilities.sum()),
            "rank_of_probability_variance": spearman(spread, probabilities),
            "rank_with_fit": spearman(hec3, first),
            "factor": float((first / hec3).median()),
        }
        explained = tracer.explain(tests)
        verdicts = verdicts or explained.verdicts
        confident = [one == "confident" for one in explained.verdicts]
        row[name] |= {
            "same_verdicts": sum(a == b for a, b in zip(verdicts, explained.verdicts, strict=True)) / TESTED,
            "confident_accuracy": _accuracy(model, tests, classes, confident),
            "others_accuracy": _accuracy(model, tests, classes, [not one for one in confident]),
            "verdicts": Counter(map(str, explained.verdicts)),
            "noise_of_noisy": auroc(explained.noise, classes == noisy) if planted else None,
            "scarcity_of_missing": auroc(explained.scarcity, classes == missing) if planted else None,
        }
    return row


def _accuracy(model: nn.Module, x: Tensor, y: Tensor, among: list[bool]) -> float:
    right = (model(x).argmax(1) == y)[torch.tensor(among)]
    return float(right.double().mean()) if len(right) else float("nan")


def table(rows: list[dict[str, Any]]) -> str:
    """One line for each network and recipe: as they are, and with a noisy and a missing class."""
    names = ("network, training", "HeC3 / after the step", "level", "standard errors", "recentered", "same verdicts")
    lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for kind, recipe in sorted({(row["network"], row["recipe"]) for row in rows}):
        some = [row for row in rows if (row["network"], row["recipe"]) == (kind, recipe)]
        fits, moved = [row["fit"] for row in some], [row["recentered"] for row in some]
        cells = [
            ", ".join(f"{one['after the step']:.2g}" for one in fits),
            ", ".join(level_now(one) for one in fits),
            *(", ".join(f"{one['hec3_over_retrained'] ** 0.5:.2g}" for one in both) for both in (fits, moved)),
            ", ".join(f"{one['same_verdicts']:.2f}" for one in moved),
        ]
        lines.append(f"| {kind.upper()}, {recipe} | {' | '.join(cells)} |")
    return "\n".join(lines)


def level_now(fit: dict[str, Any]) -> str:
    """By the numbers that were measured and the bounds of today."""
    return stationarity(fit["step"], fit["standard errors"], fit["after the step"], recentered=False, far=True).level


def main() -> None:
    """Run all of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/ordinary.json"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="one network only")
    parser.add_argument("--first", type=int, default=10**9, help="only so many networks")
    options = parser.parse_args()
    began, rows = time.perf_counter(), []
    jobs = [(k, r, p, s) for s, p, r, k in product(range(3, 3 + options.seeds), (False, True), RECIPES, ("mlp", "cnn"))]
    with ProcessPoolExecutor(options.processes, mp_context=get_context("spawn")) as pool:
        for one in as_completed([pool.submit(study, *job) for job in jobs[: 1 if options.tiny else options.first]]):
            rows.append(one.result())
            say(rows[-1]["network"], rows[-1]["recipe"], rows[-1]["fit"])
            whole = {**surroundings(), "seconds": round(time.perf_counter() - began), "rows": rows}
            save(options.out, whole)
    say(table(rows))


if __name__ == "__main__":
    main()
