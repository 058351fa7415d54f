"""A small corpus in documents, cut into sequences: scikit-learn's descriptions of its data sets, or made-up ones."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import pairwise

DOCUMENTS = (
    "breast_cancer",
    "california_housing",
    "digits",
    "iris",
    "lfw",
    "olivetti_faces",
    "species_distributions",
    "wine_data",
)
"""Names of scikit-learn's descriptions; their licence is that of the library, BSD with three clauses."""

STATEMENTS: tuple[tuple[str, str], ...] = (
    ("iris", "The data set contains three classes of fifty flowers each, where each class is a type of iris plant."),
    ("wine_data", "The wines were grown in the same region in Italy by three different cultivators."),
    ("california_housing", "A block group is the smallest geographical unit for which the census publishes data."),
    ("breast_cancer", "The features are computed from a digitized image of a fine needle aspirate of a breast mass."),
    ("digits", "Programs made available by NIST were used to extract normalized bitmaps of handwritten digits."),
    ("olivetti_faces", "There are ten images of each person, against a dark homogeneous background."),
    ("", "The harbour was empty, and the last ferry had left for the islands an hour ago."),
)
"""What is looked at: a sentence about each of some documents, in other words or the same, and one about none."""


@dataclass(frozen=True)
class Corpus:
    """Sequences of equal length, and sentences to look at.

    Attributes:
        names: of the documents.
        sequences: token numbers, all of one length.
        source: for each sequence its document, as a position among the names.
        statements: (position among the names or -1, token numbers) of each sentence that is looked at.
        words: token numbers to text.
    """

    names: tuple[str, ...]
    sequences: list[list[int]]
    source: list[int]
    statements: list[tuple[int, list[int]]]
    words: Callable[[Sequence[int]], str]

    @property
    def vocabulary(self) -> list[int]:
        """All tokens that occur, sorted."""
        return sorted({one for row in [*self.sequences, *(tokens for _, tokens in self.statements)] for one in row})


def descriptions(encode: Callable[[str], list[int]], words: Callable[[Sequence[int]], str], length: int) -> Corpus:
    """Scikit-learn's descriptions, without tables, code and references, cut after every so many tokens."""
    texts = {name: (files("sklearn.datasets.descr") / f"{name}.rst").read_text("utf-8") for name in DOCUMENTS}
    found = {name: cut(encode(prose(text)), length) for name, text in texts.items()}
    names = tuple(name for name in DOCUMENTS if found[name])  # a short one may fill no sequence
    sequences = [sequence for name in names for sequence in found[name]]
    source = [number for number, name in enumerate(names) for _ in found[name]]
    statements = [(names.index(name) if name in names else -1, encode(text)) for name, text in STATEMENTS]
    return Corpus(names, sequences, source, statements, words)


def closest(corpus: Corpus) -> list[int]:
    """For each statement the sequence with the most pairs of neighbouring tokens in common: where it comes from."""
    kept = [set(pairwise(sequence)) for sequence in corpus.sequences]
    found = []
    for _, tokens in corpus.statements:
        common = [len(pairs & set(pairwise(tokens))) for pairs in kept]
        found.append(common.index(max(common)))
    return found


def prose(text: str) -> str:
    r"""The sentences of a page: paragraphs with a full stop in them and no sign of a table, of code or of a link.

    Examples:
        >>> prose("Title\n=====\n\nIt is a set. It is\nold.\n\n  >>> code.\n\n:Number: 3.\n")
        'It is a set. It is old.'
    """
    kept = []
    for paragraph in re.split(r"\n\s*\n", text):
        plain = " ".join(paragraph.replace("`", "").replace("*", "").split())
        if re.search(r"[a-z]\.( |$)", plain) and not re.search(r">>>|::|====|--|\.\. |http|^:|^\|", plain):
            kept.append(plain)
    return " ".join(kept)


def cut(tokens: Sequence[int], length: int) -> list[list[int]]:
    """Sequences of one length; what is left at the end is dropped.

    Examples:
        >>> cut([1, 2, 3, 4, 5], 2)
        [[1, 2], [3, 4]]
    """
    return [list(tokens[low : low + length]) for low in range(0, len(tokens) - length + 1, length)]


def made_up(documents: int, each: int, length: int, vocabulary: int, seed: int) -> Corpus:
    """Documents that each go round a circle of words of their own, with a slip now and then."""
    chance = random.Random(seed)
    size = vocabulary // documents
    sequences, source, statements = [], [], []
    for number in range(documents):
        circle = list(range(number * size, (number + 1) * size))
        chance.shuffle(circle)

        def walk(slips: float, circle: list[int] = circle) -> list[int]:
            at = chance.randrange(size)
            return [circle[(at := at + 1 + (chance.random() < slips)) % size] for _ in range(length)]

        sequences += [walk(0.1) for _ in range(each)]
        source += [number] * each
        statements.append((number, walk(0.0)))
    names = tuple(f"document {number}" for number in range(documents))
    return Corpus(names, sequences, source, statements, lambda found: "".join(f" w{one}" for one in found))
