"""How frequent inputs like one are in use, beside the training examples.

A class that a network was never shown may lie so close to one it knows that no distance tells them apart. Inputs of use
do: around such an input there are many of them and few training examples. Of the nearest of both, as the network sees
them, a are from the pool of inputs of use and b from the training set. If the pool were drawn like the training set,
each of these would come from the pool with probability p = P / (P + T), for P and T inputs in all. Then

    z = (a - (a + b) p) / sqrt((a + b) p (1 - p)),    frequency = (a / b) / (P / T)

are how surprising their number is, and how many times as frequent such inputs are in use. No label enters. The z-score
is the mean of three, among as many as are neighbours in a set of each size, twice and four times as many: a kind of
inputs may be rare and apart, or frequent and among others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from whence.errors import InputError
from whence.influence.fitted import evenly_spaced
from whence.influence.neighbours import MEASURED, Embedding, Neighbours, in_chunks, neighbour_count, without_repetitions
from whence.linalg import largest

SCALES = (1, 2, 4)  # times as many neighbours as usual
LEAST_POOL = 20  # fewer inputs say too little about how frequent others are
SAME = 1e-6  # similarities that differ by less are equal up to rounding
NOT_COMPARED = -2.0  # below every similarity


class Frequency(NamedTuple):
    """How frequent inputs like some are in a pool, beside the training examples."""

    ratio: Tensor  # (m,) how many times as frequent they are in the pool; half an input is added to each count
    z: Tensor  # (m,) how surprising that is, in standard deviations


@dataclass(frozen=True)
class Pool:
    """Inputs of use, to be compared with the training examples that distances are measured from."""

    known: Embedding  # (r, d) of the training examples, without repetitions
    vectors: Embedding  # (p, d) of the inputs of use, without repetitions

    @classmethod
    def of(cls, neighbours: Neighbours, vectors: Tensor) -> Pool:
        """From vectors (p, d) of the pool's inputs, some of them, evenly spaced, if there are many."""
        if len(vectors) < LEAST_POOL:
            raise InputError(
                f"expected a pool of at least {LEAST_POOL} inputs of the kind that the model meets in use, got "
                f"{len(vectors)}. Pass more of them, or leave the pool out."
            )
        known = neighbours.distance_embedding
        chosen = vectors[evenly_spaced(torch.arange(len(vectors), device=vectors.device), MEASURED)]
        if known.whitenings:  # training examples have no repetitions either
            chosen = without_repetitions(chosen)[0]
        return cls(known, Embedding(known.whitenings, chosen))

    def frequency(self, vectors: Tensor, own: Tensor | None = None) -> Frequency:
        """Of inputs with vectors (m, d).

        Inputs that are training examples, at the positions `own` (m,) or -1 among those, are not compared with
        themselves. An input that has the same vector as one of the pool is taken to be that one.
        """
        training, pool = len(self.known.known), len(self.vectors.known)
        most, share = training + pool - 2, pool / (pool + training)
        counts = [min(times * (neighbour_count(training) + neighbour_count(pool)), most) for times in SCALES]
        found = []
        for some in in_chunks(len(vectors), training + pool, vectors.device):
            ours, theirs = self.known.similarities(vectors[some]), self.vectors.similarities(vectors[some])
            if own is not None:
                rows = (own[some] >= 0).nonzero().squeeze(1)
                ours[rows, own[some][rows]] = NOT_COMPARED
            closest, which = theirs.max(1)
            rows = (closest >= 1.0 - SAME).nonzero().squeeze(1)
            theirs[rows, which[rows]] = NOT_COMPARED
            similar = largest(torch.cat([ours, theirs], 1), max(counts))[0] - SAME  # and all that are as close
            limits = [similar[:, count - 1 : count] for count in counts]
            found.append(torch.stack([torch.stack([(s >= limit).sum(1) for limit in limits]) for s in (theirs, ours)]))
        inside, beside = torch.cat(found, 2).double()  # (scales, m)
        number = inside + beside
        z = ((inside - number * share) / (number * share * (1.0 - share)).sqrt()).mean(0)
        return Frequency((inside[0] + 0.5) / (beside[0] + 0.5) * (training / pool), z)
