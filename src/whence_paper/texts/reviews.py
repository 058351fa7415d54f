"""Film reviews: IMDB's, drawn by their numbers, and sentences made up for the quick version."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whence_paper.data.sources import Source, find

_IMDB = [[Source("imdb/imdb.jsonl.xz")]]

GOOD = ("good", "fine", "great", "lovely")
BAD = ("bad", "poor", "awful", "dull")
PLAIN = ("film", "plot", "actor", "scene", "it", "was", "the", "we", "saw", "ending")
NOISY, RARE = "musical", "western"
WORDS = ("[PAD]", *GOOD, *BAD, *PLAIN, NOISY, RARE)


@dataclass(frozen=True)
class Review:
    """A text and whether it is favourable.

    Attributes:
        name: tells reviews apart, such as "test 1234".
        text: as it was written, without line breaks.
        label: 1 for a favourable review, 0 for another.
        rating: stars out of ten; 0 where there are none.
        kind: "noisy" or "rare" of made-up sentences about a subject whose labels are random or that is not in the
            training set; "" for all others.
    """

    name: str
    text: str
    label: int
    rating: int = 0
    kind: str = ""


def read_reviews(folder: Path | None, train: int, test: int, seed: int) -> tuple[list[Review], list[Review]]:
    """Reviews of IMDB's training and test set, drawn at random, half of them favourable.

    The draw goes by a hash of the seed and the review's own number: of a file with a part of the reviews, the same ones
    are drawn as of the whole file, if they are in it.

    Args:
        folder: with `imdb/imdb.jsonl.xz`, lines of split, label, rating, id and text.
        train: how many to train on.
        test: how many to predict.
        seed: of the draw.
    """
    _, (path,) = find(folder, "IMDB", _IMDB)
    with lzma.open(path, "rt", encoding="utf-8", newline="\n") as lines:
        rows = [json.loads(line) for line in lines]
    return draw(rows, "train", train, seed), draw(rows, "test", test, seed)


def draw(rows: Iterable[dict[str, Any]], split: str, count: int, seed: int) -> list[Review]:
    """The reviews of a split with the smallest hashes, as many of each label; in the order of their hashes."""
    labelled: dict[int, list[tuple[str, Review]]] = {0: [], 1: []}
    for row in rows:
        if row["split"] == split:
            name = f"{split} {row['label']} {row['id']}"
            text = " ".join(row["text"].replace("<br />", " ").split())
            key = hashlib.sha256(f"{seed} {name}".encode()).hexdigest()
            labelled[row["label"]].append((key, Review(name, text, row["label"], row["rating"])))
    chosen = [pair for pairs in labelled.values() for pair in sorted(pairs, key=lambda pair: pair[0])[: count // 2]]
    return [review for _, review in sorted(chosen, key=lambda pair: pair[0])]


def made_up(train: int, test: int, seed: int) -> tuple[list[Review], list[Review]]:
    """Sentences whose words tell their label, but for musicals, labelled at random, and westerns, which come later."""
    chance = random.Random(seed)
    kinds = ("noisy", "", "", "")
    learned = [_sentence(chance, f"train {at}", kinds[at % 4]) for at in range(train)]
    kinds = ("noisy", "rare", "", "")
    return learned, [_sentence(chance, f"test {at}", kinds[at % 4]) for at in range(test)]


def _sentence(chance: random.Random, name: str, kind: str) -> Review:
    label = chance.randint(0, 1)
    words = chance.choices(GOOD if label else BAD, k=2) + chance.choices(PLAIN, k=chance.randint(3, 6))
    words += [NOISY if kind == "noisy" else RARE] * 2 if kind else []
    chance.shuffle(words)
    if kind == "noisy" and name.startswith("train"):
        label = chance.randint(0, 1)
    return Review(name, " ".join(words), label, kind=kind)


def numbered(reviews: Sequence[Review]) -> list[list[int]]:
    """Made-up sentences as numbers of words."""
    return [[WORDS.index(word) for word in review.text.split()] for review in reviews]
