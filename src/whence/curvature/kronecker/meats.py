"""Squares of weighted gradients in a basis: the meats of all sandwiches, in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from .basis import Basis
from .moments import Mixture, Squares, Sums, states
from .stream import LayerStream
from .view import View, views


class MeatSums:
    """Squares of J_i^T W_i in the basis for each set of weights, and sum_i J_i^T u_i, the columns of "hec3".

    Args:
        bases: coordinates of each block.
        roots: weights W (n, k, q) by name, of which names and sizes are kept.
        device: where to sum.

    Attributes:
        in_views_alone: whether the gradients are wanted in the bases and no other way.
    """

    in_views_alone: ClassVar[bool] = True

    def __init__(self, bases: Sequence[Basis], roots: Mapping[str, Tensor], device: torch.device) -> None:
        """Zeros."""
        self.bases = bases
        self.names = list(roots)
        sizes = [root.shape[2] for root in roots.values()]
        eye = torch.eye(sum(sizes), dtype=torch.float64, device=device)
        self.masks = torch.stack([part.sum(0) for part in eye.split(sizes)])  # (names, Q)
        self.last = self.masks[self.names.index("hec3")] if "hec3" in roots else torch.zeros_like(self.masks[0])
        self.sums = [Sums(basis, len(roots), device) for basis in bases]

    @property
    def given(self) -> list[Tensor]:
        """What the sums depend on beside the gradients and their weights."""
        return [one for basis in self.bases for one in basis.tensors]

    def add(self, views: Sequence[View], roots: Mapping[str, Tensor]) -> None:
        """Count one piece, with the outputs pulled back: they are combined by the weights."""
        mixture = Mixture(torch.cat(list(roots.values()), dim=2).double(), self.masks, self.last)
        for sums, view in zip(self.sums, views, strict=True):
            sums.add_mixed(view, mixture)

    def add_pulled(self, views: Sequence[View], n: int) -> None:
        """Count one piece of n examples, with the weights themselves pulled back."""
        for sums, view in zip(self.sums, views, strict=True):
            sums.add(view, self.masks, self.last.expand(n, -1))

    def finish(self) -> tuple[dict[str, list[Squares]], list[Tensor]]:
        """The squares by name, and the totals."""
        found = [one.finish() for one in self.sums]
        squares = {name: [one[at] for one in found] for at, name in enumerate(self.names)}
        return squares, [one.total for one in self.sums]


def gather_meats(stream: LayerStream, sums: MeatSums, roots: Mapping[str, Tensor]) -> MeatSums:
    """One pass for weights W (n, k, q) or (1, k, q); fewer of them than outputs are pulled back themselves."""
    problem = stream.problem
    whole = {name: root.expand(problem.n, -1, -1) for name, root in roots.items()}
    joined = torch.cat(list(whole.values()), dim=2)  # (n, k, Q)

    def pulled(where: slice, _: int) -> Tensor:
        return joined[where].permute(2, 0, 1)

    directly = joined.shape[2] <= problem.k
    reading = (pulled, joined.shape[2]) if directly else (stream.identity(), problem.k)
    for where, tangents in stream.read("meats", *reading, states(stream, sums.sums), [joined, *sums.given]):
        ready = views(tangents, sums.bases, problem.device)
        if directly:
            sums.add_pulled(ready, where.stop - where.start)
        else:
            sums.add(ready, {name: root[where] for name, root in whole.items()})
        del ready, tangents  # the next piece needs the room
    return sums


def centre(basis: Basis, squares: Squares, total: Tensor, n: int) -> Squares:
    """Squares of the centred jackknife, (n - 1) / n sum_i (v_i - mean)^2 along each direction.

    Centred in the basis, so that the variance stays above zero however the meat is approximated.

    Args:
        basis: of the block.
        squares: sum_i v_i^2 of v_i = J_i^T u_i.
        total: sum_i v_i, shaped as the block's matrix.
        n: how many are left out, one after the other.
    """
    means = basis.to(torch.float64).into(total).square() / n
    rest = float(total.square().sum() / n - means.sum()) / basis.outside if basis.outside else 0.0
    share = (n - 1) / n
    return Squares((squares.inside - means).clamp_min(0.0) * share, max(squares.outside - rest, 0.0) * share)
