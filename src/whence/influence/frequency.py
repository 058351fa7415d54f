"""How frequent inputs like one are in use, beside the training examples.

A class that a network was never shown may lie so close to one it knows that no distance tells them apart. Inputs of use
do: around such an input there are many of them and few training examples. Of the nearest of both, as the network sees
them, a are from the pool of inputs of use and b from the training set. If the pool were drawn like the training set,
each of these would come from the pool with probability p = P / (P + T), for P and T inputs in all. Then

    z = (a - (a + b) p) / sqrt((a + b) p (1 - p)),    frequency = ((a + 1/2) / (b + 1/2)) / (P / T)

are how surprising their number is, and how many times as frequent such inputs are in use. No label enters. A kind of
inputs may be rare and apart, or frequent and mixed with others, so z is the mean over three neighbourhoods: the k, 2 k
and 4 k nearest, where k is the sum of the numbers of neighbours in both sets. The frequency is that of the k nearest.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from whence.errors import InputError
from whence.influence.fitted import evenly_spaced
from whence.influence.neighbours import COMPARED, Embedding, Neighbours, in_chunks, neighbour_count
from whence.linalg import largest
from whence.runtime.model_state import rounded_products

SCALES = (1, 2, 4)  # times as many neighbours as usual
LEAST_POOL = 20  # fewer inputs say too little about how frequent others are
SAME = 1e-6  # similarities that differ by less are equal up to rounding
NOT_COMPARED = -2.0  # below every similarity


class Frequency(NamedTuple):
    """How frequent inputs like some are in a pool, beside the training examples."""

    ratio: Tensor  # (m,) how many times as frequent they are in the pool
    z: Tensor  # (m,) how surprising that is, in standard deviations of one neighbourhood


@dataclass(frozen=True)
class Pool:
    """Inputs of use, to be compared with the training examples."""

    training: Embedding  # (r, d) of the training examples, without repetitions
    repeated: Tensor  # (l,) which of these vectors each training example has
    in_use: Embedding  # (p, d) of the inputs of use
    notes: tuple[str, ...]  # what is approximated

    @classmethod
    def of(cls, neighbours: Neighbours, vectors: Tensor) -> Pool:
        """From vectors (p, d) of the pool's inputs, some of them, evenly spaced, if there are many."""
        count = len(vectors)
        if count < LEAST_POOL:
            raise InputError(
                f"expected a pool of at least {LEAST_POOL} inputs, of the kind that the model meets in use, got "
                f"{count}. Pass more of them, or leave the pool out."
            )
        training = replace(neighbours.distance_embedding, directions=None)  # so that copies have a similarity of one
        chosen = vectors[evenly_spaced(torch.arange(count, device=vectors.device), COMPARED)]
        some = f"Frequency is measured with {len(chosen):,} of {count:,} inputs of the pool."
        notes = (some,) if len(chosen) < count else ()
        return cls(training, neighbours.distinct, Embedding(training.whitenings, chosen), notes)

    def frequency(self, vectors: Tensor, own: Tensor | None = None) -> Frequency:
        """Of inputs with vectors (m, d).

        Inputs that are training examples, at the positions `own` (m,) or -1 among those, are not compared with
        themselves. An input that has the same vector as one of the pool is taken to be that one.
        """
        training, pool = len(self.repeated), len(self.in_use.known)
        most, share = training + pool - 2, pool / (pool + training)
        counts = [min(times * (neighbour_count(training) + neighbour_count(pool)), most) for times in SCALES]
        found = []
        for some in in_chunks(len(vectors), training + pool, vectors.device):
            with rounded_products(False):
                ours = self.training.similarities(vectors[some])
                theirs = self.in_use.similarities(vectors[some])
            if len(self.repeated) > ours.shape[1]:
                ours = ours[:, self.repeated]
            if own is not None:
                rows = (own[some] >= 0).nonzero().squeeze(1)
                ours[rows, own[some][rows]] = NOT_COMPARED
            closest, which = theirs.max(1)
            rows = (closest >= 1.0 - SAME).nonzero().squeeze(1)
            theirs[rows, which[rows]] = NOT_COMPARED
            found.append(nearest_from_each(theirs, ours, counts))
        from_pool, from_training = torch.cat(found, 2).double()  # (scales, m)
        number = from_pool + from_training
        z = ((from_pool - number * share) / (number * share * (1.0 - share)).sqrt()).mean(0)
        return Frequency((from_pool[0] + 0.5) / (from_training[0] + 0.5) * (training / pool), z)


def nearest_from_each(theirs: Tensor, ours: Tensor, counts: list[int]) -> Tensor:
    """(2, c, m) how many of the nearest are among the first (m, p) and among the second (m, t), by their similarities.

    For each of c ascending counts below p + t, with all that are as similar as the last one.

    Examples:
        >>> theirs, ours = torch.tensor([[0.9, 0.5]]), torch.tensor([[0.8, 0.5, 0.1]])
        >>> nearest_from_each(theirs, ours, [2, 3])[:, :, 0].tolist()
        [[1, 2], [1, 2]]
    """
    similar, which = largest(torch.cat([theirs, ours], 1), counts[-1] + 1)
    first, limits = which < theirs.shape[1], [similar[:, count - 1 : count] - SAME for count in counts]
    near = [similar >= limit for limit in limits]
    found = torch.stack([torch.stack([(one & group).sum(1) for one in near]) for group in (first, ~first)])
    more = near[-1][:, -1].nonzero().squeeze(1)  # where others may be as similar too
    if len(more):
        parts = [[(group[more] >= limit[more]).sum(1) for limit in limits] for group in (theirs, ours)]
        found[:, :, more] = torch.stack([torch.stack(part) for part in parts])
    return found
