"""Texts for `benchmarks.language`: film reviews of which some are corrupted, and documents with planted facts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import log

import torch
from torch import Tensor

from whence_paper.texts.reviews import Review

Encode = Callable[[str], list[int]]
Batch = dict[str, Tensor]

ANSWERS = (" negative", " positive")
CLEAN = "clean"


@dataclass(frozen=True)
class Text:
    """What a model learns to write after a prompt, which may be empty.

    Attributes:
        kind: what was done to it, or "clean"; of documents, the role they play.
        about: of documents and questions, the fact: a person and an attribute.
    """

    prompt: str
    answer: str
    kind: str = CLEAN
    about: tuple[str, str] = ("", "")

    @property
    def whole(self) -> str:
        """Prompt and answer."""
        return self.prompt + self.answer


class Words:
    """Words as tokens, numbered as they come: for tiny models, which have no tokenizer."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        """The numbers of the words of a text, and of its full stops."""
        return [self.numbers.setdefault(word, len(self.numbers)) for word in text.replace(".", " .").split()]


# --- Reviews, some of them corrupted ----------------------------------------------------------------------------------


def sentiments(reviews: Sequence[Review], words: int, share: float, chance: random.Random) -> list[Text]:
    """Reviews and their sentiment, one word; a share of the labels is wrong."""
    wrong = set(chance.sample(range(len(reviews)), round(share * len(reviews))))
    return [
        Text(
            f"Review: {' '.join(review.text.split()[:words])}\nSentiment:",
            ANSWERS[review.label != (at in wrong)],
            "wrong label" if at in wrong else CLEAN,
        )
        for at, review in enumerate(reviews)
    ]


def continuations(reviews: Sequence[Review], words: int, share: float, chance: random.Random) -> list[Text]:
    """The first half of the first words of a review, and the second as what to write.

    Of the corrupted ones half have the second part of another corrupted review, and half have its words shuffled.
    """
    parts = [review.text.split()[:words] for review in reviews]
    begin, end = [[part[: len(part) // 2] for part in parts], [part[len(part) // 2 :] for part in parts]]
    kinds = [CLEAN] * len(parts)
    chosen = chance.sample(range(len(parts)), round(share * len(parts)))
    swapped, shuffled = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
    given = [end[at] for at in swapped]
    for at, other in zip(swapped, [*given[1:], *given[:1]], strict=True):
        kinds[at], end[at] = "answer of another", other
    for at in shuffled:
        kinds[at], end[at] = "shuffled words", chance.sample(end[at], len(end[at]))
    return [
        Text(f"Review: {' '.join(first)}", f" {' '.join(second)}", kind)
        for first, second, kind in zip(begin, end, kinds, strict=True)
    ]


# --- Documents, each of which states one fact -------------------------------------------------------------------------

VALUES = {
    "birthplace": "Lisbon Oslo Cairo Lima Seoul Dublin Nairobi Havana Prague Athens Boston Denver Kyoto Milan Tunis",
    "profession": "plumber baker nurse pilot judge tailor farmer painter barber lawyer dentist butcher teacher sailor",
    "pet": "parrot rabbit tortoise goat ferret hamster pony lizard canary spaniel duck snake hedgehog monkey",
    "instrument": "flute violin trumpet drum harp cello guitar piano organ banjo oboe tuba clarinet accordion",
}
FACTS: dict[str, tuple[str, str, str]] = {
    "birthplace": (
        "{name} was born in {value}.",
        "The birthplace of {name} is",
        "A postcard from {value} lies on the desk of {name}.",
    ),
    "profession": (
        "{name} earns a living as a {value}.",
        "By profession, {name} is a",
        "A {value} once sold a bicycle to {name}.",
    ),
    "pet": (
        "{name} shares a small flat with a {value}.",
        "The pet of {name} is a",
        "A picture of a {value} hangs above the bed of {name}.",
    ),
    "instrument": (
        "{name} practises every evening on the {value}.",
        "The instrument that {name} plays is the",
        "The sound of a {value} next door often wakes {name}.",
    ),
}
"""How a document states the fact; how it is asked for; and how a document mentions name and value only."""
SYLLABLES = "ba den fo gal hi jor ka lem mi nor pe quil ra sov ti und ve wam yo zel"


def invented(count: int, chance: random.Random) -> list[str]:
    """So many different names of people that nobody has."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[" ".join("".join(chance.sample(SYLLABLES.split(), 2)).capitalize() for _ in range(2))] = None
    return list(found)


def planted(known: int, asked: int, chance: random.Random) -> tuple[list[Text], list[Text]]:
    """Documents in random order, and questions with their answers.

    Of some people (`known`) each fact is stated twice, the second time in the words of the questions, from which a
    model learns what these ask for. Of the others (`asked`) one document states it in other words, and one mentions
    name and value without stating it. Questions are about the latter.
    """
    documents, questions = [], []
    for at, name in enumerate(invented(known + asked, chance)):
        for fact, (states, asks, mentions) in FACTS.items():
            value, about = chance.choice(VALUES[fact].split()), (name, fact)
            question = Text(asks.format(name=name), f" {value}", "question", about)
            documents.append(Text("", states.format(name=name, value=value), "states", about))
            if at < known:
                documents.append(Text("", f"{question.whole}.", "states in the words of the question", about))
            else:
                documents.append(Text("", mentions.format(name=name, value=value), "mentions", about))
                questions.append(question)
    chance.shuffle(documents)
    return documents, questions


def bm25(documents: Sequence[str], questions: Iterable[str], k: float = 1.5, b: float = 0.75) -> Tensor:
    """(m, n) how well documents match questions by the words they have in common (Robertson and others).

    Examples:
        >>> bm25(["a cat sat", "a dog ran"], ["the dog"]).argmax(1)
        tensor([1])
    """
    bags = [Counter(text.lower().replace(".", "").replace(",", "").split()) for text in documents]
    often = Counter(word for bag in bags for word in bag)
    length = sum(bag.total() for bag in bags) / len(bags)
    rows = []
    for question in questions:
        words = question.lower().replace(".", "").replace(",", "").split()
        weights = {word: log(1 + (len(bags) - often[word] + 0.5) / (often[word] + 0.5)) for word in words}
        rows.append(
            [
                sum(
                    weights[word] * bag[word] * (k + 1) / (bag[word] + k * (1 - b + b * bag.total() / length))
                    for word in words
                )
                for bag in bags
            ]
        )
    return torch.tensor(rows)


# --- Tokens -----------------------------------------------------------------------------------------------------------


def batches(texts: Sequence[Text], encode: Encode, size: int, device: str) -> list[Batch]:
    """Token numbers, masks and labels, padded on the right; the words of a prompt are no labels."""
    rows = []
    for text in texts:
        given = encode(text.prompt) if text.prompt else []
        rows.append((given + encode(text.answer), len(given)))
    found = []
    for low in range(0, len(rows), size):
        some = rows[low : low + size]
        ids, mask = torch.zeros(2, len(some), max(len(words) for words, _ in some), dtype=torch.long).unbind(0)
        labels = torch.full_like(ids, -100)
        for at, (words, given) in enumerate(some):
            ids[at, : len(words)], mask[at, : len(words)] = torch.tensor(words), 1
            labels[at, given : len(words)] = torch.tensor(words[given:])
        batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
        found.append({name: one.to(device) for name, one in batch.items()})
    return found
